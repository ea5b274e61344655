"""Injected blocks and instructions inside a history: in every upstream request once, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tests.conftest import Database
from tests.support.injected_clients import FIRST_REQUESTS, WIRES, InjectingClient, Markers, count_each, question
from tests.support.services import Service, serve
from tests.support.upstreams import Model

TURNS = 40
OVERFLOW = "prompt is too long: 250000 tokens > 200000 maximum"
SMALL = '{"high": 2000, "low": 800}'
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/",
}
STRATEGIES: Mapping[str, str] = {
    "full": "full",
    "slim": "slim",
    "window": '{"name": "window", "context_size": 3}',
    "trim": '{"name": "trim", "max_context_tokens": 4000}',
    "compact": '{"name": "compact", "max_tokens": 4000}',
    "tiered": '{"name": "tiered", "total_budget": 3000, "working_budget": 1500, "session_budget": 500}',
}


@pytest.fixture(scope="module")
def service(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url) as running:
        yield running


@pytest.fixture(scope="module")
def replicas(store: Database, model: Model, service: Service) -> Iterator[tuple[Service, Service]]:
    """Two processes of one service."""
    with serve(store, model.url) as other:
        yield service, other


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


def sent_by(model: Model, key: str) -> list[ReceivedRequest]:
    return [each for each in list(model.state.received) if each.headers.get("X-Script") == key]


def others_about(model: Model, key: str) -> list[ReceivedRequest]:
    """Requests of Tersely's own (summaries) that speak of the session."""
    return [
        each for each in list(model.state.received) if each.headers.get("X-Script") != key and key.encode() in each.body
    ]


def new_client(
    service: Service, model: Model, http: httpx.Client, name: str, key: str, **headers: str
) -> tuple[InjectingClient, Markers]:
    dialect, first = FIRST_REQUESTS[name]
    markers = Markers(key)
    marked = markers.mark(first(), dialect)
    client = InjectingClient(service, model, key, dialect, marked, headers=headers, http=http)
    assert markers.words
    return client, markers


def check(model: Model, key: str, markers: Markers) -> bytes:
    """The newest request holds every marker once."""
    body = sent_by(model, key)[-1].body
    found = count_each(markers.words, body)
    assert set(found.values()) == {1}, (found, body[:3000])
    return body


