"""Find the live session that a call continues: by the bytes of its body, or by the reply or the conversation that it
names. Only what is new in the body is read and hashed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.names import client_name
from tersely.dialects.dialect import Dialect
from tersely.dialects.headers import Headers
from tersely.dialects.wire.array_member import read_more
from tersely.dialects.wire.lengths import check_lengths
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import Entry
from tersely.domain.history.links import MessageIdentity
from tersely.domain.messages import Message
from tersely.service.common.offload import LONG, run_in_thread_if_large
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.durability.durable_writer import DurableWriter
from tersely.service.proxy.live_calls.live_call import Continuation, Miss
from tersely.service.proxy.live_calls.references import SHORTEST_ID, References, history_of_reference, read_value
from tersely.service.proxy.live_sessions.live_session import (
    DeltaSession,
    LiveSession,
    LiveSessions,
    ReferenceSession,
    steady,
)
from tersely.service.recognition.incoming_history import IncomingHistory, extend, identify
from tersely.store.commit import reply_ids
from tersely.store.db.connection import Database
from tersely.store.history.lookups import Lookups
from tersely.store.history.sessions import ReplyMatch

# For so many seconds after the database was asked for a session, or has stored a call of it, another process's changes
# of the session are not looked for. What this process changes is known at once.
TRUSTED = 2.0


class LiveMatcher:
    """Matches the calls of one dialect with live sessions."""

    def __init__(
        self,
        dialect: Dialect,
        sessions: LiveSessions,
        *,
        database: Database,
        lookups: Lookups,
        exchanges: DurableWriter,
    ) -> None:
        self._dialect = dialect
        self._history = dialect.history
        self._references = References(dialect.history)
        self._sessions = sessions
        self._database = database
        self._lookups = lookups
        self._exchanges = exchanges

    async def match(self, call: Call, owner: int) -> Continuation | Miss:
        """Return what ``call`` adds to a live session of ``owner``, or why there is none.

        Raises `StoreUnavailable`, and `TooLarge` for a list with too many elements.
        """
        candidates = self._sessions.find(call) or self._find_referenced(call)
        reason: Miss = "unknown"
        for live in candidates:
            found = self._continue(call, live, owner)
            if not isinstance(found, str):
                await _check_lengths(call, live)
                if (live is candidates[0] and self._is_trusted(live)) or await self._is_current(live):
                    return found
                return "moved"
            reason = found
        return reason

    def _find_referenced(self, call: Call) -> list[LiveSession]:
        found = self._references.find(call.body) if call.options.session_id is None else None
        if found is None:
            return []
        return self._sessions.find_referenced(call, reply_id=found[0], conversation=found[1])

    # Whether a live session is its session still

    def _is_trusted(self, live: LiveSession) -> bool:
        # Such a call does not show that its client got replies from another replica.
        if live.is_joined:
            return False
        now = asyncio.get_running_loop().time()
        if now - live.checked_at >= TRUSTED or live.changes != self._database.changes(live.tenant):
            return False
        if live.is_named:
            return True
        if live.reference is not None:
            # The full path continues no reply whose id two sessions have.
            reply_id = live.reference.reply_id
            return len(reply_id) >= SHORTEST_ID and self._sessions.is_reply_of(live, reply_id)
        # Of several sessions with one history the database says which one a call continues.
        if self._sessions.has_twin(live):
            return False
        return not self._lookups.is_chain_of_another(live.tenant, live.chain, live.session.id)

    async def _is_current(self, live: LiveSession) -> bool:
        if live.is_named or live.reference is not None:
            is_complete = await self._exchanges.has_all(live.tenant, live.session)
            if not is_complete:
                self._sessions.forget(live.tenant, live.session.id)
                return False
            return live.reference is None or await self._is_one_reply(live, live.reference)
        known = hit_of(live)
        hit = await self._lookups.find(live.tenant, [live.chain], live.client.id, known=known)
        if hit is known:
            return True
        if hit is None or hit.session.id == live.session.id:
            self._sessions.forget(live.tenant, live.session.id)
        return False

    async def _is_one_reply(self, live: LiveSession, reference: ReferenceSession) -> bool:
        """Return whether the id of the last reply names no other one. A conversation is the session of its id."""
        if reference.conversation:
            return True
        async with self._database.reading(live.tenant) as connection:
            found = await reply_ids.find(connection, live.tenant, reference.reply_id)
        return found is not None and (found.hit.session.id, found.hit.seq) == (live.session.id, live.reply.row.seq)

    # What a call adds

    def _continue(self, call: Call, live: LiveSession, owner: int) -> Continuation | Miss:
        # Several hosts may have one dialect.
        if live.owner != owner or (call.method, call.path, call.options) != (live.method, live.path, live.options):
            return "changed"
        headers = steady(call.headers)
        if headers != live.headers and not _is_same_client(call, live):
            return "changed"
        size = len(call.body) - len(live.suffix) - live.end
        if size >= LONG:
            return "messages"
        more = call.body[live.end : live.end + size]
        if live.reference is not None:
            return self._continue_reference(call, live, live.reference, read_value(more, self._history), headers)
        if live.deltas is not None:
            return self._continue_with_delta(call, live, live.deltas, read_more(b"," + more), headers)
        raws = read_more(more)
        if raws is None or len(raws) < 2 + len(live.volatile):
            return "messages"
        brought = tuple(raws)
        revised = self._revise(live, brought)
        if revised is None:
            return "messages"
        try:
            messages = tuple(self._history.read(raws[len(revised) :]))
        except (InvalidRequest, ValueError):
            return "messages"
        history = _history(live, messages) if len(messages) > 1 else None
        if history is None or self._is_side_call(call, live, messages, headers):
            return "messages"
        return Continuation(live=live, raws=brought, revised=revised, history=history, headers=headers)

    def _continue_with_delta(
        self, call: Call, live: LiveSession, deltas: DeltaSession, raws: Sequence[bytes] | None, headers: Headers
    ) -> Continuation | Miss:
        history = self._read_behind_reply(call, live, deltas.reply, raws)
        # Words that the session has already may be the same question again.
        if history is None or history.identities[-1].digest in deltas.digests:
            return "messages"
        known = [*(each.raw for each in live.volatile), live.reply.model_raw or deltas.reply]
        revised = live.snapshot.entries[len(live.snapshot.entries) - len(live.volatile) :]
        return Continuation(live=live, raws=(*known, *(raws or ())), revised=revised, history=history, headers=headers)

    def _continue_reference(
        self,
        call: Call,
        live: LiveSession,
        reference: ReferenceSession,
        raws: Sequence[bytes] | None,
        headers: Headers,
    ) -> Continuation | Miss:
        new = self._read_behind_reply(call, live, reference.reply, raws, reference.instructions)
        if new is None:
            return "messages"
        history = history_of_reference(live, reference, new, self._dialect)
        raws = tuple([message.raw for message in history.messages])
        return Continuation(live=live, raws=raws, revised=(), history=history, headers=headers)

    def _read_behind_reply(
        self,
        call: Call,
        live: LiveSession,
        reply: bytes,
        raws: Sequence[bytes] | None,
        instructions: tuple[Message, ...] = (),
    ) -> IncomingHistory | None:
        """Read and hash the messages that a call brings behind the last ``reply``; None unless they are new questions
        and results. They are read together with the reply: the form of a result may depend on its call.
        """
        if not raws:
            return None
        known = [*self._history.elements(reply)]
        try:
            messages = tuple(self._history.read((*known, *raws)))
        except (InvalidRequest, ValueError):
            return None
        if len(messages) < 2 or _history(live, messages[:1]) is None:
            return None
        if messages[0].raw != reply and [*self._history.elements(messages[0].raw)] != known:
            return None  # a new element was read as a part of the reply
        history = _appended(live, messages[1:], (), ())
        request = live.request
        side_call = clients.side_call(
            call.header_map,
            (*instructions, *messages[1:]),
            has_tools=bool(request.tools),
            stops=request.stop,
            max_tokens=request.max_tokens,
        )
        return history if side_call is None else None

    def _revise(self, live: LiveSession, raws: Sequence[bytes]) -> tuple[Entry, ...] | None:
        """Return the entries of the volatile messages as the client sends them now; None where they are others."""
        if not live.volatile:
            return ()
        entries = live.snapshot.entries[len(live.snapshot.entries) - len(live.volatile) :]
        revised: list[Entry] = []
        for raw, before, entry in zip(raws, live.volatile, entries, strict=False):
            if raw == before.raw:
                revised.append(entry)
                continue
            if entry.message.raw != before.raw or entry.message.role == "assistant" or entry.client_view is not None:
                return None
            try:
                message = self._dialect.read_message(raw)
            except InvalidRequest:
                return None
            found = identify(message)
            is_same = (message.role, message.injected) == (entry.message.role, entry.message.injected)
            if found.digest != before.digest or not is_same:
                return None
            revised.append(replace(entry, message=message))
        return tuple(revised)

    @staticmethod
    def _is_side_call(call: Call, live: LiveSession, messages: Sequence[Message], headers: Headers) -> bool:
        """Return whether a call is none of the conversation. The last one was: only what is new can say so."""
        request = live.request
        question = next((each for each in reversed(messages) if each.role == "user"), None)
        if headers == live.headers:
            return question is not None and clients.side_question(question, max_tokens=request.max_tokens) is not None
        last = question or live.last_question
        opening = (*live.first_messages, *([last] if last is not None else ()))
        kind = clients.side_call(
            call.header_map, opening, has_tools=bool(request.tools), stops=request.stop, max_tokens=request.max_tokens
        )
        return kind is not None


async def _check_lengths(call: Call, live: LiveSession) -> None:
    """Raise `TooLarge` for a list with too many elements. Where that suffices, only the new messages are looked at."""
    most = call.max_messages
    if most is None or live.commas + call.body.count(b",", live.end, len(call.body) - len(live.suffix)) < most:
        return
    await run_in_thread_if_large(len(call.body), check_lengths, call.body, most)


def hit_of(live: LiveSession) -> ReplyMatch:
    """Return the session as a lookup finds it."""
    return ReplyMatch(
        session=live.session,
        seq=live.reply.row.seq,
        chain=live.chain,
        is_current=True,
        tail=live.rows[: live.row_count],
    )


def _is_same_client(call: Call, live: LiveSession) -> bool:
    headers = call.header_map
    if clients.is_retry(headers) or clients.idempotency_key(headers) is not None:
        return False
    if (client_name(headers) or None) != live.client_name:
        return False
    return clients.client_ids(headers, live.request.ids) == live.client


def _history(live: LiveSession, messages: tuple[Message, ...]) -> IncomingHistory | None:
    """Hash messages. None unless they are the last reply, which may have been several elements, and new ones after it,
    with nothing injected.
    """
    reply = messages[0]
    if reply.role != "assistant" or reply.injected or reply.is_malformed:
        return None
    first = identify(reply)
    if first.digest != live.reply.row.digest:
        return None
    return _appended(live, messages, (first,), (live.chain,))


def _appended(
    live: LiveSession, messages: tuple[Message, ...], known: Sequence[MessageIdentity], known_chains: Sequence[bytes]
) -> IncomingHistory | None:
    """Hash messages, of which the first ones are ``known``. None unless the others are new questions and results."""
    identities, chains = [*known], [*known_chains]
    chain = live.chain
    for message in messages[len(known) :]:
        if message.role not in {"user", "tool"} or message.injected or message.is_malformed:
            return None
        each = identify(message)
        if not (message.raw and message.parts and each.is_link):
            return None
        identities.append(each)
        chain = extend(chain, each.digest)
        chains.append(chain)
    return IncomingHistory(messages=messages, identities=tuple(identities), chains=tuple(chains))
