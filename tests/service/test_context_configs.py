from tersely.domain.text.state import strip_state
from tersely.service.context.context_configs import ContextConfigs
from tersely.strategies.epochs.policies import Auto, EveryRequest
from tersely.strategies.planning import fingerprint_of
from tersely.strategies.presets import Slim


def make(**settings):
    defaults = {
        "strategy": "slim",
        "epoch": "auto",
        "references": None,
        "instructions": True,
        "derive_terse": True,
    }
    return ContextConfigs(**(defaults | settings))


def test_by_default_every_request_is_literally_the_documents_and_has_no_index():
    config = make().choose(epoch="every_request")

    assert config.strategy == Slim(references=None)
    assert config.policy == EveryRequest()


def test_requested_index_is_present_under_every_policy():
    assert make(references=500).choose(epoch="every_request").strategy == Slim(references=500)


def test_the_request_goes_before_the_configuration():
    config = make(strategy="full").choose(strategy='{"name": "slim", "recent_turns": 5}', epoch='{"stride": 4}')

    assert fingerprint_of(config.strategy, config.policy).startswith(
        "slim(derive_terse=True, files=None, recent_turns=5"
    )


def test_the_cache_stays_warm_as_long_as_the_operator_says():
    configs = make(cache_ttl=3600)

    assert configs.choose().policy == Auto(cache_ttl=3600)
    assert configs.choose(epoch='{"cache_ttl": 60}').policy == Auto(cache_ttl=60)


def test_instructions_are_for_strategies_that_read_the_answer():
    assert make().choose(strategy="full").instructions is None
    assert make(instructions=False).choose().instructions is None
    assert "<terse>" in (make().choose().instructions or "")


def test_the_guidelines_of_window_ask_for_a_block_that_is_found():
    guidelines = make().choose(strategy="window").instructions or ""
    shown, (state,) = strip_state(guidelines)

    assert "End every reply" in shown
    assert [line.split(":")[0] for line in state.splitlines()] == ["Goal", "Context", "Resolved", "Technical Anchors"]
