"""The database away in every way: calls go through, unchanged and soon, and all heals by itself."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.common.auth import new_key
from tersely.store.db.connection import Database as Store
from tersely.store.ops import keys
from tests.conftest import Database
from tests.proxy.streaming.test_idle_streams import KINDS
from tests.support.conversations import waits_for_spool
from tests.support.dialect_wires import WIRES
from tests.support.http import STORED, Answered, body_of, post, request_bytes, wire
from tests.support.loop_time import callback_times
from tests.support.loops import eventually, until
from tests.support.relay import Relay, relay
from tests.support.rows import messages_by_number, query
from tests.support.services import Service, many, serve
from tests.support.upstreams import DONE, Model, RawUpstream, http_head, sse

BODY = b'{"model":"gpt-4o-mini", "messages":[{"role":"user","content":"is anybody there %s"}],"user":"%s"}'
LIMIT = 1.0

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect the sockets that a cut relay leaves behind here, not in another test."""
    yield
    gc.collect()


@pytest.fixture
def away(store: Database, model: Model):
    """A service, and the way to its database."""
    with relay(store) as way, serve(store, model.url, dsn=way.dsn, database_timeout=LIMIT) as running:
        yield running, way


async def healed(service: Service, key: str) -> None:
    """The next call is stored again."""

    async def is_stored() -> bool:
        answer = await post(service, body_of("back again"), X_Tersely_Session=f"{key}-{secrets.token_hex(4)}")
        if answer.headers.get("x-tersely-context") not in STORED:
            return False
        return [each.role for each in await messages_by_number(service, answer.session)] == ["user", "assistant"]

    await eventually(is_stored, 10)
    assert (await post(service, b"", method="GET", path="/readyz")).status == 200


async def assert_goes_through(service: Service, model: Model, key: str, *, within: float) -> None:
    body = BODY % (key.encode(), key.encode())
    answer = await post(service, body)
    assert (answer.status, answer.context) == (200, "fail-open")
    assert answer.seconds < within
    assert model.requests(key)[-1].body == body
    assert f"You said: is anybody there {key}" in answer.json["choices"][0]["message"]["content"]


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_the_database_goes_away_and_comes_back(away: tuple[Service, Relay], model: Model, key: str, how: str):
    service, way = away
    await healed(service, key)

    getattr(way, how)()
    await assert_goes_through(service, model, key, within=LIMIT + 1)
    for _ in range(5):
        await assert_goes_through(service, model, key, within=0.5)
    assert (await post(service, b"", method="GET", path="/readyz")).status == 200
    strictly = await post(service, b"", method="GET", path="/readyz?strict=1")
    assert (strictly.status, strictly.headers["retry-after"]) == (503, "2")
    assert (await post(service, b"", method="GET", path="/healthz")).status == 200
    metrics = await post(service, b"", method="GET", path="/metrics")
    assert re.search(rb'tersely_fail_open_total{reason="read"} [1-9]', metrics.body)

    way.restore()
    await healed(service, key)
    await waits_for_spool(service.url)
    assert await stored_words(service, key) == {"user": 6, "assistant": 6}


async def test_a_call_without_the_store_has_the_cost_of_any_other(
    away: tuple[Service, Relay], model: Model, key: str
) -> None:
    service, way = away
    await healed(service, key)
    details = {"cached_tokens": 20}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110, "prompt_tokens_details": details}
    calls = []
    for number, context in enumerate(("passthrough", "fail-open")):
        if context == "fail-open":
            way.cut()
        model.script(key, ScriptedReply(message={"content": "yes"}, usage=usage))
        headers = {"X_Tersely_Session": f"{key}-{number}", "X_Script": key}
        history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, "is anybody there"]
        assert (await post(service, body_of(*history), **headers)).context == context
    way.restore()
    await healed(service, key)
    await waits_for_spool(service.url)
    for number in range(2):
        (call,) = (await post(service, b"", method="GET", path=f"/api/sessions/{key}-{number}/calls")).json["items"]
        calls.append({name: call[name] for name in ("money", "input_tokens", "cached_tokens", "client", "strategy")})
    assert calls[0]["money"] is not None
    assert calls[1] == {**calls[0], "strategy": "full"}


