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
from tersely.service.context.loading import load_history, load_resent, with_epoch_inputs
from tersely.service.context.retrieval import Retriever
from tersely.service.context.stored_messages import restore_reply
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.call.call_config import CallConfig
from tersely.service.proxy.preparing.stages import IncomingCall, MatchedCall
from tersely.service.recognition import session_lookup
from tersely.service.recognition.incoming_history import NEWEST, IncomingHistory, hash_history
from tersely.service.recognition.session_lookup import NewestMatch, SessionHints, SessionMatch, idempotency_key
from tersely.store.db.connection import Connection, Database
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
        """Hash the messages of a request, and return it as `incoming` does."""
        return self.incoming(
            call, request, await run_in_thread_if_large(len(call.body), hash_history, request.messages)
        )

    def incoming(self, call: Call, request: Request, history: IncomingHistory) -> IncomingCall:
        """Return a request and its hashed messages with what it says of its session."""
        headers = call.header_map
        return IncomingCall(
            call=call,
            request=request,
            history=history,
            hints=SessionHints(
                session_id=call.options.session_id,
                client=clients.client_ids(headers, request.ids),
                is_retry=clients.is_retry(headers),
                key=idempotency_key(headers),
                headers=headers,
                reply_id=request.reply_id,
                conversation=request.conversation,
            ),
            started=self._clock(),
        )

    async def match(self, incoming: IncomingCall) -> MatchedCall:
        """Find the session and load what the context needs of it. Raises `StoreUnavailable`.

        A history that continues its session at the end takes one lookup, which concurrent calls share.
        """
        tenant = incoming.call.tenant
        newest = await self._find_newest(incoming)
        match = await self._continue_newest(incoming, newest)
        found = None if match is None else await self._load_resent(incoming, match)
        if found is not None and found.loaded.epoch_start is None:
            return found
        async with self._database.reading(tenant) as connection:
            if found is not None:
                loaded = await with_epoch_inputs(connection, tenant, found.match, found.loaded, found.config)
                found = replace(found, loaded=loaded)
            else:
                found = await self._find(connection, incoming, match, newest)
        strategy = found.config.strategy
        loaded = await self._retriever.with_past(
            tenant, found.match, found.loaded, strategy, found.history, self._dialect, self.restore
        )
        return replace(found, loaded=loaded)

    async def _load_resent(self, incoming: IncomingCall, match: SessionMatch) -> MatchedCall | None:
        """Load what a context needs, but for the inputs of an epoch that starts; None if that takes a query."""
        call, history = incoming.call, incoming.history
        config = self._config.choose(call, incoming.request, match.session)
        if match.needs_all(config.first_seq(epoch_of(match, config))):
            return None
        budget = self._config.budget(incoming.request, history, config, incoming.started, match)
        loaded = await run_in_thread_if_large(
            len(call.body), load_resent, match, history, self._dialect, config, budget, self.restore
        )
        return None if loaded is None else incoming.matched(match=match, config=config, budget=budget, loaded=loaded)

    async def _find(
        self, connection: Connection, incoming: IncomingCall, match: SessionMatch | None, newest: NewestMatch | None
    ) -> MatchedCall:
        """Find the session, unless ``match`` has it, and load what the context needs of it."""
        tenant, request, history = incoming.call.tenant, incoming.request, incoming.history
        if match is None:
            match = await session_lookup.find(
                connection, tenant, history, incoming.hints, now=incoming.started, new_id=self._new_id, newest=newest
            )
        config = self._config.choose(incoming.call, request, match.session)
        if match.needs_all(config.first_seq(epoch_of(match, config))):
            match = await session_lookup.with_everything(connection, tenant, history, match)
        budget = self._config.budget(request, history, config, incoming.started, match)
        loaded = await load_history(
            connection, tenant, match, history, self._dialect, config, budget, restore=self.restore
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
