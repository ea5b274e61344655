"""The simulation on a small conversation of its own: what its figures mean, not what they are on real data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulate import FIXED_DEFAULT, load, main, simulate
from tersely.domain.history.context_use import identifiers
from tersely.strategies.epochs.policies import Auto, EveryRequest
from tersely.strategies.presets import Full, Slim


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    messages: list[dict[str, object]] = []
    for turn in range(30):
        made = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": "read", "arguments": json.dumps({"path": f"src/mod_{turn // 2}.py"})},
        }
        messages.append({"role": "user", "content": f"question {turn}", "x_ts": "2024-01-15T10:30:00Z"})
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"src/mod_{turn // 2}.py " + "x" * 600})
        messages.append({"role": "assistant", "content": "done"})
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"id": "one", "meta": {}, "messages": messages}))
    return path


def test_full_saves_nothing_and_loses_nothing(recording: Path) -> None:
    (conversation,) = load(recording)
    tally = simulate(conversation, Full(), Auto())
    assert (tally.calls, tally.price, tally.tokens) == (60, tally.full_price, tally.full_tokens)
    assert (tally.referring, tally.lost) == (15, 0)


def test_a_cut_sends_less_and_the_index_saves_references(recording: Path) -> None:
    (conversation,) = load(recording)
    policy = Auto(high=3_000, low=1_200)
    plain, indexed = (simulate(conversation, Slim(references=n), policy) for n in (0, 2_000))
    assert plain.tokens < plain.full_tokens
    assert plain.epochs.keys() >= {"first", "high_watermark"}
    assert indexed.lost <= plain.lost


def test_a_window_that_moves_at_each_call_is_dearer_than_a_cached_history(recording: Path) -> None:
    (conversation,) = load(recording)
    moving = simulate(conversation, Slim(), EveryRequest())
    assert moving.tokens < moving.full_tokens
    assert moving.price[0] / moving.full_price[0] > 1
    assert conversation.fixed == FIXED_DEFAULT


def test_an_edit_is_ready_only_if_the_context_has_its_text(tmp_path: Path) -> None:
    def change(number: int, old: str) -> dict[str, object]:
        arguments = json.dumps({"file_path": "a.py", "old_string": old, "new_string": "y"})
        call = {"id": f"c{number}", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    messages = [{"role": "user", "content": "Change: x = 1"}, change(1, "x = 1")]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "done"}, change(2, "never seen")]
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"id": "one", "meta": {}, "messages": messages}))
    (conversation,) = load(path)
    tally = simulate(conversation, Full(), Auto())
    assert (tally.edits, tally.ready) == (2, 1)


def test_identifiers_are_names_not_words() -> None:
    assert identifiers('{"path": "src/app.py", "n": 5, "q": "some words HAT001"}') == ["src/app.py", "HAT001"]


def test_the_simulation_prints_a_table(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recording)]) == 0
    assert "| own | slim auto | 60 |" in capsys.readouterr().out
