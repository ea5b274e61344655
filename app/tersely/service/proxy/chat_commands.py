"""Commands in a proxied chat: answered in the chat's own dialect, kept from the model and out of the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import datetime
from functools import partial

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.command_traces import MARK, mark_reply, without_traces
from tersely.dialects.dialect import Dialect, Request
from tersely.dialects.headers import Headers
from tersely.dialects.local_reply import EVENT_STREAM, ID_PREFIX, WrittenReply
from tersely.dialects.registry import REPLY_WRITERS
from tersely.domain.chat_commands import HELP, parse_command
from tersely.domain.errors import InvalidRequest, TerselyError
from tersely.domain.messages import Message
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy import history_by_reference as named
from tersely.service.proxy.calls import Call, ContextLabels, ProxyResponse
from tersely.service.proxy.command_deduplicator import CommandDeduplicator, identify
from tersely.service.recognition import session_lookup as identity
from tersely.service.recognition.incoming_history import hash_history
from tersely.service.recognition.session_lookup import SessionHints, Source
from tersely.service.sessions.commands import Commands
from tersely.service.sessions.compactions import CompactionOptions
from tersely.service.summaries.jobs import credentials_of
from tersely.store.db.connection import Database
from tersely.store.history import sessions

_log = logging.getLogger(__name__)

NO_SESSION = "This chat has no session yet: nothing of it was stored so far."


class ChatCommands:
    """Answers the commands of chats in every dialect. ``monotonic`` in seconds."""

    def __init__(
        self,
        commands: Commands,
        database: Database,
        metrics: Metrics,
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._commands = commands
        self._database = database
        self._metrics = metrics
        self._clock = clock
        self._monotonic = monotonic
        self._new_id = new_id
        self._once = CommandDeduplicator(database, clock=clock)

    def without_traces(self, call: Call, request: Request, dialect: Dialect) -> tuple[Call, Request]:
        """The call as if no command had been typed before: its messages, its body, and what it goes on from."""
        if ID_PREFIX in request.ids.get("previous_response_id", ""):
            ids = {name: value for name, value in request.ids.items() if name != "previous_response_id"}
            call = replace(call, body=dialect.without_history(call.body))
            request = replace(request, ids=ids, reply_id="")
        if MARK.encode() not in call.body:
            return call, request

        def rest(message: Message, text: str) -> Message:
            return dialect.read_message(dialect.with_text(message.raw, text))

        kept = without_traces(request.messages, rest)
        if len(kept) == len(request.messages):
            return call, request
        body = dialect.write_request(call.body, messages=[message.raw for message in kept])
        return replace(call, body=body), replace(request, messages=tuple(kept))

    async def answer(
        self, call: Call, request: Request, dialect: Dialect, command: str, *, sent: Request, heartbeat: float
    ) -> ProxyResponse:
        """Carry out ``command``, the last message of ``request``. What goes wrong is told in the chat.

        ``sent`` is the request with the commands before it. A stream gets a sign of life every ``heartbeat`` seconds.
        """
        verb = _verb(command)
        self._metrics.chat_commands.labels(verb).inc()
        _log.info("chat command: %s", verb)
        labels = ContextLabels(context="command")
        text, found = HELP, None
        if verb != "help":
            text = NO_SESSION
            try:
                found = await self._find(call, request)
            except TerselyError as error:
                text = error.detail
        if found is not None:
            labels = replace(labels, session_id=found[0], source=found[1])
            key = identity.idempotency_key(call.header_map)
            digest = identify(sent.messages, sent.ids, key)
            work = self._carry_out(call, request, dialect, command, found[0], digest)
            carrying = asyncio.get_running_loop().create_task(work)
            is_watched = request.stream and bool(dialect.streaming.heartbeat)
            if is_watched and not await _wait(carrying, heartbeat):
                return self._stream(call, request, dialect, carrying, labels, heartbeat)
            text = await carrying
        reply = self._write(call, request, dialect, text)
        return ProxyResponse(status=200, headers=self._headers(call, reply.content_type, labels), body=reply.body)

    def _stream(
        self,
        call: Call,
        request: Request,
        dialect: Dialect,
        carrying: asyncio.Task[str],
        labels: ContextLabels,
        heartbeat: float,
    ) -> ProxyResponse:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                yield dialect.streaming.heartbeat
                while not await _wait(carrying, heartbeat):
                    yield dialect.streaming.heartbeat
                yield self._write(call, request, dialect, carrying.result()).body
            finally:
                carrying.cancel()

        headers = [*self._headers(call, EVENT_STREAM, labels), ("x-accel-buffering", "no")]
        return ProxyResponse(status=200, headers=headers, chunks=chunks())

    def _headers(self, call: Call, content_type: str, labels: ContextLabels) -> Headers:
        labels = replace(labels, overhead_ms=(self._monotonic() - call.received) * 1000)
        return [("content-type", content_type), ("cache-control", "no-cache"), *labels.headers()]

    async def _carry_out(
        self, call: Call, request: Request, dialect: Dialect, text: str, session_id: str, identity: bytes
    ) -> str:
        """What the command is answered."""
        means = CompactionOptions(
            dialect=dialect.name,
            strategy=call.options.strategy,
            epoch=call.options.epoch,
            model=request.model,
            host=call.host,
            credentials=credentials_of(call.headers, drop=call.key_headers),
        )
        try:
            command = parse_command(text)
            work = partial(self._commands.run, call.tenant, session_id, command, means)
            if command.is_mutating:
                headers = call.header_map
                is_retry = clients.is_retry(headers) or clients.idempotency_key(headers) is not None
                return await self._once.carry_out(call.tenant, session_id, identity, work, is_retry=is_retry)
            await self._once.forget(call.tenant, session_id)
            return await work()
        except TerselyError as error:
            return error.detail

    async def _find(self, call: Call, request: Request) -> tuple[str, Source] | None:
        """The session of the history before the command, and how it was found. Changes nothing."""
        own_id, headers, history = call.options.session_id, call.header_map, request.messages[:-1]
        arrival = await run_in_thread_if_large(len(call.body), hash_history, history)
        async with self._database.reading(call.tenant) as connection:
            if own_id is not None:
                session = await sessions.get(connection, call.tenant, own_id)
                return (session.id, "header") if session else None
            if request.references_history:
                asked = SessionHints(reply_id=request.reply_id, conversation=request.conversation)
                told = await named.find(connection, call.tenant, asked)
                return (told.session.id, told.source) if told and told.session else None
            ids = clients.client_ids(headers, request.ids)
            asked = SessionHints(client=ids, is_retry=clients.is_retry(headers), headers=headers)
            found = await identity.find(connection, call.tenant, arrival, asked, now=self._clock(), new_id=self._new_id)
        return (found.session.id, found.source) if found.session else None

    def _write(self, call: Call, request: Request, dialect: Dialect, text: str) -> WrittenReply:
        # Words of a history may hold lone surrogates, which many clients' JSON does not take.
        printable = text.encode("utf-8", "replace").decode()
        return REPLY_WRITERS[dialect.name](
            mark_reply(printable),
            request=request,
            name=ID_PREFIX + self._new_id(),
            created=int(self._clock().timestamp()),
            as_array="alt=sse" not in call.path.partition("?")[2].split("&"),
        )


async def _wait(work: asyncio.Task[str], seconds: float) -> bool:
    """Whether it is done within so many seconds; it ends with whoever waits for it."""
    try:
        return bool((await asyncio.wait({work}, timeout=seconds))[0])
    except asyncio.CancelledError:
        work.cancel()
        raise


def _verb(command: str) -> str:
    try:
        return parse_command(command).verb
    except InvalidRequest:
        return "unknown"