async def stored_words(service: Service, key: str) -> dict[str, int]:
    """Return the number of messages of each role that contain ``key``."""
    sql = "SELECT role, count(*) AS n FROM messages WHERE position($1::bytea IN raw) > 0 AND status = 'live' GROUP BY 1"
    return {row["role"]: row["n"] for row in await query(service, sql, f"is anybody there {key}".encode())}


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_a_delta_is_never_forwarded_without_its_history(
    away: tuple[Service, Relay], model: Model, key: str, how: str
):
    service, way = away
    first = await post(service, body_of("one", user=key), X_Tersely_Session=key)
    assert first.context in STORED
    by_reference = json.dumps({"model": "gpt-4o-mini", "input": "one", "user": key}).encode()
    reply = (await post(service, by_reference, path="/v1/responses")).json["id"]
    before = model.state.calls
    getattr(way, how)()
    named = json.dumps({"model": "gpt-4o-mini", "input": "two", "user": key, "previous_response_id": reply}).encode()
    referring = {"type": "item_reference", "id": "msg_1"}
    items = [{"role": "user", "content": "one"}, referring, {"role": "user", "content": "two"}]
    anthropic = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "two"}]}
    refused = [
        await post(service, body_of("two", user=key), X_Tersely_Session=key),
        await post(service, named, path="/v1/responses"),
        await post(service, json.dumps({**json.loads(by_reference), "input": items}).encode(), path="/v1/responses"),
        await post(service, body_of("two", user=key, stream=True), X_Tersely_Session=key),
        await post(service, json.dumps(anthropic).encode(), path="/v1/messages", X_Tersely_Session=key),
        *[
            await WIRES[name].send(service, "two", stream=streams, X_Tersely_Session=key)
            for name in ("gemini", "gemini_gca")
            for streams in (False, True)
        ],
    ]
    assert [(each.status, each.headers["retry-after"]) for each in refused] == [(503, "2")] * 9
    assert [each.json["error"].get("code") for each in refused[:4]] == ["database_unavailable"] * 4
    assert refused[4].json["type"] == "error"
    assert [each.json["error"]["status"] for each in refused[5:]] == ["UNAVAILABLE"] * 4
    assert model.state.calls == before

    way.restore()
    await healed(service, key)
    assert (await post(service, body_of("two", user=key), X_Tersely_Session=key)).context in STORED
    assert [each.role for each in await messages_by_number(service, key)][-4:] == ["user", "assistant"] * 2


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_away_from_the_start(store: Database, model: Model, key: str, how: str):
    with relay(store) as way:
        getattr(way, how)()
        with serve(store, model.url, dsn=way.dsn, database_timeout=LIMIT) as service:
            await assert_goes_through(service, model, key, within=LIMIT + 1)
            await assert_goes_through(service, model, key, within=0.5)
            assert len(model.requests(key)) == 2, "both went to the model"
            way.restore()
            await healed(service, key)
            await waits_for_spool(service.url)
            assert await stored_words(service, key) == {"user": 2, "assistant": 2}


@pytest.mark.parametrize("how", ["cut", "freeze"])
@pytest.mark.parametrize("streams", [False, True])
async def test_database_lost_during_a_reply(store: Database, raw: RawUpstream, key: str, how: str, streams: bool):
    with many(relay(store)) as (way,), serve(store, raw.url, dsn=way.dsn, database_timeout=LIMIT) as service:
        await healed_with(service, raw, key)
        reply = {"index": 0, "message": {"role": "assistant", "content": "hello again"}, "finish_reason": "stop"}
        if streams:
            raw.answer(http_head(), sse("hello", role=True), 0.5, sse(" again"), sse(finish="stop"), DONE)
        else:
            raw.answer(0.5, http_head("application/json"), json.dumps({"choices": [reply]}).encode())
        before = len(raw.requests)
        pending = asyncio.create_task(post(service, body_of("go", stream=streams), X_Tersely_Session=key))
        await until(lambda: len(raw.requests) > before)
        getattr(way, how)()
        answer = await pending
        assert answer.status == 200
        assert b"again" in answer.body
        assert answer.seconds < 0.5 + 2 * LIMIT + 1
        if streams:
            assert answer.body.endswith(DONE)
        way.restore()
        await healed_with(service, raw, f"{key}-after")


