"""`tersely backup` and `tersely restore`: everything comes back, or the command says what is wrong."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import re
import secrets
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tersely.embedded_postgres.install import find_install
from tersely.service.common.auth import new_key
from tersely.store.db.migrations import migrate
from tersely.store.ops import keys
from tersely.store.ops.backup import BackupError, read_manifest, write_backup
from tests.conftest import OWNER, TERSELY, Database, Server
from tests.store.test_distribution import on_one_server
from tests.support.services import serve
from tests.support.stores import open_store
from tests.support.upstreams import scripted

Run = Callable[..., Awaitable[subprocess.CompletedProcess[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    async def invoke(database: Database, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DATABASE_URL": database.dsn, "TERSELY_DATA_DIR": str(tmp_path / "data")}
        return await asyncio.to_thread(
            subprocess.run,
            [TERSELY, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return invoke


@pytest.fixture
async def other(server: Server) -> AsyncIterator[Database]:
    """A second database, without a schema."""
    name = f"tersely_test_{secrets.token_hex(6)}"
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(f"CREATE DATABASE {name} OWNER {OWNER}")
        yield Database(name=name, dsn=server.dsn(name, user=OWNER), admin_dsn=server.dsn(name))
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()


async def content(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, as a superuser sees them."""
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        names = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        )
        return {
            name["relname"]: sorted(
                (tuple(row) for row in await connection.fetch(f"SELECT * FROM {name['relname']}")), key=repr
            )
            for name in names
            if name["relname"] != "service_leases"  # leases belong to running processes, not to the data
        }
    finally:
        await connection.close()


async def fill(database: Database) -> dict[str, str]:
    """Conversations, notes and memos of two tenants, and of the one without a key; the tenants' keys."""
    async with open_store(database) as store:
        texts = {}
        for tenant in ("north", "south"):
            now, secret = datetime.now(UTC), secrets.token_urlsafe(32)
            texts[tenant], stored = new_key(tenant, "", now=now, key_id=secrets.token_hex(8), secret=secret)
            await keys.add(store, stored)
    with (
        scripted() as model,
        serve(database, model.url) as open_service,
        serve(database, model.url, auth="keys") as service,
    ):
        for tenant in ("", "north", "south"):
            headers = {"x-tersely-key": texts[tenant]} if tenant else {}
            url = service.url if tenant else open_service.url
            with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
                history: list[dict[str, Any]] = []
                for number in range(3):
                    history.append({"role": "user", "content": f"{tenant} asks {number}: \ud83d\ude00 \u0000"})
                    body = json.dumps({"model": "m", "messages": history})
                    answer = http.post("/v1/chat/completions", content=body, headers={"x-tersely-session": "s"})
                    assert answer.status_code == 200
                    history.append(answer.json()["choices"][0]["message"])
                http.post("/api/memos", json={"content": f"{tenant} remembers", "tags": ["a"]}).raise_for_status()
                http.put("/api/sessions/s/scratchpad", json={"text": f"{tenant} notes"}).raise_for_status()
                http.post("/api/sessions/s/compact").raise_for_status()
                http.post("/api/sessions/s/search", json={"mode": "search", "query": "asks"}).raise_for_status()
    return texts


async def put_memo(database: Database) -> None:
    """One row of one tenant."""
    connection = await asyncpg.connect(database.admin_dsn)
    await connection.execute(
        "INSERT INTO memos (tenant_id, id, tags, terms, created_at, content) "
        "VALUES ('default', 'm1', '{}', '{}', now(), 'what was said')"
    )
    await connection.close()


