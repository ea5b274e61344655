"""A session that was exported and imported elsewhere is the same one: for its client, for models, and for people."""

from __future__ import annotations

import asyncio
import json
import secrets
from base64 import b64encode
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tersely.composition.clock import clock
from tersely.dialects.wire import raw_json
from tersely.domain.history.history import Epoch, Repeats
from tersely.service.common import auth
from tersely.store.history.sessions import write_epoch
from tersely.store.ops import keys
from tersely.strategies.reduction.repeats import MAX_REPLACED
from tests.api.conftest import Api, serve
from tests.conftest import Database
from tests.support.stores import open_store

Key = dict[str, str]
MODEL = "gpt-4o"
STRATEGIES = (None, "slim", "full", "window", "trim", "compact", "tiered")
LONG = "long words of an output, " * 400


async def export(api: Api, session: str, key: Key) -> bytes:
    answer = await api.http.get(f"/api/sessions/{session}/export", headers=key)
    assert answer.status_code == 200, answer.text
    return answer.content


async def take_in(api: Api, document: bytes, key: Key, **more: object) -> Any:
    members = raw_json.split_object(document) | {name: json.dumps(value).encode() for name, value in more.items()}
    headers = {"content-type": "application/json", **key}
    return await api.http.post("/api/sessions/import", content=raw_json.join_object(members), headers=headers)


async def everything(api: Api, session: str, key: Key) -> dict[str, Any]:
    """All that can be seen of a session, but for when it was made."""
    seen: dict[str, Any] = {}
    path = f"/api/sessions/{session}"
    for where in ("state", "scratchpad", "terse?limit=1000", "turns?limit=200", "events", "stats"):
        seen[where] = (await api.http.get(f"{path}/{where}", headers=key)).content.replace(session.encode(), b"*")
    for view in ("client", "model", "all"):
        seen[view] = (await api.http.get(f"{path}/messages?limit=1000&view={view}", headers=key)).content
    found = (await api.http.get(path, headers=key)).json()
    seen["session"] = {name: found[name] for name in ("strategy", "epoch", "metadata", "turns", "messages", "tokens")}
    for strategy in STRATEGIES:
        for dialect in ("openai_chat", "anthropic"):
            body = {"model": MODEL, "strategy": strategy, "dialect": dialect}
            seen[f"{strategy} {dialect}"] = (await api.http.post(f"{path}/context", json=body, headers=key)).content
    return seen


