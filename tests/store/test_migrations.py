"""Migrations: the released ones never change, a lock does not stop them, and a newer schema is left alone."""

from __future__ import annotations

import asyncio
import time
from hashlib import sha256

import asyncpg
import httpx
import pytest
from alembic import command

from tersely.store.db import migrations
from tersely.store.db.cluster import LOCATE
from tersely.store.db.migrations import SCRIPTS, current_revision, known_revisions, migrate
from tests.conftest import OWNER, Database, Server
from tests.store.test_distribution import on_cluster, on_one_server
from tests.store.test_lookup_plans import FILL_MESSAGES, FILL_SESSIONS, NOW
from tests.support.http import STORED
from tests.support.services import serve
from tests.support.upstreams import scripted

# Databases have been made by these. A change of the schema is a new migration, which adds: old code runs on it.
FROZEN = {
    "0001_longhand.py": "7b2158ed38bdb23e8f541b803ce5933666388a347a8abd621892784f6d0a03de",
    "0002_provider_ids.py": "5d5886dcc8887fe4b5e5d06ca8f823dedbbb6ee7d54d58672bdee2b374bf7a96",
    "0003_idempotency_keys.py": "5e11a3786cea4b6d7766737cbd15a41fd45ff6b4cfea01ea05b519a34a8cdfba",
    "0004_requesters_of_summaries.py": "aac52b40ca8bd755d1bc86033ee51a6f64f4e647afd39a08967bf2690ec3fe0b",
    "0005_last_call.py": "9b66afe755bf8ecfe6310e973e243599a02f0459b477f1e40e5cc3a1eabea71d",
    "0006_usage_of_rounds.py": "bba73bc8e6aaca0b80a5275bb9e46cdf0a73700f05671c60a64c1e589008d88a",
    "0007_exchanges.py": "29e0d112e73f74ef41df05b1c4a45f06b138231e52c2aec8ec8fb0f91937f715",
    "0008_memory_runs.py": "6b6d8149d3cab06906fbaae82ada858d36875521128c4a9557b22620ebf4993e",
    "0009_resent_replies.py": "782abd1776e8cb669b506918f874477e1eea3fdbad5d0cce15445a695dd2f170",
    "0010_pending_memory.py": "f2b74b86fcec1c5506b58cf4a7c3ecf2b6334c9dd158ded3713d1f789df52440",
    "0011_readable_revision.py": "e44267fa40a095910728c9748438bcb102c95b5d69ff127a65ff91c97398863b",
    "0012_message_pieces.py": "c996c0cef53ade07f11c2d68acd307bd396165f7766ef041a013a0a040a23bb7",
    "0013_retention.py": "5aeccfdaece33a23663ec8dd7dd4634b9c5009ec0232fff508e0b83425ccbb29",
    "0014_narrowed_keys.py": "9489541589bc63f5ce05a6fab94567fb0705238755cd1921d251f08b693b1611",
    "0015_calls_and_figures.py": "c0cd3af73a2c5454527b4a57334bb6278e7202beab4f436acabf16beee6f9fba",
    "0016_limits.py": "36a11bff8f8991dc9cf5f6a73fc031cefb0d8a0d29fa38a99eb32a500ba04e97",
    "0017_cheaper_calls.py": "545c04340e568ab24e748b83da86906e28d96ee1c93c1e930de95d36f3de7ea0",
    "0018_calibrations.py": "1507cb84be8692b3d5b95504dad07261cb824d253294ad42d8395f7e76096cd5",
    "0019_hosts_of_calls.py": "8921501f0303e0d15745d1b882b86ef94925bfcb990d9ed6b8c3679163694087",
    "0020_shadows.py": "b56b43450cd0108afad8c0f9e5c18f5084546906ed727f82ff7dbff2605b895e",
    "0021_ids_of_sessions.py": "3a4573ae8e74bc18ca5996675ef2856ef2578bcd12dd25775c13fc658ba1bcd1",
    "0022_pinned_messages.py": "65ecdde7d33df66a47129093df303a24db2baa62262e2f452c7dcbd5aece9503",
    "0023_conversations_of_replies.py": "817231b37ad197269a760435f0a1eb85942a6216e7de54eb93ca052130d13dc4",
}


def test_released_migrations_are_frozen():
    found = {file.name: sha256(file.read_bytes()).hexdigest() for file in (SCRIPTS / "versions").glob("*.py")}
    assert {name: found.get(name) for name in FROZEN} == FROZEN, "add a migration instead of changing a released one"