async def test_everything_comes_back_in_another_database(database: Database, other: Database, run: Run, tmp_path: Path):
    texts = await fill(database)
    before = await content(database)
    assert all(before[name] for name in ("sessions", "messages", "memos", "scratchpads", "keys", "calls"))
    file = tmp_path / "tersely.tgz"

    done = await run(database, "backup", str(file), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["tenants"], summary["sessions"]) == (3, 3)
    assert summary["messages"] == len(before["messages"])
    assert file.stat().st_mode & 0o777 == 0o600

    done = await run(other, "restore", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 tenants, 3 sessions" in done.stdout
    assert await content(other) == before
    with scripted() as model, serve(other, model.url, auth="keys") as service:
        answer = httpx.get(f"{service.url}/api/sessions/s/messages", headers={"x-tersely-key": texts["north"]})
        assert "north asks 2" in answer.text
        assert "south" not in answer.text


async def test_everything_comes_back_in_a_migrated_database(
    database: Database, store: Database, run: Run, tmp_path: Path
):
    """On a Citus cluster both are distributed."""
    texts = await fill(database)
    before = await content(database)
    file = tmp_path / "tersely.tgz"
    assert (await run(database, "backup", str(file))).returncode == 0
    done = await run(store, "restore", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert await content(store) == before
    with scripted() as model, serve(store, model.url, auth="keys") as service:
        headers = {"x-tersely-key": texts["north"], "x-tersely-session": "s"}
        body = {"model": "m", "messages": [{"role": "user", "content": "one more"}]}
        answer = httpx.post(f"{service.url}/v1/chat/completions", headers=headers, json=body, timeout=30)
        assert answer.headers["x-tersely-context"] == "built"
        answer = httpx.get(f"{service.url}/api/sessions/s/messages", headers=headers)
        assert "north asks 2" in answer.text
        assert "one more" in answer.text
        assert "south" not in answer.text


async def test_restoring_needs_an_empty_database_and_a_whole_file(
    database: Database, other: Database, run: Run, tmp_path: Path
):
    await put_memo(database)
    file, damaged, foreign = tmp_path / "a.tgz", tmp_path / "b.tgz", tmp_path / "c.tgz"
    assert (await run(database, "backup", str(file))).returncode == 0
    again = await run(database, "backup", str(file))
    assert (again.returncode, "exists already" in again.stderr) == (1, True)

    before = await content(database)
    refused = await run(database, "restore", str(file))
    assert (refused.returncode, "not empty" in refused.stderr) == (1, True)
    assert await content(database) == before

    data = file.read_bytes()
    damaged.write_bytes(data[: len(data) // 2])
    with tarfile.open(foreign, "w:gz") as archive:
        archive.add(__file__, "test.py")
    for bad in (damaged, foreign):
        done = await run(other, "restore", str(bad))
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert bad.name in done.stderr
    assert not any(rows for table, rows in (await content(other)).items() if table != "alembic_version")


MEMBER = {"file": "0/memos.copy", "tenant": "default", "table": "memos", "columns": ["id"], "rows": 1, "sha256": "0"}
MANIFEST = {"format": "tersely backup 1", "revision": "0006", "version": "0.1", "created_at": "2026", "members": []}


@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        (json.dumps({**MANIFEST, "format": "tersely backup 2"}), "this version reads 'tersely backup 1'"),
        (json.dumps({**MANIFEST, "revision": 7}), "ValidationError"),
        (json.dumps({**MANIFEST, "members": {"a": 1}}), "ValidationError"),
        (json.dumps({**MANIFEST, "members": [{**MEMBER, "rows": "many"}]}), "ValidationError"),
        (json.dumps({**MANIFEST, "members": [{**MEMBER, "file": ["a"]}]}), "ValidationError"),
        (json.dumps({**MANIFEST, "members": [MEMBER]}), "0/memos.copy has another digest"),
        ("[" * 100_000, "RecursionError"),
        ("[]", "TypeError"),
        ("{", "JSONDecodeError"),
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path: Path, manifest: str, error: str):
    file = tmp_path / "a.tgz"
    with tarfile.open(file, "w:gz") as archive:
        entry = tarfile.TarInfo("manifest.json")
        entry.size = len(manifest)
        archive.addfile(entry, io.BytesIO(manifest.encode()))
    with pytest.raises(BackupError, match=re.escape(error)):
        read_manifest(file)


async def test_flipped_bits_and_cuts_of_a_backup_are_found(database: Database, run: Run, tmp_path: Path):
    file, damaged = tmp_path / "a.tgz", tmp_path / "b.tgz"
    assert (await run(database, "keys", "create", "--tenant", "north")).returncode == 0
    assert (await run(database, "backup", str(file))).returncode == 0
    data, manifest = file.read_bytes(), read_manifest(file)
    flipped = [
        data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :] for place in range(10, len(data))
    ]
    refused = 0
    for bad in flipped:
        damaged.write_bytes(bad)
        try:
            # A few bits change nothing: they copy the same zeros from another place.
            assert read_manifest(damaged) == manifest
        except BackupError:
            refused += 1
    assert refused > 0.9 * len(flipped)
    for bad in (*(data[:-length] for length in (1, 4, 8, 9, 100, len(data))), data + b"more", data + data):
        damaged.write_bytes(bad)
        with pytest.raises(BackupError, match="damaged"):
            read_manifest(damaged)
    damaged.write_bytes(data + bytes(512))  # a tape or a file system may pad a file with zeros
    assert read_manifest(damaged) == manifest


async def test_a_backup_of_an_unknown_schema_counts_as_newer_and_is_refused(
    database: Database, run: Run, tmp_path: Path
):
    file = tmp_path / "a.tgz"
    text = json.dumps({**MANIFEST, "revision": "before-all"}).encode()
    with tarfile.open(file, "w:gz") as archive:
        entry = tarfile.TarInfo("manifest.json")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    done = await run(database, "restore", str(file))
    assert (done.returncode, "Traceback" in done.stderr, "made by a newer version" in done.stderr) == (1, False, True)


async def test_a_member_that_was_changed_is_found(database: Database, other: Database, run: Run, tmp_path: Path):
    await put_memo(database)
    file, forged = tmp_path / "a.tgz", tmp_path / "b.tgz"
    assert (await run(database, "backup", str(file))).returncode == 0
    with tarfile.open(file) as whole, tarfile.open(forged, "w:gz") as archive:
        for entry in whole:
            stream = whole.extractfile(entry)
            assert stream is not None
            text = stream.read()
            if entry.name.endswith("memos.copy"):
                text = text.replace(b"said", b"told")
            archive.addfile(entry, io.BytesIO(text))
    done = await run(other, "restore", str(forged))
    assert (done.returncode, "damaged" in done.stderr) == (1, True)


async def test_a_backup_of_an_older_version_is_brought_up_to_date(
    server: Server, other: Database, database: Database, run: Run, tmp_path: Path
):
    await migrate(other.dsn, "0006")
    await put_memo(other)
    file = tmp_path / "old.tgz"
    manifest = await write_backup(other.dsn, file, version="0.0.1", now=datetime.now(UTC))
    assert manifest.revision == "0006"
    admin = await asyncpg.connect(server.admin_dsn)
    await admin.execute(f"DROP DATABASE {database.name} WITH (FORCE)")
    await admin.execute(f"CREATE DATABASE {database.name} OWNER {OWNER}")
    await admin.close()
    done = await run(database, "restore", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    after = await content(database)
    assert len(after["memos"]) == 1
    assert after["alembic_version"] > [("0006",)]


@on_one_server  # the owner's dump of a coordinator succeeds, and holds no rows either
async def test_a_plain_dump_of_the_owner_holds_no_rows(database: Database):
    """Why there are commands for that; docs/backup.md says so."""
    await put_memo(database)
    program = find_install().program("pg_dump")

    async def dump(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), "--data-only", "--table=memos", *arguments, database.dsn]
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)

    refused = await dump()
    assert (refused.returncode, "row-level security" in refused.stderr) == (1, True)
    silent = await dump("--enable-row-security")
    assert silent.returncode == 0
    assert "FROM stdin;\n\\.\n" in silent.stdout, "it holds no row"


async def test_a_second_backup_to_the_same_file_is_refused(database: Database, run: Run, tmp_path: Path):
    """Both would write into the same unfinished file, and the first one's name would go to the second one's part."""
    part = tmp_path / "b.tgz.part"
    with part.open("wb") as first:
        first.write(b"half")
        first.flush()
        fcntl.flock(first, fcntl.LOCK_EX)
        done = await run(database, "backup", str(tmp_path / "b.tgz"))
        assert (done.returncode, done.stderr) == (1, f"tersely: another backup to {tmp_path}/b.tgz is under way\n")
        assert part.read_bytes() == b"half"
    # What a killed backup leaves is in nobody's way.
    assert (await run(database, "backup", str(tmp_path / "b.tgz"))).returncode == 0
    assert not part.exists()
    assert (tmp_path / "b.tgz").stat().st_mode & 0o777 == 0o600
    assert read_manifest(tmp_path / "b.tgz").revision


async def test_backups_at_once_leave_one_whole_file(database: Database, run: Run, tmp_path: Path):
    await fill(database)
    path = tmp_path / "b.tgz"
    done = await asyncio.gather(*(run(database, "backup", str(path), "--force") for _ in range(4)))
    assert 0 in {each.returncode for each in done}
    assert {each.stderr for each in done if each.returncode} <= {f"tersely: another backup to {path} is under way\n"}
    assert read_manifest(path).revision
    assert sorted(each.name for each in tmp_path.glob("b.tgz*")) == ["b.tgz"]


async def test_a_link_in_place_of_the_unfinished_file_is_refused(database: Database, run: Run, tmp_path: Path):
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "b.tgz.part").symlink_to(tmp_path / "victim")
    assert (await run(database, "backup", str(tmp_path / "b.tgz"))).returncode == 1
    assert (tmp_path / "victim").read_bytes() == b"mine"
