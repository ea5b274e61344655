"""The context configuration and the token budget of one call."""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect, Overflow, Request, ToolOffer
from tersely.dialects.tool_rounds import tool_names
from tersely.domain.history.sessions import Session
from tersely.domain.messages import INSTRUCTION_ROLES
from tersely.domain.models import known_window, usable_window
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.context.context_config import ContextConfig, TokenBudget, count_additions
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.proxy.call.call import Call
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch


class CallConfig:
    """Configures the calls of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        configs: ContextConfigs,
        calibrations: Calibrations,
        fixed_tokens: tokens.FixedTokens,
    ) -> None:
        self._dialect = dialect
        self._configs = configs
        self._calibrations = calibrations
        self._fixed_tokens = fixed_tokens

    def choose(self, call: Call, request: Request, session: Session | None) -> ContextConfig:
        """Resolve the context configuration. Drop instructions and tools that the model or the response format does not
        support, and tools whose names the client uses.
        """
        options = call.options
        config = self._configs.choose_for_call(
            strategy=options.strategy, epoch=options.epoch, shadow=options.shadow, session=session
        )
        if config.shadow is not None:
            config = replace(config, shadow=self._fit_to_request(config.shadow, call, request))
        return self._fit_to_request(config, call, request)

    def _fit_to_request(self, config: ContextConfig, call: Call, request: Request) -> ContextConfig:
        if not request.takes_additions:
            return replace(config, instructions=None, offers=())
        if not config.offers:
            return config
        # A stream that is one JSON array cannot be continued, nor can several replies at once.
        is_array = self._dialect.streaming.has_arrays and request.stream and "alt=sse" not in call.path
        rounds = self._dialect.rounds if request.takes_tools and request.n == 1 and not is_array else None
        offers = rounds and _without_clients_names(config.offers, request.tools, rounds.tools_outside_list(call.body))
        return config if offers == config.offers else replace(config, offers=offers or ())

    def budget(
        self, request: Request, history: IncomingHistory, config: ContextConfig, now: datetime, match: SessionMatch
    ) -> TokenBudget:
        """Count instructions and tools, and estimate the model's window in the tokens of this service."""
        raws = [message.raw for message in history.messages if message.role in INSTRUCTION_ROLES]
        added = count_additions(match.session.plan if match.session else None, config)
        tools = self._fixed_tokens.count_tools(request.model, request.tools) + added.tools
        instructions = self._fixed_tokens.count_instructions(request.model, raws) + added.instructions
        window = usable_window(request.model, request.max_tokens)
        return TokenBudget(
            fixed_tokens=instructions + tools,
            tool_tokens=tools,
            added=added,
            window=None if window is None else self._calibrated(request, window),
            now=now,
            model_window=known_window(request.model),
        )

    def after_overflow(self, request: Request, budget: TokenBudget, overflow: Overflow) -> TokenBudget:
        """Return the budget with the window that the provider named when it refused the request."""
        if not overflow.limit:
            return budget
        window = max(overflow.limit // 4, overflow.limit - (request.max_tokens or overflow.limit // 8))
        return replace(budget, window=self._calibrated(request, window))

    def _calibrated(self, request: Request, window: int) -> int:
        return int(window / self._calibrations.ratio(request.model))


def _without_clients_names(
    offers: tuple[ToolOffer, ...], tools: bytes, others: frozenset[str]
) -> tuple[ToolOffer, ...]:
    """Drop offers whose names the client uses for its own tools: in its list ``tools``, or outside it (``others``)."""
    if not others and b"\\u" not in tools and not any(offer.name.encode() in tools for offer in offers):
        return offers
    taken = tool_names(tools) | others
    return tuple(offer for offer in offers if offer.name not in taken)