def test_revisions_are_one_line_and_numbered():
    revisions = known_revisions()
    assert revisions == tuple(f"{number:04}" for number in range(1, len(revisions) + 1))
    assert {file.name[:4] for file in (SCRIPTS / "versions").glob("*.py")} == set(revisions)


@pytest.fixture
async def empty(server: Server, database: Database):
    """The database with its schema taken away."""
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(f"DROP DATABASE {database.name}")
        await admin.execute(f"CREATE DATABASE {database.name} OWNER {OWNER}")
    finally:
        await admin.close()
    return database


async def test_an_address_takes_the_parameters_of_managed_servers(empty: Database):
    mark = "&" if "?" in empty.dsn else "?"
    dsn = f"{empty.dsn}{mark}sslmode=prefer&application_name=tersely"
    await migrate(dsn)
    with scripted() as model, serve(empty, model.url, dsn=dsn) as service:
        async with httpx.AsyncClient(base_url=service.url) as http:
            assert (await http.get("/readyz", params={"strict": "1"})).status_code == 200


async def execute(database: Database, statement: str) -> None:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def revision_of(database: Database) -> str:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        return str(await connection.fetchval("SELECT version_num FROM alembic_version"))
    finally:
        await connection.close()


@pytest.mark.parametrize(("revision", "table"), [("0008", "messages"), ("0014", "calls"), ("0022", "reply_ids")])
async def test_a_migration_lets_others_pass_while_it_waits_for_a_lock(empty: Database, revision: str, table: str):
    await migrate(empty.dsn, revision)
    holder = await asyncpg.connect(empty.dsn)
    reader = await asyncpg.connect(empty.admin_dsn)
    try:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute(f"LOCK TABLE {table} IN ROW EXCLUSIVE MODE")  # as a long write holds it
        migrating = asyncio.create_task(migrate(empty.dsn))
        longest = 0.0
        for _ in range(20):
            began = time.monotonic()
            await reader.execute(f"INSERT INTO {table} SELECT * FROM {table} WHERE false")
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.2)
        assert not migrating.done()
        assert longest < 3.0, "a write waited behind the migration for longer than its own limit"
        await transaction.commit()
        await migrating
    finally:
        await holder.close()
        await reader.close()
    assert await revision_of(empty) == current_revision()


SLOW_INDEXES = """
CREATE FUNCTION wait() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1.5); END $$;
CREATE EVENT TRIGGER slow_indexes ON ddl_command_end WHEN TAG IN ('CREATE INDEX') EXECUTE FUNCTION wait();
"""


@on_one_server
async def test_readers_go_on_while_an_index_of_a_large_table_is_made(empty: Database):
    await migrate(empty.dsn, "0024")
    reader = await asyncpg.connect(empty.admin_dsn)
    try:
        await reader.execute(SLOW_INDEXES)
        migrating = asyncio.create_task(migrate(empty.dsn))
        longest = 0.0
        while not migrating.done():
            began = time.monotonic()
            await reader.execute("SELECT FROM epochs")
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.05)
        await migrating
        assert longest < 1.0, "a read waited until the index was made"
    finally:
        await reader.execute("DROP EVENT TRIGGER slow_indexes")
        await reader.close()


@on_one_server
async def test_rows_without_a_newest_turn_say_whether_they_are_older_than_it(empty: Database):
    await migrate(empty.dsn, "0027")
    admin = await asyncpg.connect(empty.admin_dsn)
    try:
        for number, newest in ((1, 0), (2, -1)):
            await admin.execute(FILL_SESSIONS.replace("'s'", f"'{number}s'"), "north", NOW, 1)
            await admin.execute(FILL_MESSAGES.replace("'s'", f"'{number}s'"), "north", NOW, 1)
            await migrate(empty.dsn)
            found = await admin.fetch("SELECT DISTINCT newest_turn FROM messages WHERE session_id = $1", f"{number}s1")
            assert [record["newest_turn"] for record in found] == [newest]
    finally:
        await admin.close()


