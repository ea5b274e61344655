"""Calls that reference a history which the model host may have stored: find it, and decide who supplies it.

A host stores its replies and appends to its conversations. If the host has exactly the history that the model is to
see, the request goes out unchanged. If the host reports that the history is missing, the request is sent again with a
context built here.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect, RequestPatch
from tersely.domain.errors import StoreUnavailable
from tersely.domain.history.history import EpochInputs, Snapshot
from tersely.domain.history.sessions import Session
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_config import ContextConfig, TokenBudget, instructions_in, offers_in
from tersely.service.context.history import History, epoch_of
from tersely.service.context.loading import first_seq_to_load, load_history
from tersely.service.context.retrieval import Retriever
from tersely.service.context.stored_messages import restore_reply
from tersely.service.proxy.call import history_by_reference
from tersely.service.proxy.call.call_config import CallConfig
from tersely.service.proxy.call.history_by_reference import ReferencedHistory, ResolvedHistory
from tersely.service.proxy.preparing.stages import IncomingCall, MatchedCall, PreparedCall
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages
from tersely.strategies.presets import Full

_NOT_LOADED = History(snapshot=Snapshot(entries=()), epoch_start=None, epoch_inputs=EpochInputs(), is_verbatim=False)


class ServerSideHistory:
    """Matches the calls of one dialect that reference their history."""

    def __init__(
        self,
        dialect: Dialect,
        config: CallConfig,
        *,
        database: Database,
        retriever: Retriever,
    ) -> None:
        self._dialect = dialect
        self._config = config
        self._database = database
        self._restore = partial(restore_reply, dialect)
        self._retriever = retriever

    async def match(self, incoming: IncomingCall) -> MatchedCall | ResolvedHistory | None:
        """Find the referenced history; None if it is not known here. Raises `StoreUnavailable`.

        A `ResolvedHistory` is returned for a request that continues the history of another session than the one which
        Tersely's own header names: that request is matched as if it had sent the messages.
        """
        call, request, own, hints = incoming.call, incoming.request, incoming.history, incoming.hints
        if not own.links:
            return None
        async with self._database.reading(call.tenant) as connection:
            referenced = await history_by_reference.find(connection, call.tenant, hints)
            if referenced is None:
                return None
            config = self._config.choose(call, request, referenced.session)
            is_elsewhere = hints.session_id not in {None, referenced.session_id}
            start = 1 if is_elsewhere else await _first_seq(connection, call.tenant, referenced.session, config)
            resolved = await history_by_reference.resolve_history(
                connection, call.tenant, referenced, own, self._dialect, start=start
            )
            if resolved is not None and _needs_earlier(resolved, config):
                resolved = await history_by_reference.resolve_history(
                    connection, call.tenant, referenced, own, self._dialect, start=1
                )
            if resolved is None:
                return None
            if not is_elsewhere and _has_all_at_host(referenced, config):
                return _left_at_host(incoming, resolved, config)
            resolved = await self._fill(connection, call.tenant, resolved)
            if is_elsewhere:
                return resolved
            budget, loaded = await self._load(connection, incoming, resolved, config)
        return incoming.matched(
            match=resolved.match,
            config=config,
            budget=budget,
            loaded=await self._with_past(call.tenant, resolved, config, loaded),
            resolved=resolved,
        )

    async def rebuild_locally(self, prepared: PreparedCall) -> PreparedCall | None:
        """Load the history of a call whose host turned out not to have it; None if that is not possible."""
        call, resolved = prepared.call, prepared.resolved
        if resolved is None:
            return None
        config = self._config.choose(call, prepared.request, prepared.match.session)
        try:
            async with self._database.reading(call.tenant) as connection:
                resolved = await self._fill(connection, call.tenant, resolved)
                budget, loaded = await self._load(connection, prepared, resolved, config)
        except StoreUnavailable:
            return None
        return replace(
            prepared,
            history=resolved.history,
            resolved=resolved,
            config=config,
            budget=budget,
            loaded=await self._with_past(call.tenant, resolved, config, loaded),
            is_at_host=False,
        )

    async def expand_history(self, incoming: IncomingCall) -> bytes | None:
        """Return the body of a side call with its whole history. Raises `StoreUnavailable`.

        None if the host may have that history, or if it is not known here.
        """
        call = incoming.call
        async with self._database.reading(call.tenant) as connection:
            referenced = await history_by_reference.find(connection, call.tenant, incoming.hints)
            if referenced is None or referenced.history_owner != "tersely":
                return None
            resolved = await history_by_reference.resolve_history(
                connection, call.tenant, referenced, incoming.history, self._dialect, start=1
            )
            if resolved is None:
                return None
            resolved = await self._fill(connection, call.tenant, resolved)
        return await run_in_thread_if_large(
            resolved.history.size,
            self._dialect.write_request,
            self._dialect.without_history(call.body),
            RequestPatch(messages=[message.raw for message in resolved.messages]),
        )

    async def _fill(self, connection: Connection, tenant: str, resolved: ResolvedHistory) -> ResolvedHistory:
        return await history_by_reference.fill(connection, tenant, resolved, self._dialect)

    async def _load(
        self, connection: Connection, incoming: IncomingCall, resolved: ResolvedHistory, config: ContextConfig
    ) -> tuple[TokenBudget, History]:
        history, match = resolved.history, resolved.match
        budget = self._config.budget(incoming.request, history, config, incoming.started, match)
        return budget, await load_history(
            connection,
            incoming.call.tenant,
            match,
            history,
            self._dialect,
            config,
            budget,
            restore=self._restore,
        )

    async def _with_past(
        self, tenant: str, resolved: ResolvedHistory, config: ContextConfig, loaded: History
    ) -> History:
        return await self._retriever.with_past(
            tenant, resolved.match, loaded, config.strategy, resolved.history, self._dialect, self._restore
        )


def _left_at_host(incoming: IncomingCall, resolved: ResolvedHistory, config: ContextConfig) -> MatchedCall:
    return incoming.matched(
        match=resolved.match,
        config=replace(config, strategy=Full(), instructions=None, offers=(), shadow=None),
        budget=TokenBudget(fixed_tokens=0, window=None, now=incoming.started),
        loaded=_NOT_LOADED,
        resolved=resolved,
        is_at_host=True,
    )


async def _first_seq(connection: Connection, tenant: str, session: Session | None, config: ContextConfig) -> int:
    """Return the first sequence number that a context needs."""
    if session is None:
        return 1
    first = await first_seq_to_load(connection, tenant, session, config, config.first_seq(session.plan))
    first = min(session.cut, first)
    if 1 < first == session.cleared_at:  # a cleared turn may go on
        first = min([first, *await messages.of_turn_before(connection, tenant, session.id, first)])
    return first


def _needs_earlier(resolved: ResolvedHistory, config: ContextConfig) -> bool:
    """Return whether this request alone makes the context reach back to before the resolved history."""
    plan = resolved.match.session.plan if resolved.match.session else None
    if plan is None or config.plans_anew(plan):
        return False  # as much was resolved as is ever looked at
    return config.first_seq(epoch_of(resolved.match, config)) < resolved.match.expanded_from


def _has_all_at_host(referenced: ReferencedHistory, config: ContextConfig) -> bool:
    """Return whether the host has what the model is to see: it alone has the history, or nothing has to be changed."""
    if referenced.history_owner == "both":
        plan = referenced.session.plan if referenced.session else None
        adds = instructions_in(plan, config) is not None or offers_in(plan, config)
        return isinstance(config.strategy, Full) and not adds and referenced.is_untouched
    return referenced.history_owner == "host"
