"""A backup of everything that is stored, and its restoration, through row-level security.

Every table forces row-level security on its owner too, so a plain dump of the owner holds no rows. A backup therefore
reads one tenant after the other, in one transaction that sees one state of the database. Its file is a compressed tar
archive with one member per tenant and table (Postgres's binary COPY format, ordered by primary key) and a manifest with
the columns, the number of rows and the SHA-256 digest of each. A restoration checks every member before it is written,
and reads it back to compare count and digest before anything is committed.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import asyncpg
import msgspec

from tersely.domain.errors import TerselyError
from tersely.store.db.connection import TENANT, Connection
from tersely.store.db.liveness import ended_when_silent
from tersely.store.db.server import PROPAGATE_SETTINGS

FORMAT = "tersely backup 1"
MANIFEST = "manifest.json"
DEFAULT_TENANT = "default"
CONNECT_SECONDS = 10.0
# A member up to this size is kept in memory while it is made, in bytes.
IN_MEMORY = 8 * 1024 * 1024
READ_BYTES = 1024 * 1024
# Text columns compare byte by byte, so that every database orders the rows alike.
_COLLATED = frozenset({"text", "character varying"})
# These tables can be rebuilt from the messages; a server without `vector` lacks one of their columns.
DERIVED = frozenset({"embeddings"})

TABLES = """
SELECT c.relname AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname = current_schema()
  AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped)
ORDER BY c.relname
"""
COLUMNS = """
SELECT a.attname AS name, format_type(a.atttypid, NULL) AS type, i.indkey IS NOT NULL AS is_key,
    array_position(i.indkey::int2[], a.attnum) AS place
FROM pg_attribute a LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY (i.indkey)
WHERE a.attrelid = $1::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
REVISION = "SELECT version_num FROM alembic_version"
SEES_ALL = "SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
# A distributed Postgres (Citus): every node learns which tenant's rows the transaction sees, and gives us one
# connection, so that its rows are of one moment. A plain Postgres ignores these settings.
DISTRIBUTED = f"{PROPAGATE_SETTINGS}; SET LOCAL citus.max_adaptive_executor_pool_size = 1"

# The setting by which a transaction sees rows of all tenants, and the tables for which it works.
_LISTS = ("keys", "sessions", "limits")
_LISTED = frozenset({"keys", "sessions", "tenants", "limits", "tenant_limits"})

_UNREADABLE = (EOFError, ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError)
DATABASE_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError)


class BackupError(TerselyError):
    """The backup or restoration cannot be done; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupMember:
    """The rows of one tenant in one table."""

    file: str
    tenant: str
    table: str
    columns: tuple[str, ...]
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a backup. ``revision`` is the schema's, ``version`` Tersely's."""

    revision: str
    version: str
    created_at: str
    members: tuple[BackupMember, ...]
    format: str = FORMAT

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        return sum(member.rows for member in self.members if member.table == table)

    @property
    def tenants(self) -> int:
        """Return the number of tenants that have rows."""
        return len({member.tenant for member in self.members})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    name: str
    columns: tuple[str, ...]
    order: str

    def select(self, columns: Sequence[str]) -> str:
        """Return the statement that reads one tenant's rows in the order of the primary key."""
        names = ", ".join(f'"{name}"' for name in columns)
        return f'SELECT {names} FROM "{self.name}" WHERE tenant_id = $1 ORDER BY {self.order}'


