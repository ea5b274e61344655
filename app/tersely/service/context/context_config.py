"""The configuration of a request's context: its strategy, its epoch policy, and the tokens that it may use."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import msgspec

from tersely.dialects.dialect import ToolOffer
from tersely.domain.history.history import (
    Epoch,
)
from tersely.domain.history.tiers import ReadBack, read_back_tools
from tersely.domain.text.tags import TagKinds
from tersely.service.common import tokens
from tersely.strategies.epochs.policies import Policy
from tersely.strategies.planning import (
    first_seq_needed,
    needs_full_plan,
)
from tersely.strategies.presets import Full, Slim, Strategy, Window


class ContextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Strategy and epoch policy of a request, Tersely's own ``instructions`` for the model (None: none), and the tools
    that Tersely may offer to the model (``offers``; ``offers_always``: in plain epochs too). ``folds_repeats``: new
    epochs replace repeated text by references. ``setting``: the strategy as a configuration text.

    ``is_unchanged``: requests that carry their history are sent as they come. ``shadow`` is then the configuration that
    is only tried out (None: none).
    """

    strategy: Strategy
    policy: Policy
    instructions: str | None
    offers: tuple[ToolOffer, ...] = ()
    offers_always: bool = False
    folds_repeats: bool = False
    setting: str = ""
    is_unchanged: bool = False
    shadow: ContextConfig | None = None

    @property
    def read_back(self) -> ReadBack:
        """The offered tools that let the model read back what the strategy shortens."""
        if isinstance(self.strategy, Slim | Full):
            return ""
        return read_back_tools({offer.name for offer in self.offers})

    @property
    def hidden_tags(self) -> TagKinds:
        """The kinds of tags that replies may carry and that the client must not see."""
        return TagKinds(terse=isinstance(self.strategy, Slim), state=isinstance(self.strategy, Window))

    def plans_anew(self, epoch: Epoch) -> bool:
        """Return whether the next epoch must look at the messages that ``epoch`` cut."""
        return needs_full_plan(epoch, strategy=self.strategy, policy=self.policy)

    def first_seq(self, epoch: Epoch | None) -> int:
        """Return the first sequence number to load."""
        return first_seq_needed(epoch, strategy=self.strategy, policy=self.policy)


class FixedCounts(NamedTuple):
    """Tokens of instructions and of tools."""

    instructions: int
    tools: int

    @property
    def total(self) -> int:
        """Tokens of both."""
        return self.instructions + self.tools


class TokenBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a context may use.

    ``fixed_tokens``: tokens of instructions and tools; ``tool_tokens``: of the tools among them; ``added``: of those
    among both that are Tersely's own. ``window``: the model's window less its reserve.
    ``model_window``: the whole window. ``last_call_at``: time of the agent's last activity in a session that has no
    call through Tersely.
    """

    fixed_tokens: int
    window: int | None
    now: datetime
    tool_tokens: int = 0
    added: FixedCounts = FixedCounts(0, 0)
    model_window: int | None = None
    last_call_at: datetime | None = None


def offers_in(epoch: Epoch | None, config: ContextConfig) -> list[ToolOffer]:
    """Return the tools that are offered throughout an epoch. `context_search` is offered only where
    something was cut, and in a plain epoch only what the operator named.
    """
    if epoch is not None and epoch.is_plain and not config.offers_always:
        return []
    is_cut = epoch is not None and (epoch.cut > 1 or any(tier.read_back for tier in epoch.tiers))
    return [offer for offer in config.offers if is_cut or offer.name != "context_search"]


def instructions_in(epoch: Epoch | None, config: ContextConfig) -> str | None:
    """Return the instructions that stand in front throughout an epoch. A plain epoch has none there."""
    return None if epoch is not None and epoch.is_plain else config.instructions


def count_additions(epoch: Epoch | None, config: ContextConfig) -> FixedCounts:
    """Count the tokens of Tersely's instructions and tools in front of an epoch; without one, of the most that it may
    have.
    """
    offers = offers_in(epoch, config)
    instructions = instructions_in(epoch, config)
    return FixedCounts(
        instructions=tokens.count_short(instructions) if instructions else 0,
        tools=sum(tokens.count_short(f"{offer.name}{offer.description}{offer.parameters}") for offer in offers),
    )
