"""`TERSELY_SHADOW`: requests go up as they come, and figures say what another strategy would have sent."""

from __future__ import annotations

import asyncio
import html
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.common.metrics import Metrics
from tersely.service.money.prices import Prices
from tersely.service.shadows.planning import AnsweredCall
from tersely.service.shadows.shadows import ShadowJob, Shadows
from tersely.store.commit.records import CallReport
from tersely.store.db.connection import Database as Store
from tersely.store.ops import shadows as shadow_rows
from tersely.store.ops.shadows import ShadowCall
from tests.conftest import Database
from tests.support.dialect_wires import WIRES, Wire
from tests.support.http import Answered, body_of, post
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import Model

# Cut above 2,000 tokens: after about fourteen questions with PADDING.
POLICY = '{"high": 2000, "low": 900, "instructions_at": 0.25}'
PADDING = "These words are here to be counted, and nothing else. " * 10
GCA = Wire(path="/v1internal:generateContent", stream_path="/v1internal:streamGenerateContent?alt=sse")
WAYS = {**WIRES, "gemini_gca": GCA}
TURNS = 24
# Of one token each.
SUBJECTS = iter(range(100, 1000))
JUDGED = "SELECT * FROM shadow_calls WHERE session_id = $1 ORDER BY number"


@pytest.fixture(scope="module")
def replicas(store: Database, model: Model) -> Iterator[tuple[Service, Service]]:
    """Two processes on one database that try out `slim`."""
    with (
        serve(store, model.url, epoch=POLICY, shadow="slim") as first,
        serve(store, model.url, epoch=POLICY, shadow="slim") as second,
    ):
        yield first, second


@dataclass
class Talk:
    """A conversation: what the client sent, what went up, what came back."""

    given: list[bytes] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)

    @property
    def session(self) -> str:
        (session,) = {answer.session for answer in self.answers}
        return session


def body_for(dialect: str, history: Sequence[tuple[str, str]], *, stream: bool) -> bytes:
    if dialect == "gemini_gca":
        inner = json.loads(WIRES["gemini"].body(history))
        return json.dumps({"model": "gemini-3-flash", "project": "p", "request": inner}).encode()
    return WAYS[dialect].body(history, stream=stream)


async def talk(
    services: Sequence[Service], model: Model, key: str, dialect: str, *, stream: bool, turns: int, **headers: str
) -> Talk:
    way, history, found, subject = WAYS[dialect], [], Talk(), next(SUBJECTS)
    for turn in range(turns):
        history.append(("user", f"Question {turn} of {subject}. {PADDING}"))
        model.script(key, ScriptedReply(message={"role": "assistant", "content": f"Answer {turn}."}))
        body = body_for(dialect, history, stream=stream)
        path = way.stream_path if stream and way.stream_path else way.path
        answer = await post(services[turn % len(services)], body, path=path, X_Script=key, **headers)
        assert answer.status == 200, answer.body
        found.given.append(body)
        found.sent.append(model.last.body)
        found.answers.append(answer)
        history.append(("assistant", f"Answer {turn}."))
    return found


async def judged(service: Service, session: str, count: int) -> list[Any]:
    """The judged calls of a session, once there are ``count``."""
    rows: list[Any] = []
    for _ in range(600):
        rows = await query(service, JUDGED, session)
        if len(rows) >= count:
            return rows
        await asyncio.sleep(0.05)
    raise AssertionError(f"{len(rows)} of {count} calls were judged")


async def get(service: Service, path: str) -> Any:
    answer = await post(service, b"", method="GET", path=path)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", WAYS)
async def test_requests_go_up_byte_for_byte_and_figures_are_those_of_a_real_session(
    replicas: tuple[Service, Service], model: Model, key: str, dialect: str, stream: bool
) -> None:
    tried = await talk(replicas, model, key, dialect, stream=stream, turns=TURNS)
    real = await talk(replicas, model, key + "r", dialect, stream=stream, turns=TURNS, X_Tersely_Strategy="slim")

    assert tried.sent == tried.given
    assert {answer.context for answer in tried.answers} == {"passthrough"}
    rows = await judged(replicas[0], tried.session, TURNS)
    calls = (await get(replicas[0], f"/api/sessions/{real.session}/calls?limit=100"))["items"]
    assert real.sent != real.given
    assert calls[-1]["epoch"] > 2
    assert [(row["tokens"], row["epoch"]) for row in rows] == [(each["tokens_after"], each["epoch"]) for each in calls]
    assert not await query(replicas[0], JUDGED, real.session)