async def test_database_lost_while_an_epoch_starts(store: Database, model: Model, key: str):
    """The whole history of the call that starts it is spooled, and stored later; then the session goes on."""
    with relay(store) as way, serve(
        store, model.url, dsn=way.dsn, database_timeout=LIMIT, strategy="slim", epoch='{"high": 1500, "low": 600}'
    ) as service:  # fmt: skip
        messages: list[dict[str, object]] = [{"role": "system", "content": "Be brief."}]

        async def ask(words: str) -> Answered:
            messages.append({"role": "user", "content": f"{key} {words}"})
            body = json.dumps({"model": "gpt-4o-mini", "messages": messages, "user": key})
            answer = await post(service, body.encode())
            assert answer.status == 200, answer.body
            messages.append(answer.json["choices"][0]["message"])
            return answer

        answer = await ask("hello")
        for number in range(23):
            answer = await ask(f"{number} " + "word " * 60)
        epoch = answer.headers["x-tersely-epoch"]
        model.script(key, ScriptedReply(message={"content": "At last."}, first_delay=0.5))
        before = len(model.requests(key))
        asking = asyncio.create_task(ask("slow " + "word " * 900))
        await until(lambda: len(model.requests(key)) > before)
        way.cut()
        started = await asking
        assert started.headers["x-tersely-epoch"] != epoch
        way.restore()

        async def goes_on() -> bool:
            return (await post(service, b"", method="GET", path="/readyz")).status == 200

        await eventually(goes_on, 10)
        await waits_for_spool(service.url)
        following = await ask("and now?")
        assert following.session == started.session == answer.session
        stored = [each.role for each in await messages_by_number(service, answer.session)]
        assert stored == ["system", *["user", "assistant"] * 26]


async def healed_with(service: Service, raw: RawUpstream, key: str) -> None:
    reply = {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
    raw.answer(http_head("application/json"), json.dumps({"choices": [reply]}).encode())
    await healed(service, key)


async def test_many_at_once_wait_no_longer_than_one(away: tuple[Service, Relay], key: str):
    service, way = away
    await healed(service, key)
    way.freeze()

    answers = await asyncio.gather(*(post(service, body_of(f"call {n}")) for n in range(40)))

    assert {answer.context for answer in answers} == {"fail-open"}
    assert max(answer.seconds for answer in answers) < 2 * LIMIT + 1.5
    way.restore()
    await healed(service, key)


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_closed_where_that_is_wanted(store: Database, model: Model, key: str, how: str):
    with (
        relay(store) as way,
        serve(store, model.url, dsn=way.dsn, database_timeout=LIMIT, fail_open="off") as service,
    ):
        await healed(service, key)
        getattr(way, how)()

        answer = await post(service, BODY % (key.encode(), key.encode()), X_Tersely_Session=key)

        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        assert answer.json["error"]["code"] == "database_unavailable"
        assert model.requests(key) == []
        assert (await post(service, b"", method="GET", path="/v1/models")).status == 200
        way.restore()
        await healed(service, key)


@pytest.fixture
async def tsk(store: Database) -> AsyncIterator[str]:
    """A tenant's key."""
    text, stored = new_key(
        "acme", "", now=datetime.now(UTC), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32)
    )
    database = Store(dsn=store.dsn)
    await database.open()
    await keys.add(database, stored)
    yield text
    await database.close()


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_keys_never_open(store: Database, model: Model, key: str, tsk: str, how: str):
    with relay(store) as way, serve(store, model.url, dsn=way.dsn, database_timeout=LIMIT, auth="keys") as service:
        getattr(way, how)()
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            assert (await post(service, BODY % (key.encode(), key.encode()), path=path)).status == 401
            answer = await post(service, BODY % (key.encode(), key.encode()), path=path, X_Tersely_Key=tsk)
            assert (answer.status, answer.json["error"]["code"]) == (503, "database_unavailable")
        assert model.requests(key) == []

        way.restore()
        await eventually(lambda: _is_let_in(service, tsk))


async def _is_let_in(service: Service, tsk: str) -> bool:
    return (await post(service, body_of("hello"), X_Tersely_Key=tsk)).status == 200


async def test_a_client_that_leaves_during_a_freeze(away: tuple[Service, Relay], key: str):
    service, way = away
    await healed(service, key)
    way.freeze()
    for _ in range(5):
        async with wire(service) as line:
            await line.send(request_bytes(body_of("never mind", stream=True), X_Tersely_Session=key))
    way.restore()
    await healed(service, key)
    assert (await post(service, b"", method="GET", path="/readyz?strict=1")).status == 200


