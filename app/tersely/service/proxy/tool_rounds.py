"""Tools of ours inside a proxied chat: the model's calls to them are answered here, and it is asked again.

The client sees one reply, without a trace of what was ours. What the model did is kept beside that reply, hidden from
the client, so that the next request shows the model its whole history.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from tersely.dialects.dialect import Dialect, Reply
from tersely.dialects.tool_rounds import RoundsStream
from tersely.dialects.wire import raw_json
from tersely.domain.errors import NotFound, StoreUnavailable, UpstreamUnavailable
from tersely.domain.messages import Message, ToolCall, ToolResult
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.attempts import EVENT_STREAM, MAX_ERROR_BODY, Attempts, StartedReply
from tersely.service.proxy.calls import Call
from tersely.service.proxy.limited_reader import OVERSIZED, LimitedReader
from tersely.service.proxy.preparing import CallPreparer, PreparedCall
from tersely.service.proxy.recording import Recorder
from tersely.service.proxy.round_transcript import RoundTranscript
from tersely.service.proxy.stream_end import StreamEnd, iter_until_terminal_event, terminal_detector
from tersely.service.tools.tools import ToolOutcome as ToolAnswer
from tersely.upstream.client import UpstreamReply as Response

_log = logging.getLogger(__name__)

MAX_ROUNDS = 8
"""After so many rounds the model has to answer."""
TOOL_SECONDS = 20.0
MAX_CALLS = 16
"""Calls of one round that are answered with more than a refusal."""
CUT_OFF = frozenset(
    {
        "length",
        "max_tokens",
        "max_output_tokens",
        "content_filter",
        "incomplete",
        "cancelled",
        "queued",
        "in_progress",
        OVERSIZED,
    }
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
        preparer: CallPreparer,
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

    async def whole(self, call: Call, prepared: PreparedCall, first: bytes, status: int) -> tuple[bytes, int]:
        """Body and status for the client; ``first`` is the body of the first round. Raises `UpstreamUnavailable`."""
        rounds = self._dialect.rounds
        assert rounds is not None
        told = RoundTranscript(self._dialect, prepared.tools)
        body = first
        try:
            while True:
                split = partial(self._dialect.split_reply, body, prepared.extract, sent=call.body)
                client_body, said = await run_in_thread_if_large(len(body), split)
                ours, is_mixed = await run_in_thread_if_large(len(body), _calls_of_ours, told, said)
                results = await self._run(call, prepared, ours)
                if not results or is_mixed:
                    break
                told.go_on(said, results)
                begun = await self._ask_again(call, prepared, told)
                prepared, response = begun.prepared, begun.reply
                try:
                    body = begun.body or await response.read(self._max_reply)
                finally:
                    response.close()
                failed, said = self._dialect.split_reply(body, prepared.extract, sent=call.body)
                if response.status >= 400 or not (said.choices or said.unread):
                    await self._recorder.commit_failure(prepared, response.status)
                    return failed, response.status
        except UpstreamUnavailable:
            await self._recorder.commit_failure(prepared, None)
            raise
        except BaseException:
            self._recorder.record_failure(prepared, status)
            raise
        has_calls = bool(told.calls(said)[0])
        reply, beside = await run_in_thread_if_large(len(body), told.end, said, results)
        await self._recorder.commit(prepared, reply, status, is_whole=True, beside=beside)
        if not (has_calls or told.rounds) or said.unread or told.client == b"":
            return client_body, status
        return rounds.write_body(first, client_body, told.client, reply.usage), status

    # Streams

    async def stream(
        self, call: Call, prepared: PreparedCall, response: Response, first: bytes
    ) -> AsyncIterator[bytes]:
        """The rounds as one stream. Words go out as they come; the end when the whole is on disk."""
        rounds = self._dialect.rounds
        assert rounds is not None
        loop = asyncio.get_running_loop()
        shown = rounds.open(prepared.tools)
        told = RoundTranscript(self._dialect, prepared.tools)
        status = response.status
        reader = self._reader(call, prepared)
        is_committed = False
        try:
            while True:
                end = terminal_detector(self._dialect.streaming)
                on_cut = partial(self._commit_partial, prepared, told, reader, status)
                async for out in self._round(response, first, reader, end, shown, on_cut):
                    yield out
                if out := shown.feed(end.held + reader.close()):
                    yield out
                response.close()
                if reader.is_cut:
                    break
                said = await reader.reply()
                ours, is_mixed = await run_in_thread_if_large(reader.size, _calls_of_ours, told, said)
                running = loop.create_task(self._run(call, prepared, ours))
                async for beat in self._beating(running):
                    yield beat
                results = running.result()
                if not results or is_mixed:
                    break
                told.go_on(said, results)
                reader = self._reader(call, prepared)
                if out := shown.next_round(usage=told.usage, has_text=told.has_words):
                    yield out
                asking = loop.create_task(self._ask_again(call, prepared, told))
                async for beat in self._beating(asking):
                    yield beat
                begun = asking.result()
                prepared, response, first = begun.prepared, begun.reply, begun.first
                if response.status >= 400 or response.content_type != EVENT_STREAM:
                    is_committed = True
                    yield await self._refused(begun, told)
                    return
            is_committed = True
            if not reader.is_cut:
                await self._commit(prepared, told, reader, status, results=results, is_whole=_is_finished(said))
            if last := shown.close():
                yield last
        except (StoreUnavailable, NotFound, UpstreamUnavailable, ValueError) as error:
            was_committed, is_committed = is_committed, True
            if not was_committed:
                await self._commit_broken(prepared, told, reader, status)
            yield self._last_event(error, was_committed=was_committed)
        finally:
            response.close()
            if not (is_committed or reader.is_cut):
                # The client went away: what was said until then is kept, and the model is stopped.
                reader.close()
                self._recorder.record_partial(prepared, reader, status, with_rounds=told.end)

    async def _commit(
        self,
        prepared: PreparedCall,
        told: RoundTranscript,
        reader: LimitedReader,
        status: int,
        *,
        results: Sequence[bytes],
        is_whole: bool,
    ) -> None:
        """Return when the rounds and what ``reader`` has read of the last one are on disk."""
        reply, beside = await run_in_thread_if_large(reader.size, told.end, await reader.reply(), results)
        await self._recorder.commit(prepared, reply, status, is_whole=is_whole, beside=beside)

    async def _commit_broken(
        self, prepared: PreparedCall, told: RoundTranscript, reader: LimitedReader, status: int
    ) -> None:
        """Commit what was said until the host broke off, unless that happened when the reply passed the limit."""
        if not reader.is_cut:
            reader.close()
            await self._commit_partial(prepared, told, reader, status)

    def _last_event(self, error: Exception, *, was_committed: bool) -> bytes:
        """Return the event that ends a stream after ``error``, which came before the commit or from it."""
        if isinstance(error, StoreUnavailable | NotFound):
            return self._recorder.not_stored_event(error)
        if was_committed:
            raise error
        told = error if isinstance(error, UpstreamUnavailable) else UpstreamUnavailable(str(error))
        return self._dialect.error_event(self._error(told))

    async def _commit_partial(
        self, prepared: PreparedCall, told: RoundTranscript, reader: LimitedReader, status: int
    ) -> None:
        """Commit what is not all of the reply; the client is told so, or gets the rest, in any case."""
        reply, beside = await run_in_thread_if_large(reader.size, told.end, await reader.reply(), ())
        await self._recorder.commit_partial(prepared, reply, status, beside=beside)

    async def _refused(self, begun: StartedReply, told: RoundTranscript) -> bytes:
        """Record that the host refused to go on; return the event that tells the client."""
        body = begun.body or await begun.reply.read(MAX_ERROR_BODY)
        await self._recorder.commit_partial(begun.prepared, told.end(Reply())[0], begun.reply.status)
        return self._dialect.error_event(_on_one_line(body) or self._error(_REFUSED))

    async def _round(
        self,
        response: Response,
        first: bytes,
        reader: LimitedReader,
        end: StreamEnd,
        shown: RoundsStream,
        on_cut: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[bytes]:
        """One round for the client; ``on_cut`` is awaited when it passes the limit of what is read."""
        if first and (out := shown.feed(end.hold(reader.feed(first)))):
            yield out
        is_known_cut = False
        now = asyncio.get_running_loop().time
        told = now()
        async for chunk in iter_until_terminal_event(response, end, self._heartbeat):
            out = shown.feed(end.hold(reader.feed(chunk))) if chunk else self._dialect.streaming.heartbeat
            if reader.is_cut and not is_known_cut:
                is_known_cut = True
                await on_cut()
            if not out and now() - told >= self._heartbeat:  # what is held back may be long
                out = self._dialect.streaming.heartbeat
            if out:
                told = now()
                yield out

    async def _beating(
        self,
        work: asyncio.Future[list[bytes]] | asyncio.Future[StartedReply],
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
                    if isinstance(done, StartedReply):
                        done.reply.close()

    def _reader(self, call: Call, prepared: PreparedCall) -> LimitedReader:
        """Reads a round. The model was sent more than the client had asked it, whatever the reply repeats of that."""
        stream = self._dialect.open_stream(tags=prepared.extract, strip_usage=prepared.strip_usage, sent=call.body)
        return LimitedReader(stream, self._max_reply)

    def _error(self, error: UpstreamUnavailable) -> bytes:
        return self._dialect.error_body(error.detail, type=error.kind, code=error.code)

    # Rounds

    async def _ask_again(self, call: Call, prepared: PreparedCall, told: RoundTranscript) -> StartedReply:
        """Send the context with all that was said since."""
        is_last = told.rounds >= MAX_ROUNDS
        return await self._attempts.ask(call, self._preparer.go_on(call, prepared, told.extra, is_last=is_last))

    async def _run(self, call: Call, prepared: PreparedCall, calls: Sequence[ToolCall]) -> list[bytes]:
        """The results of ``calls``, in their order, as messages."""
        if not calls:
            return []
        await self._recorder.wait_for_request(prepared)
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


_REFUSED = UpstreamUnavailable("the upstream refused")


def _calls_of_ours(told: RoundTranscript, said: Reply) -> tuple[list[ToolCall], bool]:
    """The calls of our tools in a finished round that are to be answered, and whether there are others."""
    if not _is_finished(said):
        return [], False
    ours, is_mixed = told.calls(said)
    return (ours if told.rounds < MAX_ROUNDS else []), is_mixed


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