# Cut above about 2,000 tokens, as `POLICY` does for strategies that follow watermarks.
SMALL: dict[str, dict[str, Any]] = {
    "window": {"name": "window", "context_size": 6},
    "trim": {"name": "trim", "max_context_tokens": 2_000},
    "compact": {"name": "compact", "max_tokens": 1_500, "reserve_tokens": 126_000, "keep_recent_tokens": 600},
    "tiered": {"name": "tiered", "total_budget": 2_000, "session_budget": 500, "working_budget": 800},
}


@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic"])
@pytest.mark.parametrize("strategy", SMALL)
async def test_figures_of_every_strategy_are_those_of_a_real_session(
    replicas: tuple[Service, Service], model: Model, key: str, strategy: str, dialect: str
) -> None:
    # What `compact` reserves counts from the model's window.
    reserve = {"reserve_tokens": 198_500} if (strategy, dialect) == ("compact", "anthropic") else {}
    setting = json.dumps(SMALL[strategy] | reserve)
    tried = await talk(replicas, model, key, dialect, stream=False, turns=TURNS, X_Tersely_Shadow=setting)
    real = await talk(replicas, model, key + "r", dialect, stream=False, turns=TURNS, X_Tersely_Strategy=setting)

    assert tried.sent == tried.given
    rows = await judged(replicas[0], tried.session, TURNS)
    calls = (await get(replicas[0], f"/api/sessions/{real.session}/calls?limit=100"))["items"]
    assert real.sent != real.given
    assert calls[-1]["epoch"] > 1
    assert [json.loads(each) for each in {row["strategy"] for row in rows}] == [json.loads(setting)]
    assert [(row["tokens"], row["epoch"]) for row in rows] == [(each["tokens_after"], each["epoch"]) for each in calls]


async def test_tokens_of_a_shadow_repeat_within_an_epoch(
    replicas: tuple[Service, Service], model: Model, key: str
) -> None:
    tried = await talk(replicas, model, key, "openai_chat", stream=False, turns=TURNS)

    rows = await judged(replicas[0], tried.session, TURNS)
    for before, after in pairwise(rows):
        # The newest question was estimated at its own call, and is counted since.
        assert 0 <= before["full_tokens"] - after["full_cached"] <= 15
        if after["epoch"] == before["epoch"]:
            assert 0 <= before["tokens"] - after["cached_tokens"] <= 15
    assert any(after["cached_tokens"] < before["tokens"] for before, after in pairwise(rows))


