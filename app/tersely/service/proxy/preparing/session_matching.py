"""The first two steps of a call that sends its history: hash the messages, then find and load their session."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial

from msgspec.structs import replace

from tersely.dialects.clients import known as clients
from tersely.dialects.dialect import Dialect, Request
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.entries import Restore
from tersely.service.context.history import epoch_of
from tersely.service.context.loading import load_history, load_resent
from tersely.service.context.retrieval import Retriever
from tersely.service.context.stored_messages import restore_reply
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.call.call_config import CallConfig
from tersely.service.proxy.preparing.stages import IncomingCall, MatchedCall
from tersely.service.recognition import session_lookup
from tersely.service.recognition.incoming_history import NEWEST, IncomingHistory, hash_history
from tersely.service.recognition.session_lookup import NewestMatch, SessionHints, SessionMatch, idempotency_key
from tersely.store.db.connection import Database
from tersely.store.history.lookups import Lookups


class SessionMatcher:
    """Reads and matches the calls of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        config: CallConfig,
        *,
        database: Database,
        lookups: Lookups,
        retriever: Retriever,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._dialect = dialect
        self._config = config
        self._database = database
        self._lookups = lookups
        self.restore: Restore = partial(restore_reply, dialect)
        self._retriever = retriever
        self._clock = clock
        self._new_id = new_id

    def read_whole(self, call: Call) -> tuple[Request, IncomingHistory]:
        """Read and hash the whole of a request, at once."""
        request = with_address(self._dialect.read_request(call.body), call)
        return request, hash_history(request.messages)

    async def read(self, call: Call, request: Request) -> IncomingCall:
        """Hash the messages of a request and collect what it says of its session."""
        now = self._clock()
        headers = call.header_map
        return IncomingCall(
            call=call,
            request=request,
            history=await run_in_thread_if_large(len(call.body), hash_history, request.messages),
            hints=SessionHints(
                session_id=call.options.session_id,
                client=clients.client_ids(headers, request.ids),
                is_retry=clients.is_retry(headers),
                key=idempotency_key(headers),
                headers=headers,
                reply_id=request.reply_id,
                conversation=request.conversation,
            ),
            started=now,
        )

    async def match(self, incoming: IncomingCall) -> MatchedCall:
        """Find the session and load what the context needs of it. Raises `StoreUnavailable`.

        A history that continues its session at the end takes one lookup, which concurrent calls share.
        """
        call, request, history = incoming.call, incoming.request, incoming.history
        now, restore = incoming.started, self.restore
        newest = await self._find_newest(incoming)
        match = await self._continue_newest(incoming, newest)
        if match is not None:
            config = self._config.choose(call, request, match.session)
            budget = self._config.budget(request, history, config, now, match)
            loaded = None
            if not match.needs_all(config.first_seq(epoch_of(match, config))):
                loaded = await run_in_thread_if_large(
                    len(call.body), load_resent, match, history, self._dialect, config, budget, restore
                )
            if loaded is not None:
                return incoming.matched(match=match, config=config, budget=budget, loaded=loaded)
        async with self._database.reading(call.tenant) as connection:
            if match is None:
                match = await session_lookup.find(
                    connection, call.tenant, history, incoming.hints, now=now, new_id=self._new_id, newest=newest
                )
            config = self._config.choose(call, request, match.session)
            if match.needs_all(config.first_seq(epoch_of(match, config))):
                match = await session_lookup.with_everything(connection, call.tenant, history, match)
            budget = self._config.budget(request, history, config, now, match)
            loaded = await load_history(
                connection, call.tenant, match, history, self._dialect, config, budget, restore=restore
            )
        loaded = await self._retriever.with_past(
            call.tenant, match, loaded, config.strategy, history, self._dialect, restore
        )
        return incoming.matched(match=match, config=config, budget=budget, loaded=loaded)

    async def _find_newest(self, incoming: IncomingCall) -> NewestMatch | None:
        """Look up the newest replies of a history; None if there are none, or if the call names its session."""
        hints = incoming.hints
        chains = incoming.history.reply_chains()[:NEWEST] if hints.session_id is None else []
        if not chains:
            return None
        return NewestMatch(await self._lookups.find(incoming.call.tenant, chains, hints.client.id))

    async def _continue_newest(self, incoming: IncomingCall, newest: NewestMatch | None) -> SessionMatch | None:
        """Match a history that continues the tail of its session; None if the call takes more than one lookup."""
        if newest is None or newest.reply_match is None:
            return None
        return await run_in_thread_if_large(
            len(incoming.call.body), session_lookup.continued, incoming.history, incoming.hints, newest.reply_match
        )


def with_address(request: Request, call: Call) -> Request:
    """Return the request with the model and the kind of reply that its address names, if the body does not."""
    if not call.model and not call.streams:
        return request
    return replace(request, model=call.model or request.model, stream=call.streams or request.stream)