def talk(
    client: InjectingClient, markers: Markers, replicas: tuple[Service, Service], model: Model, key: str, *, words: int
) -> None:
    """Forty turns, every second one streamed, on one replica for ten turns each; all requests hold all markers once."""
    client.ask()
    check(model, key, markers)
    for turn in range(1, TURNS):
        client.service, client.streams = replicas[turn // 10 % 2], turn % 2 == 1
        client.say(question(turn, words))
        check(model, key, markers)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", FIRST_REQUESTS)
def test_blocks_stand_in_every_request_once(
    replicas: tuple[Service, Service], model: Model, http: httpx.Client, key: str, name: str, strategy: str
) -> None:
    client, markers = new_client(
        replicas[0], model, http, name, key, x_tersely_strategy=STRATEGIES[strategy], x_tersely_epoch=SMALL
    )
    talk(client, markers, replicas, model, key, words=90)
    if strategy != "full":
        assert int(client.epoch) > 1, "nothing was cut"
    if strategy not in {"full", "compact"}:  # the checkpoint of `compact` quotes what was asked
        assert b"part1x7" not in sent_by(model, key)[-1].body.replace(b"\\", b""), "turn 1 was not cut"
    for each in others_about(model, key):
        assert not any(count_each(markers.words, each.body).values())


def recorded_first_requests(directory: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The first main request of each recorded run that injects something: client, dialect, body."""
    for folder in sorted(each for each in directory.iterdir() if each.is_dir()):
        seen: set[str] = set()
        for line in (folder / "requests.jsonl").read_text().splitlines():
            call = json.loads(line)
            run = call["note"].partition("|")[0]
            dialect = next((name for name, path in PATHS.items() if call["path"].startswith(path)), None)
            if dialect is None or run in seen or not call["note"].endswith("main turn") or not call["body"]:
                continue
            seen.add(run)
            body = {name: value for name, value in call["body"].items() if name not in {"stream", "stream_options"}}
            if Markers("x").count(body, dialect):
                yield folder.name, dialect, body


@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "words"), [(SMALL, 90), ("auto", 500)], ids=["small", "default"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_of_recorded_clients_stand_in_every_request_once(
    replicas: tuple[Service, Service],
    model: Model,
    http: httpx.Client,
    key: str,
    shared_data: Path,
    strategy: str,
    epoch: str,
    words: int,
) -> None:
    directory = shared_data / "clients"
    if not directory.is_dir():
        pytest.skip(f"no recorded clients at {directory}")
    # Of each client the run that injects most.
    recorded: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, dialect, body in recorded_first_requests(directory):
        if name not in recorded or Markers("").count(*reversed(recorded[name])) < Markers("").count(body, dialect):
            recorded[name] = dialect, body
    assert {"claude-code", "codex", "gemini-cli", "qwen-code", "copilot-cli"} <= recorded.keys()
    given = STRATEGIES[strategy] if epoch == SMALL else strategy
    # Each client talks under each strategy, in one of the two policies.
    first = (list(STRATEGIES).index(strategy) + (epoch == SMALL)) % 2
    for number, (dialect, body) in list(enumerate(recorded.values()))[first::2]:
        name = f"{key}-{number}"
        markers = Markers(name)
        marked = markers.mark(body, dialect)
        headers = {"x_tersely_strategy": given, "x_tersely_epoch": epoch}
        client = InjectingClient(replicas[0], model, name, dialect, marked, headers=headers, http=http)
        talk(client, markers, replicas, model, name, words=words)
        if strategy not in {"full", "compact"}:
            assert int(client.epoch) > 1


def wire_prefix(client: InjectingClient, body: bytes) -> list[str]:
    """The messages of a request, each as text, without the marks that say where a prompt is worth caching."""
    request = json.loads(body)
    held = request["request"] if client.dialect == "gemini_gca" else request
    return [_without_marks(message) for message in held[client.wire.member]]


def _without_marks(value: Any) -> str:
    def clean(each: Any) -> Any:
        if isinstance(each, dict):
            return {name: clean(inner) for name, inner in each.items() if name != "cache_control"}
        return [clean(inner) for inner in each] if isinstance(each, list) else each

    return json.dumps(clean(value))


@pytest.mark.parametrize("name", FIRST_REQUESTS)
def test_requests_of_one_epoch_extend_each_other(
    service: Service, model: Model, http: httpx.Client, key: str, name: str
) -> None:
    client, markers = new_client(service, model, http, name, key, x_tersely_strategy="slim", x_tersely_epoch=SMALL)
    client.ask()
    before, epoch = wire_prefix(client, sent_by(model, key)[-1].body), client.epoch
    extended = 0
    for turn in range(1, 16):
        client.say(question(turn))
        after = wire_prefix(client, check(model, key, markers))
        if client.epoch == epoch:
            assert after[: len(before)] == before
            extended += 1
        before, epoch = after, client.epoch
    assert extended > 5


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("claude-code", each) for each in STRATEGIES),
        *zip((each for each in FIRST_REQUESTS if each != "claude-code"), cycle(["slim", "trim", "tiered", "window"])),
    ],
)
def test_blocks_stand_in_every_request_over_the_default_watermarks(
    service: Service, model: Model, http: httpx.Client, key: str, name: str, strategy: str
) -> None:
    client, markers = new_client(service, model, http, name, key, x_tersely_strategy=strategy)
    client.ask()
    for turn in range(1, TURNS):
        client.say(question(turn, 500))
        check(model, key, markers)
    if strategy not in {"full", "compact"}:  # `compact` cuts by the window of the model, which is large
        assert int(client.epoch) > 1


@pytest.mark.parametrize("policy", ["every_request", '{"stride": 2}'])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_stand_in_every_request_under_every_policy(
    service: Service, model: Model, http: httpx.Client, key: str, strategy: str, policy: str
) -> None:
    client, markers = new_client(
        service, model, http, "claude-code", key, x_tersely_strategy=STRATEGIES[strategy], x_tersely_epoch=policy
    )
    client.ask()
    for turn in range(1, 12):
        client.say(question(turn))
        body = sent_by(model, key)[-1].body
        assert set(count_each(markers.words, body).values()) == {1}, body[:3000]


def test_a_resumed_client_brings_the_newest_rules(service: Service, model: Model, http: httpx.Client, key: str) -> None:
    """On resume a client writes its blocks anew: the head holds what this request says, from then on."""
    client, markers = new_client(service, model, http, "claude-code", key, x_tersely_epoch=SMALL)
    client.ask()
    for turn in range(1, 8):
        client.say(question(turn))
    cut = client.epoch
    assert int(cut) > 1
    old, new = markers.words[2], f"{key}-rewritten-end"
    first = client.history[0]
    first["content"][2]["text"] = first["content"][2]["text"].replace(old, new)
    client.say("What are the rules now?")
    markers.words[2] = new
    check(model, key, markers)
    assert old.encode() not in sent_by(model, key)[-1].body
    resumed = client.epoch
    client.say("And now?")
    check(model, key, markers)
    assert client.epoch == resumed
    # A block that the client no longer sends is gone.
    gone = markers.words.pop(0)
    del first["content"][0]
    client.say("Which skills are there?")
    assert gone.encode() not in check(model, key, markers)


@pytest.mark.parametrize("name", ["codex", "cline"])
def test_a_newer_version_replaces_the_older_one_with_the_next_epoch(
    service: Service, model: Model, http: httpx.Client, key: str, name: str
) -> None:
    client, markers = new_client(service, model, http, name, key, x_tersely_epoch=SMALL)
    client.ask()
    for turn in range(1, 8):
        client.say(question(turn))
    assert int(client.epoch) > 1
    index = 0 if name == "codex" else 1
    old, new = markers.words[index], f"{key}-newer-end"
    tag = "environment_context" if name == "codex" else "environment_details"
    block = f"<{tag}>\n{new}\n</{tag}>"
    if name == "codex":
        client.ask(client.wire.user(block), client.wire.user("What has changed?"))
    else:
        client.say(f"What has changed?\n{block}")
    epoch = client.epoch
    assert sent_by(model, key)[-1].body.count(old.encode()) == 1, "the head is frozen"
    markers.words[index] = new
    check(model, key, markers)
    turn = 100
    while client.epoch == epoch or b"What has changed" in sent_by(model, key)[-1].body:
        client.say(question(turn))
        check(model, key, markers)
        turn += 1
    assert old.encode() not in sent_by(model, key)[-1].body


@pytest.mark.parametrize("name", FIRST_REQUESTS)
def test_delta_requests_keep_the_stored_injected_blocks(
    service: Service, model: Model, http: httpx.Client, key: str, name: str
) -> None:
    client, markers = new_client(service, model, http, name, key, x_tersely_session=key, x_tersely_epoch=SMALL)
    client.ask()
    for turn in range(1, 25):
        client.history.clear()
        client.say(question(turn))
        check(model, key, markers)
    assert int(client.epoch) > 1
    sent = sent_by(model, key)[-1].body
    assert b"part1x7 " not in sent


@pytest.mark.parametrize("name", FIRST_REQUESTS)
async def test_sessions_that_an_earlier_release_cut_get_their_blocks_back(
    service: Service, model: Model, http: httpx.Client, key: str, name: str
) -> None:
    """A plan of an earlier release holds no blocks: those of the first messages are looked up."""
    client, markers = new_client(service, model, http, name, key, x_tersely_session=key, x_tersely_epoch=SMALL)
    client.ask()
    for turn in range(1, 12):
        client.history.clear()
        client.say(question(turn))
    assert int(client.epoch) > 1
    connection = await asyncpg.connect(service.database.admin_dsn)
    try:
        for table, column in (("sessions", "id"), ("epochs", "session_id")):
            for row in await connection.fetch(f"SELECT ctid, plan FROM {table} WHERE {column} = $1", key):
                plan = json.loads(row["plan"])
                del plan["injected"], plan["has_injected"]
                written = json.dumps(plan).encode()
                await connection.execute(f"UPDATE {table} SET plan = $2 WHERE ctid = $1", row["ctid"], written)
    finally:
        await connection.close()
    for turn in range(12, 15):
        client.history.clear()
        client.say(question(turn))
        check(model, key, markers)


@pytest.mark.parametrize("name", FIRST_REQUESTS)
def test_a_hidden_message_keeps_its_injected_blocks(
    service: Service, model: Model, http: httpx.Client, key: str, name: str
) -> None:
    """`drop`, `undo`, `clear` and `compact` take words, and no instructions."""
    client, markers = new_client(service, model, http, name, key)
    api = f"{service.url}/api/sessions"
    client.ask()
    client.say("Tell me more.")
    assert http.post(f"{api}/{client.session}/turns/t1/drop").status_code == 200
    client.say("And more.")
    check(model, key, markers)
    assert http.post(f"{api}/{client.session}/compact").status_code in {200, 409}
    client.say("Go on.")
    check(model, key, markers)
    assert http.post(f"{api}/{client.session}/clear").status_code == 200
    client.say("Begin again.")
    body = check(model, key, markers)
    assert b"Tell me more." not in body
    assert http.post(f"{api}/{client.session}/undo").status_code == 200
    client.say("Once more.")
    check(model, key, markers)


@pytest.mark.parametrize("strategy", ["full", "slim", "window"])
@pytest.mark.parametrize("way", ["drop", "hide"])
@pytest.mark.parametrize("name", FIRST_REQUESTS)
def test_blocks_around_a_hidden_message_stand_once_resent_and_by_reference(
    service: Service, model: Model, http: httpx.Client, key: str, name: str, way: str, strategy: str
) -> None:
    """The place of a block is in front of the next message that is shown, whoever brings the history."""
    client, markers = new_client(service, model, http, name, key, x_tersely_strategy=strategy)
    client.ask()
    client.say("Tell me more.")
    api = f"{service.url}/api/sessions/{client.session}"
    if way == "drop":
        assert http.post(f"{api}/turns/t1/drop").status_code == 200
    else:
        turn = http.get(f"{api}/turns/t1").json()
        for seq in range(turn["first_seq"], turn["last_seq"] + 1):
            changed = http.patch(f"{api}/messages/{seq}", json={"model_visible": False})
            assert changed.status_code in {200, 409, 422}, changed.text
    client.say("And more.")
    check(model, key, markers)
    epoch, resent = client.epoch, list(client.history)
    built = http.post(f"{api}/context", json={"dialect": client.dialect}).json()
    shown = json.dumps([built["messages"], built["instructions"]]).encode()
    assert set(count_each(markers.words, shown).values()) == {1}, shown
    client.history.clear()
    client.say("Only this is new.", x_tersely_session=client.session)
    check(model, key, markers)
    client.history[:] = [*resent, *client.history]
    client.say("Everything again.")
    check(model, key, markers)
    assert client.epoch == epoch


@pytest.mark.parametrize("name", FIRST_REQUESTS)
def test_blocks_stand_in_contexts_of_sessions_without_calls(
    service: Service, http: httpx.Client, key: str, name: str
) -> None:
    dialect, first = FIRST_REQUESTS[name]
    markers = Markers(key)
    body = markers.mark(first(), dialect)
    wire = WIRES[dialect]
    history = body["request"][wire.member] if dialect == "gemini_gca" else body[wire.member]
    api = f"{service.url}/api/sessions"
    assert http.post(api, json={"id": key, "epoch": json.loads(SMALL)}).status_code == 201

    def append(*messages: Mapping[str, Any]) -> None:
        answer = http.post(f"{api}/{key}/messages", json={"dialect": dialect, "messages": list(messages)})
        assert answer.status_code == 201, answer.text

    def check_context(**more: Any) -> dict[str, Any]:
        answer = http.post(f"{api}/{key}/context", json={"dialect": dialect, **more})
        assert answer.status_code == 200, answer.text
        context: dict[str, Any] = answer.json()
        shown = json.dumps([context["messages"], context["instructions"]]).encode()
        assert set(count_each(markers.words, shown).values()) == {1}, shown
        return context

    append(*history)
    role = "model" if wire.member == "contents" else "assistant"
    for turn in range(1, 20):
        reply = {"role": role, "parts": [{"text": f"Answer {turn}."}]}
        if wire.member != "contents":
            reply = {"role": role, "content": f"Answer {turn}."}
        append(reply, wire.user(question(turn)))
        check_context()
    for strategy in STRATEGIES.values():
        check_context(strategy=json.loads(strategy) if strategy.startswith("{") else strategy)
    report = check_context()["report"]
    assert report["epoch"]["cut"] > 1
    if name != "memory-framework":
        assert next(layer["tokens"] for layer in report["layers"] if layer["name"] == "injected") > 50
    assert http.post(f"{api}/{key}/turns/t1/drop").status_code == 200
    check_context()
    assert http.post(f"{api}/{key}/clear").status_code == 200
    append(wire.user("Begin again."))
    context = check_context()
    assert "part1x7 " not in json.dumps(context["messages"])


def test_blocks_survive_an_overflow(service: Service, model: Model, http: httpx.Client, key: str) -> None:
    client, markers = new_client(service, model, http, "claude-code", key)
    client.ask()
    for turn in range(1, 12):
        client.say(question(turn))
    refusal = {"type": "error", "error": {"type": "invalid_request_error", "message": OVERFLOW}}
    model.script(key, ScriptedReply(status=400, body=json.dumps(refusal).encode()))
    calls = len(sent_by(model, key))
    client.say(question(12))
    assert len(sent_by(model, key)) == calls + 2
    check(model, key, markers)
    assert b"part1x7 " not in sent_by(model, key)[-1].body


def test_large_rules_start_no_epochs(service: Service, model: Model, http: httpx.Client, key: str) -> None:
    """Blocks count as instructions: rules beyond the high watermark leave the conversation its room."""
    client, markers = new_client(
        service, model, http, "claude-code", key, x_tersely_epoch='{"high": 4000, "low": 1600}'
    )
    rules = client.history[0]["content"][2]
    rules["text"] = rules["text"].replace("# claudeMd", "# claudeMd\n" + "Prefer small functions. " * 2000)
    client.ask()
    for turn in range(1, 6):
        client.say(f"Short question {turn}.")
        check(model, key, markers)
    assert client.epoch == "1"


async def test_nothing_that_is_made_of_a_session_quotes_its_blocks(
    service: Service, model: Model, http: httpx.Client, key: str
) -> None:
    sessions: list[str] = []
    for strategy in STRATEGIES.values():
        client, markers = new_client(
            service, model, http, "claude-code", f"{key}-{len(sessions)}", x_tersely_strategy=strategy,
            x_tersely_epoch=SMALL,
        )  # fmt: skip
        client.ask()
        for turn in range(1, 20):
            client.say(question(turn))
        sessions.append(client.session)
        found = http.post(
            f"{service.url}/api/sessions/{client.session}/search", json={"mode": "search", "query": markers.words[1]}
        )
        assert found.json()["excerpts"] == []
        title = http.get(f"{service.url}/api/sessions/{client.session}").json().get("title") or ""
        assert key not in title
    connection = await asyncpg.connect(service.database.admin_dsn)
    try:
        tables = await connection.fetch(
            "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'public' "
            "AND data_type IN ('bytea', 'text') AND table_name NOT IN "
            "('messages', 'sessions', 'epochs', 'spool', 'attributes')"  # attributes: the requests themselves
        )
        assert any(name == "terse" for name, *_ in tables)
        for table, column, kind in tables:
            value = f'"{column}"' if kind == "bytea" else f"convert_to(\"{column}\", 'UTF8')"
            quoted = await connection.fetchval(
                f'SELECT count(*) FROM "{table}" WHERE position($1::bytea IN {value}) > 0', b"-rule-1-end"
            )
            assert quoted == 0, (table, column)
    finally:
        await connection.close()


def test_settings_inside_a_history_stay_messages(service: Service, model: Model, http: httpx.Client, key: str) -> None:
    """An instruction that sets more than words (`output_config`) keeps its members when its place is cut."""
    client, markers = new_client(service, model, http, "claude-code", key, x_tersely_epoch=SMALL)
    client.ask()
    setting = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    client.ask(client.wire.user("Be quick."), setting)
    for turn in range(1, 12):
        client.say(question(turn))
        check(model, key, markers)
    assert int(client.epoch) > 1
    sent = json.loads(sent_by(model, key)[-1].body)["messages"]
    assert [message for message in sent if "output_config" in message] == [setting]
    assert "Be quick." not in json.dumps(sent)
