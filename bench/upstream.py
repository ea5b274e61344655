"""A model host that answers at once: OpenAI chat completions, streamed or not, from precomputed bytes; Anthropic's
messages; and OpenAI's responses, not streamed.

Every answer differs: it carries the marker of the question (see `texts`). A reply ends with a `<terse>` summary
when the request asked for one, as a model that follows its instructions would; usage comes with a stream when
asked for. `POST /_bench/gap?ms=2` sets a pause between the events of all later streams, `POST /_bench/delay?ms=20` one
before all later answers.
"""

import argparse
import asyncio
import re
from collections import deque
from itertools import count
from typing import Final, cast

import httptools
import uvloop
from typing_extensions import override

from bench import texts

_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_USAGE: Final = re.compile(rb'"include_usage"\s*:\s*true')
_SLOT: Final = b"#" * texts.MARK_DIGITS
_BYTES_PER_TOKEN: Final = 5
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-request-id: req_" + _SLOT + b"\r\nopenai-processing-ms: 1\r\ntransfer-encoding: chunked\r\n\r\n"
)
_JSON_HEAD: Final = (
    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nx-request-id: req_"
    + _SLOT
    + b"\r\nopenai-processing-ms: 1\r\ncontent-length: %d\r\n\r\n"
)
_END: Final = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(choices: bytes, usage: bytes = b"") -> bytes:
    """One stream event, framed."""
    return _chunk(
        b'data: {"id":"chatcmpl-' + _SLOT + b'","object":"chat.completion.chunk","created":1700000000,'
        b'"model":"gpt-4o-mini-2024-07-18","service_tier":"default","system_fingerprint":"fp_bench",'
        b'"choices":[' + choices + b"]" + usage + b"}\n\n"
    )


def _named(name: bytes, members: bytes) -> bytes:
    """One event of Anthropic's, framed."""
    return _chunk(b"event: " + name + b'\ndata: {"type":"' + name + b'",' + members + b"}\n\n")


def _delta(text: bytes) -> bytes:
    return _event(b'{"index":0,"delta":{"content":"' + text + b'"},"logprobs":null,"finish_reason":null}')