def message(role: str, text: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": text, **more}


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
TURN = st.builds(
    lambda question, reply, terse, outputs, call: [
        message("user", question),
        *(
            piece
            for number, output in enumerate(outputs)
            for piece in (
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": f"{call}{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": f"{call}{number}", "content": output},
            )
        ),
        message("assistant", f"{reply}.\n### STATE\nGoal: {reply}\n{terse}"),
    ],
    WORDS,
    WORDS,
    st.sampled_from(["", "<terse>done</terse>", "<terse>a</terse> and <terse>b</terse>"]),
    st.lists(st.sampled_from(["ok", LONG, LONG * 6]), max_size=2),
    st.uuids().map(str),
)
DEED = st.sampled_from(
    [
        ("post", "undo", None),
        ("post", "turns/t1/drop", None),
        ("delete", "turns/t2", None),
        ("post", "messages/1/pin", None),
        ("put", "messages/2/priority", {"priority": 90}),
        ("put", "state", {"text": "Goal: mine\u2028"}),
        ("put", "scratchpad", {"text": "a plan\n"}),
        ("post", "compact", {}),
        ("post", "clear", {}),
        ("patch", "", {"strategy": {"name": "tiered"}, "metadata": {"a": [1.5, "\u00e4"]}}),
        ("patch", "", {"strategy": "compact", "epoch": {"stride": 2}}),
        ("patch", "", {"strategy": "window"}),
    ]
)


# An example may hold messages of a hundred kilobytes; Hypothesis warns when it writes such a one down.
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_out_and_in_to_another_tenant_is_the_same(database: Database) -> None:
    with asyncio.Runner() as runner:

        async def begin() -> tuple[AsyncExitStack, Api, Key, Key]:
            stack = AsyncExitStack()
            api = await stack.enter_async_context(serve(database.dsn, auth="keys"))
            return stack, api, await new_key(database, "ours"), await new_key(database, "theirs")

        stack, api, ours, theirs = runner.run(begin())

        @settings(max_examples=12, suppress_health_check=list(HealthCheck))
        @given(goes=st.lists(st.one_of(TURN, TURN, DEED), min_size=1, max_size=12))
        def same(goes: list[Any]) -> None:
            exported, exported_again = runner.run(export_and_import(api, ours, theirs, goes))
            assert exported_again == exported

        try:
            same()
        finally:
            runner.run(stack.aclose())


async def export_and_import(api: Api, ours: Key, theirs: Key, goes: list[Any]) -> tuple[bytes, bytes]:
    """Return the export of a session, and the export of its copy with the other tenant."""
    session, copy = (f"s-{secrets.token_hex(8)}" for _ in range(2))
    await api.http.post("/api/sessions", json={"id": session, "strategy": "slim"}, headers=ours)
    for each in goes:
        if isinstance(each, list):
            path = f"/api/sessions/{session}/messages"
            assert (await api.http.post(path, json={"messages": each}, headers=ours)).status_code == 201
        else:
            method, where, body = each
            path = f"/api/sessions/{session}/{where}".rstrip("/")
            assert (await api.http.request(method, path, json=body, headers=ours)).status_code < 500
    # Summaries that the appends asked for are made in the background.
    before, now = None, await everything(api, session, ours)
    while now != before:
        await asyncio.sleep(0.3)
        before, now = now, await everything(api, session, ours)
    document = await export(api, session, ours)
    made = await take_in(api, document, theirs, id=copy)
    assert made.status_code == 201, made.text
    assert await everything(api, copy, theirs) == await everything(api, session, ours)
    return document, await export(api, copy, theirs)


async def new_key(database: Database, tenant: str) -> Key:
    async with open_store(database) as store:
        text, stored = auth.new_key(
            tenant, "", now=clock(), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32)
        )
        await keys.add(store, stored)
    return {"x-tersely-key": text}


AT = "2026-01-01T00:00:00+00:00"
EVENT = {"number": 1, "kind": "x", "created_at": AT, "body": "AAAA"}
EPOCH = {"number": 1, "cut": 1, "reason": "first", "head_tokens": 0, "tokens_before": 0, "tokens_after": 0,
         "created_at": AT, "plan": "e30="}  # fmt: skip


def plan_with(replaced: bytes) -> str:
    """A plan as an export has it, with checksums of repeated text."""
    epoch = Epoch(
        number=1,
        cut=1,
        head=(),
        kept=(),
        reason="first",
        fingerprint="",
        references=(),
        created_at=datetime.fromisoformat(AT),
        repeats=Repeats(replaced=replaced),
    )
    return b64encode(write_epoch(epoch)).decode()


BAD: list[tuple[str, Any]] = [
    ("tersely.session.plan", lambda d: d["tersely"]["session"].update(plan=plan_with(b"abcde"))),
    ("tersely.session.plan", lambda d: d["tersely"]["session"].update(plan=plan_with(bytes(4 * MAX_REPLACED + 4)))),
    ("tersely.epochs[0].plan", lambda d: d["tersely"].update(epochs=[EPOCH | {"plan": plan_with(b"abc")}])),
    ("tersely.version", lambda d: d["tersely"].update(version=2)),
    ("tersely.secrets", lambda d: d["tersely"].update(secrets=[])),
    ("tersely.session", lambda d: d["tersely"].pop("session")),
    ("tersely.session.plan", lambda d: d["tersely"]["session"].update(plan="AAAA")),
    ("tersely.session.calls", lambda d: d["tersely"]["session"].update(calls=-1)),
    ("tersely.messages", lambda d: d["tersely"]["messages"].pop(0)),
    ("tersely.messages", lambda d: d["tersely"].update(messages={})),
    ("tersely.messages[0]", lambda d: d["tersely"]["messages"].insert(0, 7)),
    ("tersely.messages[1].turn", lambda d: d["tersely"]["messages"][1].update(turn=2**40)),
    ("tersely.messages[1].role", lambda d: d["tersely"]["messages"][1].update(role="wizard")),
    ("tersely.messages[1].raw", lambda d: d["tersely"]["messages"][1].update(role="assistant")),
    ("tersely.messages[2].raw", lambda d: d["context"][2].update(content=5.5, role="user")),
    ("tersely.messages[2].raw", lambda d: d["context"].__setitem__(2, {"turnId": "t1", "x": {"y": "z"}})),
    ("tersely.messages[1].status", lambda d: d["tersely"]["messages"][1].update(status="gone")),
    ("tersely.messages[1].place", lambda d: d["tersely"]["messages"][1].update(place=1e300)),
    ("tersely.messages[1].model_raw", lambda d: d["tersely"]["messages"][1].update(model_raw="***")),
    ("tersely.messages[1].raw", lambda d: d["tersely"]["messages"][1].update(model_raw="AAAA")),
    ("tersely.messages[1].tenant_id", None),
    ("tersely", lambda d: d["context"].pop()),
    ("tersely", lambda d: d["context"][1].update(turnId="t9")),
    ("tersely", lambda d: d["tersely"]["messages"][1].update(status="undone", raw="e30=")),
    ("tersely", lambda d: d["tersely"]["states"].extend(d["tersely"]["states"] * 2)),
    ("tersely.states[0].created_at", lambda d: d["tersely"]["states"][0].update(created_at="soon")),
    ("tersely.events[0].body", lambda d: d["tersely"].update(events=[EVENT])),
    ("tersely.epochs[0].plan", lambda d: d["tersely"].update(epochs=[EPOCH])),
    ("strategy", lambda d: d["tersely"]["session"].update(strategy="magic")),
]


@pytest.mark.parametrize(("field", "spoil"), BAD, ids=range(len(BAD)))
async def test_bad_copies_are_refused_whole(api: Api, field: str, spoil: Any) -> None:
    await api.append("one", message("system", "be kind"), message("user", "hi"), message("assistant", "Hello."))
    await api.http.put("/api/sessions/one/state", json={"text": "Goal: x"})
    document = json.loads(await export(api, "one", {}))
    if spoil is None:
        document["tersely"]["messages"][1]["tenant_id"] = "another"
        field = "tersely.messages[1]"
    else:
        spoil(document)
    refused = await take_in(api, json.dumps(document).encode(), {}, id="two")
    assert refused.status_code == 422, refused.text
    assert refused.json()["field"] == field
    assert (await api.http.get("/api/sessions/two")).status_code == 404


async def test_plans_with_checksums_of_repeated_text_are_imported(api: Api) -> None:
    await api.append("one", message("user", "hi"), message("assistant", "Hello."))
    document = json.loads(await export(api, "one", {}))
    document["tersely"]["session"]["plan"] = plan_with(bytes(4 * MAX_REPLACED))
    made = await take_in(api, json.dumps(document).encode(), {}, id="two")
    assert made.status_code == 201, made.text


async def test_everything_beside_the_history_may_be_missing_from_an_export(api: Api) -> None:
    await api.append("one", message("user", "hi"), message("assistant", "Hello. <terse>greeted</terse>"))
    document = json.loads(await export(api, "one", {}))
    del document["tersely"]
    assert (await take_in(api, json.dumps(document).encode(), {}, id="two")).status_code == 201
    again = json.loads(await export(api, "two", {}))
    assert (again["context"], again["terse"]) == (document["context"], document["terse"])


async def test_parents_and_settings_come_along(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "mother"})
    settings_of = {"strategy": {"name": "slim", "recent_turns": 2}, "epoch": {"stride": 3}, "metadata": {"a": 1}}
    await api.http.post("/api/sessions", json={"id": "one", "parent": "mother", **settings_of})
    document = await export(api, "one", {})
    here = (await take_in(api, document, {}, id="two")).json()
    assert here["parent"] == "mother"
    await api.http.delete("/api/sessions/mother")
    elsewhere = (await take_in(api, document, {}, id="three", metadata={"b": 2})).json()
    assert (elsewhere["parent"], elsewhere["metadata"]) == (None, {"b": 2})
    assert (await api.http.get("/api/sessions/one")).json()["strategy"] == here["strategy"] == elsewhere["strategy"]
    assert here["epoch"] == elsewhere["epoch"] == {"stride": 3}
