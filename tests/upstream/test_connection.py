"""One connection's reading of replies: cut anywhere, hostile, broken off. No sockets."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.upstream.connection import MAX_HEAD, READ_BUFFER, BrokenOff, Connection
from tersely.upstream.request_head import write_head

BODY = bytes(range(256)) * 3
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nX-A:  b c \t\r\n\r\n" + b"".join(
    b"%x;ext=1\r\n" % len(piece) + piece + b"\r\n" for piece in (BODY[:1], BODY[1:300], BODY[300:])
)
# A reply, how its connection goes on, and what ends it.
WHOLE = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 768\r\nX-A: b c\r\n\r\n" + BODY,
    "chunked": CHUNKED + b"0\r\n\r\n",
    "trailers": CHUNKED + b"0\r\nX-Checksum: 7\r\n\r\n",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + CHUNKED + b"0\r\n\r\n",
}
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nX-A: b c\r\n\r\n" + BODY


class Transport:
    """The part of a transport that a connection uses."""

    def __init__(self) -> None:
        self.written = b""
        self.is_cut = self.is_reading = False
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, data: list[bytes]) -> None:
        self.written += b"".join(data)

    def abort(self) -> None:
        self.is_cut = True

    def is_closing(self) -> bool:
        return self.is_cut

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> None:
        return None

    def reads(self) -> bool:
        return self.is_reading

    def pause_reading(self) -> None:
        assert not self.is_cut
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_cut
        self.is_reading = True


_loop = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def close_loop() -> Any:
    yield
    _loop.close()


def ask(method: str = "POST") -> tuple[Connection, Transport]:
    async def make() -> Connection:
        return Connection(lambda _: None)

    connection, transport = _loop.run_until_complete(make()), Transport()
    transport.is_reading = True
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.send(method, b"head", ())
    return connection, transport


def taken(connection: Connection) -> tuple[bytes, bool]:
    """Everything at hand, and whether that is the end."""
    found = b""
    while piece := connection.take():
        found += piece
    return found, piece == b""


def feed(connection: Connection, transport: Transport, data: bytes, cuts: list[int]) -> bytes:
    found = b""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if start < end and not transport.is_cut:
            connection.data_received(data[start:end])
            if connection.status and not transport.is_cut:
                found += taken(connection)[0]
    return found


@st.composite
def cut_replies(draw: st.DrawFn) -> tuple[str, list[int]]:
    name = draw(st.sampled_from(sorted(WHOLE)))
    return name, sorted(draw(st.lists(st.integers(0, len(WHOLE[name])), max_size=12)))


@given(cut_replies())
@settings(max_examples=300, deadline=None)
def test_a_reply_cut_anywhere_is_the_same_reply(drawn: tuple[str, list[int]]) -> None:
    name, cuts = drawn
    connection, transport = ask()
    assert feed(connection, transport, WHOLE[name], cuts) == BODY
    assert taken(connection) == (b"", True)
    assert connection.status == 200
    assert ("X-A", "b c") in connection.headers
    assert connection.finish()
    assert not transport.is_cut


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_byte_by_byte_and_again_on_the_same_connection(name: str) -> None:
    connection, transport = ask()
    for _ in range(3):
        assert feed(connection, transport, WHOLE[name], list(range(1, len(WHOLE[name])))) == BODY
        assert connection.finish()
        connection.send("POST", b"head", ())
        assert connection.take() is None


@given(cut_replies(), st.integers(0, 100_000))
@settings(max_examples=300, deadline=None)
def test_an_early_end_is_never_taken_for_the_end(drawn: tuple[str, list[int]], at: int) -> None:
    name, cuts = drawn
    at %= len(WHOLE[name])
    connection, transport = ask()
    found = feed(connection, transport, WHOLE[name][:at], [cut for cut in cuts if cut < at])
    connection.eof_received()
    assert BODY.startswith(found)
    with pytest.raises(BrokenOff):
        taken(connection)
    assert not connection.finish()


@given(st.lists(st.integers(0, len(UNTIL_CLOSE)), max_size=8).map(sorted))
@settings(deadline=None)
def test_a_reply_without_a_length_ends_with_its_connection(cuts: list[int]) -> None:
    connection, transport = ask()
    assert feed(connection, transport, UNTIL_CLOSE, cuts) == BODY
    assert connection.take() is None
    connection.eof_received()
    assert connection.take() == b""
    assert not connection.finish()


def test_a_reset_is_not_the_end_of_a_reply_without_a_length() -> None:
    connection, transport = ask()
    feed(connection, transport, UNTIL_CLOSE, [])
    connection.connection_lost(ConnectionResetError())
    with pytest.raises(BrokenOff):
        connection.take()


def test_bytes_before_a_break_are_returned() -> None:
    connection, _ = ask()
    connection.data_received(CHUNKED)
    connection.connection_lost(ConnectionResetError())
    assert connection.take() == BODY
    with pytest.raises(BrokenOff):
        connection.take()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\rb\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02P",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_HEAD + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: aaaaaaaaaaaaaaaa\r\n" * 10_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;" + b"a" * 2 * MAX_HEAD,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-T: " + b"a" * 2 * MAX_HEAD,
    ],
)
@pytest.mark.parametrize("step", [1, 7, 60_000])
def test_ambiguous_or_endless_replies_break_the_connection(reply: bytes, step: int) -> None:
    connection, transport = ask()
    feed(connection, transport, reply, list(range(step, len(reply), step)))
    assert transport.is_cut
    with pytest.raises(BrokenOff):
        taken(connection)
    assert not connection.finish()


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=4).map(sorted))
@settings(max_examples=300, deadline=None)
def test_no_bytes_do_harm(data: bytes, cuts: list[int]) -> None:
    for reply in (data, b"HTTP/1.1 200 OK\r\n" + data, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data):
        connection, transport = ask()
        feed(connection, transport, reply, [cut for cut in cuts if cut < len(reply)])
        connection.eof_received()
        connection.connection_lost(None)
        with suppress(BrokenOff):
            taken(connection)
        assert not connection.finish(), "a connection that the host has closed is not used again"


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body(status: int) -> None:
    connection, _ = ask()
    connection.data_received(b"HTTP/1.1 %d X\r\nContent-Length: 30\r\n\r\n" % status)
    assert connection.take() == b""
    assert connection.finish()


def test_the_reply_to_head_has_no_body() -> None:
    connection, _ = ask("HEAD")
    connection.data_received(b"HTTP/1.1 200 X\r\nContent-Length: 30\r\n\r\n")
    assert connection.take() == b""
    assert not connection.finish()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\najunk",
    ],
)
def test_a_connection_that_is_not_to_be_used_again(reply: bytes) -> None:
    connection, transport = ask()
    connection.data_received(reply)
    assert taken(connection) == (b"a", True)
    assert not connection.finish()
    assert transport.is_cut


def test_bytes_from_an_idle_host_answer_no_later_request() -> None:
    connection, transport = ask()
    connection.data_received(WHOLE["length"])
    assert connection.finish()
    connection.data_received(WHOLE["length"])
    assert transport.is_cut
    assert not connection.is_usable


def test_a_reply_before_the_request_is_sent_ends_the_connection() -> None:
    connection, transport = ask()
    transport.unsent = 10
    connection.data_received(WHOLE["length"])
    assert not connection.finish()
    assert transport.is_cut


def test_a_host_that_is_too_fast_is_not_read_from() -> None:
    connection, transport = ask()
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (4 * READ_BUFFER))
    connection.data_received(b"x" * READ_BUFFER)
    assert transport.reads()
    connection.data_received(b"x")
    assert not transport.reads()
    assert len(connection.take() or b"") == READ_BUFFER + 1
    assert transport.reads()
    connection.data_received(b"x" * (3 * READ_BUFFER - 1))
    assert not transport.reads()
    assert connection.finish(), "unread, but all there"
    assert transport.reads()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("timeout=5", 4), ("max=100, timeout=5", 4), ("timeout=900, max=1", 30), ("timeout=x", 30), ("timeout=0", -1)],
)
def test_how_long_the_host_lets_it_idle(header: str, seconds: float) -> None:
    connection, _ = ask()
    connection.data_received(f"HTTP/1.1 200 OK\r\nKeep-Alive: {header}\r\nContent-Length: 0\r\n\r\n".encode())
    assert connection.keep_alive(30) == seconds


async def test_waiting_ends_at_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    connection = Connection(lambda _: None)
    connection.connection_made(Transport())  # type: ignore[arg-type]
    connection.send("GET", b"", ())
    began = loop.time()
    assert not await connection.wait_for_head(began + 0.05)
    connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert not await connection.wait_for_head(began + 0.1), "an interim reply is none"
    assert loop.time() - began < 1


# Parts that are received in the callback


@given(cut_replies(), st.lists(st.booleans(), max_size=12))
@settings(max_examples=300, deadline=None)
def test_parts_that_are_received_and_parts_that_are_taken_are_the_reply(
    drawn: tuple[str, list[int]], wanted: list[bool]
) -> None:
    name, cuts = drawn
    connection, transport = ask()
    found: list[bytes] = []
    wants = iter(wanted)

    def receive(part: bytes) -> bool:
        found.append(part)
        return next(wants, True)

    async def read() -> None:
        while True:
            while piece := connection.take():
                found.append(piece)
            if piece == b"":
                return
            assert await connection.wait(_loop.time() + 5, receive, 5)

    async def play() -> None:
        reading = asyncio.create_task(read())
        for start, end in zip([0, *cuts], [*cuts, len(WHOLE[name])], strict=True):
            await asyncio.sleep(0)
            if start < end:
                connection.data_received(WHOLE[name][start:end])
        async with asyncio.timeout(2):
            await reading

    _loop.run_until_complete(play())
    assert b"".join(found) == BODY
    assert connection.finish()
    assert not transport.is_cut


async def test_received_parts_put_the_deadline_off() -> None:
    connection, transport = Connection(lambda _: None), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.send("POST", b"head", ())
    loop = asyncio.get_running_loop()
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
    # A wait with a later deadline leaves its timer behind, which must not serve the next one.
    loop.call_later(0.01, connection.data_received, b"a")
    assert await connection.wait(loop.time() + 5)
    assert connection.take() == b"a"
    parts: list[bytes] = []

    def receive(part: bytes) -> bool:
        parts.append(part)
        return True

    began = loop.time()
    for number in range(1, 4):
        loop.call_later(0.06 * number, connection.data_received, b"b")
    assert not await connection.wait(began + 0.1, receive, 0.1)
    assert parts == [b"b"] * 3
    assert 0.27 < loop.time() - began < 1
    assert connection.received_at == pytest.approx(began + 0.18, abs=0.05)
    # Whoever has stopped waiting gets nothing more.
    connection.data_received(b"c")
    assert connection.take() == b"c"
    assert parts == [b"b"] * 3


def test_an_error_in_the_middle_is_not_passed_over() -> None:
    connection, _ = ask()
    parts: list[bytes] = []

    async def play() -> None:
        waiting = asyncio.create_task(
            connection.wait(_loop.time() + 5, lambda part: parts.append(part) or True, 5)  # type: ignore[func-returns-value]
        )
        await asyncio.sleep(0)
        connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\nno size\r\n")
        assert await waiting

    _loop.run_until_complete(play())
    assert parts == []
    assert connection.take() == b"a"
    with pytest.raises(BrokenOff):
        connection.take()


# The head of a request


def test_the_request_head_is_written() -> None:
    head = write_head("POST", "/v1/x?a=b%20c", "h:1", [("Host", "evil"), ("content-length", "7"), ("a", "b\tc é")], 3)
    assert head == "POST /v1/x?a=b%20c HTTP/1.1\r\nHost: h:1\r\na: b\tc é\r\ncontent-length: 3\r\n\r\n".encode()
    assert b"content-length: 0" in write_head("POST", "/", "h", [], 0)
    assert b"content-length" not in write_head("GET", "/", "h", [], 0)


_texts = st.text(st.characters(blacklist_categories=()), max_size=12) | st.sampled_from(
    ["a\r\nx: y", "a\nb", "a\rb", "\r\n\r\nGET / HTTP/1.1", "a b", "", ":", "é", "\x00", "x\x7f"]
)


_tokens = st.sampled_from(["GET", "x", "X-Y"]) | _texts


@given(_tokens, st.just("/a") | _texts, _tokens, _texts)
@settings(max_examples=1000, deadline=None)
def test_header_values_cannot_inject_lines(method: str, target: str, name: str, value: str) -> None:
    try:
        head = write_head(method, target, "h", [("a", "1"), (name, value), ("z", "2")], 5)
    except ValueError:
        return
    lines = head.decode("utf-8", "surrogateescape").removesuffix("\r\n\r\n").split("\r\n")
    assert "\n" not in "".join(lines)
    assert "\r" not in "".join(lines)
    ours = name.lower() in {"host", "connection", "content-length", "transfer-encoding"}
    assert lines == [
        f"{method} {target} HTTP/1.1",
        "Host: h",
        "a: 1",
        *([] if ours else [f"{name}: {value}"]),
        "z: 2",
        "content-length: 5",
    ]
