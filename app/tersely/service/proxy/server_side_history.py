"""Calls whose history is named, not sent: whether the model host is left to know it, or is sent a context.

A host keeps what it answered, and appends to its conversations by itself. So where it has the very history that the
model is to see, a call goes up as it came; where it says that it has not, the same call is made again with a context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from tersely.dialects.clients.names import client_name
from tersely.dialects.dialect import Dialect, Request
from tersely.domain.errors import StoreUnavailable
from tersely.domain.history.history import EpochInputs, Snapshot
from tersely.domain.history.sessions import Session
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_config import ContextConfig, TokenBudget, offers_in
from tersely.service.context.history import History, epoch_of
from tersely.service.context.loading import first_seq_to_load, load_history
from tersely.service.context.parse_cache import ParseCache
from tersely.service.context.retrieval import Retriever
from tersely.service.proxy import history_by_reference as named
from tersely.service.proxy.calls import Call, ContextLabels
from tersely.service.proxy.history_by_reference import ReferencedHistory, ResolvedHistory
from tersely.service.proxy.preparing import CallPreparer, PreparedCall
from tersely.store.db.connection import Connection, Database
from tersely.strategies.presets import Full, strategy_name

_NOT_READ = History(snapshot=Snapshot(entries=()), advance=None, epoch_inputs=EpochInputs(), is_verbatim=False)


class ServerSideHistory:
    """Prepares the calls of one dialect that name their history."""

    def __init__(
        self,
        preparer: CallPreparer,
        *,
        dialect: Dialect,
        database: Database,
        memo: ParseCache,
        retriever: Retriever,
        clock: Callable[[], datetime],
    ) -> None:
        self._preparer = preparer
        self._dialect = dialect
        self._database = database
        self._memo = memo
        self._retriever = retriever
        self._clock = clock

    async def prepare(self, call: Call, request: Request, headers: dict[str, str]) -> PreparedCall | None:
        """As `CallPreparer.prepare`; None where the history is not known here."""
        now = self._clock()
        own, asked = await self._preparer.hash_history(call, request, headers)
        if not own.links:
            return None
        async with self._database.reading(call.tenant) as connection:
            found = await named.find(connection, call.tenant, asked)
            if found is None:
                return None
            recipe = self._preparer.recipe(call, request, found.session)
            is_elsewhere = asked.session_id not in {None, found.session_id}
            start = 1 if is_elsewhere else await _start(connection, call.tenant, found.session, recipe)
            laid = await named.resolve_history(connection, call.tenant, found, own, self._dialect, start=start)
            if laid is not None and _needs_earlier(laid, recipe):
                laid = await named.resolve_history(connection, call.tenant, found, own, self._dialect, start=1)
            if laid is None:
                return None
            if not is_elsewhere and _stays_at_host(found, recipe):
                return self._left_at_host(call, request, laid, recipe, now)
            laid = await named.fill(connection, call.tenant, laid, self._dialect, self._memo.read)
            loaded = None if is_elsewhere else await self._load(connection, call, request, laid, recipe, now)
        if loaded is None:
            # A session under an id of ours goes on from what was said in another: as if that had been sent.
            sent = replace(request, messages=laid.messages)
            resent = await self._preparer.hash_history(call, sent, headers)
            return await self._preparer.go_into(call, sent, *resent, now)
        around, history = loaded
        history = await self._with_past(call, laid, recipe, history)
        return await self._preparer.finish(call, request, laid.arrival, laid.found, recipe, around, history, laid=laid)

    async def keep_on(self, call: Call, prepared: PreparedCall) -> PreparedCall | None:
        """A call whose history the host does not have, or not any more, with a context; None where there is none."""
        laid, session = prepared.laid, prepared.found.session
        if laid is None:
            return None
        recipe = self._preparer.recipe(call, prepared.request, session)
        try:
            async with self._database.reading(call.tenant) as connection:
                laid = await named.fill(connection, call.tenant, laid, self._dialect, self._memo.read)
                around, history = await self._load(
                    connection, call, prepared.request, laid, recipe, prepared.around.now
                )
        except StoreUnavailable:
            return None
        history = await self._with_past(call, laid, recipe, history)
        own = replace(
            prepared,
            arrival=laid.arrival,
            laid=laid,
            recipe=recipe,
            around=around,
            history=history,
            is_at_host=False,
        )
        return await self._preparer.rebuild(call, own)

    async def spell_out(self, call: Call, request: Request) -> bytes | None:
        """The body of a call beside the conversation with all of the history that it names; None where the host may
        have that itself, or it is not known here. Raises `StoreUnavailable`.
        """
        own, asked = await self._preparer.hash_history(call, request, call.header_map)
        async with self._database.reading(call.tenant) as connection:
            found = await named.find(connection, call.tenant, asked)
            if found is None or found.keeper != "tersely":
                return None
            laid = await named.resolve_history(connection, call.tenant, found, own, self._dialect, start=1)
            if laid is None:
                return None
            laid = await named.fill(connection, call.tenant, laid, self._dialect, self._memo.read)
        body = self._dialect.without_history(call.body)
        return await run_in_thread_if_large(
            laid.arrival.size, self._dialect.write_request, body, messages=[each.raw for each in laid.messages]
        )

    def _left_at_host(
        self, call: Call, request: Request, laid: ResolvedHistory, recipe: ContextConfig, now: datetime
    ) -> PreparedCall:
        """The call as it came; what it adds is stored behind the history that it names."""
        recipe = replace(recipe, strategy=Full(), instructions=None, offers=())
        found = laid.found
        write = self._preparer.request_write(call, request, laid.arrival, found, {}, now, laid.named)
        return PreparedCall(
            call=call,
            request=request,
            arrival=laid.arrival,
            found=found,
            recipe=recipe,
            around=TokenBudget(fixed_tokens=0, window=None, now=now),
            history=_NOT_READ,
            built=None,
            body=call.body,
            write=write,
            started=now,
            strip_usage=False,
            labels=ContextLabels(
                context="passthrough",
                strategy=strategy_name(recipe.strategy),
                session_id=found.session_id,
                source=found.source,
            ),
            laid=laid,
            is_at_host=True,
            client=client_name(call.header_map) or None,
            request_id=call.request_id or None,
            keeper=laid.keeper if laid.keeper == "host" or request.is_stored else "tersely",
        )

    async def _load(
        self,
        connection: Connection,
        call: Call,
        request: Request,
        laid: ResolvedHistory,
        recipe: ContextConfig,
        now: datetime,
    ) -> tuple[TokenBudget, History]:
        around = self._preparer.circumstances(request, laid.arrival, recipe, now, laid.found)
        return around, await load_history(
            connection,
            call.tenant,
            laid.found,
            laid.arrival,
            self._dialect,
            recipe,
            around,
            restore=self._memo.restore,
        )

    async def _with_past(self, call: Call, laid: ResolvedHistory, recipe: ContextConfig, history: History) -> History:
        return await self._retriever.with_past(
            call.tenant, laid.found, history, recipe.strategy, laid.arrival, self._dialect, self._memo.restore
        )


async def _start(connection: Connection, tenant: str, session: Session | None, recipe: ContextConfig) -> int:
    """From where on the history has to be read for a context."""
    if session is None:
        return 1
    return min(
        session.cut, await first_seq_to_load(connection, tenant, session, recipe, recipe.first_seq(session.plan))
    )


def _needs_earlier(laid: ResolvedHistory, recipe: ContextConfig) -> bool:
    """Whether this request alone makes the context reach back to before what was laid out."""
    plan = laid.found.session.plan if laid.found.session else None
    if plan is None or recipe.plans_anew(plan):
        return False  # as much was laid out as is ever looked at
    return recipe.first_seq(epoch_of(laid.found, recipe)) < laid.found.expanded_from


def _stays_at_host(history: ReferencedHistory, recipe: ContextConfig) -> bool:
    """Whether the host has what the model is to see: what it alone has all of, or the same as is stored here."""
    if history.keeper == "both":
        plan = history.session.plan if history.session else None
        adds = recipe.instructions is not None or offers_in(plan, recipe)
        return isinstance(recipe.strategy, Full) and not adds and history.is_untouched
    return history.keeper == "host"
