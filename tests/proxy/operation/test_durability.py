"""Acknowledged means stored: what a client read to its end is in the store, once and in order, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tersely.domain.errors import StoreUnavailable
from tersely.fakellm.scripted import ScriptedReply
from tersely.service.proxy.durability import durable_writer
from tersely.store.commit import batches, spool_marks, writer
from tersely.store.commit.records import RequestWrite
from tests.conftest import Database
from tests.support.conversations import KINDS, Conversation, compare, converse, script, waits_for_spool
from tests.support.http import STORED, post
from tests.support.locks import locked
from tests.support.loops import eventually
from tests.support.relay import Relay, relay
from tests.support.rows import query
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model, scripted

LIMIT = 1.0

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """A model that answers with the mark of the question."""
    with scripted() as running:
        running.state.script = script
        yield running


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def served(database: Database, model: Model, data_dir: Path, **more: Any) -> Any:
    given = {"database_timeout": LIMIT, "data_dir": data_dir, "strategy": "window", **more}
    return serve(database, model.url, **{"epoch": FROM_THE_START, **given})


@contextmanager
def slowed(model: Model, seconds: float) -> Iterator[None]:
    """The model takes that long for each reply."""
    usual = model.state.script

    async def delayed(received: Any) -> Any:
        await asyncio.sleep(seconds)
        return script(received)

    model.state.script = delayed
    try:
        yield
    finally:
        model.state.script = usual


async def start(service: Service, kinds: tuple[str, ...] = KINDS) -> list[Conversation]:
    """A conversation of each kind, with one turn that is stored."""
    made = [Conversation(service.url, kind) for kind in kinds]
    for got in await asyncio.gather(*(converse(each, 1) for each in made)):
        assert got[0].has_ended, got
        assert got[0].context in STORED, got
    return made


async def assert_stored_right(service: Service, database: Database, made: list[Conversation]) -> None:
    await waits_for_spool(service.url)
    compared = await compare(database.admin_dsn, made)
    assert compared.is_right, compared
    assert compared.acknowledged == sum(len(each.acknowledged) for each in made) > 0


async def test_a_locked_table_loses_nothing(database: Database, model: Model, data_dir: Path) -> None:
    with served(database, model, data_dir) as service:
        made = await start(service)
        async with locked(database.admin_dsn):
            pending = asyncio.gather(*(converse(each, 3) for each in made))
            await asyncio.sleep(4 * LIMIT)
        await pending
        await asyncio.gather(*(converse(each, 1) for each in made))
        assert all(len(each.acknowledged) >= 2 for each in made)
        assert all(len(each.acknowledged) == 5 for each in made if not each.is_delta)
        await assert_stored_right(service, database, made)


async def test_calls_that_end_while_the_table_is_locked_are_built_and_stored(
    database: Database, model: Model, data_dir: Path
) -> None:
    with served(database, model, data_dir) as service:
        made = await start(service, ("chat", "chat stream", "chat delta", "responses named", "anthropic stream") * 4)
        with slowed(model, 0.8):
            pending = asyncio.gather(*(converse(each, 1) for each in made))
            await asyncio.sleep(0.4)
            async with locked(database.admin_dsn):
                got = await pending
                assert {each[0].context for each in got} <= STORED
                assert all(each[0].has_ended for each in got)
                files = list(data_dir.glob("spool/*/*.spool"))
                assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600]
                assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
        assert (await converse(made[2], 1))[0].has_ended
        await assert_stored_right(service, database, made)


@pytest.mark.parametrize("kind", ["chat", "chat delta stream", "anthropic", "responses named", "gemini stream"])
async def test_a_reply_whose_question_is_still_being_stored_is_stored_too(
    database: Database, model: Model, data_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is withdrawn from the queue and waits in the spool, while the question's transaction goes on."""
    usual, write_all, slow = model.state.script, batches.write_all, False

    async def delayed(received: Any) -> Any:
        await asyncio.sleep(0.3)
        return script(received)

    async def write_slowly(*arguments: Any) -> None:
        if slow and any(isinstance(write, RequestWrite) for write in arguments[3]):
            await asyncio.sleep(2.2 * LIMIT)
        await write_all(*arguments)

    monkeypatch.setattr(writer, "write_all", write_slowly)
    with served(database, model, data_dir) as service:
        made = await start(service, (kind,))
        model.state.script, slow = delayed, True
        try:
            (got,) = await converse(made[0], 1)
        finally:
            model.state.script, slow = usual, False
        assert got.has_ended
        assert got.context in STORED
        await assert_stored_right(service, database, made)
        assert (await converse(made[0], 1))[0].has_ended
        await assert_stored_right(service, database, made)