@on_cluster
async def test_a_migration_that_waits_for_one_node_lets_the_tenants_of_others_pass(database: Database):
    admin = await asyncpg.connect(database.admin_dsn)
    await admin.execute("ALTER TABLE reply_ids DROP COLUMN conversation")
    await admin.execute("UPDATE alembic_version SET version_num = '0022'")
    tenants = {}
    for number in range(32):
        place = await admin.fetchrow(LOCATE, f"t{number}")
        assert place is not None
        tenants[place["host"], place["port"]] = f"t{number}"
    await admin.close()
    (holder, held), (writer, other) = [
        (await asyncpg.connect(database.admin_dsn, host=host, port=port), tenants[host, port])
        for host, port in database.nodes[:2]
    ]
    try:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("DELETE FROM reply_ids WHERE tenant_id = $1", held)
        migrating = asyncio.create_task(migrate(database.dsn))
        longest = 0.0
        for _ in range(20):
            began = time.monotonic()
            await writer.execute("DELETE FROM reply_ids WHERE tenant_id = $1", other)
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.2)
        assert not migrating.done()
        assert 1.0 < longest < 4.0, "the migration waits for the node's lock, but not for longer than its limit"
        await transaction.commit()
        await migrating
    finally:
        await holder.close()
        await writer.close()
    assert await revision_of(database) == current_revision()


async def test_this_version_serves_on_a_newer_schema_and_says_so(database: Database):
    await execute(
        database, "UPDATE alembic_version SET version_num = '9999'; ALTER TABLE sessions ADD COLUMN later text"
    )
    await migrate(database.dsn)
    assert await revision_of(database) == "9999"
    with scripted() as model, serve(database, model.url) as service:
        ready = httpx.get(f"{service.url}/readyz?strict=1")
        assert ready.status_code == 200
        assert ready.json() == {
            "status": "ready",
            "database": "ready",
            "schema": f"9999, newer than {current_revision()}",
        }
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{service.base_url}/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-tersely-context"] in STORED


@on_one_server  # Citus' coordinator is asked as the owner of the tables
async def test_readiness_names_an_older_schema(database: Database, monkeypatch: pytest.MonkeyPatch):
    async def away(dsn: str) -> None:
        raise TimeoutError

    monkeypatch.setattr("tersely.lifespan.migrate", away)
    await execute(database, "UPDATE alembic_version SET version_num = '0010'")
    schema = f"0010, older than {current_revision()}: run tersely migrate"
    with scripted() as model, serve(database, model.url) as service:
        assert httpx.get(f"{service.url}/readyz").json() == {
            "status": "ready",
            "database": "outdated",
            "schema": schema,
        }
        strict = httpx.get(f"{service.url}/readyz?strict=1")
        assert strict.status_code == 503
        assert strict.json() == {"status": "database outdated", "schema": schema}
    await execute(database, "REVOKE SELECT ON alembic_version FROM tersely_app")
    with scripted() as model, serve(database, model.url) as service:
        assert httpx.get(f"{service.url}/readyz?strict=1").json()["schema"].startswith("unknown, older than")


SCHEMA = """
SELECT 'column', table_name, column_name, data_type || is_nullable || coalesce(column_default, '')
FROM information_schema.columns WHERE table_schema = 'public'
UNION ALL SELECT 'index', tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL SELECT 'policy', tablename, policyname, coalesce(qual, '') FROM pg_policies WHERE schemaname = 'public'
UNION ALL SELECT 'grant', table_name, grantee, privilege_type FROM information_schema.role_table_grants
WHERE table_schema = 'public'
UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace
"""


@on_one_server  # the nodes of a distributed Postgres have shards beside
async def test_each_downgrade_takes_its_upgrade_back(empty: Database):
    async def schema() -> set[tuple[object, ...]]:
        connection = await asyncpg.connect(empty.admin_dsn)
        try:
            return {tuple(row) for row in await connection.fetch(SCHEMA)}
        finally:
            await connection.close()

    config = migrations._config()
    config.attributes.update(dsn=empty.dsn, known=known_revisions())
    schemas = {}
    for revision in known_revisions():
        await migrate(empty.dsn, revision)
        schemas[revision] = await schema()
    for older in known_revisions()[-2::-1]:
        await asyncio.to_thread(command.downgrade, config, older)
        assert await schema() == schemas[older], older
    await migrate(empty.dsn)
    assert await schema() == schemas[current_revision()]


async def test_a_service_migrates_an_older_database_by_itself(empty: Database):
    await migrate(empty.dsn, "0006")
    with scripted() as model, serve(empty, model.url) as service:
        for _ in range(100):
            if httpx.get(f"{service.url}/readyz?strict=1").status_code == 200:
                break
            await asyncio.sleep(0.1)
        assert httpx.get(f"{service.url}/readyz?strict=1").json() == {"status": "ready", "database": "ready"}
    assert await revision_of(empty) == current_revision()
    assert migrations.is_newer("9999")
    assert not migrations.is_outdated("9999")
    assert migrations.is_outdated("0001")
