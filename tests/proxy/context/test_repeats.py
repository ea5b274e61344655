"""`TERSELY_REPEATS`: repeated text goes up once; store, client and console know all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tersely.dialects.registry import dialect_named
from tersely.domain.history.history import Epoch
from tersely.store.history.sessions import read_epoch
from tests.conftest import Database
from tests.support.dialect_wires import WIRES
from tests.support.http import post
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import Model

SIGNATURE = "skip_thought_signature_validator"
FILE = "\n".join(f"def function_{n}(argument: int) -> int: return argument + {n}" for n in range(40))

EPOCH = '{"high": 2850, "low": 2300}'
STRATEGY = '{"name": "slim", "recent_turns": 2, "files": 0, "references": 0}'


@pytest.fixture(scope="module")
def folding(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url, repeats="on", live_sessions="64") as running:
        yield running


def step(dialect: str, number: int, text: str) -> list[dict[str, Any]]:
    """A call that reads the file, and its result."""
    name, given, arguments = f"call_{number}", {"path": "src/app.py"}, '{"path": "src/app.py"}'
    match dialect:
        case "openai_chat":
            called = {"id": name, "type": "function", "function": {"name": "read", "arguments": arguments}}
            return [
                {"role": "assistant", "content": None, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": name, "content": text},
            ]
        case "openai_responses":
            return [
                {"type": "function_call", "call_id": name, "name": "read", "arguments": arguments},
                {"type": "function_call_output", "call_id": name, "output": text},
            ]
        case "anthropic":
            use = {"type": "tool_use", "id": name, "name": "read", "input": given}
            answer = {"type": "tool_result", "tool_use_id": name, "content": [{"type": "text", "text": text}]}
            return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
        case _:
            response = {"name": "read", "response": {"output": text}}
            return [
                {
                    "role": "model",
                    "parts": [{"functionCall": {"name": "read", "args": given}, "thoughtSignature": SIGNATURE}],
                },
                {"role": "user", "parts": [{"functionResponse": response}]},
            ]


def body_for(dialect: str, key: str, steps: int, *, stream: bool) -> bytes:
    member = {"openai_responses": "input", "gemini": "contents", "gemini_gca": "contents"}.get(dialect, "messages")
    body = json.loads(WIRES[dialect].body(f"Read it, {key}.", stream=stream))
    for number in range(steps):
        body.get("request", body)[member] += step(dialect, number, FILE)
    return json.dumps(body).encode()


def sent(dialect: str, body: bytes) -> list[bytes]:
    return [message.raw for message in dialect_named(dialect).read_request(body).messages]


@pytest.mark.parametrize("strategy", ["full", "slim"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", WIRES)
async def test_repeated_results_go_up_as_references(
    folding: Service, model: Model, key: str, dialect: str, stream: bool, strategy: str
) -> None:
    way = WIRES[dialect]
    path = way.stream_path if stream and way.stream_path else way.path
    ups: list[bytes] = []
    session = ""
    for steps in (1, 2, 3):
        body = body_for(dialect, key, steps, stream=stream)
        answer = await post(
            folding, body, path=path, X_Script=key, X_Tersely_Strategy=strategy, X_Tersely_Session=f"{key}-{steps}"
        )
        assert answer.status == 200, answer.body
        session = answer.session
        ups.append(model.last.body)

    once, twice, thrice = (sent(dialect, body) for body in ups)
    assert twice[: len(once)] == once
    assert thrice[: len(twice)] == twice
    assert b"Repeated text: lines" not in b"".join(once)
    assert twice[-1].count(b"Repeated text: lines 1 to 40 of the result of read(path=src/app.py)") == 1
    assert b"function_7(" not in twice[-1]
    # Whoever asks again gets the whole text.
    assert b"function_7(" in thrice[-1]

    stored = await post(folding, b"", method="GET", path=f"/api/sessions/{session}/messages?view=client")
    assert json.dumps(stored.json["items"]).count("function_7(") == 3
    shown_context = (await post(folding, b"", method="GET", path=f"/api/sessions/{session}/calls/1/context")).json
    assert json.dumps(shown_context["messages"]).count("function_7(") == 2
    reasons = [line["reason"] for line in shown_context["lines"] if line["kept"] == "truncated"]
    assert reasons == ["shortened: text that stands above"]


async def test_a_session_goes_on_with_its_references(folding: Service, model: Model, key: str) -> None:
    ups: list[list[bytes]] = []
    for steps in (1, 2, 4):
        await post(folding, body_for("anthropic", key, steps, stream=False), path="/v1/messages", X_Script=key)
        ups.append(sent("anthropic", model.last.body))

    marked = [b"".join(each).count(b"Repeated text: lines") for each in ups]
    assert marked == [0, 1, 2]
    assert ups[2][:3] == ups[1][:3]


async def test_a_second_ask_by_another_tool_after_a_cut_goes_up_whole(folding: Service, model: Model, key: str) -> None:
    body = json.loads(body_for("openai_chat", key, 1, stream=False))
    body["messages"] += [
        {"role": "assistant", "content": f"It has forty functions. {'word ' * 1_200}"},
        {"role": "user", "content": "Read it again."},
        *step("openai_chat", 1, FILE),
    ]
    how = {"X_Script": key, "X_Tersely_Session": key, "X_Tersely_Epoch": EPOCH, "X_Tersely_Strategy": STRATEGY}
    await post(folding, json.dumps(body).encode(), **how)
    assert b"Repeated text: lines 1 to 40" in sent("openai_chat", model.last.body)[-1]

    # The first copy is cut: the second one goes up whole.
    body["messages"] += [
        {"role": "assistant", "content": "It still has forty functions."},
        {"role": "user", "content": f"Now look at this listing. {'word ' * 300}"},
    ]
    await post(folding, json.dumps(body).encode(), **how)
    assert b"".join(sent("openai_chat", model.last.body)).count(b"function_7(") == 1
    assert b"Repeated text" not in b"".join(sent("openai_chat", model.last.body))

    called = {"id": "call_9", "type": "function", "function": {"name": "bash", "arguments": '{"command": "cat it"}'}}
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_9", "content": FILE},
    ]
    before = sent("openai_chat", model.last.body)
    await post(folding, json.dumps(body).encode(), **how)
    after = sent("openai_chat", model.last.body)
    assert b"function_7(" in after[-1]
    assert after[: len(before)] == before


async def plans_of(service: Service, session: str) -> list[Epoch]:
    """The stored plans of a session: the current one, and those of its epochs."""
    stored = "SELECT plan FROM sessions WHERE id = $1 UNION ALL SELECT plan FROM epochs WHERE session_id = $1"
    return [read_epoch(row["plan"]) for row in await query(service, stored, session)]


async def test_removed_turns_leave_no_checksums(folding: Service, model: Model, key: str) -> None:
    body = json.loads(body_for("openai_chat", key, 2, stream=False))
    how = {"X_Script": key, "X_Tersely_Session": key, "X_Tersely_Epoch": EPOCH, "X_Tersely_Strategy": STRATEGY}
    await post(folding, json.dumps(body).encode(), **how)
    for turn in (2, 3):
        body["messages"] += [
            {"role": "assistant", "content": f"It has forty functions. {'word ' * 1_200}"},
            {"role": "user", "content": f"Look at listing {turn}. {'word ' * 300}"},
        ]
        await post(folding, json.dumps(body).encode(), **how)
    session = (await post(folding, json.dumps(body).encode(), **how)).session
    plans = await plans_of(folding, session)
    assert all(plan.repeats and plan.repeats.replaced for plan in plans[:1]), plans

    removed = await post(folding, b"", method="DELETE", path=f"/api/sessions/{session}/turns/t1")
    assert removed.status == 204
    plans = await plans_of(folding, session)
    assert len(plans) > 1
    assert [plan.repeats for plan in plans] == [None] * len(plans)


async def test_contexts_over_rest_are_those_of_calls(folding: Service, key: str) -> None:
    messages = json.loads(body_for("openai_chat", key, 2, stream=False))["messages"]
    await post(folding, json.dumps({"messages": messages}).encode(), path=f"/api/sessions/{key}/messages")
    made = (await post(folding, b"{}", path=f"/api/sessions/{key}/context")).json

    assert json.dumps(made["messages"]).count("function_7(") == 1
    assert "Repeated text: lines 1 to 40" in json.dumps(made["messages"])


async def test_off_is_the_default(service: Service, model: Model, key: str) -> None:
    body = body_for("anthropic", key, 2, stream=False)
    await post(service, body, path="/v1/messages", X_Script=key)
    assert model.last.body == body
