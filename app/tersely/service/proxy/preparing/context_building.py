"""The third step of a call: build the context that the model is to see."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from tersely.dialects.dialect import Dialect, Overflow
from tersely.domain.errors import ContextTooLarge, StoreUnavailable
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.building import BuiltContext, build
from tersely.service.context.history import History
from tersely.service.context.loading import after_overflow
from tersely.service.context.memo_layer import with_memos
from tersely.service.proxy.call.call_config import CallConfig
from tersely.service.proxy.preparing.stages import MatchedCall, PreparedCall
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.commit.records import HiddenReplyParts
from tersely.store.db.connection import Database
from tersely.store.history.tail_cache import ROW_SIZE
from tersely.strategies.composition import overflow_tries


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context of a call (``built`` None: none fits) and the history that it was built from.

    ``hidden_parts``: the parts of the request's messages that only the model sees, by index.
    """

    loaded: History
    built: BuiltContext | None
    hidden_parts: Mapping[int, HiddenReplyParts] = msgspec.field(default_factory=dict)


class ContextBuilder:
    """Builds the contexts of calls in one dialect."""

    def __init__(self, dialect: Dialect, config: CallConfig, database: Database) -> None:
        self._dialect = dialect
        self._config = config
        self._database = database

    async def build(self, matched: MatchedCall) -> CallContext:
        """Build the context of a call. Raises `StoreUnavailable`."""
        if matched.is_at_host:
            return CallContext(loaded=matched.loaded, built=None)
        loaded, hidden_parts = await with_memos(
            self._database,
            matched.call.tenant,
            matched.match,
            matched.loaded,
            matched.config.strategy,
            matched.history,
            self._dialect,
        )
        built = await _build(matched, loaded)
        if built is None and _resends_hidden_messages(matched.match):
            # The client's own bytes would show what is hidden: better the live messages, whatever the window.
            built = await _build(matched, replace(loaded, snapshot=replace(loaded.snapshot, window=None)))
        return CallContext(loaded=loaded, built=built, hidden_parts=hidden_parts)

    async def build_again(self, prepared: PreparedCall) -> CallContext:
        """Build the context of a call from the history that has been loaded for it now."""
        return CallContext(loaded=prepared.loaded, built=await _build(prepared, prepared.loaded))

    async def reduce(self, prepared: PreparedCall, overflow: Overflow) -> PreparedCall | None:
        """Plan a smaller context after an overflow; None if there is none. The call's request is not built yet."""
        if prepared.config.is_unchanged or prepared.loaded.overflows >= overflow_tries(prepared.config.strategy):
            return None
        budget = self._config.after_overflow(prepared.request, prepared.budget, overflow)
        try:
            loaded = await after_overflow(
                self._database, prepared.call.tenant, prepared.match, prepared.loaded, prepared.config, budget
            )
        except StoreUnavailable:
            return None
        return replace(prepared, budget=budget, loaded=loaded)


def work_size(matched: MatchedCall) -> int:
    """Estimate how many bytes a context is built from: the body, or what is stored if the body only brings more."""
    return max(len(matched.call.body), len(matched.match.rows) * ROW_SIZE)


async def _build(matched: MatchedCall, loaded: History) -> BuiltContext | None:
    def work() -> BuiltContext | None:
        try:
            return build(loaded, matched.config, matched.budget, matched.request.model)
        except ContextTooLarge:
            return None

    return await run_in_thread_if_large(work_size(matched), work)


def _resends_hidden_messages(match: SessionMatch) -> bool:
    """Return whether the request carries messages that were dropped, undone or removed."""
    return any(placed.turn > 0 and placed.status != "live" for placed in match.decision.placed)
