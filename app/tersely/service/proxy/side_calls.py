"""Side calls are not stored. Replies to a client's own summary calls are remembered: it may continue from them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tersely.dialects.clients import known as clients
from tersely.dialects.dialect import Dialect, Reply, Request
from tersely.domain.client_ids import ClientIds
from tersely.domain.history.chain import summary_anchors
from tersely.service.proxy.call.call import Call
from tersely.service.recognition import session_lookup
from tersely.service.recognition.incoming_history import NEWEST, IncomingHistory, hash_history
from tersely.store.commit import reply_ids
from tersely.store.db.connection import Connection, Database
from tersely.store.history import sessions
from tersely.store.ops import side_replies


class SideCalls:
    """Remembers the replies to clients' own summary calls, for some hours."""

    def __init__(self, *, dialect: Dialect, database: Database, clock: Callable[[], datetime]) -> None:
        self._dialect = dialect
        self._database = database
        self._clock = clock

    async def remember(self, call: Call, request: Request, reply: Reply) -> None:
        """Remember the reply to a summary call if its session is known. Raises `StoreUnavailable`."""
        anchors = {
            anchor
            for choice in reply.choices
            for anchor in summary_anchors(self._dialect.read_reply(choice.client_message))
        }
        if not anchors:
            return
        incoming = hash_history(request.messages)
        client = clients.client_ids(call.header_map, request.ids)

        async def write(connection: Connection) -> None:
            session_id = await self._session_of_side_call(connection, call, request, incoming, client)
            if session_id is not None:
                now = self._clock()
                by = clients.requester_id(call.header_map, client)
                await side_replies.remember(connection, call.tenant, session_id, sorted(anchors), by, now)
                await side_replies.forget(connection, call.tenant, session_id, now - session_lookup.SUMMARY_WITHIN)

        await self._database.run(write, tenant=call.tenant)

    async def _session_of_side_call(
        self, connection: Connection, call: Call, request: Request, incoming: IncomingHistory, client: ClientIds
    ) -> str | None:
        if call.options.session_id is not None:
            session = await sessions.get(connection, call.tenant, call.options.session_id)
            return session.id if session else None
        if request.reply_id:
            referenced = await reply_ids.find(connection, call.tenant, request.reply_id)
            return referenced.hit.session.id if referenced else None
        chains = incoming.reply_chains()[: session_lookup.MAX_CHAINS]
        if chains:
            hit = await sessions.find_by_chain(connection, call.tenant, chains, client.id)
            if hit is not None:
                return hit.session.id
        quoted = hash_history(clients.quoted_messages(request.messages))
        session = await sessions.find_by_reply(connection, call.tenant, quoted.identifying_replies(), client.id)
        if session is None:
            newest = quoted.reply_chains()[:NEWEST]
            session = await sessions.find_by_whole_chain(connection, call.tenant, newest, client.id)
        if session is not None:
            return session.id
        if client.id is not None:
            first = await sessions.find_by_client_id(connection, call.tenant, client.id)
            return first.id if first else None
        return None