def step(number: int, name: str, text: str, **arguments: str) -> list[dict[str, Any]]:
    called = {"name": name, "arguments": json.dumps(arguments)}
    return [
        {"role": "assistant", "tool_calls": [{"id": f"call_{number}", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
    ]


async def run_agent(service: Service, model: Model, key: str, steps: Sequence[list[dict[str, Any]]]) -> str:
    """Play an agent's task with a tool call for each step; returns the session."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Mend it, {key}."}]
    session = ""
    for reply, result in steps:
        model.script(key, ScriptedReply(message=reply))
        answer = await post(service, body_of(*messages), X_Script=key)
        assert answer.status == 200, answer.body
        session = answer.session
        messages += [answer.json["choices"][0]["message"], result]
    return session


async def test_parameter_sets_of_one_strategy_are_told_apart(
    replicas: tuple[Service, Service], model: Model, key: str
) -> None:
    short, long = ('{"name":"window","context_size":2}', '{"name":"window","context_size":9}')
    history: list[tuple[str, str]] = []
    session = ""
    for turn, tried in enumerate((short, short, long, long, long)):
        history.append(("user", f"Question {turn} of {key}. {PADDING}"))
        model.script(key, ScriptedReply(message={"role": "assistant", "content": f"Answer {turn}."}))
        body = WIRES["openai_chat"].body(history)
        session = (await post(replicas[0], body, X_Script=key, X_Tersely_Shadow=tried)).session
        history.append(("assistant", f"Answer {turn}."))
    await judged(replicas[0], session, 5)

    shadow = (await get(replicas[0], f"/api/sessions/{session}/stats"))["shadow"]
    assert (shadow["strategy"], shadow["calls"]) == (long, 3)
    total = (await get(replicas[0], "/api/savings"))["total"]["shadow"]
    assert total["strategy"] is None
    sentences = total["text"].split("; ")
    assert len(sentences) == len({each.partition(" these calls would ")[0] for each in sentences})
    for tried, calls in ((short, 2), (long, 3)):
        (sentence,) = [each for each in sentences if each.startswith(f"with {tried} these calls would have cost ")]
        assert f" of {calls} calls used something" in sentence
    page = await post(replicas[0], b"", method="GET", path="/console/savings")
    assert "; with {" in html.unescape(page.body.decode())


async def test_calls_that_use_what_is_cut_are_counted_in_all_views(
    replicas: tuple[Service, Service], model: Model, key: str
) -> None:
    line = "result = compute(first_value, second_value)"
    # Too long for an excerpt in the head.
    text = f"def run():\n    {line}\n" + "".join(f"    first_value = advance(first_value, {n})\n" for n in range(60))
    steps = [step(0, "read", text, path="src/deep/engine.py")]
    steps += [step(n, "look", f"{n} {PADDING}" * 3, word=f"word{n}") for n in range(1, 16)]
    steps.append(step(16, "edit", "done", path="src/deep/engine.py", old_string=line, new_string="result = 1"))

    session = await run_agent(replicas[0], model, key, steps)
    rows = await judged(replicas[0], session, len(steps))

    last = rows[-1]
    assert (last["edits"], last["ready"], last["full_ready"]) == (1, 0, 1)
    assert last["pointing"] == 1
    shadow = (await get(replicas[0], f"/api/sessions/{session}/stats"))["shadow"]
    assert shadow["strategy"] == "slim"
    assert shadow["calls"] == len(steps)
    assert shadow["missing_calls"] == 1
    assert shadow["edits"] == {"calls": 1, "ready": 0, "full_ready": 1}
    assert 0 < shadow["relative_price"] < 1
    price = f"{shadow['relative_price']:.2f}"
    expected = f"this session would have cost {price} of what it cost, and 1 of 17 calls used something that would have"
    assert shadow["text"].startswith(expected)
    total = (await get(replicas[0], "/api/savings"))["total"]["shadow"]
    assert total["calls"] >= len(steps)
    assert total["missing_calls"] >= 1
    page = await post(replicas[0], b"", method="GET", path=f"/console/session/savings?id={session}")
    assert expected in page.body.decode()
    listed = await post(replicas[0], b"", method="GET", path="/console/sessions")
    assert f"shadow {price}" in listed.body.decode()


async def click(service: Service, session: str) -> int:
    """Press the button of the savings page; returns the status."""
    async with httpx.AsyncClient(base_url=service.url) as http:
        page = await http.get("/console/session/savings", params={"id": session})
        form = page.text[page.text.index('action="/console/session/strategy"') :]
        given = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form[: form.index("</form>")]))
        refused = await http.post("/console/session/strategy", data={**given, "token": "0" * 64})
        assert refused.status_code == 403
        return (await http.post("/console/session/strategy", data=given)).status_code


@pytest.mark.parametrize("way", ["patch", "click"])
async def test_a_session_is_switched_from_shadow_to_real(
    replicas: tuple[Service, Service], model: Model, key: str, way: str
) -> None:
    tried = await talk(replicas, model, key, "openai_chat", stream=False, turns=TURNS)
    await judged(replicas[0], tried.session, TURNS)

    if way == "patch":
        path = f"/api/sessions/{tried.session}"
        assert (await post(replicas[0], b'{"strategy": "slim"}', method="PATCH", path=path)).status == 200
    else:
        assert await click(replicas[0], tried.session) == 303
    history = [(message["role"], message["content"]) for message in json.loads(tried.given[-1])["messages"]]
    history += [("assistant", f"Answer {TURNS - 1}."), ("user", "And now?")]
    whole = await post(
        replicas[0],
        json.dumps({"messages": [{"role": "user", "content": "And now?"}], "model": "gpt-4o-mini"}).encode(),
        path=f"/api/sessions/{tried.session}/context",
    )
    answer = await post(replicas[1], WIRES["openai_chat"].body(history), X_Script=key, X_Tersely_Shadow="slim")

    assert answer.session == tried.session
    assert answer.context == "built"
    assert int(answer.headers["x-tersely-tokens-after"]) < 2000 < int(answer.headers["x-tersely-tokens-before"])
    sent = json.loads(model.last.body)["messages"]
    assert sent[-len(whole.json["messages"]) :] == whole.json["messages"]
    assert any("Answer 3." in json.dumps(message) for message in sent)  # the log of the turns that are cut
    await asyncio.sleep(0.5)
    assert len(await query(replicas[0], JUDGED, tried.session)) == TURNS


async def test_calls_whose_history_the_host_has_are_not_judged(
    replicas: tuple[Service, Service], model: Model, key: str
) -> None:
    """The model's input is not known then: zero tokens would look like a saving."""
    referenced: dict[str, str] = {}
    session = ""
    for turn in range(3):
        body = {"model": "gpt-4o", "input": [{"role": "user", "content": f"Question {turn}. {PADDING}"}], **referenced}
        answer = await post(
            replicas[0], json.dumps(body).encode(), path="/v1/responses", X_Script=key, X_Tersely_Shadow="trim"
        )
        assert answer.status == 200
        assert json.loads(model.last.body) == body
        referenced, session = {"previous_response_id": answer.json["id"]}, answer.session

    await judged(replicas[0], session, 1)
    await asyncio.sleep(0.5)
    rows = await query(replicas[0], JUDGED, session)
    assert [row["number"] for row in rows] == [1]
    assert rows[0]["tokens"] > 0


async def test_a_call_that_adds_to_a_stored_history_counts_all_of_it_in_the_queue(
    replicas: tuple[Service, Service], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(Shadows, "submit", lambda _, job: sizes.append(job.size))
    session = f"queued-{key}"
    long = "".join(f"Line {number} is one of very many. " for number in range(3000))
    for content in (long, "and?"):
        answer = await post(replicas[0], body_of(content), X_Script=key, X_Tersely_Session=session)
        assert answer.status == 200
    first, second = sizes
    assert first > 3 * len(long)
    assert second > len(long)


@pytest.mark.parametrize("shadow", ["meter", "off"])
async def test_meter_plans_nothing_and_off_ends_a_shadow(
    replicas: tuple[Service, Service], model: Model, key: str, shadow: str
) -> None:
    found = await talk(replicas, model, key, "anthropic", stream=False, turns=20, X_Tersely_Shadow=shadow)

    assert (found.sent == found.given) is (shadow == "meter")
    stats = await get(replicas[0], f"/api/sessions/{found.session}/stats")
    assert stats["calls"] == 20
    assert stats["shadow"] is None
    assert (stats["tokens_before"] == stats["tokens_after"]) is (shadow == "meter")


async def test_figures_are_those_of_the_strategy_that_was_tried_last(
    replicas: tuple[Service, Service], model: Model, key: str
) -> None:
    history: list[tuple[str, str]] = []
    session = ""
    for turn, tried in enumerate(("slim", "slim", "window", "window", "window")):
        history.append(("user", f"Question {turn} of {key}."))
        model.script(key, ScriptedReply(message={"role": "assistant", "content": f"Answer {turn}."}))
        body = WIRES["openai_chat"].body(history)
        session = (await post(replicas[0], body, X_Script=key, X_Tersely_Shadow=tried)).session
        history.append(("assistant", f"Answer {turn}."))
    rows = await judged(replicas[0], session, 5)

    shadow = (await get(replicas[0], f"/api/sessions/{session}/stats"))["shadow"]
    assert (shadow["strategy"], shadow["calls"]) == ("window", 3)
    assert shadow["tokens"] == sum(row["tokens"] for row in rows[2:])
    assert "of 3 calls" in shadow["text"]


async def test_unknown_shadow_is_refused(service: Service) -> None:
    answer = await post(service, body_of("Hello"), X_Tersely_Shadow="slimmer")

    assert answer.status == 400
    assert "shadow must be one of" in answer.json["error"]["message"]


async def test_session_ids_of_another_tenant_have_no_shadow(replicas: tuple[Service, Service]) -> None:
    answer = await post(replicas[0], b"", method="GET", path="/api/sessions/nobody/stats")

    assert answer.status == 404


async def test_a_removed_turn_leaves_nothing_in_the_shadow(
    replicas: tuple[Service, Service], model: Model, key: str
) -> None:
    tried = await talk(replicas, model, key, "openai_chat", stream=False, turns=TURNS)
    await judged(replicas[0], tried.session, TURNS)
    state = "SELECT plan, sent FROM shadows WHERE session_id = $1"
    (before,) = await query(replicas[0], state, tried.session)
    assert b"Answer 0." in before["plan"], "the shadow's log tells of the first turn"

    removed = await post(replicas[0], b"", method="DELETE", path=f"/api/sessions/{tried.session}/turns/t1")
    assert removed.status == 204
    (after,) = await query(replicas[0], state, tried.session)
    assert b"Answer 0." not in after["plan"]
    assert after["sent"] == b""

    # A call that was answered before the removal, and is judged after it, does not bring the text back.
    database = Store(dsn=replicas[0].database.dsn)
    await database.open()
    try:
        async with database.transaction("default") as connection:
            found = await shadow_rows.get(connection, "default", tried.session)
            assert found is not None
            last = await query(replicas[0], JUDGED, tried.session)
            names = [each.name for each in fields(ShadowCall)]
            call = ShadowCall(**{name: last[-1][name] for name in names})
            is_stored = await shadow_rows.advance(
                connection, "default", tried.session, found, call, expected=found.last_call, edits=0,
                now=datetime.now(UTC),
            )  # fmt: skip
        assert not is_stored
    finally:
        await database.close()


# The queue


def job_of(release: Any, *, size: int = 10) -> ShadowJob:
    def load() -> AnsweredCall:
        release.wait(10)
        raise RuntimeError("not to be judged")

    report = CallReport(model="", strategy="full", epoch=1, cut=1, tools=None, tokens_before=1, tokens_after=1)
    return ShadowJob(
        tenant="default", session_id="none", number=1, edits=0, strategy="slim", dialect="openai_chat", report=report,
        started=datetime.now(UTC), size=size, load=load,
    )  # fmt: skip


@pytest.mark.parametrize("bounds", [{"most_jobs": 2}, {"most_bytes": 25}])
async def test_a_full_queue_drops_calls_and_counts_them(store: Database, bounds: dict[str, int]) -> None:
    release, database, metrics = threading.Event(), Store(dsn=store.dsn), Metrics()
    await database.open()
    shadows = Shadows(database, Prices(), metrics, monotonic=time.monotonic, clock=lambda: datetime.now(UTC), **bounds)

    def count(result: str) -> float:
        samples = metrics.samples()["tersely_shadow_calls_total"]
        return next(value for labels, value in samples if labels["result"] == result)

    try:
        began = time.monotonic()
        for _ in range(5):
            shadows.submit(job_of(release))
        assert time.monotonic() - began < 1
        assert count("dropped") == 3
        release.set()
        async with asyncio.timeout(20):
            while count("failed") < 2:
                await asyncio.sleep(0.01)
        shadows.submit(job_of(release))
        assert count("dropped") == 3
    finally:
        await shadows.close()
        await database.close()


async def test_work_takes_a_share_of_the_time(store: Database) -> None:
    class Slow:
        def wait(self, _: float) -> None:
            time.sleep(0.05)

    database, metrics = Store(dsn=store.dsn), Metrics()
    await database.open()
    shadows = Shadows(database, Prices(), metrics, monotonic=time.monotonic, clock=lambda: datetime.now(UTC), share=0.2)
    try:
        began = time.monotonic()
        for _ in range(4):
            shadows.submit(job_of(Slow()))
        async with asyncio.timeout(20):
            while dict_of(metrics)["failed"] < 4:
                await asyncio.sleep(0.01)
        # Three pauses of four times the work.
        assert time.monotonic() - began > 3 * 5 * 0.05
    finally:
        await shadows.close()
        await database.close()


def dict_of(metrics: Metrics) -> dict[str, float]:
    return {labels["result"]: value for labels, value in metrics.samples()["tersely_shadow_calls_total"]}