async def write_backup(dsn: str, path: Path, *, version: str, now: datetime) -> Manifest:
    """Write a backup of the database at ``dsn`` to a new file, readable by its owner alone.

    Raises `BackupError`, `OSError`, and what asyncpg raises.
    """
    members: list[BackupMember] = []
    async with _transaction(dsn, isolation="repeatable_read", readonly=True) as connection:
        revision = await _revision(connection)
        tables = await _tables(connection)
        tenants = await _tenants(connection, tables)
        with (
            _new_file(path) as file,
            gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for number, tenant in enumerate(tenants):
                await _see(connection, tenant)
                for table in tables:
                    with tempfile.SpooledTemporaryFile(IN_MEMORY) as rows:
                        count, digest = await _copy_out(connection, table, table.columns, tenant, rows)
                        if count:
                            member = BackupMember(
                                file=f"{number}/{table.name}.copy",
                                tenant=tenant,
                                table=table.name,
                                columns=table.columns,
                                rows=count,
                                sha256=digest,
                            )
                            _add(archive, member.file, rows, now)
                            members.append(member)
            manifest = Manifest(revision=revision, version=version, created_at=now.isoformat(), members=tuple(members))
            _add(archive, MANIFEST, io.BytesIO(json.dumps(asdict(manifest), indent=1).encode()), now)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read a backup to its end and return its manifest, with every member's digest checked.

    Raises `BackupError` for a file that is no backup, or is damaged, and `OSError`.
    """
    digests: dict[str, str] = {}
    text = b""
    try:
        with _read_archive(path) as (packed, archive):
            for entry in archive:
                content = archive.extractfile(entry)
                if content is None:
                    raise BackupError(f"{path} is not a Tersely backup")
                if entry.name == MANIFEST:
                    text = content.read()
                else:
                    digests[entry.name] = _digest(content)
            # No digest covers the manifest. gzip's own checksum does; it is compared at the end of the file.
            while rest := packed.read(READ_BYTES):
                if rest.strip(b"\0"):
                    raise BackupError(f"{path} is damaged: bytes follow the end of the archive")
        manifest = _parse(text)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, *_UNREADABLE) as error:
        raise BackupError(f"{path} is damaged or not a Tersely backup: {type(error).__name__}") from error
    expected = {member.file: member.sha256 for member in manifest.members}
    if digests != expected:
        wrong = sorted(name for name in expected.keys() | digests.keys() if expected.get(name) != digests.get(name))
        raise BackupError(f"{path} is damaged: {wrong[0]} has another digest")
    return manifest


async def load_backup(dsn: str, path: Path, manifest: Manifest) -> tuple[str, ...]:
    """Write the rows of a backup into an empty database at the backup's own schema revision, and compare them.

    All of it is one transaction. Returns the tables that were left out because they can be made anew. Raises
    `BackupError`, `OSError`, and what asyncpg raises; then nothing was written.
    """
    left_out: set[str] = set()
    async with _transaction(dsn) as connection:
        revision = await _revision(connection)
        if revision != manifest.revision:
            raise BackupError(f"the database is at schema {revision}, the backup at {manifest.revision}")
        tables = {table.name: table for table in await _tables(connection)}
        await _check_empty(connection, list(tables.values()))
        members = {member.file: member for member in manifest.members}
        # A session's row comes before the rows that refer to it.
        for is_first in (True, False):
            with _read_archive(path) as (_, archive):
                for entry in archive:
                    member = members.get(entry.name)
                    if member is None or (member.table == "sessions") != is_first:
                        continue
                    table = tables.get(member.table)
                    if table is None or not set(member.columns) <= set(table.columns):
                        if member.table not in DERIVED:
                            raise BackupError(f"the database lacks columns of {member.table}")
                        left_out.add(member.table)
                        continue
                    content = archive.extractfile(entry)
                    assert content is not None
                    await _copy_in(connection, table, member, content)
    return tuple(sorted(left_out))


async def _copy_in(connection: Connection, table: _Table, member: BackupMember, content: Any) -> None:
    """Write one member's rows, read them back and compare. COPY is refused under row-level security, so rows go through
    a temporary table, from where a statement with RETURNING inserts them on other nodes without COPY too.
    """
    await _see(connection, member.tenant)
    columns = ", ".join(f'"{name}"' for name in member.columns)
    await connection.execute(
        f'CREATE TEMPORARY TABLE tersely_restore ON COMMIT DROP AS SELECT {columns} FROM "{table.name}" WITH NO DATA'
    )
    await connection.copy_to_table(
        "tersely_restore", source=content, columns=list(member.columns), format="binary", schema_name="pg_temp"
    )
    await connection.execute(
        f'INSERT INTO "{table.name}" ({columns}) SELECT {columns} FROM pg_temp.tersely_restore RETURNING 1'
    )
    await connection.execute("DROP TABLE pg_temp.tersely_restore")
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as rows:
        count, digest = await _copy_out(connection, table, member.columns, member.tenant, rows)
    if (count, digest) != (member.rows, member.sha256):
        raise BackupError(
            f"{table.name} of {member.tenant} differs after the restore: {count} rows instead of {member.rows}"
        )


async def _copy_out(
    connection: Connection, table: _Table, columns: Sequence[str], tenant: str, target: Any
) -> tuple[int, str]:
    """Copy one tenant's rows into a file; how many they are, and the digest of the bytes."""
    status = await connection.copy_from_query(table.select(columns), tenant, output=target, format="binary")
    target.seek(0)
    return int(status.rpartition(" ")[2]), _digest(target)


async def _tables(connection: Connection) -> list[_Table]:
    """Return all of Tersely's tables."""
    tables = []
    for record in await connection.fetch(TABLES):
        columns = await connection.fetch(COLUMNS, f'"{record["name"]}"')
        keys = sorted((each for each in columns if each["is_key"]), key=lambda each: each["place"])
        order = ", ".join(f'"{k["name"]}"' + (' COLLATE "C"' if k["type"] in _COLLATED else "") for k in keys)
        tables.append(_Table(name=record["name"], columns=tuple(each["name"] for each in columns), order=order))
    if "sessions" not in {table.name for table in tables}:
        raise BackupError("the database has no Tersely tables")
    return tables


async def _tenants(connection: Connection, tables: Sequence[_Table]) -> list[str]:
    """Return every tenant: those that the operator created, that have a key, limits or a session, and the one without
    keys. Other rows, such as memos, exist only for these.
    """
    found = {DEFAULT_TENANT}
    if await connection.fetchval(SEES_ALL):
        for table in tables:
            found |= {
                each["t"] for each in await connection.fetch(f'SELECT DISTINCT tenant_id AS t FROM "{table.name}"')
            }
    else:
        await connection.execute("; ".join(f"SET LOCAL app.list_{name} = 'on'" for name in _LISTS))
        for name in {table.name for table in tables} & _LISTED:
            found |= {each["t"] for each in await connection.fetch(f"SELECT DISTINCT tenant_id AS t FROM {name}")}
        await connection.execute("; ".join(f"SET LOCAL app.list_{name} = 'off'" for name in _LISTS))
    return sorted(found)


async def _check_empty(connection: Connection, tables: Sequence[_Table]) -> None:
    for tenant in await _tenants(connection, tables):
        await _see(connection, tenant)
        for table in tables:
            if await connection.fetchval(f'SELECT EXISTS (SELECT FROM "{table.name}" WHERE tenant_id = $1)', tenant):
                raise BackupError("the database is not empty: restore into a new one")


async def _revision(connection: Connection) -> str:
    try:
        return str(await connection.fetchval(REVISION))
    except asyncpg.UndefinedTableError:
        raise BackupError("the database has no Tersely tables") from None


async def _see(connection: Connection, tenant: str) -> None:
    if not TENANT.fullmatch(tenant):
        raise BackupError(f"{tenant!r} is not a valid tenant name")
    await connection.execute(f"SET LOCAL app.tenant = '{tenant}'")


@asynccontextmanager
async def _transaction(dsn: str, **options: Any) -> AsyncIterator[Connection]:
    """A transaction of the login's own role, which owns the tables, without a limit of time for its statements.

    Raises `TimeoutError` when the server has stopped answering.
    """
    connection = await asyncpg.connect(dsn, timeout=CONNECT_SECONDS, statement_cache_size=0)
    try:
        async with ended_when_silent(dsn, connection), connection.transaction(**options):
            await connection.execute(DISTRIBUTED)
            yield connection
    finally:
        await connection.close()


@contextmanager
def _read_archive(path: Path) -> Iterator[tuple[gzip.GzipFile, tarfile.TarFile]]:
    """Open a backup for reading. tarfile's own decompression would not compare the checksum at the file's end."""
    with gzip.open(path) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
        yield packed, archive


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when it is complete and on disk. Raises `BackupError` if another process writes
    it: both would write into the same unfinished file.
    """
    part = path.with_name(path.name + ".part")
    with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), part.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise BackupError(f"another backup to {path} is under way")
        try:
            part.chmod(0o600)
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _add(archive: tarfile.TarFile, name: str, content: Any, now: datetime) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = content.seek(0, io.SEEK_END)
    entry.mtime = int(now.timestamp())
    entry.mode = 0o600
    content.seek(0)
    archive.addfile(entry, content)


def _digest(content: Any) -> str:
    found = sha256()
    while chunk := content.read(READ_BYTES):
        found.update(chunk)
    return found.hexdigest()


def _parse(text: bytes) -> Manifest:
    """Return the manifest; raises `BackupError` for another format, `msgspec.MsgspecError` and what JSON raises."""
    value = json.loads(text)
    if value["format"] != FORMAT:
        raise BackupError(f"the file is {value['format']!r}, and this version reads {FORMAT!r}")
    return msgspec.convert(value, Manifest)