def _cut(text: bytes, pieces: int) -> list[bytes]:
    """`text` in `pieces` parts of about one length, never inside a marker."""
    first = texts.ANSWER + _SLOT + b"]"
    rest = text[len(first) :]
    step = -(-len(rest) // (pieces - 1))
    return [first, *(rest[i : i + step] for i in range(0, len(rest), step))]


class PreparedReply:
    """One answer text, rendered as JSON and as events with a slot of fixed width for the marker."""

    __slots__ = ("body", "events", "message", "message_events", "response")

    def __init__(self, text: bytes, tail: bytes) -> None:
        self.body = (
            b'{"id":"chatcmpl-' + _SLOT + b'","object":"chat.completion","created":1700000000,'
            b'"model":"gpt-4o-mini-2024-07-18","choices":[{"index":0,"message":{"role":"assistant","content":"'
            + text
            + tail
            + b'","refusal":null,"annotations":[]},"logprobs":null,"finish_reason":"stop"}],'
            b'"usage":{"prompt_tokens":%d,"completion_tokens":130,"total_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":0,"audio_tokens":0}},'
            b'"service_tier":"default","system_fingerprint":"fp_bench"}'
        )
        opening = _event(
            b'{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        )
        parts = [_delta(piece) for piece in _cut(text, texts.EVENTS_OF_TEXT)]
        if tail:
            half = len(tail) // 3
            parts += [_delta(piece) for piece in (tail[:half], tail[half:])]
        closing = _event(b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}')
        self.events = [_STREAM_HEAD + opening, *parts, closing]
        usage = b'"usage":{"input_tokens":%d,"cache_read_input_tokens":0,"output_tokens":130}'
        front = b'"id":"msg_' + _SLOT + b'","type":"message","role":"assistant","model":"claude-sonnet-4-5",'
        self.message = (
            b"{" + front + b'"content":[{"type":"text","text":"' + text + tail + b'"}],'
            b'"stop_reason":"end_turn","stop_sequence":null,' + usage + b"}"
        )
        self.response = (
            b'{"id":"resp_' + 2 * _SLOT + b'","object":"response","created_at":1700000000,"status":"completed",'
            b'"error":null,"incomplete_details":null,"instructions":null,"model":"gpt-4o-mini","output":[{"id":"msg_'
            + _SLOT
            + b'","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text",'
            b'"annotations":[],"text":"'
            + text
            + tail
            + b'"}]}],"previous_response_id":null,"store":true,"tools":[],"usage":{"input_tokens":%d,'
            b'"input_tokens_details":{"cached_tokens":0},"output_tokens":130,"total_tokens":%d}}'
        )
        started = b"{" + front + b'"content":[],"stop_reason":null,"stop_sequence":null,' + usage % 1234567 + b"}"
        half = len(tail) // 3
        pieces = [*_cut(text, texts.EVENTS_OF_TEXT), *((tail[:half], tail[half:]) if tail else ())]
        self.message_events = [
            _STREAM_HEAD + _named(b"message_start", b'"message":' + started),
            _named(b"content_block_start", b'"index":0,"content_block":{"type":"text","text":""}'),
            *(
                _named(b"content_block_delta", b'"index":0,"delta":{"type":"text_delta","text":"' + piece + b'"}')
                for piece in pieces
            ),
            _named(b"content_block_stop", b'"index":0'),
            _named(
                b"message_delta",
                b'"delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":130}',
            ),
            _chunk(b'event: message_stop\ndata: {"type":"message_stop"}\n\n') + _END,
        ]


def _replies(*, terse: bool) -> list[PreparedReply]:
    tail = b"\\n" + texts.terse_line(_SLOT) if terse else b""
    return [PreparedReply(texts.answer(b"%016x" % n).replace(b"%016x" % n, _SLOT), tail) for n in range(texts.VARIANTS)]


class Replies:
    """All precomputed answers, and the settings that all connections share."""

    def __init__(self) -> None:
        self.plain = _replies(terse=False)
        self.terse = _replies(terse=True)
        self.gap_s = 0.0
        self.delay_s = 0.0
        self.counter = count()

    def pick(self, body: bytes) -> tuple[bytes, PreparedReply]:
        """The marker of the newest question in a request and the answer to it."""
        at = body.rfind(texts.QUESTION)
        key = body[at + len(texts.QUESTION) :][: texts.MARK_DIGITS] if at >= 0 else b""
        if len(key) < texts.MARK_DIGITS:
            key = b"%016x" % next(self.counter)
        family = self.terse if b"<terse>" in body else self.plain
        return key, family[int(key[-1:], 16) % texts.VARIANTS]


class MockConnection(asyncio.Protocol):
    """One client connection; requests are answered in the order they came."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.loop = asyncio.get_running_loop()
        self.queue: deque[bytes] = deque()
        self.sending = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpRequestParser(self)

    @override
    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.queue.clear()

    def on_message_begin(self) -> None:
        self.url = b""
        self.parts: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        path, _, query = self.url.partition(b"?")
        if path.endswith(b"/chat/completions"):
            self._answer(b"".join(self.parts))
        elif path.endswith(b"/messages"):
            self._answer_messages(b"".join(self.parts))
        elif path.endswith(b"/responses"):
            self._answer_response(b"".join(self.parts))
        elif path == b"/_bench/gap":
            self.replies.gap_s = float(query.partition(b"=")[2]) / 1000
            self._send([_json_head(200, b"OK", 2), b"{}"])
        elif path.endswith(b"/_bench/delay"):
            self._send([_json_head(200, b"OK", 2), b"{}"])
            self.replies.delay_s = float(query.partition(b"=")[2]) / 1000
        elif path.endswith(b"/models"):
            self._send_json(b'{"object":"list","data":[{"id":"gpt-4o-mini","object":"model"}]}')
        elif path == b"/healthz":
            self._send_json(b"{}")
        else:
            self._send([_json_head(404, b"Not Found", 2), b"{}"])

    def _answer(self, body: bytes) -> None:
        key, reply = self.replies.pick(body)
        tokens = len(body) // _BYTES_PER_TOKEN
        if not _STREAM.search(body, 0, 400) and not _STREAM.search(body, max(0, len(body) - 2000)):
            answer = reply.body.replace(_SLOT, key) % (tokens, tokens + 130)
            head = _json_head(200, b"OK", len(answer)).replace(_SLOT, key)
            self._send([head + answer])
            return
        events = b"\0".join(reply.events).replace(_SLOT, key).split(b"\0")
        if _USAGE.search(body, 0, 400) or _USAGE.search(body, max(0, len(body) - 2000)):
            events.append(_event(b"", _usage(tokens)).replace(_SLOT, key))
        events.append(_chunk(b"data: [DONE]\n\n") + _END)
        self._send(events)

    def _answer_messages(self, body: bytes) -> None:
        key, reply = self.replies.pick(body)
        tokens = len(body) // _BYTES_PER_TOKEN
        if not _STREAM.search(body, 0, 400) and not _STREAM.search(body, max(0, len(body) - 2000)):
            answer = reply.message.replace(_SLOT, key) % tokens
            head = _json_head(200, b"OK", len(answer)).replace(_SLOT, key)
            self._send([head + answer])
            return
        self._send(
            b"\0".join(reply.message_events).replace(_SLOT, key).replace(b"1234567", b"%7d" % tokens).split(b"\0")
        )

    def _answer_response(self, body: bytes) -> None:
        key, reply = self.replies.pick(body)
        tokens = len(body) // _BYTES_PER_TOKEN
        answer = reply.response.replace(_SLOT, key) % (tokens, tokens + 130)
        self._send([_json_head(200, b"OK", len(answer)).replace(_SLOT, key) + answer])

    def _send_json(self, body: bytes) -> None:
        self._send([_json_head(200, b"OK", len(body)) + body])

    def _send(self, pieces: list[bytes]) -> None:
        if self.replies.delay_s:
            self.loop.call_later(self.replies.delay_s, self._send_now, pieces)
        else:
            self._send_now(pieces)

    def _send_now(self, pieces: list[bytes]) -> None:
        self.queue.extend(pieces)
        if not self.sending:
            self.sending = True
            self._pump()

    def _pump(self) -> None:
        """Write one piece, and the next one in the loop's next round (or after the gap)."""
        if self.queue and not self.transport.is_closing():
            self.transport.write(self.queue.popleft())
        if not self.queue:
            self.sending = False
        elif self.replies.gap_s:
            self.loop.call_later(self.replies.gap_s, self._pump)
        else:
            self.loop.call_soon(self._pump)


def _usage(tokens: int) -> bytes:
    return (
        b',"usage":{"prompt_tokens":%d,"completion_tokens":130,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":0}}' % (tokens, tokens + 130)
    )


def _json_head(status: int, reason: bytes, length: int) -> bytes:
    return _JSON_HEAD % (status, reason, length)


async def serve(port: int) -> None:
    """Answer on the loopback until stopped."""
    replies = Replies()
    server = await asyncio.get_running_loop().create_server(
        lambda: MockConnection(replies), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
