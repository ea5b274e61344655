"""Commands in a proxied chat: answered in the dialect of the chat, and hidden from the model and the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from functools import partial

from msgspec import structs

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.command_traces import MARK, mark_reply, without_traces
from tersely.dialects.dialect import Dialect, Request, RequestPatch
from tersely.dialects.headers import Headers
from tersely.dialects.local_reply import EVENT_STREAM, ID_PREFIX, LocalReply, WrittenReply
from tersely.dialects.registry import REPLY_WRITERS
from tersely.domain.chat_commands import HELP, parse_command
from tersely.domain.errors import InvalidRequest, TerselyError
from tersely.domain.messages import Message
from tersely.domain.text.encodable import encodable
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.call import history_by_reference
from tersely.service.proxy.call.call import Call, ContextLabels, ProxyResponse
from tersely.service.proxy.command_deduplicator import CommandDeduplicator, identify
from tersely.service.recognition import session_lookup
from tersely.service.recognition.incoming_history import hash_history
from tersely.service.recognition.session_lookup import SessionHints, SessionSource
from tersely.service.sessions.commands import Commands
from tersely.service.sessions.compactions import CompactionOptions
from tersely.service.summaries.jobs import credentials_of
from tersely.store.db.connection import Database
from tersely.store.history import sessions

_log = logging.getLogger(__name__)

NO_SESSION = "This chat has no session yet: none of its messages is stored."


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
        self._deduplicator = CommandDeduplicator(database, clock=clock)

    def without_traces(self, call: Call, request: Request, dialect: Dialect) -> tuple[Call, Request]:
        """Remove earlier commands and their answers from the messages, the body and the references of a call."""
        if ID_PREFIX in request.ids.get("previous_response_id", ""):
            ids = {name: value for name, value in request.ids.items() if name != "previous_response_id"}
            call = structs.replace(call, body=dialect.without_history(call.body))
            request = structs.replace(request, ids=ids, reply_id="")
        if MARK.encode() not in call.body:
            return call, request

        def rest(message: Message, text: str) -> Message:
            return dialect.read_message(dialect.with_text(message.raw, text))

        kept = without_traces(request.messages, rest)
        if len(kept) == len(request.messages):
            return call, request
        body = dialect.write_request(call.body, RequestPatch(messages=[message.raw for message in kept]))
        return structs.replace(call, body=body), structs.replace(request, messages=tuple(kept))

    async def answer(
        self, call: Call, request: Request, dialect: Dialect, command: str, *, sent: Request, heartbeat: float
    ) -> ProxyResponse:
        """Run ``command``, the last message of ``request``. Errors are answered in the chat.

        ``sent`` is the request with the earlier commands. A stream gets a heartbeat every ``heartbeat`` seconds.
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
            labels = structs.replace(labels, session_id=found[0], source=found[1])
            key = session_lookup.idempotency_key(call.header_map)
            digest = identify(sent.messages, sent.ids, key)
            work = self._run(call, request, dialect, command, found[0], digest)
            running = asyncio.get_running_loop().create_task(work)
            is_streamed = request.stream and bool(dialect.streaming.heartbeat)
            if is_streamed and not await _wait(running, heartbeat):
                return self._stream(call, request, dialect, running, labels, heartbeat)
            text = await running
        reply = self._write(call, request, dialect, text)
        return ProxyResponse(status=200, headers=self._headers(call, reply.content_type, labels), body=reply.body)

    def _stream(
        self,
        call: Call,
        request: Request,
        dialect: Dialect,
        running: asyncio.Task[str],
        labels: ContextLabels,
        heartbeat: float,
    ) -> ProxyResponse:
        async def chunks() -> AsyncGenerator[bytes, None]:
            try:
                yield dialect.streaming.heartbeat
                while not await _wait(running, heartbeat):
                    yield dialect.streaming.heartbeat
                yield self._write(call, request, dialect, running.result()).body
            finally:
                running.cancel()

        headers = [*self._headers(call, EVENT_STREAM, labels), ("x-accel-buffering", "no")]
        return ProxyResponse(status=200, headers=headers, chunks=chunks())

    def _headers(self, call: Call, content_type: str, labels: ContextLabels) -> Headers:
        labels = structs.replace(labels, overhead_ms=(self._monotonic() - call.received) * 1000)
        return [("content-type", content_type), ("cache-control", "no-cache"), *labels.headers()]

    async def _run(
        self, call: Call, request: Request, dialect: Dialect, text: str, session_id: str, identity: bytes
    ) -> str:
        """Run a command and return the text of its answer."""
        options = CompactionOptions(
            dialect=dialect.name,
            strategy=call.options.strategy,
            epoch=call.options.epoch,
            model=request.model,
            host=call.host,
            credentials=credentials_of(call.headers, drop=call.key_headers),
        )
        try:
            command = parse_command(text)
            work = partial(self._commands.run, call.tenant, session_id, command, options)
            if command.is_mutating:
                headers = call.header_map
                is_retry = clients.is_retry(headers) or clients.idempotency_key(headers) is not None
                return await self._deduplicator.run_once(call.tenant, session_id, identity, work, is_retry=is_retry)
            await self._deduplicator.forget(call.tenant, session_id)
            return await work()
        except TerselyError as error:
            return error.detail

    async def _find(self, call: Call, request: Request) -> tuple[str, SessionSource] | None:
        """Find the session of the history before the command; return its id and how it was found. Writes nothing."""
        own_id, headers, history = call.options.session_id, call.header_map, request.messages[:-1]
        incoming = await run_in_thread_if_large(len(call.body), hash_history, history)
        async with self._database.reading(call.tenant) as connection:
            if own_id is not None:
                session = await sessions.get(connection, call.tenant, own_id)
                return (session.id, "header") if session else None
            if request.references_history:
                hints = SessionHints(reply_id=request.reply_id, conversation=request.conversation)
                referenced = await history_by_reference.find(connection, call.tenant, hints)
                session = referenced.session if referenced else None
                return (session.id, referenced.source) if referenced and session else None
            ids = clients.client_ids(headers, request.ids)
            hints = SessionHints(client=ids, is_retry=clients.is_retry(headers), headers=headers)
            match = await session_lookup.find(
                connection, call.tenant, incoming, hints, now=self._clock(), new_id=self._new_id
            )
        return (match.session.id, match.source) if match.session else None

    def _write(self, call: Call, request: Request, dialect: Dialect, text: str) -> WrittenReply:
        # Text of a history may hold lone surrogates, which the JSON parsers of many clients refuse.
        printable = encodable(text)
        reply = LocalReply(
            text=mark_reply(printable),
            request=request,
            name=ID_PREFIX + self._new_id(),
            created=int(self._clock().timestamp()),
            as_array="alt=sse" not in call.path.partition("?")[2].split("&"),
        )
        return REPLY_WRITERS[dialect.name](reply)


async def _wait(work: asyncio.Task[str], seconds: float) -> bool:
    """Return whether ``work`` ends within so many seconds. Cancel it if the caller is cancelled."""
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
