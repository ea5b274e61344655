"""How a context is built for a request: its strategy, its epoch policy, and the tokens that it may use."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """How a context is to be built. ``instructions`` is Tersely's own text for the model, if any; ``offers`` are the
    tools of its own that it may offer the model.
    """

    strategy: Strategy
    policy: Policy
    instructions: str | None
    offers: tuple[ToolOffer, ...] = ()

    @property
    def read_back(self) -> ReadBack:
        """The tools by which the model gets back what the strategy shortens."""
        if isinstance(self.strategy, Slim | Full):
            return ""
        return read_back_tools({offer.name for offer in self.offers})

    @property
    def hidden_tags(self) -> TagKinds:
        """What replies may carry that the client must not see."""
        return TagKinds(terse=isinstance(self.strategy, Slim), state=isinstance(self.strategy, Window))

    def plans_anew(self, epoch: Epoch) -> bool:
        """Whether the next epoch has to look at what ``epoch`` cut."""
        return needs_full_plan(epoch, strategy=self.strategy, policy=self.policy)

    def first_seq(self, epoch: Epoch | None) -> int:
        """The first sequence number that has to be loaded."""
        return first_seq_needed(epoch, strategy=self.strategy, policy=self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """What besides the history a decision looks at. Tokens of instructions and tools; the model's window less what is
    kept free in it, and the whole of it.

    ``last_call_at``: when the agent last went on with a session that no call of ours belongs to.
    """

    fixed_tokens: int
    window: int | None
    now: datetime
    model_window: int | None = None
    last_call_at: datetime | None = None


def offers_in(epoch: Epoch | None, recipe: ContextConfig) -> list[ToolOffer]:
    """What a model is offered throughout an epoch: `context_search` only where there is something out of view."""
    is_cut = epoch is not None and (epoch.cut > 1 or any(tier.read_back for tier in epoch.tiers))
    return [offer for offer in recipe.offers if is_cut or offer.name != "context_search"]


def count_offers(epoch: Epoch | None, recipe: ContextConfig) -> int:
    """Tokens of the tools that a model is offered throughout an epoch."""
    offers = offers_in(epoch, recipe)
    return sum(tokens.count_short(f"{offer.name}{offer.description}{offer.parameters}") for offer in offers)
