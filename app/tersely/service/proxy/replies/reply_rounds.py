"""The sixth step of a call: relay the reply to the client, and record it.

A reply comes in rounds. A round is one request to the model. If the model calls Tersely's tools and no others, the
calls are run here and the model is asked again: the next round. Most replies take one round. The client sees one reply
without a trace of the calls; they are stored beside the reply, so that the next request shows them to the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from tersely.dialects.dialect import NO_REPLY, ClientView, Dialect, ErrorDescription, Reply
from tersely.dialects.headers import Headers
from tersely.dialects.wire import raw_json
from tersely.domain.errors import NotFound, StoreUnavailable, UpstreamUnavailable
from tersely.domain.messages import ToolCall
from tersely.service.common.call_fields import add_fields
from tersely.service.common.offload import LONG_REPLY, run_in_thread_if_large
from tersely.service.proxy.call.call_timer import CallTimer
from tersely.service.proxy.recording.recorder import Recorder
from tersely.service.proxy.recording.round_transcript import RoundTranscript
from tersely.service.proxy.replies.tool_calls import ToolCalls
from tersely.service.proxy.sending.sender import EVENT_STREAM, MAX_ERROR_BODY
from tersely.service.proxy.sending.sent_call import SentCall, StartedReply
from tersely.service.proxy.streams.client_stream import ClientStream
from tersely.service.proxy.streams.direct_relay import DirectChunks, DirectRelay
from tersely.service.proxy.streams.host_chunks import iter_until_terminal_event

_REFUSED = UpstreamUnavailable("the upstream refused")

NextRound = Callable[[SentCall, RoundTranscript], Coroutine[Any, Any, StartedReply]]


class RoundSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a relay. ``next_round`` sends a call again with the messages of a transcript.

    ``heartbeat`` in seconds, ``max_reply`` in bytes.
    """

    dialect: Dialect
    recorder: Recorder
    tool_calls: ToolCalls
    timer: CallTimer
    next_round: NextRound
    heartbeat: float
    max_reply: int

    async def run(self, prepared: SentCall, calls: Sequence[ToolCall]) -> list[bytes]:
        """Run calls of Tersely's tools; return their results as messages."""
        if not calls:
            return []
        session_id = await self.recorder.wait_for_session(prepared)
        return await self.tool_calls.run(prepared.call.tenant, session_id, calls)


class RelayedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply for the client that is not streamed. ``headers`` are the host's with the body; ``chunks`` take the place
    of a body that is over the size limit.
    """

    status: int
    headers: Headers
    body: bytes = b""
    chunks: AsyncGenerator[bytes, None] | None = None


async def relay_whole(steps: RoundSteps, started: StartedReply) -> RelayedReply:
    """Return the reply for the client, when it is stored. Raises `UpstreamUnavailable`, `StoreUnavailable`.

    What a later round ends with that is no reply goes to the client as it is.
    """
    prepared, source, body = started.prepared, started.reply, started.body
    call, sent_at = prepared.call, started.sent_at
    transcript = RoundTranscript(dialect=steps.dialect, tools=prepared.tools)
    ended_at = steps.timer.now()
    try:
        while True:
            client_body, reply = await _split(steps.dialect, prepared, body)
            is_joinable = _is_object(body) and bool(reply.choices)
            if (is_only_round := transcript.is_only_round(reply)) or not is_joinable:
                break
            calls, is_mixed = await run_in_thread_if_large(len(body), transcript.calls_to_run, reply)
            results = await steps.run(prepared, calls)
            if not results or is_mixed:
                break
            transcript = transcript.with_round(reply, results)
            following = await _read_whole(steps, await steps.next_round(prepared, transcript))
            prepared, source, body = following.prepared, following.reply, following.body
            if following.is_oversized:
                return RelayedReply(
                    status=source.status,
                    headers=source.headers,
                    chunks=relay_oversized(steps, following, transcript.unfinished),
                )
            source.close()
            ended_at = steps.timer.now()
            failed, reply = await _split(steps.dialect, prepared, body)
            if source.status >= 400 or not (reply.choices or reply.unread):
                await steps.recorder.commit_failure(prepared, source.status, transcript.unfinished)
                steps.timer.observe(call, sent_at, ended_at)
                return RelayedReply(status=source.status, headers=source.headers, body=failed)
    except UpstreamUnavailable:
        await steps.recorder.commit_failure(prepared, None, transcript.unfinished)
        raise
    except BaseException:
        steps.recorder.record_failure(prepared, source.status, transcript.unfinished)
        raise
    as_it_is = RelayedReply(status=source.status, headers=source.headers, body=client_body)
    if is_only_round:
        await steps.recorder.commit(prepared, reply, source.status, is_whole=True)
        steps.timer.observe(call, sent_at, ended_at)
        return as_it_is
    if not is_joinable:
        unread = replace(transcript.unfinished, unread=reply.unread or (body,))
        await steps.recorder.commit(prepared, unread, source.status, is_whole=True)
        steps.timer.observe(call, sent_at, ended_at)
        return as_it_is
    has_own_calls = bool(transcript.own_calls(reply)[0])
    try:
        combined = await run_in_thread_if_large(len(body), transcript.combine, reply, results)
    except asyncio.CancelledError:
        steps.recorder.record_failure(prepared, source.status, transcript.unfinished)
        raise
    await steps.recorder.commit(prepared, combined.reply, source.status, is_whole=True, hidden=combined.hidden)
    steps.timer.observe(call, sent_at, ended_at)
    if not (has_own_calls or transcript.rounds) or reply.unread or not combined.client_message:
        return as_it_is
    rounds = steps.dialect.rounds
    assert rounds is not None
    joined = rounds.write_body(started.body, client_body, combined.client_message, combined.reply.usage)
    return RelayedReply(status=source.status, headers=started.reply.headers, body=joined)


async def _read_whole(steps: RoundSteps, started: StartedReply) -> StartedReply:
    """Read a later round whose reply comes in pieces though the client asked for a whole one."""
    if not started.is_streamed:
        return started
    try:
        rest, is_whole = await started.reply.read_up_to(steps.max_reply)
    except BaseException:
        started.reply.close()
        raise
    return replace(started, body=started.first + rest, is_oversized=not is_whole)


def _is_object(body: bytes) -> bool:
    return body.lstrip()[:1] == b"{"


async def relay_oversized(
    steps: RoundSteps, started: StartedReply, earlier: Reply = NO_REPLY
) -> AsyncGenerator[bytes, None]:
    """Relay a reply over the size limit unchanged; store its beginning unread. ``earlier``: what is reported of the
    rounds before it.
    """
    try:
        reply = replace(earlier, unread=(started.body,))
        await steps.recorder.commit_partial(started.prepared, reply, started.reply.status)
        yield started.body
        async for chunk in started.reply.chunks():
            if chunk:
                yield chunk
    finally:
        started.reply.close()
        steps.timer.observe(started.prepared.call, started.sent_at, steps.timer.now())


async def _split(dialect: Dialect, prepared: SentCall, body: bytes) -> tuple[bytes, Reply]:
    view = ClientView(tags=prepared.tags, own_request=prepared.own_request)
    if len(body) < LONG_REPLY:
        return dialect.split_reply(body, view)
    return await asyncio.to_thread(dialect.split_reply, body, view)


class StreamRelay:
    """Relays and records one stream over all its rounds.

    A reply over the size limit is stored up to the limit, and relayed unread from there on.
    """

    def __init__(self, steps: RoundSteps, started: StartedReply) -> None:
        self._steps = steps
        self._started = started
        self._prepared = started.prepared
        self._response = started.reply
        self._status = started.reply.status
        self._has_events = started.reply.content_type == EVENT_STREAM
        self._transcript = RoundTranscript(dialect=steps.dialect, tools=started.prepared.tools)
        self._stream = ClientStream(
            steps.dialect, steps.max_reply, _client_view(started.prepared), tools=started.prepared.tools
        )
        self._direct = DirectRelay(self._stream, steps.heartbeat)
        self._is_committed = False
        self._ended_at = started.sent_at

    def chunks(self) -> DirectChunks:
        """Return the reply for the client. Text is relayed as it comes, the end when the reply is stored."""
        return DirectChunks(self._chunks(), self._direct.write_to)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        steps, stream = self._steps, self._stream
        try:
            async with aclosing(self._relay_rounds()) as chunks:
                async for out in chunks:
                    yield out
        except (StoreUnavailable, NotFound) as error:
            if not self._is_committed:
                await self._commit_partial()
            if not self._has_events:
                raise  # the client's connection breaks: such a stream has no event for errors
            yield steps.recorder.not_stored_event(error)
        except (UpstreamUnavailable, ValueError) as error:
            if self._is_committed and not stream.is_cut:
                raise
            self._ended_at = steps.timer.now()
            rest = stream.break_off()
            if not self._is_committed:
                await self._commit_partial(is_answered=stream.size > 0)
            if not (stream.is_between_events and self._has_events):
                raise  # half an event has been sent: the client's connection breaks as the host's did
            yield rest + _error_event(steps.dialect, error)
        finally:
            self._response.close()
            if not self._is_committed:
                # The client is gone: store what was written until then, and stop the model.
                stream.reader.close()
                steps.recorder.record_partial(self._prepared, stream.reader, self._transcript.combine, self._status)
                self._ended_at = steps.timer.now()
            steps.timer.observe(self._prepared.call, self._started.sent_at, self._ended_at)

    async def _relay_rounds(self) -> AsyncGenerator[bytes, None]:
        steps, stream, first = self._steps, self._stream, self._started.first
        while True:
            async for out in self._relay_round(first):
                yield out
            self._ended_at = steps.timer.now()
            if out := await stream.end_round():
                yield out
            self._response.close()
            if stream.is_cut:
                break
            reply = await stream.reply()
            calls, is_mixed = await run_in_thread_if_large(stream.size, self._transcript.calls_to_run, reply)
            results: list[bytes] = []
            if calls:
                running = asyncio.get_running_loop().create_task(steps.run(self._prepared, calls))
                async for beat in self._heartbeats(running):
                    yield beat
                results = running.result()
            if not results or is_mixed:
                await self._commit(reply, results)
                break
            self._transcript = transcript = self._transcript.with_round(reply, results)
            if out := stream.next_round(_client_view(self._prepared), transcript.finished):
                yield out
            asking = asyncio.get_running_loop().create_task(steps.next_round(self._prepared, transcript))
            async for beat in self._heartbeats(asking):
                yield beat
            following = asking.result()
            self._prepared, self._response, first = following.prepared, following.reply, following.first
            if self._response.status >= 400 or self._response.content_type != EVENT_STREAM:
                yield await self._record_refusal(following)
                return
        if last := stream.close():
            yield last

    async def _relay_round(self, first: bytes) -> AsyncIterator[bytes]:
        """Relay one round, of which ``first`` has been read already."""
        steps, stream, direct = self._steps, self._stream, self._direct
        start = 0
        while not start or start < len(first):
            out, start = await stream.feed_part(first, start)
            if out:
                yield out
        now = asyncio.get_running_loop().time
        direct.last_sent = now()
        async for chunk in iter_until_terminal_event(self._response, stream.end, steps.heartbeat, direct):
            start = 0
            while not start or start < len(chunk):
                out, start = await stream.feed_part(chunk, start)
                if stream.is_cut and not self._is_committed:
                    await self._commit_partial()
                # What is held back may be long.
                is_silent = not chunk or now() - direct.last_sent >= steps.heartbeat
                if not out and is_silent and stream.is_between_events:
                    out = steps.dialect.streaming.heartbeat
                if out:
                    direct.last_sent = now()
                    yield out

    async def _heartbeats(self, work: asyncio.Task[list[bytes]] | asyncio.Task[StartedReply]) -> AsyncIterator[bytes]:
        """Yield heartbeats while ``work`` runs. If the caller stops, cancel ``work`` and close its response."""
        try:
            while not (await asyncio.wait({work}, timeout=self._steps.heartbeat))[0]:
                if beat := self._steps.dialect.streaming.heartbeat:
                    yield beat
        finally:
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError, UpstreamUnavailable):
                    done = await work
                    if isinstance(done, StartedReply):
                        done.reply.close()

    async def _commit(self, reply: Reply, results: Sequence[bytes]) -> None:
        """Commit the rounds, of which ``reply`` was the last. Raises `StoreUnavailable`, `NotFound`."""
        size = self._stream.size
        combined = await run_in_thread_if_large(size, self._transcript.combine, reply, results)
        self._is_committed = True
        await self._steps.recorder.commit(
            self._prepared, combined.reply, self._status, is_whole=reply.is_complete, hidden=combined.hidden
        )

    async def _commit_partial(self, *, is_answered: bool = True) -> None:
        """Commit an incomplete reply. The client gets an error, or the rest of the reply, in any case.

        ``is_answered``: something of the last round has come.
        """
        stream = self._stream
        combined = await run_in_thread_if_large(stream.size, self._transcript.combine, await stream.reply())
        self._is_committed = True
        await self._steps.recorder.commit_partial(
            self._prepared, combined.reply, self._status, is_answered=is_answered, hidden=combined.hidden
        )

    async def _record_refusal(self, following: StartedReply) -> bytes:
        """Record that the host refused a further round; return the event that tells the client."""
        dialect = self._steps.dialect
        body = following.body
        if not body:
            with suppress(UpstreamUnavailable):
                body, _ = await following.reply.read_up_to(MAX_ERROR_BODY)
        self._is_committed = True
        reply = self._transcript.combine(NO_REPLY).reply
        await self._steps.recorder.commit_partial(following.prepared, reply, following.reply.status)
        return dialect.error_event(_error_on_one_line(body) or _error_body(dialect, _REFUSED))


def _client_view(prepared: SentCall) -> ClientView:
    return ClientView(tags=prepared.tags, strip_usage=prepared.strip_usage, own_request=prepared.own_request)


def _error_on_one_line(body: bytes) -> bytes:
    """Return an error body as an event can carry it; empty if ``body`` is no error."""
    with suppress(ValueError):
        error = raw_json.load(body)
        if isinstance(error, dict) and isinstance(error.get("error"), dict):
            return raw_json.dump(error)
    return b""


def _error_event(dialect: Dialect, error: Exception) -> bytes:
    add_fields(outcome="interrupted")
    failure = error if isinstance(error, UpstreamUnavailable) else UpstreamUnavailable(str(error))
    return dialect.error_event(_error_body(dialect, failure))


def _error_body(dialect: Dialect, error: UpstreamUnavailable) -> bytes:
    return dialect.error_body(ErrorDescription(message=error.detail, type=error.kind, code=error.code))
