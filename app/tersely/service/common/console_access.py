"""Access to the console: a signed cookie, and a token for every change.

With keys turned on, a visitor logs in with a key of the tenant. The cookie names the key and is signed with a secret
derived from the key's stored hash. It needs no table, every replica can check it, and it ends with the key. Without
keys every visitor is the one tenant, and the secret is in the data directory.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from tersely.dialects.headers import Headers
from tersely.domain.errors import Forbidden, Unauthorized
from tersely.service.common.auth import DEFAULT_TENANT, Auth, key_id_of, read_credentials
from tersely.store.db.connection import Database
from tersely.store.ops import keys

LIFETIME = timedelta(hours=12)
NO_KEY = "-"
SIGNING_FILE = "console.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleVisitor:
    """A visitor of the console. Every change must carry ``token``; ``scope`` is that of the key."""

    tenant: str
    cookie: str
    token: str
    scope: str | None = None

    def check_scope(self, *, changes: bool) -> None:
        """Raise `Forbidden` unless the key permits it: a key for the proxy may not view, a key for reading may not
        change.
        """
        if self.scope is not None and (changes or self.scope != "read"):
            raise Forbidden("this key may not do that in the console")


class ConsoleAccess:
    """Makes and checks the cookies of the console."""

    def __init__(self, database: Database, auth: Auth, *, required: bool, directory: Path) -> None:
        """``required``: a key is needed. ``directory`` holds the secret where none is."""
        self._database = database
        self._auth = auth
        self.required = required
        self._directory = directory

    async def log_in(self, key: str, *, now: datetime, nonce: str) -> ConsoleVisitor:
        """A new visitor. Raises `Unauthorized`."""
        if not self.required:
            return self._visit(NO_KEY, DEFAULT_TENANT, self._own_secret, now + LIFETIME, nonce)
        caller = await self._auth.caller(read_credentials({"x-tersely-key": key.strip()}))
        if caller.client is not None:
            raise Forbidden(f"this key is for {caller.client} only")
        key_id = key_id_of(key.strip())
        return self._visit(key_id, caller.tenant, await self._secret(key_id), now + LIFETIME, nonce)

    async def visit(self, cookie: str, *, now: datetime) -> ConsoleVisitor:
        """Return the visitor of a cookie. Raises `Unauthorized`, `StoreUnavailable`."""
        parts = cookie.split(".")
        if len(parts) != 4 or not parts[1].isdecimal() or not parts[1].isascii():
            raise Unauthorized("log in to the console")
        key_id, expires, nonce, _ = parts
        if (key_id == NO_KEY) == self.required or int(expires) < now.timestamp():
            raise Unauthorized("log in to the console again")
        tenant = DEFAULT_TENANT
        scope: str | None = None
        secret = b"" if self.required else self._own_secret
        if self.required:
            stored = await keys.find(self._database, key_id)
            if stored is None or stored.revoked_at is not None:
                raise Unauthorized("the key was revoked: log in with another one")
            if stored.expires_at is not None and stored.expires_at <= now:
                raise Unauthorized("the key has expired: log in with another one")
            scope = stored.scope
            tenant, secret = stored.tenant, _derived(stored.secret_hash)
        right = self._visit(key_id, tenant, secret, datetime.fromtimestamp(int(expires), now.tzinfo), nonce)
        right = replace(right, scope=scope)
        if not hmac.compare_digest(right.cookie.encode(), cookie.encode()):
            raise Unauthorized("log in to the console again")
        return right

    def check_address(self, headers: Headers) -> None:
        """Raise `Forbidden` for a request without keys that another host's page may have sent."""
        self._auth.check_address(headers)

    def check_token(self, visitor: ConsoleVisitor, token: str) -> None:
        """Raise `Forbidden` unless ``token`` is that of the visitor."""
        if not hmac.compare_digest(visitor.token.encode(), token.encode("utf-8", "replace")):
            raise Forbidden("the form is out of date: reload the page and try again")

    async def _secret(self, key_id: str) -> bytes:
        stored = await keys.find(self._database, key_id)
        if stored is None:
            raise Unauthorized("no such Tersely key, or it was revoked")
        return _derived(stored.secret_hash)

    @cached_property
    def _own_secret(self) -> bytes:
        path = self._directory / SIGNING_FILE
        if path.exists():
            return _derived(path.read_bytes())
        self._directory.mkdir(parents=True, exist_ok=True)
        # Written whole under another name first: whoever finds the file finds all of it.
        draft = path.with_name(f"{SIGNING_FILE}.{os.getpid()}")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(os.urandom(32))
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
        return _derived(path.read_bytes())

    def _visit(self, key_id: str, tenant: str, secret: bytes, expires: datetime, nonce: str) -> ConsoleVisitor:
        signed = f"{key_id}.{int(expires.timestamp())}.{nonce}"
        return ConsoleVisitor(
            tenant=tenant, cookie=f"{signed}.{_sign(secret, signed)}", token=_sign(secret, f"change {signed}")
        )


class OperatorAccess:
    """Decides who sees the operator's view: whoever has the admin key; where no keys are needed and there is no such
    key, every visitor.
    """

    def __init__(self, admin_key: str | None, *, is_open: bool) -> None:
        """``is_open``: keys are off."""
        self._admin_key = admin_key
        self.needs_key = admin_key is not None
        self.is_shut = admin_key is None and not is_open

    def log_in(self, key: str, *, now: datetime, nonce: str) -> ConsoleVisitor:
        """A new visitor. Raises `Unauthorized`."""
        if self._admin_key is None or not hmac.compare_digest(
            key.strip().encode("utf-8", "replace"), self._admin_key.encode()
        ):
            raise Unauthorized("that is not the admin key")
        return self._visit(now + LIFETIME, nonce)

    def visit(self, cookie: str, *, now: datetime) -> ConsoleVisitor:
        """Return the visitor of a cookie. Raises `Unauthorized`."""
        parts = cookie.split(".")
        if len(parts) != 3 or not (parts[0].isascii() and parts[0].isdecimal()) or int(parts[0]) < now.timestamp():
            raise Unauthorized("log in with the admin key")
        right = self._visit(datetime.fromtimestamp(int(parts[0]), now.tzinfo), parts[1])
        if not hmac.compare_digest(right.cookie.encode(), cookie.encode("utf-8", "replace")):
            raise Unauthorized("log in with the admin key")
        return right

    def _visit(self, expires: datetime, nonce: str) -> ConsoleVisitor:
        secret = sha256(b"tersely operator " + (self._admin_key or "").encode()).digest()
        signed = f"{int(expires.timestamp())}.{nonce}"
        return ConsoleVisitor(
            tenant="", cookie=f"{signed}.{_sign(secret, signed)}", token=_sign(secret, f"change {signed}")
        )


def _derived(secret: bytes) -> bytes:
    return sha256(b"tersely console " + secret).digest()


def _sign(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), "sha256").hexdigest()
