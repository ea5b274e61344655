"""Authenticate callers. Keys are ``tsk_<id>_<secret>``: looked up by id, compared in constant time, never logged."""

from __future__ import annotations

import asyncio
import hmac
import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from tersely.dialects.clients.names import CLIENT_NAME
from tersely.dialects.headers import Headers
from tersely.domain.errors import Forbidden, InvalidRequest, StoreUnavailable, Unauthorized
from tersely.service.common.replay_tenants import is_replay_tenant
from tersely.store.db.connection import TENANT, Database
from tersely.store.ops import keys
from tersely.store.ops.keys import ApiKey

Item = TypeVar("Item")

DEFAULT_TENANT = "default"
# Last path segments of POST routes that change nothing.
READING_POSTS = frozenset({"search", "context", "query"})
# Seconds for which a verified key is trusted while the database cannot say whether it was revoked.
TRUST = 30.0
# Seconds after which the trusted keys are checked for revocation, while requests go on; and after which they wait.
CHECK_AFTER = 0.75
CHECK_AT_LAST = 1.5
MAX_TRUSTED = 4096
# Characters of a key's label.
MAX_LABEL = 200
_KEY = re.compile(r"tsk_([0-9a-z]{8,32})_([0-9A-Za-z_-]{32,128})")

# In order of precedence. All but the first are the headers in which providers' SDKs send their key.
KEY_HEADERS = ("x-tersely-key", "authorization", "x-api-key", "api-key", "x-goog-api-key")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's data in the headers of a request: the Tersely keys in them, in order of precedence, the names of
    the headers with keys, the hosts that it was sent to, and the web pages that it came from.
    """

    keys: tuple[str, ...]
    carriers: frozenset[str]
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The tenant of a request, and the headers that carried its key, which are not forwarded.

    ``scope``: what the key permits. ``key_id`` is empty without a key. ``client``: the only client that may use the
    key.
    """

    tenant: str
    key_headers: frozenset[str]
    scope: str | None = None
    key_id: str = ""
    client: str | None = None

    def check_client(self, name: str) -> None:
        """Raise `Forbidden` unless a client of that name may use the key."""
        if self.client is not None and name != self.client:
            raise Forbidden(f"this key is for {self.client} only")

    def check_proxy(self) -> None:
        """Raise `Forbidden` unless the key may call models."""
        if self.scope not in (None, "proxy"):
            raise Forbidden("this key may not call models: it was made to read only")

    def check_rest(self, method: str, path: str) -> None:
        """Raise `Forbidden` unless the key may use that route of the REST API."""
        if self.scope is None:
            return
        if self.scope != "read":
            raise Forbidden("this key may call models only")
        if not self.only_reads(method, path):
            raise Forbidden("this key may only read")

    @staticmethod
    def only_reads(method: str, path: str) -> bool:
        """Return whether a route of the REST API changes nothing."""
        return method in ("GET", "HEAD") or path.rpartition("/")[2] in READING_POSTS


class _TrustedKey(msgspec.Struct, frozen=True):
    """A key that was verified at ``since``, a monotonic time in seconds."""

    since: float
    tenant: str
    scope: str | None
    expires_at: datetime | None
    key_id: str
    client: str | None


class Auth:
    """Finds the caller's tenant. With keys off everybody is the one tenant ``default``."""

    def __init__(
        self,
        database: Database,
        *,
        required: bool,
        monotonic: Callable[[], float],
        clock: Callable[[], datetime],
        is_local: bool = False,
        origins: Collection[str] = (),
    ) -> None:
        """``required``: every request needs a key. Otherwise with ``is_local``: refuse requests from web pages of other
        origins, except ``origins``.
        """
        self._is_local = is_local
        self._origins = origins
        self._database = database
        self._required = required
        self._monotonic = monotonic
        self._clock = clock
        self._trusted: OrderedDict[bytes, _TrustedKey] = OrderedDict()
        self._checked = -math.inf
        self._check: asyncio.Task[None] | None = None

    async def caller(self, credentials: Credentials) -> Caller:
        """Return a request's caller. Raises `Unauthorized`, `Forbidden`, or `StoreUnavailable`: it never opens by
        itself.
        """
        carriers = credentials.carriers
        if not self._required:
            if self._is_local:
                _check_local(credentials, self._origins)
            return Caller(tenant=DEFAULT_TENANT, key_headers=carriers)
        if not credentials.keys:
            raise Unauthorized("a Tersely key is needed (X-Tersely-Key, or Authorization: Bearer tsk_...)")
        key = await self._verify(credentials.keys[0])
        if key.expires_at is not None and key.expires_at <= self._clock():
            raise Unauthorized("this Tersely key has expired")
        return Caller(tenant=key.tenant, key_headers=carriers, scope=key.scope, key_id=key.key_id, client=key.client)

    def check_address(self, headers: Mapping[str, str] | Headers) -> None:
        """Raise `Forbidden` where keys are off and a page of another host may be behind the request."""
        if self._is_local and not self._required:
            _check_local(read_credentials(headers))

    async def _verify(self, key: str) -> _TrustedKey:
        digest = sha256(key.encode()).digest()
        now = self._monotonic()
        if digest in self._trusted:
            await self._forget_revoked(now)
        trusted = self._trusted.get(digest)
        if trusted is not None and now - trusted.since < TRUST:
            return trusted
        match = _KEY.fullmatch(key)
        if match is None:
            raise Unauthorized("that is not a Tersely key")
        stored = await keys.find(self._database, match[1])
        expected = stored.secret_hash if stored else bytes(32)
        is_right = hmac.compare_digest(sha256(match[2].encode()).digest(), expected)
        if stored is None or not is_right or stored.revoked_at is not None:
            self._trusted.pop(digest, None)
            raise Unauthorized("no such Tersely key, or it was revoked")
        trusted = self._trusted[digest] = _TrustedKey(
            now, stored.tenant, stored.scope, stored.expires_at, stored.id, stored.client
        )
        if len(self._trusted) > MAX_TRUSTED:
            self._trusted.popitem(last=False)
        return trusted

    async def _forget_revoked(self, now: float) -> None:
        """Check all trusted keys at once, and wait for that where the last check is too old.

        Other processes revoke keys, too. Where the database does not answer, keys are trusted as long as before.
        """
        age = now - self._checked
        if age < CHECK_AFTER:
            return
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._check_trusted(now))
        if age >= CHECK_AT_LAST:
            await asyncio.wait({self._check}, timeout=CHECK_AT_LAST)

    async def _check_trusted(self, now: float) -> None:
        """Forget the trusted keys that were revoked; the others are trusted from ``now`` on."""
        known = dict(self._trusted)
        try:
            valid = await keys.valid_among(self._database, {each.key_id for each in known.values()})
        except StoreUnavailable:
            return
        for digest, trusted in known.items():
            if self._trusted.get(digest) is not trusted:
                continue
            if trusted.key_id in valid:
                self._trusted[digest] = replace(trusted, since=now)
            else:
                del self._trusted[digest]
        self._checked = now


