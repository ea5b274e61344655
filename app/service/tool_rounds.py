"""Tools of ours inside a proxied chat: the model's calls to them are answered here, and it is asked again.

The client sees one reply, without a trace of what was ours. What the model did is kept beside that reply, hidden from
the client, so that the next request shows the model its whole history.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from app.dialects import raw_json
from app.dialects.dialect import Dialect, Reply, ReplyReader
from app.dialects.rounds import RoundsStream
from app.domain.errors import UpstreamUnavailable
from app.domain.messages import Message, ToolCall, ToolResult
from app.service.attempts import EVENT_STREAM, MAX_ERROR_BODY, Attempts, Begun
from app.service.calls import Call
from app.service.metrics import Metrics
from app.service.preparing import Prepared, Preparer
from app.service.recording import Recorder
from app.service.stream_end import StreamEnd, end_of, until_end
from app.service.told import Told
from app.service.tools import Answer as ToolAnswer
from app.upstream.client import Reply as Response

_log = logging.getLogger(__name__)

MAX_ROUNDS = 8
"""After so many rounds the model has to answer."""
TOOL_SECONDS = 20.0
MAX_CALLS = 16
"""Calls of one round that are answered with more than a refusal."""
CUT_OFF = frozenset(
    {"length", "max_tokens", "max_output_tokens", "content_filter", "incomplete", "cancelled", "queued", "in_progress"}
)
"""How a reply ends whose calls need not be whole."""


class RunsTools(Protocol):
    """Runs tools by name."""

    async def answer(self, tenant: str, session_id: str, name: str, arguments: object) -> ToolAnswer:
        """Never fails."""


class ToolRounds:
    """Goes on with calls of one dialect until the reply is the client's."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        preparer: Preparer,
        recorder: Recorder,
        tools: RunsTools,
        metrics: Metrics,
        attempts: Attempts,
        heartbeat: float,
        max_reply: int,
        seconds: float = TOOL_SECONDS,
    ) -> None:
        """``heartbeat`` and ``seconds`` (for one tool call) in seconds, ``max_reply`` in bytes."""
        self._dialect = dialect
        self._preparer = preparer
        self._recorder = recorder
        self._tools = tools
        self._metrics = metrics
        self._attempts = attempts
        self._heartbeat = heartbeat
        self._max_reply = max_reply
        self._seconds = seconds

    # Whole replies

    async def whole(self, call: Call, prepared: Prepared, first: bytes, status: int) -> tuple[bytes, int]:
        """Body and status for the client; ``first`` is the body of the first round. Raises `UpstreamUnavailable`."""
        rounds = self._dialect.rounds
        assert rounds is not None
        told = Told(self._dialect, prepared.tools)
        body = first
        try:
            while True:
                client_body, said = self._dialect.split_reply(body, prepared.extract, sent=call.body)
                ours, is_mixed = told.calls(said) if _is_finished(said) else ([], False)
                is_last = is_mixed or told.rounds >= MAX_ROUNDS
                results = await self._run(call, prepared, ours) if ours and told.rounds < MAX_ROUNDS else []
                if not results or is_last:
                    break
                told.go_on(said, results)
                begun = await self._ask_again(call, prepared, told)
                prepared, response = begun.prepared, begun.reply
                try:
                    body = begun.body or await response.read(self._max_reply)
                finally:
                    response.close()
                failed, said = self._dialect.split_reply(body, prepared.extract, sent=call.body)
                if response.status >= 400 or not said.choices:
                    await self._recorder.commit_failure(prepared, response.status)
                    return failed, response.status
        except UpstreamUnavailable:
            await self._recorder.commit_failure(prepared, None)
            raise
        except BaseException:
            self._recorder.record_failure(prepared, status)
            raise
        has_calls = bool(told.calls(said)[0])
        reply, beside = told.end(said, results)
        await self._recorder.commit(prepared, reply, status, is_whole=True, beside=beside)
        if not (has_calls or told.rounds):
            return client_body, status
        return rounds.write_body(first, client_body, told.client, reply.usage), status

    # Streams

    async def stream(self, call: Call, prepared: Prepared, response: Response, first: bytes) -> AsyncIterator[bytes]:
        """The rounds as one stream. Words go out as they come; the end when the whole is on disk."""
        rounds = self._dialect.rounds
        assert rounds is not None
        loop = asyncio.get_running_loop()
        shown = rounds.open(prepared.tools)
        told = Told(self._dialect, prepared.tools)
        status = response.status
        reader = self._reader(call, prepared)
        is_committed = False
        try:
            while True:
                end = end_of(self._dialect.streaming)
                async for out in self._round(response, first, reader.feed, end, shown):
                    yield out
                if out := shown.feed(end.held + reader.close()):
                    yield out
                response.close()
                said = reader.reply
                ours, is_mixed = told.calls(said) if _is_finished(said) else ([], False)
                running = loop.create_task(self._run(call, prepared, ours if told.rounds < MAX_ROUNDS else []))
                async for beat in self._beating(running):
                    yield beat
                results = running.result()
                if not results or is_mixed:
                    break
                told.go_on(said, results)
                reader = self._reader(call, prepared)
                if out := shown.next_round(usage=told.usage, has_said=told.has_words):
                    yield out
                asking = loop.create_task(self._ask_again(call, prepared, told))
                async for beat in self._beating(asking):
                    yield beat
                begun = asking.result()
                prepared, response, first = begun.prepared, begun.reply, begun.first
                if response.status >= 400 or response.content_type != EVENT_STREAM:
                    body = begun.body or await response.read(MAX_ERROR_BODY)
                    is_committed = True
                    await self._recorder.commit(prepared, told.end(Reply())[0], response.status, is_whole=False)
                    yield self._dialect.error_event(_on_one_line(body) or self._error("the upstream refused"))
                    return
            is_committed = True
            reply, beside = told.end(said, results)
            is_whole = _is_finished(said)
            await self._recorder.commit(prepared, reply, status, is_whole=is_whole, beside=beside)
            if last := shown.close():
                yield last
        except (UpstreamUnavailable, ValueError) as error:
            if is_committed:
                raise
            is_committed = True
            reader.close()
            reply, beside = told.end(reader.reply)
            await self._recorder.commit(prepared, reply, status, is_whole=False, beside=beside)
            yield self._dialect.error_event(self._error(str(error)))
        finally:
            response.close()
            if not is_committed:
                # The client went away: what was said until then is kept, and the model is stopped.
                reader.close()
                reply, beside = told.end(reader.reply)
                self._recorder.submit_reply(prepared, reply, status, is_whole=False, beside=beside)

    async def _round(
        self,
        response: Response,
        first: bytes,
        read: Callable[[bytes], bytes],
        end: StreamEnd,
        shown: RoundsStream,
    ) -> AsyncIterator[bytes]:
        if first and (out := shown.feed(end.hold(read(first)))):
            yield out
        now = asyncio.get_running_loop().time
        told = now()
        async for chunk in until_end(response, end, self._heartbeat):
            out = shown.feed(end.hold(read(chunk))) if chunk else self._dialect.streaming.heartbeat
            if not out and now() - told >= self._heartbeat:  # what is held back may be long
                out = self._dialect.streaming.heartbeat
            if out:
                told = now()
                yield out

    async def _beating(
        self,
        work: asyncio.Future[list[bytes]] | asyncio.Future[Begun],
    ) -> AsyncIterator[bytes]:
        """Heartbeats while ``work`` is under way; it ends with who waits for it, and so does its response."""
        try:
            while not (await asyncio.wait({work}, timeout=self._heartbeat))[0]:
                if beat := self._dialect.streaming.heartbeat:
                    yield beat
        finally:
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError, UpstreamUnavailable):
                    done = await work
                    if isinstance(done, Begun):
                        done.reply.close()

    def _reader(self, call: Call, prepared: Prepared) -> ReplyReader:
        """Reads a round. The model was sent more than the client had asked it, whatever the reply repeats of that."""
        return self._dialect.open_stream(extract=prepared.extract, strip_usage=prepared.strip_usage, sent=call.body)

    def _error(self, message: str) -> bytes:
        return self._dialect.error_body(message, type="upstream_error", code="upstream_unavailable")

    # Rounds

    async def _ask_again(self, call: Call, prepared: Prepared, told: Told) -> Begun:
        """Send the context with all that was said since."""
        is_last = told.rounds >= MAX_ROUNDS
        return await self._attempts.ask(call, self._preparer.go_on(call, prepared, told.extra, is_last=is_last))

    async def _run(self, call: Call, prepared: Prepared, calls: Sequence[ToolCall]) -> list[bytes]:
        """The results of ``calls``, in their order, as messages."""
        if not calls:
            return []
        if prepared.written is not None:
            with suppress(Exception):  # whoever commits the reply is told; a tool says that it is not available
                await asyncio.shield(prepared.written)
        outcome = prepared.write.outcome
        session_id = outcome.session_id if outcome is not None else prepared.found.session_id
        running = [self._answer(call.tenant, session_id, each, number) for number, each in enumerate(calls)]
        texts = await asyncio.gather(*running)
        return [
            self._dialect.write_message(Message(role="tool", parts=(ToolResult(call_id=each.id, text=text),), raw=b""))
            for each, text in zip(calls, texts, strict=True)
        ]

    async def _answer(self, tenant: str, session_id: str, call: ToolCall, number: int) -> str:
        if number >= MAX_CALLS:
            result, text = "refused", f"Too many calls at once: at most {MAX_CALLS} are answered. Call it again."
        else:
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await self._tools.answer(tenant, session_id, call.name, call.arguments)
                text, result = answer.text, "error" if answer.is_error else "ok"
            except TimeoutError:
                result, text = (
                    "timeout",
                    f"{call.name} took too long and was stopped. Ask for less, or go on without it.",
                )
        self._metrics.tool_calls.labels(call.name, result).inc()
        return text


def _is_finished(said: Reply) -> bool:
    """Whether a round was said to its end: calls in what broke off are not whole."""
    if said.error or not said.choices:
        return False
    finish = said.choices[0].finish_reason.lower()
    return (said.is_done or bool(finish)) and finish not in CUT_OFF


def _on_one_line(body: bytes) -> bytes:
    """An error's body as an event can carry it; nothing for what tells of none."""
    with suppress(ValueError):
        said = raw_json.load(body)
        if isinstance(said, dict) and isinstance(said.get("error"), dict):
            return raw_json.dump(said)
    return b""
