"""Choose the strategy and the epoch policy that hold for a request.

| for | the first of these that is set |
|---|---|
| a call | its headers, the session's own setting, the shadow (header, then configured), the configured default |
| anything else (contexts over REST, appends, commands, figures, cleanup) | its own parameters, the session's own
  setting, the headers of the session's last call, the configured default |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from msgspec import structs

from tersely.dialects.dialect import ToolOffer
from tersely.domain.history.sessions import Session
from tersely.domain.history.tiers import READ_BACK_TOOLS
from tersely.domain.tools.catalog import TOOLS, parse_offer
from tersely.service.context.context_config import ContextConfig
from tersely.strategies.epochs.policies import Auto, Policy, parse_policy
from tersely.strategies.planning import read_back_of
from tersely.strategies.presets import Full, Slim, Strategy, Window, parse_strategy, strategy_name
from tersely.strategies.prompts import HISTORY_GUIDELINES, TERSE_INSTRUCTIONS

METER = "meter"
"""A shadow that plans nothing: requests go up unchanged, and are stored and counted."""
SHADOW_OFF = "off"


class ContextConfigs:
    """Parse each setting once. Raises `InvalidRequest` for an unknown or out-of-range value."""

    def __init__(
        self,
        *,
        strategy: str,
        epoch: str,
        references: int | None,
        instructions: bool,
        derive_terse: bool,
        cache_ttl: float = 300,
        offers: Callable[[str], tuple[ToolOffer, ...]] | None = None,
        offers_always: bool = False,
        repeats: bool = False,
        shadow: str | None = None,
        policy_for_model: Callable[[str], Auto] | None = None,
    ) -> None:
        """Set the defaults.

        ``references``: tokens of the reference index (None: 2,000, but 0 under ``every_request``). ``cache_ttl``:
        seconds that the upstream keeps a prompt cache. ``instructions``: whether the model is asked for terse
        summaries. ``offers``: maps a strategy's name to the tools that it offers to models. ``offers_always``:
        from the first request of a session on. ``repeats``: whether repeated text is replaced by references.
        ``shadow``: the strategy that is tried out where nothing names another one, `METER` or None.
        ``policy_for_model``: marks and prices where a policy names a model; None: always the constant ones.
        """
        self._shadow = shadow
        self._policy_for_model = policy_for_model
        self._cache_ttl = int(cache_ttl)
        self._offers = offers or _none
        self._offers_always = offers_always
        self._repeats = repeats
        self._strategy = strategy
        self._epoch = epoch
        self._references = references
        self._instructions = instructions
        self._derive_terse = derive_terse
        self._read_strategy = lru_cache(maxsize=256)(self._parse_strategy)
        self._read_policy = lru_cache(maxsize=256)(self._parse_policy)
        self.default = self.choose()
        self.check(strategy=None, epoch=None, shadow=shadow)

    def choose_for_call(
        self, *, strategy: str | None, epoch: str | None, shadow: str | None, session: Session | None
    ) -> ContextConfig:
        """Return the configuration of a call whose headers ask for ``strategy``, ``epoch`` and ``shadow``."""
        config = self.choose(strategy=strategy, epoch=epoch, session=session)
        tried = shadow or self._shadow or SHADOW_OFF
        if tried == SHADOW_OFF or strategy or (session is not None and session.strategy):
            return config
        return structs.replace(
            config,
            strategy=Full(),
            instructions=None,
            offers=(),
            folds_repeats=False,
            is_unchanged=True,
            shadow=None if tried == METER else self.choose(strategy=tried, epoch=epoch, session=session),
        )

    def choose(
        self, *, strategy: str | None = None, epoch: str | None = None, session: Session | None = None
    ) -> ContextConfig:
        """Return the configuration that ``strategy`` and ``epoch`` ask for."""
        text = strategy or (session.strategy if session else None) or self._strategy
        policy = epoch or (session.epoch_policy if session else None) or self._epoch
        chosen = self._read_strategy(text)
        return ContextConfig(
            strategy=chosen,
            policy=self._read_policy(policy),
            instructions=_instructions_for(chosen) if self._instructions else None,
            offers=self._offers(strategy_name(chosen)),
            offers_always=self._offers_always,
            folds_repeats=self._repeats,
            setting=text,
        )

    def choose_outside_calls(
        self, session: Session, *, strategy: str | None = None, epoch: str | None = None
    ) -> ContextConfig:
        """Return the configuration of a request that is no call, with its own ``strategy`` and ``epoch``: see the table
        above.
        """
        own_strategy, own_epoch = self.settings_of(session)
        return self.choose(strategy=strategy or own_strategy, epoch=epoch or own_epoch)

    def settings_of(self, session: Session) -> tuple[str, str]:
        """Return strategy and epoch policy for `choose_outside_calls`, as configuration texts."""
        return (
            session.strategy or session.last_strategy or self._strategy,
            session.epoch_policy or session.last_epoch_policy or self._epoch,
        )

    def choose_for_preview(
        self,
        session: Session,
        *,
        strategy: str | None = None,
        epoch: str | None = None,
        tools: Sequence[str] | None = None,
    ) -> ContextConfig:
        """Return the configuration of a context that no call asked for, with the tools that its model will have.

        ``tools`` are the names that the caller gives. Without them the tools of the session's calls count, as its epoch
        remembers them. A session without calls offers no tools.
        """
        config = self.choose_outside_calls(session, strategy=strategy, epoch=epoch)
        if tools is not None:
            return structs.replace(config, offers=tuple(_offer(name) for name in parse_offer(",".join(tools) or "off")))
        if not session.calls:
            return structs.replace(config, offers=())
        if session.plan is None or isinstance(config.strategy, Slim | Full):
            return config
        read_back = read_back_of(session.plan).split(", ")
        kept = tuple(offer for offer in config.offers if offer.name not in READ_BACK_TOOLS or offer.name in read_back)
        return structs.replace(config, offers=kept)

    def check(self, *, strategy: str | None, epoch: str | None, shadow: str | None = None) -> None:
        """Raise `InvalidRequest` unless all values are valid."""
        if shadow is not None and shadow not in {METER, SHADOW_OFF}:
            parse_strategy(shadow, references=self._references, field="shadow")
        if strategy is not None:
            self._read_strategy(strategy)
        if epoch is not None:
            self._read_policy(epoch)

    def _parse_policy(self, text: str) -> Policy:
        policy = parse_policy(text, policy_for_model=self._policy_for_model)
        if isinstance(policy, Auto) and "cache_ttl" not in text:
            return replace(policy, cache_ttl=self._cache_ttl)
        return policy

    def _parse_strategy(self, text: str) -> Strategy:
        strategy = parse_strategy(text, references=self._references)
        if isinstance(strategy, Slim) and not self._derive_terse:
            return replace(strategy, derive_terse=False)
        return strategy


@lru_cache(maxsize=256)
def compact_setting(text: str | None) -> str | None:
    """Return a checked setting without superfluous blanks."""
    if text is None or not text.lstrip().startswith("{"):
        return text and text.strip()
    return json.dumps(json.loads(text), separators=(",", ":"))


def _offer(name: str) -> ToolOffer:
    tool = TOOLS[name]
    return ToolOffer(name=name, description=tool.description, parameters=tool.parameters)


def _none(_: str) -> tuple[ToolOffer, ...]:
    return ()


def _instructions_for(strategy: Strategy) -> str | None:
    """Return the instructions that make a model's replies carry what the strategy reads from them."""
    match strategy:
        case Slim():
            return TERSE_INSTRUCTIONS
        case Window():
            return HISTORY_GUIDELINES
        case _:
            return None
