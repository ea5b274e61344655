"""Oversized tool outputs, whole: noticed when their message is stored, fetched by their SHA-256."""

from __future__ import annotations

import re

from tersely.domain.errors import InvalidRequest, NotFound
from tersely.domain.text.tool_output import output_digest
from tersely.service.sessions.messages import dialect_of
from tersely.store.db.connection import Database
from tersely.store.history import artifacts
from tersely.store.history.artifacts import ArtifactPlace

# Seconds; an output may have many megabytes.
LIMIT = 10.0

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Artifacts:
    """Fetching, within a tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_session(self, tenant: str, session_id: str, *, limit: int) -> list[ArtifactPlace]:
        """Return where the newest artifacts of a session are; none for a session that is not there."""
        async with self._database.reading(tenant) as connection:
            return await artifacts.of_session(connection, tenant, session_id, limit)

    async def get(self, tenant: str, sha256: str) -> bytes:
        """Return the output in UTF-8, a lone surrogate as its three bytes: the bytes that the SHA-256 is of.

        Raises `InvalidRequest` for what is no SHA-256 in lower-case hex, and `NotFound`.
        """
        digest = digest_of(sha256)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            stored = await artifacts.find(connection, tenant, digest)
        if stored is not None:
            for result in dialect_of(stored.dialect).read_message(stored.raw).results:
                if output_digest(result.text) == sha256:
                    return result.text.encode("utf-8", "surrogatepass")
        raise NotFound("there is no such artifact")


def digest_of(sha256: str) -> bytes:
    """Return the bytes of a SHA-256 in lower-case hex. Raises `InvalidRequest` for any other text."""
    if not _SHA256.fullmatch(sha256):
        raise InvalidRequest("sha256 must be 64 hex digits in lower case", field="sha256")
    return bytes.fromhex(sha256)