async def while_permitted(
    permission: Callable[[], Awaitable[object]], items: AsyncIterator[Item]
) -> AsyncIterator[Item]:
    """Yield the items of a stream without end until ``permission`` raises: keys expire and are revoked meanwhile."""
    async for each in items:
        try:
            await permission()
        except (Unauthorized, Forbidden):
            return
        except StoreUnavailable:
            pass
        yield each


def key_id_of(key: str) -> str:
    """The id in a key. Raises `Unauthorized` for what is no key."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise Unauthorized("that is not a Tersely key")
    return match[1]


def _check_local(credentials: Credentials, origins: Collection[str] = ()) -> None:
    """Raise `Forbidden` for what a browser sends on behalf of a page that is not of this machine.

    Such a page can send requests without asking first, or point a name of its own at this machine.
    """
    for host in credentials.hosts:
        if not is_loopback(f"//{host}"):
            raise Forbidden("without keys Tersely answers only under a loopback name (Host)")
    for origin in credentials.origins:
        if origin not in origins and not is_loopback(origin):
            raise Forbidden("without keys Tersely refuses web pages of other hosts (Origin)")


@lru_cache(maxsize=256)
def is_loopback(url: str) -> bool:
    """Return whether the host of that address is this machine's own."""
    try:
        host = urlsplit(url.strip()).hostname
        return host is not None and (host == "localhost" or ip_address(host).is_loopback)
    except ValueError:
        return False


def read_credentials(headers: Mapping[str, str] | Headers) -> Credentials:
    """Return what headers say of the caller. Their names are in lower case."""
    pairs = list(headers.items()) if isinstance(headers, Mapping) else headers
    found = _presented(pairs)
    carriers = [name for name, value in pairs if "tsk_" in value and _KEY.search(value)]
    return Credentials(
        keys=tuple(key for _, key in found),
        carriers=frozenset(carriers).union(name for name, _ in found),
        hosts=tuple(value for name, value in pairs if name == "host"),
        origins=tuple(value for name, value in pairs if name == "origin"),
    )


def _presented(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers that present a Tersely key, with the key, in order of precedence."""
    found = []
    for name, text in headers:
        if name not in KEY_HEADERS:
            continue
        value = text.strip()
        if name == "authorization" and value[:7].lower() == "bearer ":
            value = value[7:].strip()
        if value.startswith("tsk_") or (name == "x-tersely-key" and value):
            found.append((name, value))
    return sorted(found, key=lambda each: KEY_HEADERS.index(each[0]))


def new_key(
    tenant: str,
    label: str,
    *,
    now: datetime,
    key_id: str,
    secret: str,
    scope: str | None = None,
    days: int | None = None,
    client: str | None = None,
) -> tuple[str, ApiKey]:
    """Return a new key as its owner sees it once, and as it is stored. Raises `InvalidRequest` for an
    invalid tenant, label or client.
    """
    if not TENANT.fullmatch(tenant):
        raise InvalidRequest("a tenant's name is 1 to 128 letters, digits, and . _ @ : - (not first)", field="tenant")
    if is_replay_tenant(tenant):
        raise InvalidRequest("names that end with :replays are reserved for replayed transcripts", field="tenant")
    if len(label) > MAX_LABEL:
        raise InvalidRequest(f"a key's name has at most {MAX_LABEL} characters", field="name")
    if client is not None and not CLIENT_NAME.fullmatch(client):
        # No request could use such a key.
        raise InvalidRequest(
            "a client's name, as lists of calls show it, is 1 to 32 lower-case letters, digits, and . _ - (not first)",
            field="client",
        )
    stored = ApiKey(
        id=key_id,
        tenant=tenant,
        label=label,
        secret_hash=sha256(secret.encode()).digest(),
        created_at=now,
        revoked_at=None,
        scope=scope,
        expires_at=None if days is None else now + timedelta(days=days),
        client=client,
    )
    return f"tsk_{key_id}_{secret}", stored
