"""Remove a tenant, a session or a user for good, and report what was removed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from tersely.dialects.wire import raw_json
from tersely.domain.errors import NotFound
from tersely.service.common.replay_tenants import replay_tenant
from tersely.store.commit import exchanges, spool
from tersely.store.db.connection import Database
from tersely.store.ops import tenants

# Members of a session's metadata that may name its user.
USER_NAMES = ("user", "user_id")


class Forgetting:
    """Removes rows in the database and refused exchanges in the spool directory."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime], directory: Path) -> None:
        """``directory``: of this machine's spool for that database."""
        self._database = database
        self._clock = clock
        self._directory = directory

    async def forget_tenant(self, tenant: str, *, is_dry: bool = False) -> dict[str, Any]:
        """Remove everything of a tenant, the transcripts it replayed included; the receipt. ``is_dry``: only count."""
        names = (tenant, replay_tenant(tenant))
        found = await self._count(names)
        files = await asyncio.to_thread(self._refused, tenant, None)
        if not found and not files:
            raise NotFound(f"there is no data of a tenant {tenant}")
        if not is_dry:
            found = Counter()
            for name in names:
                found += await tenants.forget(self._database, name)
            await asyncio.to_thread(_remove, files)
        left = await self._count(names)
        return self._receipt({"tenant": tenant}, found, files, left, is_dry=is_dry)

    async def _count(self, names: Collection[str]) -> Counter[str]:
        """Count the rows of these tenants by table."""
        found: Counter[str] = Counter()
        for name in names:
            found += await tenants.count_rows(self._database, name)
        return found

    async def forget_sessions(
        self, tenant: str, *, session: str | None, user: str | None, is_dry: bool = False
    ) -> dict[str, Any]:
        """Remove a session, or all sessions whose metadata name a user, with their descendants; the receipt."""
        ids = [session] if session is not None else await self._of_user(tenant, user or "")
        family = await tenants.family_of(self._database, tenant, ids)
        files = await asyncio.to_thread(self._refused, tenant, frozenset(family))
        if not family:
            raise NotFound(f"{tenant} has no such session" if user is None else f"{tenant} has no session of that user")
        found = await tenants.count_rows(self._database, tenant, family)
        if not is_dry:
            found = await tenants.forget_sessions(self._database, tenant, family)
            await asyncio.to_thread(_remove, files)
        left = await tenants.count_rows(self._database, tenant, family)
        subject = {"tenant": tenant, **({"session": session} if user is None else {"user": user}), "sessions": family}
        return self._receipt(subject, found, files, left, is_dry=is_dry)

    async def _of_user(self, tenant: str, user: str) -> list[str]:
        """Return the sessions whose metadata name that user at their top level."""
        # Metadata are stored in UTF-8, or with escapes where they hold what UTF-8 cannot write.
        words = raw_json.dump(user)[1:-1], json.dumps(user)[1:-1].encode()
        found = []
        for session_id, text in await tenants.with_metadata(self._database, tenant, *words):
            metadata = json.loads(text)
            if isinstance(metadata, dict) and any(metadata.get(name) == user for name in USER_NAMES):
                found.append(session_id)
        return found

    def _refused(self, tenant: str, sessions: Collection[str] | None) -> list[Path]:
        """Return the files of exchanges that the database refused, of that tenant and those sessions."""
        found = []
        for path in self._directory.glob(f"*{spool.REFUSED}"):
            try:
                exchange = exchanges.decode(path.read_bytes())
            except (OSError, ValueError):
                continue
            if exchange.tenant == tenant and (sessions is None or exchange.session_id in sessions):
                found.append(path)
        return found

    def _receipt(
        self, subject: dict[str, Any], found: Counter[str], files: list[Path], left: Counter[str], *, is_dry: bool
    ) -> dict[str, Any]:
        return {
            **subject,
            "at": self._clock().isoformat(timespec="seconds"),
            "dry_run": is_dry,
            "rows": dict(sorted(found.items())),
            "refused_files": len(files),
            "left": dict(sorted(left.items())),
        }


def _remove(files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
