"""Calls beside a conversation: forgotten, but for a client's own summaries, from which it may go on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from app.dialects.dialect import Dialect, Request
from app.dialects.dialect import Reply as SaidReply
from app.domain import clients
from app.domain.chain import summary_anchors
from app.domain.clients import ClientIds
from app.service import identity
from app.service.arrival import Arrival, arrive
from app.service.calls import Call
from app.service.memo import MessageMemo
from app.store import reply_ids, sessions, side_replies
from app.store.connection import Connection, Database


class Summaries:
    """Remembers what clients' own summary calls were answered with, for some hours."""

    def __init__(
        self, *, dialect: Dialect, database: Database, memo: MessageMemo, clock: Callable[[], datetime]
    ) -> None:
        self._dialect = dialect
        self._database = database
        self._memo = memo
        self._clock = clock

    async def remember(self, call: Call, request: Request, said: SaidReply) -> None:
        """Remember the reply to a summary call, where its session can be told. Raises `StoreUnavailable`."""
        anchors = {
            anchor
            for choice in said.choices
            for anchor in summary_anchors(self._dialect.read_reply(choice.client_message))
        }
        if not anchors:
            return
        arrival = arrive(request.messages, self._memo.identify)
        client = clients.client_ids(call.header_map, request.ids)

        async def write(connection: Connection) -> None:
            session_id = await self._session_of_side_call(connection, call, request, arrival, client)
            if session_id is not None:
                now = self._clock()
                await side_replies.remember(connection, call.tenant, session_id, sorted(anchors), now)
                await side_replies.forget(connection, call.tenant, session_id, now - identity.SUMMARY_WITHIN)

        await self._database.run(write, tenant=call.tenant)

    async def _session_of_side_call(
        self, connection: Connection, call: Call, request: Request, arrival: Arrival, client: ClientIds
    ) -> str | None:
        if call.options.session_id is not None:
            session = await sessions.get(connection, call.tenant, call.options.session_id)
            return session.id if session else None
        if request.reply_id:
            named = await reply_ids.find(connection, call.tenant, request.reply_id)
            return named.hit.session.id if named else None
        chains = arrival.reply_chains()[: identity.MAX_CHAINS]
        if chains:
            hit = await sessions.find_by_chain(connection, call.tenant, chains, client.id)
            if hit is not None:
                return hit.session.id
        if client.id is not None:
            first = await sessions.find_by_client_id(connection, call.tenant, client.id)
            return first.id if first else None
        return None
