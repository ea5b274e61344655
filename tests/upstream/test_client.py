"""The HTTP client over sockets: its pool, its time limits, TLS, cancellation, retries."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from tersely.domain.errors import UpstreamUnavailable
from tersely.upstream.client import Timeouts, Upstream
from tersely.upstream.connection import READ_BUFFER

MIB = 1024 * 1024

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
QUICK = Timeouts(connect=2, first_byte=2, idle=2)


class Host:
    """Plays one script per connection; keeps what it was sent."""

    def __init__(self, *scripts: Callable[[Host, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.scripts = list(scripts)
        self.requests: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()
        self.readers: dict[asyncio.Task[None] | None, asyncio.StreamReader] = {}
        self.port = 0

    @property
    def reader(self) -> asyncio.StreamReader:
        """Return the reader of the connection whose script runs."""
        return self.readers[asyncio.current_task()]

    async def request(self) -> bytes:
        """The next request on the connection at hand."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        self.requests.append(head + await self.reader.readexactly(length))
        return self.requests[-1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self.scripts[min(self.connections, len(self.scripts) - 1)]
        self.connections += 1
        self.readers[asyncio.current_task()] = reader
        try:
            await script(self, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


async def answer(host: Host, writer: asyncio.StreamWriter) -> None:
    while True:
        await host.request()
        writer.write(OK)


def says(*pieces: bytes, pause: float = 0.0) -> Callable[[Host, asyncio.StreamWriter], Awaitable[None]]:
    """Answers one request with these pieces and hangs up."""

    async def script(host: Host, writer: asyncio.StreamWriter) -> None:
        await host.request()
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return script


def stalls(*pieces: bytes) -> Callable[[Host, asyncio.StreamWriter], Awaitable[None]]:
    """Answers with these pieces and falls silent, until the client hangs up."""

    async def script(host: Host, writer: asyncio.StreamWriter) -> None:
        await host.request()
        for piece in pieces:
            writer.write(piece)
        await host.reader.readexactly(1)

    return script


@asynccontextmanager
async def running(
    *scripts: Callable[[Host, asyncio.StreamWriter], Awaitable[None]],
    timeouts: Timeouts = QUICK,
    base: str = "http://127.0.0.1:{port}/v1",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Upstream, Host]]:
    host = Host(*scripts)
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    upstream = Upstream(base.format(port=host.port), timeouts)
    await upstream.open()
    try:
        yield upstream, host
    finally:
        await upstream.close()
        server.close()
        await asyncio.sleep(0.01)


async def call(upstream: Upstream, method: str = "POST", path: str = "/x", body: bytes = b"hi") -> bytes:
    reply = await upstream.send(method, path, [("A", "b")], body)
    try:
        return await reply.read(1 << 20)
    finally:
        reply.close()


async def collect(chunks: AsyncIterator[bytes]) -> tuple[list[bytes], str]:
    """Return the pieces that come, and the end."""
    found: list[bytes] = []
    while True:
        try:
            found.append(await anext(chunks))
        except (UpstreamUnavailable, StopAsyncIteration) as error:
            return found, str(error)


async def test_a_request_and_its_reply() -> None:
    async with running(answer) as (upstream, host):
        assert await call(upstream, path="/x?a=%2Fb") == b"ok"
        head, _, body = host.requests[0].partition(b"\r\n\r\n")
        assert body == b"hi"
        assert head.split(b"\r\n") == [
            b"POST /v1/x?a=%2Fb HTTP/1.1",
            b"Host: 127.0.0.1:%d" % host.port,
            b"A: b",
            b"content-length: 2",
        ]


async def test_connections_are_used_again_and_no_more_than_needed() -> None:
    async with running(answer) as (upstream, host):
        for _ in range(5):
            await call(upstream)
        assert host.connections == 1
        await asyncio.gather(*(call(upstream) for _ in range(3)))
        assert host.connections <= 3


async def test_a_large_body_goes_out_whole() -> None:
    body = bytes(range(256)) * 4096
    async with running(answer) as (upstream, host):
        assert await call(upstream, body=body) == b"ok"
        assert host.requests[0].endswith(b"\r\n\r\n" + body)


async def test_an_idle_connection_keeps_no_body() -> None:
    body = bytes(range(256)) * 4096
    before = sys.getrefcount(body)
    async with running(answer) as (upstream, host):
        assert await call(upstream, body=body) == b"ok"
        host.requests.clear()
        assert sys.getrefcount(body) == before


async def test_a_connection_that_the_host_closed_meanwhile_is_not_used() -> None:
    async with running(says(OK)) as (upstream, host):
        for _ in range(3):
            assert await call(upstream) == b"ok"
            await asyncio.sleep(0.02)
        assert host.connections == len(host.requests) == 3


async def test_nor_is_one_whose_end_the_loop_has_not_seen_yet() -> None:
    async with running(says(OK)) as (upstream, host):
        for _ in range(20):
            # No turn of the loop between the reply and the next request: only the socket knows.
            assert await call(upstream) == b"ok"
            await asyncio.sleep(0.002)
        assert len(host.requests) == 20


async def _closes_on_the_second(host: Host, writer: asyncio.StreamWriter) -> None:
    await host.request()
    writer.write(OK)
    await host.request()


async def test_a_request_that_may_have_been_processed_is_not_sent_twice() -> None:
    async with running(_closes_on_the_second, answer) as (upstream, host):
        await call(upstream)
        with pytest.raises(UpstreamUnavailable, match="cannot be reached"):
            await call(upstream)
        assert len(host.requests) == 2


async def test_a_safe_request_is_sent_again() -> None:
    async with running(_closes_on_the_second, answer) as (upstream, host):
        await call(upstream, "GET", body=b"")
        assert await call(upstream, "GET", body=b"") == b"ok"
        assert (len(host.requests), host.connections) == (3, 2)


async def test_but_not_on_a_new_connection_nor_for_ever() -> None:
    async with running(says(b""), says(b"")) as (upstream, host):
        with pytest.raises(UpstreamUnavailable):
            await call(upstream, "GET", body=b"")
        assert host.connections == 1


async def test_a_host_that_is_not_there() -> None:
    upstream = Upstream("http://127.0.0.1:9", QUICK)
    await upstream.open()
    with pytest.raises(UpstreamUnavailable, match="cannot be reached"):
        await call(upstream)
    await upstream.close()


@pytest.mark.parametrize("url", ["", "ftp://h/", "http://", "h:80"])
async def test_invalid_base_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base URL"):
        await Upstream(url, QUICK).open()


@pytest.mark.parametrize(
    ("path", "header"),
    [("/x y", "b"), ("/x\r\nEvil: 1", "b"), ("/x", "b\r\nEvil: 1"), ("/x", "b\nEvil: 1"), ("/x", "b\0")],
)
async def test_requests_cannot_be_smuggled(path: str, header: str) -> None:
    async with running(answer) as (upstream, host):
        with pytest.raises(UpstreamUnavailable):
            await upstream.send("POST", path, [("A", header)], b"")
        assert not host.connections


async def test_a_login_in_the_base_url() -> None:
    async with running(answer, base="http://us%40er:pass@127.0.0.1:{port}/") as (upstream, host):
        reply = await upstream.send("GET", "/x", [("authorization", "Bearer client")], b"")
        reply.close()
        assert host.requests[0].startswith(b"GET /x HTTP/1.1\r\n")
        assert host.requests[0].lower().count(b"authorization") == 1
        assert b"authorization: Basic dXNAZXI6cGFzcw==\r\n" in host.requests[0]


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with running(answer) as (upstream, _):
        assert await call(upstream) == b"ok"


# Time


@pytest.mark.parametrize("pieces", [(), (b"HTTP/1.1 200 OK\r\n",), (b"HTTP/1.1 100 Continue\r\n\r\n",)])
async def test_a_host_that_does_not_answer_in_time(pieces: tuple[bytes, ...]) -> None:
    async with running(stalls(*pieces), timeouts=Timeouts(connect=2, first_byte=0.1, idle=2)) as (upstream, host):
        with pytest.raises(UpstreamUnavailable, match="in time"):
            await call(upstream)
        await asyncio.wait_for(host.gone.wait(), 1)


async def test_dripping_a_head_does_not_buy_time() -> None:
    drip = says(b"HTTP/1.1 200 OK\r\n", *(b"X: y\r\n" for _ in range(40)), pause=0.02)
    began = asyncio.get_running_loop().time()
    async with running(drip, timeouts=Timeouts(connect=2, first_byte=0.1, idle=2)) as (upstream, _):
        with pytest.raises(UpstreamUnavailable, match="in time"):
            await call(upstream)
    assert asyncio.get_running_loop().time() - began < 0.6


async def test_a_host_that_falls_silent() -> None:
    silent = stalls(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")
    async with running(silent, timeouts=Timeouts(connect=2, first_byte=2, idle=0.2)) as (upstream, host):
        reply = await upstream.send("GET", "/", [], b"")
        found, error = await collect(await reply.next_piece(heartbeat=0.05) or b"" for _ in count())
        reply.close()
        assert "silent" in error
        assert found[0] == b"ab"
        assert 2 <= found.count(b"") <= 4
        await asyncio.wait_for(host.gone.wait(), 1)


async def test_parts_go_to_their_receiver_until_it_wants_none() -> None:
    pieces = [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", b"a", b"b", b"c", b"d", b"ef"]
    async with running(says(*pieces, pause=0.03)) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        parts: list[bytes] = []

        def receive(part: bytes) -> bool:
            parts.append(part)
            return len(parts) < 3

        assert await reply.next_piece(receive=receive) is None
        assert parts == [b"a", b"b", b"c"]
        await asyncio.sleep(0.1)
        rest = b""
        while piece := await reply.next_piece():
            rest += piece
        assert (parts, rest) == ([b"a", b"b", b"c"], b"def")
        reply.close()


async def test_received_parts_are_no_silence() -> None:
    drip = says(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n", *(b"a" for _ in range(20)), pause=0.03)
    async with running(drip, timeouts=Timeouts(connect=2, first_byte=2, idle=0.15)) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        parts: list[bytes] = []

        def receive(part: bytes) -> bool:
            parts.append(part)
            return True

        assert await reply.next_piece(0.1, receive) == b""
        assert parts == [b"a"] * 20
        reply.close()
    silent = stalls(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"a")
    async with running(silent, timeouts=Timeouts(connect=2, first_byte=2, idle=0.2)) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        began = asyncio.get_running_loop().time()
        found, error = await collect(await reply.next_piece(0.05, receive) or b"" for _ in count())
        assert "silent" in error
        assert 2 <= found.count(b"") <= 5
        assert asyncio.get_running_loop().time() - began < 0.4
        reply.close()


async def test_a_slow_reader_is_no_silent_host() -> None:
    slow = says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"a", b"b", pause=0.05)
    async with running(slow, timeouts=Timeouts(connect=2, first_byte=2, idle=0.2)) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        assert await reply.next_piece(0.15, lambda _: False) is None
        await asyncio.sleep(0.3)
        assert await reply.next_piece(0.15) == b"b"
        assert await reply.next_piece(0.15) == b""
        reply.close()


async def test_compressed_parts_have_no_receiver() -> None:
    packed = gzip.compress(b"words")
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with running(says(head, packed, pause=0.02)) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        reply.unpack(1000)
        parts: list[bytes] = []
        assert await reply.next_piece(1, lambda part: bool(parts.append(part))) == b"words"  # type: ignore[func-returns-value]
        assert parts == []
        reply.close()


async def test_chunk_sizes_alone_are_silence() -> None:
    drip = says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", *(b"a" for _ in range(40)), pause=0.02)
    began = asyncio.get_running_loop().time()
    async with running(drip, timeouts=Timeouts(connect=2, first_byte=2, idle=0.1)) as (upstream, _):
        with pytest.raises(UpstreamUnavailable, match="silent"):
            await call(upstream)
    assert asyncio.get_running_loop().time() - began < 0.6


async def test_peek_and_trailer_respect_their_timeouts() -> None:
    async with running(stalls(b"HTTP/1.1 200 OK\r\n\r\n")) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        assert await reply.peek(0.03) == b""
        assert await reply.trailer(0.03) == b""
        reply.close()
    async with running(says(b"HTTP/1.1 200 OK\r\n\r\n", b"abc", pause=0.01)) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        assert await reply.peek(1) == b"abc"
        assert await reply.trailer(1) == b""
        reply.close()


# Ends


async def test_a_host_that_breaks_off() -> None:
    async with running(says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        found, error = await collect(reply.chunks())
        reply.close()
        assert "broke off" in error
        assert found == [b"ab"]


async def test_cancelling_before_the_reply_stops_the_host() -> None:
    async with running(stalls()) as (upstream, host):
        task = asyncio.create_task(call(upstream))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(host.gone.wait(), 1)


async def test_a_reply_that_is_closed_half_way_stops_the_host() -> None:
    async with running(stalls(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"), answer) as (upstream, host):
        reply = await upstream.send("GET", "/", [], b"")
        reply.close()
        reply.close()
        await asyncio.wait_for(host.gone.wait(), 1)
        with pytest.raises(UpstreamUnavailable):
            await reply.read(10)
        assert await call(upstream) == b"ok"


async def test_a_reply_that_is_closed_does_not_read_the_next_one() -> None:
    async with running(answer) as (upstream, host):
        first = await upstream.send("GET", "/", [], b"")
        assert await first.read(10) == b"ok"
        first.close()
        second = await upstream.send("GET", "/", [], b"")
        with pytest.raises(UpstreamUnavailable):
            await first.read(10)
        assert await second.read(10) == b"ok"
        second.close()
        assert host.connections == 1


async def test_a_reply_is_at_most_so_long() -> None:
    async with running(says(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000)) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        with pytest.raises(UpstreamUnavailable, match="over 999 bytes"):
            await reply.read(999)
        reply.close()


async def test_a_host_that_is_too_fast_waits() -> None:
    sent = 0

    async def flood(host: Host, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await host.request()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(512):
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with running(flood) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        await asyncio.sleep(0.3)
        assert READ_BUFFER < sent < 24 * 1024 * 1024
        assert len(await reply.read(64 * 1024 * 1024)) == 512 * 65536
        reply.close()


async def test_compressed_replies_pass_as_they_come_or_are_unpacked() -> None:
    packed = gzip.compress(b"a" * 5_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)

    async def script(host: Host, writer: asyncio.StreamWriter) -> None:
        while True:
            await host.request()
            writer.write(head + packed)

    async with running(script) as (upstream, host):
        assert await call(upstream) == packed
        reply = await upstream.send("GET", "/", [], b"")
        reply.unpack(8 * MIB)
        pieces = [piece async for piece in reply.chunks()]
        reply.close()
        assert b"".join(pieces) == b"a" * 5_000_000
        assert max(map(len, pieces)) <= 1024 * 1024
        assert reply.headers == []
        assert host.connections == 1


@pytest.mark.parametrize("cut", [1, 500, 30_000])
@pytest.mark.parametrize("after", [b"", b"\0" * 512, b"trailing"])
async def test_a_compressed_reply_of_several_members_is_read_to_its_end(cut: int, after: bytes) -> None:
    words = [b"some words %d " % number * 50 for number in range(2000)]
    packed = b"".join(map(gzip.compress, words)) + gzip.compress(b"") + gzip.compress(b"end") + after

    async def script(host: Host, writer: asyncio.StreamWriter) -> None:
        await host.request()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n")
        for start in range(0, cut * 20, cut):
            writer.write(packed[start : start + cut])
            await asyncio.sleep(0)
        writer.write(packed[cut * 20 :])

    async with running(script) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        reply.unpack(8 * MIB)
        assert await reply.read(8 * MIB) == b"".join(words) + b"end"
        reply.close()


@pytest.mark.parametrize(
    "broken", [b"\x1f\x8b\x08garbage" * 9, gzip.compress(b"x")[:-8] + b"\1" * 8], ids=["head", "checksum"]
)
async def test_what_came_before_a_broken_member_is_not_lost(broken: bytes) -> None:
    packed = gzip.compress(b"a word") + broken

    async def script(host: Host, writer: asyncio.StreamWriter) -> None:
        await host.request()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed))
        writer.write(packed)

    async with running(script) as (upstream, _):
        reply = await upstream.send("GET", "/", [], b"")
        reply.unpack(8 * MIB)
        pieces = reply.chunks()
        assert (await anext(pieces)).startswith(b"a word")
        with pytest.raises(UpstreamUnavailable, match="broke off"):
            await anext(pieces)
        reply.close()


async def test_nothing_is_left_open() -> None:
    async with running(answer, stalls()) as (upstream, host):
        await call(upstream)
        busy = [asyncio.create_task(call(upstream)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await upstream.close()
        done = await asyncio.gather(*busy, return_exceptions=True)
        assert any(isinstance(each, UpstreamUnavailable) for each in done)
        assert host.connections == 2


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for ``localhost`` that nobody else vouches for."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl")
    path = tmp_path_factory.mktemp("tls")
    made = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made += ["-keyout", str(path / "key"), "-out", str(path / "crt")]
    subprocess.run(made, check=True, capture_output=True)
    return path


def _server_side(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "crt", certificate / "key")
    return context


async def test_requests_over_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "crt"))
    async with running(answer, base="https://localhost:{port}", tls=_server_side(certificate)) as (upstream, host):
        for _ in range(3):
            assert await call(upstream, body=b"x" * 200_000) == b"ok"
            await asyncio.sleep(0.02)
        assert host.connections == 1
        assert host.requests[0].startswith(b"POST /x HTTP/1.1\r\nHost: localhost:")


async def test_a_stream_over_tls_that_breaks_off(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "crt"))
    script = says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
    async with running(script, base="https://localhost:{port}", tls=_server_side(certificate)) as (upstream, _):
        with pytest.raises(UpstreamUnavailable, match="broke off"):
            await call(upstream)


@pytest.mark.parametrize(("name", "is_known"), [("localhost", False), ("127.0.0.1", True)])
async def test_certificates_are_checked(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_known: bool
) -> None:
    if is_known:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "crt"))
    base = "https://" + name + ":{port}"
    async with running(answer, base=base, tls=_server_side(certificate)) as (upstream, host):
        with pytest.raises(UpstreamUnavailable, match="SSLCertVerificationError"):
            await call(upstream)
        assert not host.requests


async def test_no_tls_where_there_should_be() -> None:
    async with running(answer, base="https://127.0.0.1:{port}") as (upstream, host):
        with pytest.raises(UpstreamUnavailable):
            await call(upstream)
        assert not host.requests


@pytest.mark.parametrize(
    "sizes", [(0,), (3, 0, 5), (100_000, 7, 1), (10, 300_000, 1, 1), (700_000, 500_000, 3), (262_144, 1), (1,) * 40]
)
async def test_a_body_in_pieces_arrives_whole_and_in_order(sizes: tuple[int, ...]) -> None:
    pieces = [bytes([65 + index % 26]) * size for index, size in enumerate(sizes)]
    async with running(answer) as (upstream, host):
        for _ in range(2):  # over a new connection, and over one that is there
            reply = await upstream.begin("POST", "/x", [], pieces).reply()
            assert reply.status == 200
            await reply.read(1 << 20)
            reply.close()
    assert [each.partition(b"\r\n\r\n")[2] for each in host.requests] == [b"".join(pieces)] * 2
    assert host.connections == 1