@pytest.fixture
def replicas(database: Database, model: Model, tmp_path: Path) -> Iterator[tuple[Service, Relay, Service]]:
    """A service with the way to its database, and another one on another machine."""
    with (
        relay(database) as way,
        served(database, model, tmp_path / "one", dsn=way.dsn) as one,
        served(database, model, tmp_path / "other") as other,
    ):
        yield one, way, other
    # What a connection that was cut off at the wrong moment leaves behind is collected here, not in another test.
    gc.collect()


async def speak(conversation: Conversation, service: Service) -> None:
    """One turn at that service."""
    conversation.url = service.url
    got = (await converse(conversation, 1))[0]
    assert got.has_ended, got


async def goes_on_within(seconds: float, conversation: Conversation, service: Service) -> None:
    """Ask there until a question is answered."""
    conversation.url = service.url
    async with asyncio.timeout(seconds):
        while not (await converse(conversation, 1))[0].has_ended:
            await asyncio.sleep(0.1)


async def lose_both(conversation: Conversation, service: Service, way: Relay, database: Database) -> None:
    """One turn at a service that can read and not write; then its database goes away, while its statement may still be
    carried out there.
    """
    async with locked(database.admin_dsn, "messages IN SHARE MODE"):
        conversation.url = service.url
        got = (await converse(conversation, 1))[0]
        assert got.has_ended, got
        assert got.context in STORED
        way.cut()


async def lose(conversation: Conversation, service: Service, way: Relay, model: Model) -> str:
    """One turn at a service whose database goes away while the model speaks. Returns the context."""
    conversation.url = service.url
    usual, calls, is_cut = model.state.script, model.state.calls, asyncio.Event()

    async def delayed(received: Any) -> Any:
        while not is_cut.is_set():
            await asyncio.sleep(0.02)
        return script(received)

    model.state.script = delayed
    try:
        pending = asyncio.create_task(converse(conversation, 1))
        while model.state.calls == calls and not pending.done():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.25)  # its question is stored meanwhile
        way.cut()
        is_cut.set()
        got = (await pending)[0]
    finally:
        is_cut.set()
        model.state.script = usual
    assert got.has_ended, got
    return got.context


@pytest.mark.parametrize(
    "kind", ["chat", "chat stream", "chat delta", "chat tools", "anthropic stream", "gemini stream"]
)
@pytest.mark.parametrize("lost", ["reply", "both"])
async def test_another_replica_takes_the_next_call(
    database: Database, model: Model, replicas: tuple[Service, Relay, Service], kind: str, lost: str
) -> None:
    one, way, other = replicas
    conversation = Conversation(one.url, kind)
    await speak(conversation, one)
    if lost == "reply":
        assert await lose(conversation, one, way, model) in STORED
    else:
        await lose_both(conversation, one, way, database)
    if lost == "both" and conversation.is_delta:  # the first one could still say that a call waits there
        conversation.url = other.url
        assert [got.status for got in await converse(conversation, 1)] == [503]
        way.restore()
        await waits_for_spool(one.url)
    await speak(conversation, other)
    await speak(conversation, other)
    way.restore()
    await assert_stored_right(one, database, [conversation])
    await speak(conversation, one)
    await assert_stored_right(one, database, [conversation])


@pytest.mark.parametrize("kind", ["chat delta", "chat delta stream", "responses named", "responses named stream"])
async def test_a_delta_waits_for_the_spool_of_another_machine(
    database: Database, model: Model, tmp_path: Path, kind: str
) -> None:
    """The database was away for both machines, and the first one's replay takes its time."""
    with (
        relay(database) as way,
        relay(database) as other_way,
        served(database, model, tmp_path / "one", dsn=way.dsn, strategy="full") as one,
        served(database, model, tmp_path / "other", dsn=other_way.dsn, strategy="full") as other,
    ):
        conversation = Conversation(one.url, kind)
        await speak(conversation, one)
        await lose(conversation, one, way, model)
        other_way.cut()
        conversation.url = other.url
        assert [got.status for got in await converse(conversation, 1)] == [503]
        calls = model.state.calls
        async with locked(database.admin_dsn, "messages IN SHARE MODE"):
            way.restore()
            other_way.restore()
            for _ in range(3):
                assert [got.status for got in await converse(conversation, 1)] == [503]
        assert model.state.calls == calls
        await waits_for_spool(one.url)
        await speak(conversation, other)
        if "delta" in kind:  # a named history is the host's own
            assert all(f":{number}." in model.last.body.decode() for number in (0, 1, conversation.requests - 1))
        await assert_stored_right(one, database, [conversation])
        marks = await query(one, "SELECT id FROM replays WHERE id LIKE 'waiting:%'")
        assert marks == []
    gc.collect()