MOST = 128 * 1024
WHOLE = b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"%s"},"finish_reason":"stop"}]}'
# Whether a stream was asked for, what the host sends, and finish reason and status of the reply in the store.
REPLIES: dict[str, tuple[bool, list[bytes | float], str, str]] = {
    "unknown shape": (False, [http_head("application/json"), b'{"choices":"xylophone"}'], "unread", "superseded"),
    "text": (False, [http_head("text/plain"), b"xylophone"], "unread", "superseded"),
    "status 201": (
        False,
        [http_head("application/json", status="201 Created"), WHOLE % b"xylophone"],
        "stop",
        "live",
    ),
    "long": (
        False,
        [http_head("application/json"), WHOLE % (b"xylophone" + b"y" * 3 * MOST)],
        "unread",
        "superseded",
    ),
    "stream of unknown shape": (
        True,
        [http_head(), b'data: {"choices":"xylophone"}\n\n', DONE],
        "unread",
        "superseded",
    ),
    "long stream": (
        True,
        [http_head(), sse("xylophone", role=True), *[sse("y" * (MOST // 2))] * 6, sse(finish="stop"), DONE],
        "oversized",
        "live",
    ),
    "stream without an end": (True, [http_head(), sse("xylophone", role=True)], "interrupted", "live"),
}


async def stored_exchange(service: Service, key: str) -> list[tuple[str, str | None, str, bool]]:
    """Role, finish reason, status, and whether the word of the reply is in it, of the session with ``key``."""
    await waits_for_spool(service.url)
    sql = (
        "SELECT role, finish, status, raw FROM messages WHERE session_id = "
        "(SELECT session_id FROM messages WHERE position($1::bytea IN raw) > 0) ORDER BY seq"
    )

    async def found() -> list[tuple[str, str | None, str, bool]]:
        rows = await query(service, sql, key.encode())
        words = (b"xylophone", b64encode(b"xylophone"), b"half a word")
        return [(r["role"], r["finish"], r["status"], any(word in r["raw"] for word in words)) for r in rows]

    return await eventually(found)


@pytest.mark.parametrize("reply", REPLIES)
async def test_any_reply_that_went_through_is_stored(store: Database, raw: RawUpstream, key: str, reply: str):
    """As it is with the database present."""
    streams, pieces, finish, status = REPLIES[reply]
    raw.answer(*pieces)
    with relay(store) as way, serve(store, raw.url, dsn=way.dsn, database_timeout=LIMIT, max_reply=MOST) as service:
        way.cut()
        answer = await post(service, body_of(f"is anybody there {key}", stream=streams))
        assert (answer.context, b"xylophone" in answer.body) == ("fail-open", True)
        way.restore()
        found = await stored_exchange(service, key)
        assert found == [("user", None, "live", False), ("assistant", finish, status, True)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("who", ["client", "host"])
async def test_a_stream_that_breaks_off_is_stored(store: Database, raw: RawUpstream, key: str, name: str, who: str):
    speaker = KINDS[name]
    raw.answer(http_head(content_length="99999"), speaker.beginning, 0.2 if who == "host" else 5.0)
    body = speaker.body.replace(b'"hello"', f'"{key}"'.encode())
    with relay(store) as way, serve(store, raw.url, dsn=way.dsn, database_timeout=LIMIT) as service:
        way.cut()
        async with wire(service) as line:
            await line.send(request_bytes(body, path=speaker.path))
            await line.until(b"half a word")
            if who == "host":
                await line.to_end()
        await _is_spooled(service)
        way.restore()
        finish = "interrupted" if who == "host" else "client_left"
        assert (await stored_exchange(service, key))[1:] == [("assistant", finish, "live", True)]


async def _is_spooled(service: Service) -> None:
    async def is_one() -> bool:
        return b"tersely_spooled_exchanges 1.0" in (await post(service, b"", method="GET", path="/metrics")).body

    await eventually(is_one)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", ["short events", "one long event"])
async def test_a_long_stream_that_goes_through_does_not_block_other_calls(
    store: Database, raw: RawUpstream, name: str, shape: str
):
    speaker = KINDS[name]
    mark = b"\r\n\r\n" if b"\r\n\r\n" in speaker.beginning else b"\n\n"
    word = next(each for each in speaker.beginning.split(mark) if b"half a word" in each) + mark
    size = 12 * 1024 * 1024
    if shape == "short events":
        middle = [word * (size // 100 // len(word))] * 100
    else:
        middle = [word.replace(b"half a word", b"half a word " * (size // 12))]
    raw.answer(http_head(), speaker.beginning, *middle, speaker.end)
    with relay(store) as way, serve(store, raw.url, dsn=way.dsn, database_timeout=LIMIT) as service:
        way.cut()
        await post(service, speaker.body, path=speaker.path)  # it is noticed
        with callback_times(service) as times:
            answer = await post(service, speaker.body, path=speaker.path)
        assert answer.context == "fail-open"
        assert len(answer.body) > size * 0.9
        assert times.worst[0] < 0.02, times.worst
