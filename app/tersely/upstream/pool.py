"""The connections to one host: made when needed, kept for a while when they can be used again."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from functools import lru_cache, partial

from aiohappyeyeballs import AddrInfoType, start_connection

from tersely.upstream.connection import BrokenOff, Connection

# Seconds: how long an unused connection is kept, how long a resolved name is valid, and after which time the next
# address is tried.
KEEP_ALIVE = 30.0
ADDRESS_LIFETIME = 60.0
NEXT_ADDRESS_AFTER = 0.25


class ConnectionPool:
    """Connections to ``host`` and ``port``, as many as there are requests."""

    def __init__(self, host: str, port: int, *, secure: bool, connect: float) -> None:
        """``secure``: with TLS and the system's certificates; ``connect`` in seconds."""
        self._host = host
        self._port = port
        self._tls = _tls() if secure else None
        self._connect = connect
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._addresses: list[AddrInfoType] = []
        self._addresses_expire = 0.0
        self._resolving = asyncio.Lock()
        self._sweep: asyncio.TimerHandle | None = None

    def take(self) -> Connection | None:
        """Return the latest unused connection that still works; None if there is none."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.expires > now and connection.is_usable:
                return connection
            connection.abort()
        return None

    async def make(self, deadline: float) -> Connection:
        """Return a new connection before ``deadline``, in the loop's time. Raises `OSError`, also for TLS and for
        time-out.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(min(deadline, loop.time() + self._connect)):
            sock = await self._open_socket()
            try:
                transport, connection = await loop.create_connection(
                    partial(Connection, self._forget),
                    sock=sock,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
            except BaseException:
                sock.close()
                raise
        if transport.is_closing():
            raise BrokenOff("closed at once")
        self._all.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Take a connection back: to be used again if its reply was read, cut if not."""
        if not connection.finish():
            return
        loop = asyncio.get_running_loop()
        connection.expires = loop.time() + connection.keep_alive(KEEP_ALIVE)
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE, self._sweep_out)

    def interrupt(self) -> None:
        """End what is under way on every connection."""
        for connection in list(self._all):
            connection.interrupt()

    async def close(self) -> None:
        """Cut every connection."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in self._all:
            connection.abort()
        self._idle.clear()
        # Transports are closed at the loop's next turns.
        for _ in range(100):
            if not self._all:
                break
            await asyncio.sleep(0)

    async def _open_socket(self) -> socket.socket:
        try:
            return await start_connection(await self._resolve(), happy_eyeballs_delay=NEXT_ADDRESS_AFTER, interleave=1)
        except OSError:
            self._addresses_expire = 0.0
            raise

    async def _resolve(self) -> list[AddrInfoType]:
        loop = asyncio.get_running_loop()
        async with self._resolving:
            if self._addresses_expire <= loop.time():
                self._addresses = await loop.getaddrinfo(  # type: ignore[assignment]
                    self._host, self._port, type=socket.SOCK_STREAM
                )
                self._addresses_expire = loop.time() + ADDRESS_LIFETIME
            return list(self._addresses)

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _sweep_out(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [each for each in self._idle if each.expires <= now]:
            self._idle.remove(connection)
            connection.abort()
        if self._idle:
            self._sweep = loop.call_later(KEEP_ALIVE, self._sweep_out)


def _tls() -> ssl.SSLContext:
    return _tls_with(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@lru_cache(maxsize=4)
def _tls_with(*_: str | None) -> ssl.SSLContext:
    """Return what the connections to all hosts share: reading the system's certificates takes 30 ms. OpenSSL looks for
    them where the arguments say, which are its variables.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