@pytest.mark.parametrize("kind", ["chat delta", "responses named"])
async def test_a_delta_waits_for_a_spool_whose_database_was_never_away(
    database: Database, model: Model, tmp_path: Path, kind: str
) -> None:
    with (
        served(database, model, tmp_path / "one", strategy="full") as one,
        served(database, model, tmp_path / "other", strategy="full") as other,
    ):
        conversation = Conversation(one.url, kind)
        await speak(conversation, one)
        async with locked(database.admin_dsn, "messages IN SHARE MODE"):
            await speak(conversation, one)
            conversation.url = other.url
            calls = model.state.calls
            assert [got.status for got in await converse(conversation, 1)] == [503]
            assert model.state.calls == calls
        await speak(conversation, other)
        if "delta" in kind:  # a named history is the host's own
            assert all(f":{number}." in model.last.body.decode() for number in (0, 1, conversation.requests - 1))
        await assert_stored_right(one, database, [conversation])


async def test_a_delta_goes_on_elsewhere_though_a_mark_was_not_removed_at_once(
    database: Database, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmark, failures = spool_marks.unmark, 3

    async def fail_at_first(*arguments: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise StoreUnavailable
        await unmark(*arguments)

    with (
        served(database, model, tmp_path / "one", strategy="full") as one,
        served(database, model, tmp_path / "other", strategy="full") as other,
    ):
        conversation = Conversation(one.url, "chat delta")
        await speak(conversation, one)
        monkeypatch.setattr(spool_marks, "unmark", fail_at_first)
        async with locked(database.admin_dsn, "messages IN SHARE MODE"):
            await speak(conversation, one)
        await waits_for_spool(one.url)
        await goes_on_within(10, conversation, other)
        assert failures < 0
        await assert_stored_right(one, database, [conversation])


async def test_a_delta_goes_on_elsewhere_when_the_spool_of_an_ended_process_is_empty(
    database: Database, model: Model, tmp_path: Path
) -> None:
    """The mark of that process goes with its spool."""
    with served(database, model, tmp_path / "other", strategy="full") as other:
        with ExitStack() as ending:
            one = ending.enter_context(served(database, model, tmp_path / "one", strategy="full"))
            conversation = Conversation(one.url, "chat delta")
            await speak(conversation, one)
            async with locked(database.admin_dsn, "messages IN SHARE MODE"):
                await speak(conversation, one)
                await asyncio.to_thread(ending.close)
        with served(database, model, tmp_path / "one", strategy="full") as heir:
            await waits_for_spool(heir.url)
            await goes_on_within(10, conversation, other)
            await assert_stored_right(heir, database, [conversation])


@pytest.mark.parametrize("kind", ["chat", "chat stream", "anthropic", "gemini stream", "responses"])
async def test_conversation_started_without_a_database_continues_elsewhere(
    database: Database, model: Model, replicas: tuple[Service, Relay, Service], kind: str
) -> None:
    one, way, other = replicas
    way.cut()
    conversation = Conversation(one.url, kind)
    assert [got.context for got in await converse(conversation, 2)] == ["fail-open"] * 2
    await speak(conversation, other)
    conversation.url = one.url
    assert (await converse(conversation, 1))[0].context == "fail-open"
    way.restore()
    await assert_stored_right(one, database, [conversation])
    relayed = await query(one, "SELECT count(*) AS n FROM messages WHERE role = 'assistant' AND chain IS NOT NULL")
    assert relayed[0]["n"] == 4
    await speak(conversation, one)
    await assert_stored_right(one, database, [conversation])


@pytest.mark.parametrize("kind", ["chat", "chat tools stream", "anthropic", "code assist stream", "responses"])
async def test_a_conversation_whose_first_reply_waits_goes_on_elsewhere(
    database: Database, model: Model, replicas: tuple[Service, Relay, Service], kind: str
) -> None:
    """Its question is stored, in a session that nobody can find by its reply: the replay leaves that one."""
    one, way, other = replicas
    conversation = Conversation(one.url, kind)
    assert await lose(conversation, one, way, model) in STORED
    await speak(conversation, other)
    await speak(conversation, other)
    way.restore()
    await assert_stored_right(one, database, [conversation])
    await speak(conversation, one)
    await assert_stored_right(one, database, [conversation])


@pytest.mark.parametrize("kind", ["chat", "chat tools stream", "anthropic stream", "gemini", "responses"])
@pytest.mark.parametrize("answered", [0, 2])
async def test_a_question_that_broke_off_elsewhere_is_left(
    database: Database, model: Model, replicas: tuple[Service, Relay, Service], kind: str, answered: int
) -> None:
    """It made a session that nobody goes on with: its client asked something else, and no reply was known there."""
    one, way, other = replicas
    conversation = Conversation(one.url, kind)
    assert await lose(conversation, one, way, model) in STORED
    conversation.url = other.url
    usual = model.state.script
    model.state.script = lambda _: ScriptedReply(status=500, body=b"{}")
    try:
        assert not (await converse(conversation, 1))[0].has_ended
    finally:
        model.state.script = usual
    for _ in range(answered):
        await speak(conversation, other)
    way.restore()
    await waits_for_spool(one.url)
    await speak(conversation, one)

    async def is_right() -> bool:
        return (await compare(database.admin_dsn, [conversation])).is_right

    await eventually(is_right, 30)
    await speak(conversation, other)
    await assert_stored_right(one, database, [conversation])


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "chat tools stream", "anthropic", "responses"])
async def test_two_replicas_that_store_a_beginning_at_the_same_moment_end_with_one_session(
    database: Database, model: Model, tmp_path: Path, kind: str, calls: int
) -> None:
    """The replay of the first calls and the next one, on another replica, cannot see each other's session."""
    with (
        relay(database) as way,
        served(database, model, tmp_path / "one", dsn=way.dsn, database_timeout=6.0) as one,
        served(database, model, tmp_path / "other", database_timeout=6.0) as other,
    ):
        way.cut()
        conversation = Conversation(one.url, kind)
        assert [got.context for got in await converse(conversation, calls)] == ["fail-open"] * calls
        conversation.url = other.url
        async with locked(database.admin_dsn, "messages IN SHARE MODE"):
            pending = asyncio.create_task(converse(conversation, 1))
            await asyncio.sleep(0.5)
            way.restore()
            await asyncio.sleep(2.0)
        assert (await pending)[0].has_ended
        await waits_for_spool(one.url)

        async def is_right() -> bool:
            return (await compare(database.admin_dsn, [conversation])).is_right

        await eventually(is_right, 20)
        await speak(conversation, one)
        await assert_stored_right(one, database, [conversation])
    gc.collect()


@pytest.mark.parametrize("kind", ["chat", "chat tools stream", "anthropic stream", "code assist", "responses"])
@pytest.mark.parametrize("calls", [1, 3])
async def test_a_conversation_that_went_on_without_the_store_goes_on_elsewhere(
    database: Database, model: Model, replicas: tuple[Service, Relay, Service], kind: str, calls: int
) -> None:
    """The replay leaves the messages that another replica has stored in the meantime as they are."""
    one, way, other = replicas
    conversation = Conversation(one.url, kind)
    await speak(conversation, one)
    way.cut()
    for got in await converse(conversation, calls):
        assert (got.context, got.has_ended) == ("fail-open", True)
    await speak(conversation, other)
    await speak(conversation, other)
    way.restore()
    await assert_stored_right(one, database, [conversation])
    await speak(conversation, one)
    await assert_stored_right(one, database, [conversation])


@pytest.mark.parametrize("kind", ["chat", "chat delta stream"])
async def test_the_client_edits_its_history_meanwhile(
    database: Database, model: Model, replicas: tuple[Service, Relay, Service], kind: str
) -> None:
    one, way, other = replicas
    conversation = Conversation(one.url, kind)
    await speak(conversation, one)
    assert await lose(conversation, one, way, model) in STORED
    edited = Conversation(other.url, "chat", name=conversation.name, history=conversation.history[:2], requests=7)
    await speak(edited, other)
    way.restore()
    await waits_for_spool(one.url)
    rows = await query(
        one, "SELECT role, status, convert_from(raw, 'UTF8') AS raw FROM messages WHERE turn > 0 ORDER BY place, seq"
    )
    found = [
        (row["role"], row["raw"].split(f"Q:{conversation.name}:")[1][0]) for row in rows if row["status"] == "live"
    ]
    turns = ["0", "7"]
    assert sorted(found) == sorted((role, turn) for turn in turns for role in ("user", "assistant"))
    assert len(rows) == 6


@pytest.mark.parametrize("how", ["delete", "undo"])
async def test_changes_to_the_session_during_an_outage_hold(
    database: Database, model: Model, replicas: tuple[Service, Relay, Service], how: str
) -> None:
    one, way, other = replicas
    conversation = Conversation(one.url, "chat delta")
    await speak(conversation, one)
    assert await lose(conversation, one, way, model) in STORED
    path = f"/api/sessions/{conversation.name}"
    if how == "delete":
        assert (await post(other, b"", method="DELETE", path=path)).status == 204
    else:
        assert (await post(other, b"", path=f"{path}/undo")).status == 200
    way.restore()
    await waits_for_spool(one.url)
    rows = await query(one, "SELECT role, status, turn FROM messages WHERE turn > 0 ORDER BY place, seq")
    if how == "delete":
        assert rows == []
    else:
        assert [row["role"] for row in rows] == ["user", "assistant"] * 2
        assert [row["status"] for row in rows] == ["live", "live", "undone", "undone"]


@pytest.mark.parametrize(
    "kind", ["chat", "chat stream", "chat tools stream", "anthropic stream", "gemini stream", "responses"]
)
@pytest.mark.parametrize("epoch", [FROM_THE_START, "auto"], ids=["built", "passthrough"])
async def test_a_call_ends_with_an_error_where_neither_store_nor_spool_takes_it(
    database: Database, model: Model, tmp_path: Path, epoch: str, kind: str
) -> None:
    with relay(database) as way, served(database, model, tmp_path, dsn=way.dsn, spool_size=0, epoch=epoch) as service:
        conversation = Conversation(service.url, kind)
        await speak(conversation, service)
        with slowed(model, 0.5):
            pending = asyncio.create_task(converse(conversation, 1))
            await asyncio.sleep(0.25)
            way.cut()
            got = (await pending)[0]
        assert not got.has_ended
        assert "error" in got.error
        assert got.status == (200 if "stream" in kind else 503)


async def test_an_exchange_that_the_database_refuses_is_kept_and_blocks_nothing(
    database: Database, model: Model, tmp_path: Path
) -> None:
    with relay(database) as way, served(database, model, tmp_path, dsn=way.dsn) as service:
        poison, fine = (Conversation(service.url, "chat") for _ in range(2))
        way.cut()
        assert (await converse(poison, 1))[0].context == "fail-open"
        assert (await converse(fine, 1))[0].context == "fail-open"
        refused = f"CHECK (position('{poison.name}'::bytea IN raw) = 0)"
        await query(service, f"ALTER TABLE messages ADD CONSTRAINT refused {refused}")
        way.restore()
        await assert_stored_right(service, database, [fine])
        (kept,) = tmp_path.glob("spool/*/*.refused")
        assert poison.name.encode() in kept.read_bytes()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        got = (await converse(Conversation(service.url, "chat stream", name=poison.name), 1))[0]
        assert not got.has_ended
        assert "database" in got.error


async def test_an_exchange_that_keeps_failing_does_not_hold_up_the_others(
    database: Database, model: Model, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_writer, "REPLAY_LIMIT", 0.3)
    monkeypatch.setattr(durable_writer, "RETRY_FAILED_EVERY", 0.5)
    with served(database, model, data_dir) as service:
        first, *others = made = await start(service, ("chat", "anthropic", "gemini"))
        (session,) = await query(
            service,
            "SELECT tenant_id, session_id FROM messages WHERE position($1::bytea in raw) > 0 LIMIT 1",
            first.name.encode(),
        )
        holder = await asyncpg.connect(database.admin_dsn)
        try:
            async with locked(database.admin_dsn):
                for each in made:
                    await converse(each, 1)
                await holder.execute("BEGIN")
                await holder.execute(
                    "SELECT FROM sessions WHERE tenant_id = $1 AND id = $2 FOR UPDATE", *session.values()
                )

            async def only_one_waits() -> bool:
                (row,) = await query(service, "SELECT count(*) FROM messages WHERE role = 'assistant'")
                return bool(row["count"] == 2 * len(made) - 1)

            await eventually(only_one_waits)
            compared = await compare(database.admin_dsn, others)
            assert compared.is_right, compared
        finally:
            await holder.close()
        await assert_stored_right(service, database, made)
