"""Tools of ours inside a proxied chat of OpenAI's responses: one well-formed reply, and a history that is whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.chat_messages import user
from tests.support.http import post, request_bytes, view_of, wire
from tests.support.loops import eventually
from tests.support.responses_talks import MODEL, TOOL
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model

PAD = ("manage_scratchpad", {"action": "update", "content": "remember the milk"})
OURS = {"query_db", "manage_scratchpad", "save_memo", "retrieve_memos"}
USAGE = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 15,
}


@pytest.fixture
def client(offering: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=offering.base_url, api_key="sk-upstream", max_retries=0) as made:
        yield made


# What the model says


def thought(name: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "encrypted_content": f"secret {name}"}


def words(name: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [part]}


def called(name: str, tool: str, given: Any) -> dict[str, Any]:
    arguments = given if isinstance(given, str) else json.dumps(given)
    head = {"type": "function_call", "id": f"fc_{name}", "call_id": name, "status": "completed"}
    return {**head, "name": tool, "arguments": arguments}


def reply_of(*items: dict[str, Any], **more: Any) -> ScriptedReply:
    return ScriptedReply(message={"output": list(items)}, **more)


def noting(name: str) -> dict[str, Any]:
    """A call of ours."""
    return called(name, *PAD)


# What the client does


def ask(client: openai.OpenAI, streams: bool, **request: Any) -> Response:
    """The response as the official client puts it together; its stream is looked at event by event."""
    if not streams:
        whole: Response = client.responses.create(model=MODEL, **request)
        return whole
    with client.responses.stream(model=MODEL, **request) as stream:
        events: list[Any] = list(stream)
        final: Response = stream.get_final_response()
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.created") == kinds.count("response.in_progress") == 1
    assert [kind for kind in kinds if kind == "response.completed"] == kinds[-1:]
    assert {event.response.id for event in events if hasattr(event, "response")} == {final.id}
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == list(range(len(done)))
    assert [(event.item.type, event.item.id) for event in done] == [(item.type, item.id) for item in final.output]
    written = "".join(event.model_dump_json(warnings=False) for event in events)
    assert not any(f'"{name}"' in written for name in OURS)
    return final


def echo(response: Response) -> list[dict[str, Any]]:
    """Return the part of a response that a client sends back."""
    items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    for item in items:
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return items


def answer(name: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": text}


def kinds(items: list[Any]) -> list[str]:
    return [str(item.get("type", "message")) for item in items]


def sent(model: Model, key: str, number: int) -> list[dict[str, Any]]:
    """The items of one of them."""
    return list(model.bodies(key)[number]["input"])


# One reply


@pytest.mark.parametrize("streams", [False, True])
def test_own_tool_call_is_answered_within_one_response(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    model.script(
        key,
        reply_of(thought("1"), words("1", "Let me note that."), noting("c1"), usage=USAGE),
        reply_of(thought("2"), noting("c2"), usage=USAGE),
        reply_of(thought("3"), words("3", "Noted."), usage=USAGE),
    )
    request: dict[str, Any] = {"user": key, "tools": [TOOL], "instructions": "Be kind.", "tool_choice": "auto"}
    first = [user(f"note this {key}")]
    seen = ask(client, streams, input=first, **request)
    assert [item.id for item in seen.output] == ["rs_1", "msg_1", "rs_3", "msg_3"]
    assert (seen.status, seen.instructions, [tool.name for tool in seen.tools]) == ("completed", "Be kind.", ["add"])  # type: ignore[union-attr]
    assert seen.usage is not None
    assert seen.usage.model_dump(exclude_none=True)["output_tokens_details"] == {"reasoning_tokens": 9}
    assert (seen.usage.input_tokens, seen.usage.input_tokens_details.cached_tokens) == (30, 12)
    assert seen.usage.total_tokens == 45

    third = sent(model, key, 2)
    ones = ["reasoning", "message", "function_call", "function_call_output"]
    assert kinds(third) == ["message", *ones, "reasoning", "function_call", "function_call_output"]
    assert [item["encrypted_content"] for item in third if item.get("type") == "reasoning"] == ["secret 1", "secret 2"]
    assert third[4]["output"].startswith("Saved.")
    assert [model.bodies(key)[n]["tools"] for n in (1, 2)] == [model.bodies(key)[0]["tools"]] * 2

    model.script(key, reply_of(words("4", "Milk.")))
    ask(client, streams, input=[*first, *echo(seen), user("what?")], **request)
    fourth = sent(model, key, 3)
    assert fourth[: len(third)] == third
    assert [item.get("id") for item in fourth[len(third) :]] == ["rs_3", "msg_3", None]
    assert model.bodies(key)[3]["tools"] == model.bodies(key)[0]["tools"]


@pytest.mark.parametrize("streams", [False, True])
def test_of_a_mixed_reply_the_client_sees_its_own_calls(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    model.script(key, reply_of(thought("1"), noting("c1"), called("c2", "add", {"a": 1}), called("c3", "query_db", {})))
    request: dict[str, Any] = {"user": key, "tools": [TOOL]}
    first = [user(f"do both {key}")]
    seen = ask(client, streams, input=first, **request)
    assert [item.id for item in seen.output] == ["rs_1", "fc_c2"]
    assert len(model.requests(key)) == 1

    model.script(key, reply_of(words("2", "Both done.")))
    assert ask(client, streams, input=[*first, *echo(seen), answer("c2", "2")], **request).output_text == "Both done."
    items = sent(model, key, 1)
    assert kinds(items)[1:] == ["reasoning", *["function_call"] * 3, *["function_call_output"] * 3]
    assert [item["call_id"] for item in items[2:]] == ["c1", "c2", "c3", "c1", "c3", "c2"]


@pytest.mark.parametrize("streams", [False, True])
def test_turns_with_calls_of_both_kinds_hang_together(
    client: openai.OpenAI, model: Model, offering: Service, store: Database, key: str, streams: bool
) -> None:
    headers = {"X-Tersely-Session": key}
    request: dict[str, Any] = {"user": key, "tools": [TOOL], "extra_headers": headers}
    model.script(
        key, reply_of(words("1", "First."), noting("c1")), reply_of(thought("2"), noting("c2"), called("t", "add", {}))
    )
    history = [user("go")]
    seen = ask(client, streams, input=history, **request)
    assert [item.id for item in seen.output] == ["msg_1", "rs_2", "fc_t"]
    assert [each["seq"] for each in view_of(offering, key, "client")] == [1, 4]
    assert [each["seq"] for each in view_of(offering, key, "model")] == [1, 2, 3, 4, 5]

    history += [*echo(seen), answer("t", "2")]
    model.script(key, reply_of(noting("c3")), reply_of(words("4", "Two.")))
    with serve(
        store, model.url, strategy="window", instructions="off", epoch=FROM_THE_START
    ) as other:  # which remembers nothing
        at_another = openai.OpenAI(base_url=other.base_url, api_key="sk", max_retries=0)
        seen = ask(at_another, streams, input=history, **request)
    assert seen.output_text == "Two."
    history += echo(seen)
    items = sent(model, key, 3)
    assert items[: len(sent(model, key, 1))] == sent(model, key, 1)
    assert [item["call_id"] for item in items if item.get("type") == "function_call"] == ["c1", "c2", "t", "c3"]
    assert [item["call_id"] for item in items if "output" in item] == ["c1", "c2", "t", "c3"]

    for number in range(2):
        history.append(user(f"more {number}"))
        model.script(
            key, reply_of(thought(f"m{number}"), noting(f"m{number}")), reply_of(words(f"n{number}", f"Ok {number}."))
        )
        history += echo(ask(client, streams, input=history, **request))
    # Only what is new: the stored history has it all.
    model.script(key, reply_of(words("z", "Yes.")))
    ask(client, streams, input=[user("sure?")], **request)
    whole = sent(model, key, -1)
    assert [item["call_id"] for item in whole if item.get("type") == "function_call"][-2:] == ["m0", "m1"]
    assert whole[: len(items)] == items
    assert {each["status"] for each in view_of(offering, key, "all")} == {"live"}


async def test_asynchronous_stream_delivers_text_at_once(offering: Service, model: Model, key: str) -> None:
    model.script(
        key,
        reply_of(words("1", "one two three four"), noting("c1"), delay=0.05, chunk_chars=4),
        reply_of(words("2", "five"), first_delay=0.5),
    )
    loop = asyncio.get_running_loop()
    async with openai.AsyncOpenAI(base_url=offering.base_url, api_key="sk", max_retries=0) as client:
        stream = await client.responses.create(model=MODEL, input=f"count {key}", user=key, stream=True)
        deltas = [(loop.time(), event.delta) async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(text for _, text in deltas) == "one two three fourfive"
    times = [at for at, _ in deltas]
    assert times[1] - times[0] > 0.03
    assert times[-1] - times[-2] > 0.4


@pytest.mark.parametrize("streams", [False, True])
def test_the_clients_items_can_be_sent_to_the_provider_unchanged(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    model.script(
        key,
        reply_of(thought("1"), noting("c1")),
        reply_of(thought("2"), words("2", "So."), thought("2b"), noting("c2")),
        reply_of(thought("3"), noting("c3"), thought("3b"), called("t", "add", {}), noting("c4")),
    )
    history = [user(f"go {key}")]
    seen = ask(client, streams, input=history, user=key, tools=[TOOL])
    assert [item.id for item in seen.output] == ["rs_2", "msg_2", "rs_3b", "fc_t"]
    history += [*echo(seen), answer("t", "1")]
    ask(client, streams, input=history, user=key, tools=[TOOL], extra_headers={"X-Tersely-Bypass": "true"})
    assert sent(model, key, -1) == history


def test_items_before_the_rounds_stay_before_them(client: openai.OpenAI, model: Model, key: str) -> None:
    late = {"role": "developer", "content": "Be brief from now on."}
    history = [user(f"go {key}"), late]
    model.script(key, reply_of(words("1", "So."), noting("c1")), reply_of(noting("c2")), reply_of(words("3", "There.")))
    seen = ask(client, False, input=history, user=key)
    ask(client, False, input=[*history, *echo(seen), user("on")], user=key)
    *_, last, following = [each["input"] for each in model.bodies(key)]
    assert last[:2] == history
    assert following[: len(last)] == last


@pytest.mark.parametrize("streams", [False, True])
def test_state_block_of_any_round_is_stripped(
    client: openai.OpenAI, model: Model, offering: Service, key: str, streams: bool
) -> None:
    state = "\n\n### STATE\nGoal: milk\nContext: {}\nResolved: none\nTechnical Anchors: none"
    model.script(
        key,
        reply_of(thought("1"), words("1", "Noting." + state.format("one")), noting("c1"), chunk_chars=5),
        reply_of(words("2", "Noted." + state.format("two")), chunk_chars=5),
    )
    headers = {"X-Tersely-Session": key}
    history = [user("go")]
    seen = ask(client, streams, input=history, user=key, extra_headers=headers)
    assert [item.id for item in seen.output] == ["rs_1", "msg_1", "msg_2"]
    assert seen.output_text.split() == ["Noting.Noted."] or seen.output_text.split() == ["Noting.", "Noted."]
    assert "Context: two" in httpx.get(f"{offering.url}/api/sessions/{key}/state").text
    ask(client, streams, input=[*history, *echo(seen), user("on")], user=key, extra_headers=headers)
    texts = [item["content"][0]["text"] for item in sent(model, key, -1) if item.get("role") == "assistant"]
    assert ["Context: one" in texts[0], "Context: two" in texts[1]] == [True, True]


@pytest.mark.parametrize("number", [1, 17], ids=["tools in their list", "tools among the items"])
async def test_codex_sees_one_response_and_continues_from_it(
    offering: Service, model: Model, key: str, shared_data: Path, number: int
) -> None:
    path = shared_data / "clients" / "codex" / "requests.jsonl"
    if not path.exists():
        pytest.skip(f"no recorded client at {path}")
    recorded = next(call for call in map(json.loads, path.read_text().splitlines()) if call["n"] == number)
    named = {name: value for name, value in recorded["headers"].items() if name in {"session-id", "thread-id"}}
    headers = {"X-Script": key} | {name: f"{value}-{key}" for name, value in named.items()}
    body: dict[str, Any] = recorded["body"]

    async def turn(*items: Any) -> list[dict[str, Any]]:
        request = json.dumps({**body, "input": [*body["input"], *items]}).encode()
        reply = await post(offering, request, path="/v1/responses", **headers)
        events = [json.loads(line[6:]) for line in reply.body.splitlines() if line.startswith(b"data: ")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert not any(f'"{name}"'.encode() in reply.body for name in OURS)
        assert events[-1]["response"]["tools"] == body.get("tools", [])
        done: list[dict[str, Any]] = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        return [{**item, "content": None} if item["type"] == "reasoning" else item for item in done]

    own = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "t", "name": "exec", "input": "ls"}
    model.script(
        key, reply_of(thought("1"), noting("c1")), reply_of(thought("2"), words("2", "Look."), noting("c2"), own)
    )
    seen = await turn()
    assert [item["id"] for item in seen] == ["rs_2", "msg_2", "ctc_1"]
    model.script(key, reply_of(thought("3"), words("3", "There.")))
    result = {"type": "custom_tool_call_output", "call_id": "t", "output": "a.txt"}
    assert [item["id"] for item in await turn(*seen, result)] == ["rs_3", "msg_3"]

    first, second, third = (
        json.loads(each.body) for each in model.state.received if each.headers.get("X-Script") == key
    )
    for request in (first, second, third):
        assert request["input"][: len(body["input"])] == body["input"]
        assert [tool.get("name") for tool in request["tools"][len(body.get("tools", [])) :]] == [
            "query_db", "manage_scratchpad", "save_memo", "retrieve_memos",
        ]  # fmt: skip
    assert third["input"][: len(second["input"])] == second["input"]
    assert kinds(third["input"][len(second["input"]) :]) == [
        *("reasoning", "message", "function_call", "custom_tool_call"),
        *("function_call_output", "custom_tool_call_output"),
    ]
    assert third["input"][-6]["encrypted_content"] == "secret 2"


def test_session_switching_to_chat_completions_keeps_only_text(client: openai.OpenAI, model: Model, key: str) -> None:
    headers = {"X-Tersely-Session": key}
    model.script(key, reply_of(thought("1"), words("1", "Noting."), noting("c1")), reply_of(words("2", "Noted.")))
    seen = ask(client, True, input=[user("go")], user=key, extra_headers=headers)
    model.script(key, ScriptedReply(message={"role": "assistant", "content": "Milk."}))
    history: list[Any] = [user("go"), {"role": "assistant", "content": "Noting.\nNoted."}, user("what?")]
    client.chat.completions.create(model=MODEL, messages=history, user=key, extra_headers=headers)
    messages = model.bodies(key)[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert "tool_calls" not in messages[1]
    assert "Noted." in messages[1]["content"]
    model.script(key, reply_of(words("4", "Yes.")))
    later = [user("go"), *echo(seen), user("what?"), {"role": "assistant", "content": "Milk."}, user("sure?")]
    ask(client, False, input=later, user=key, extra_headers=headers)
    assert kinds(sent(model, key, -1)) == [
        *("message", "reasoning", "message", "function_call", "function_call_output", "message"),
        *("message", "message", "message"),
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_a_body_sent_again_has_another_reply_and_the_first_can_come_back(
    client: openai.OpenAI, model: Model, offering: Service, key: str, streams: bool
) -> None:
    headers = {"X-Tersely-Session": key}
    request: dict[str, Any] = {"input": [user(f"go {key}")], "user": key}
    model.script(key, reply_of(words("a", "One."), noting("c1")), reply_of(words("b", "First.")))
    first = ask(client, streams, **request, extra_headers=headers)
    model.script(key, reply_of(thought("c"), noting("c2")), reply_of(words("d", "Second.")))
    again = ask(client, streams, **request, extra_headers={**headers, "x-stainless-retry-count": "1"})
    assert [item.id for item in again.output] == ["msg_d"]
    assert sent(model, key, 2) == [user(f"go {key}")]
    assert [each["role"] for each in view_of(offering, key, "model")] == ["user", "assistant", "tool", "assistant"]

    model.script(key, reply_of(words("e", "Third.")))
    ask(client, streams, input=[*request["input"], *echo(first), user("more")], user=key)
    shown = sent(model, key, 4)
    assert [item["id"] for item in shown if "id" in item and "role" in item] == ["msg_a", "msg_b"]
    assert [item["call_id"] for item in shown if "call_id" in item] == ["c1", "c1"]


def test_slim_offers_search_once_messages_are_omitted(service: Service, model: Model, key: str) -> None:
    client = openai.OpenAI(base_url=service.base_url, api_key="sk", max_retries=0)
    request: dict[str, Any] = {"user": key, "extra_headers": {"X-Tersely-Epoch": '{"high": 1500, "low": 500}'}}
    history: list[dict[str, Any]] = []
    for number in range(8):
        history.append(user(f"question {number} {key} " + "word " * 200))
        model.script(key, reply_of(words(f"h{number}", f"answer {number}<terse>told {number}</terse>")))
        history += echo(ask(client, True, input=history, **request))
    assert "tools" not in model.bodies(key)[0]
    assert [tool["name"] for tool in model.bodies(key)[-1]["tools"]] == ["context_search"]
    search = called("s", "context_search", {"mode": "search", "query": "question 0"})
    late = reply_of(words("z", "There.<terse>found</terse>"), chunk_chars=3, crlf=True)
    model.script(key, reply_of(words("y", "A moment.<terse>looked</terse>"), search, chunk_chars=3, crlf=True), late)
    seen = ask(client, True, input=[*history, user("what was the first?")], **request)
    assert [item["content"][0]["text"] for item in echo(seen)] == ["A moment.", "There."]
    assert f"question 0 {key}" in sent(model, key, -1)[-1]["output"]


@pytest.mark.parametrize("streams", [False, True])
def test_client_that_continues_by_id_keeps_the_whole_history(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    request: dict[str, Any] = {"user": key, "tools": [TOOL]}
    model.script(
        key, reply_of(words("1", "First."), noting("c1")), reply_of(thought("2"), noting("c2"), called("t", "add", {}))
    )
    seen = ask(client, streams, input=[user(f"go {key}")], **request)
    model.script(key, reply_of(noting("c3")), reply_of(words("4", "Two.")))
    seen = ask(client, streams, input=[answer("t", "2")], previous_response_id=seen.id, **request)
    assert [item.id for item in seen.output] == ["msg_4"]
    model.script(key, reply_of(words("5", "Yes.")))
    seen = ask(client, streams, input="sure?", previous_response_id=seen.id, **request)
    assert seen.output_text == "Yes."
    *_, before, whole = model.bodies(key)
    assert "previous_response_id" not in whole
    assert [item["call_id"] for item in whole["input"] if item.get("type") == "function_call"] == [
        "c1",
        "c2",
        "t",
        "c3",
    ]
    assert whole["input"][: len(before["input"])] == before["input"]


@pytest.mark.parametrize("streams", [False, True])
def test_host_side_history_continues_over_rounds(client: openai.OpenAI, model: Model, key: str, streams: bool) -> None:
    conversation = f"conv_{key}"
    request: dict[str, Any] = {"user": key, "tools": [TOOL], "conversation": conversation}
    for number in range(3):
        model.script(
            key, reply_of(words(f"a{number}", "So."), noting(f"c{number}")), reply_of(words(f"b{number}", "There."))
        )
        seen = ask(client, streams, input=f"go {number}", **request)
        assert [item.id for item in seen.output] == [f"msg_a{number}", f"msg_b{number}"]
    whole = sent(model, key, -1)
    assert [item["call_id"] for item in whole if item.get("type") == "function_call"] == ["c0", "c1", "c2"]


# What may go wrong


@pytest.mark.parametrize("streams", [False, True])
def test_parallel_calls_and_bad_arguments_get_answers_that_help(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    model.script(
        key,
        reply_of(
            called("a", "manage_scratchpad", "{not json"),
            called("b", "manage_scratchpad", {"action": "read"}),
            called("c", "query_db", {"sql": "DROP TABLE messages"}),
            {"type": "custom_tool_call", "id": "ct", "call_id": "d", "name": "save_memo", "input": "x"},
        ),
        reply_of(words("2", "Fine.")),
    )
    assert ask(client, streams, input=[user(f"go {key}")], user=key).output_text == "Fine."
    results = sent(model, key, 1)[5:]
    assert [each["call_id"] for each in results] == ["a", "b", "c", "d"]
    assert [each["type"] for each in results] == ["function_call_output"] * 3 + ["custom_tool_call_output"]
    assert "JSON" in results[0]["output"]
    assert results[1]["output"] == "The scratchpad is empty."
    assert results[2]["output"].startswith("query_db:")
    assert "JSON" in results[3]["output"]


OWN = {"name": "manage_scratchpad", "description": "mine"}
NAMED: dict[str, dict[str, Any]] = {
    "function": {"tools": [{"type": "function", **OWN, "parameters": {"type": "object"}, "strict": False}]},
    "custom": {"tools": [{"type": "custom", **OWN}]},
    "namespace": {
        "tools": [{"type": "namespace", "name": "x", "description": "", "tools": [{"type": "custom", **OWN}]}]
    },
    "additional": {
        "input": [{"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", **OWN}]}, user("go")]
    },
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("named", sorted(NAMED))
def test_a_tool_of_the_clients_keeps_its_name(
    client: openai.OpenAI, model: Model, key: str, streams: bool, named: str
) -> None:
    model.script(key, reply_of(noting("c1")))
    headers = {"X-Tersely-Session": key}
    whole = client.responses.create(
        **{
            "model": MODEL,
            "input": [user("go")],
            "user": key,
            "extra_headers": headers,
            "stream": streams,
            **NAMED[named],
        }
    )
    if streams:
        whole = next(event for event in whole if event.type == "response.completed").response
    assert [item.call_id for item in whole.output] == ["c1"]
    offered = [each["name"] for each in model.bodies(key)[0]["tools"]]
    assert offered[-3:] == ["query_db", "save_memo", "retrieve_memos"]
    assert len(model.requests(key)) == 1


def test_own_tools_are_offered_for_any_tool_choice(client: openai.OpenAI, model: Model, key: str) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": [user(f"go {key}")], "user": key, "tools": [TOOL]}
    one = {"type": "function", "name": "add"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [one]}
    for choice in ("auto", "none", one, allowed, allowed | {"mode": "auto"}):
        seen = client.responses.create(**(request | {"tool_choice": choice}))
        assert seen.to_dict()["tool_choice"] == choice
    client.responses.create(**request, parallel_tool_calls=False)
    first, *others = [each["tools"] for each in model.bodies(key)]
    assert first[0] == TOOL
    assert {each["name"] for each in first[1:]} == OURS
    assert all(tools == first for tools in others)


@pytest.mark.parametrize(
    "more",
    [
        {"background": True},
        {"max_tool_calls": 3},
        {"prompt": {"id": "pmpt_1"}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_no_tools_are_offered_where_rounds_would_be_visible(
    client: openai.OpenAI, model: Model, key: str, more: dict[str, Any]
) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": [user(f"go {key}")], "user": key, **more}
    client.responses.create(**request)
    assert "tools" not in model.bodies(key)[0]


def test_a_plain_format_is_no_structured_one(client: openai.OpenAI, model: Model, key: str) -> None:
    text = {"format": {"type": "text"}, "verbosity": "low"}
    request: dict[str, Any] = {"model": MODEL, "input": [user(f"go {key}")], "user": key, "text": text}
    client.responses.create(**request)
    assert len(model.bodies(key)[0]["tools"]) == len(OURS)


@pytest.mark.parametrize("streams", [False, True])
def test_after_eight_rounds_the_model_has_to_answer(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    model.script(key, *[reply_of(thought(f"{n}"), words(f"{n}", f"r{n}"), noting(f"c{n}")) for n in range(12)])
    seen = ask(client, streams, input=[user(f"go {key}")], user=key)
    assert seen.output_text == "".join(f"r{number}" for number in range(9))
    assert {item.type for item in seen.output} == {"reasoning", "message"}
    assert seen.tool_choice == "auto"
    requests = model.bodies(key)
    assert [each.get("tool_choice") for each in requests] == [None] * 8 + ["none"]


@pytest.mark.parametrize("streams", [False, True])
def test_required_tool_choice_drops_own_tools_in_the_last_round(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    model.script(key, *[reply_of(noting(f"c{n}")) for n in range(8)], reply_of(called("t", "add", {"a": 1})))
    seen = ask(client, streams, input=[user(f"go {key}")], user=key, tools=[TOOL], tool_choice="required")
    assert [item.id for item in seen.output] == ["fc_t"]
    last = model.bodies(key)[-1]
    assert (last["tool_choice"], last["tools"]) == ("required", [TOOL])


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_not_whole_never_happened(client: openai.OpenAI, model: Model, key: str, streams: bool) -> None:
    cut = called("c", PAD[0], '{"action": "up') | {"status": "incomplete"}
    model.script(
        key, reply_of(words("1", "Hm."), noting("c1")), reply_of(thought("2"), cut, finish_reason="max_output_tokens")
    )
    request: dict[str, Any] = {"model": MODEL, "input": [user("go")], "user": key, "stream": streams}
    whole = client.responses.create(**request, extra_headers={"X-Tersely-Session": key})
    if streams:
        events = list(whole)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.incomplete"
        whole = events[-1].response
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert [item.id for item in whole.output] == ["msg_1"]
    assert len(model.requests(key)) == 2
    model.script(key, reply_of(words("3", "Then.")))
    ask(
        client,
        streams,
        input=[user("go"), *echo(whole), user("on")],
        user=key,
        extra_headers={"X-Tersely-Session": key},
    )
    assert kinds(sent(model, key, 2)) == ["message"] * 3


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_in_a_later_round_is_the_clients_and_nothing_half_is_kept(
    client: openai.OpenAI, model: Model, offering: Service, key: str, is_late: bool
) -> None:
    error = {"code": "server_error", "message": "oh"}
    tools = [{"type": "function", "name": name} for name in OURS]
    failed = {"id": "resp_x", "status": "failed", "error": error, "output": [], "tools": tools}
    refusal = ScriptedReply(status=429, body=b'{"error":{"message":"slow down","type":"rate_limit"}}')
    model.script(key, reply_of(noting("c1")), ScriptedReply(body=json.dumps(failed).encode()) if is_late else refusal)
    request: dict[str, Any] = {"model": MODEL, "input": [user("go")], "user": key}
    request["extra_headers"] = {"X-Tersely-Session": key}
    if is_late:
        reply = client.responses.create(**request)
        assert reply.status == "failed"
        assert not any(name in reply.model_dump_json() for name in OURS)
    else:
        with pytest.raises(openai.RateLimitError, match="slow down"):
            client.responses.create(**request)
    assert [each["role"] for each in view_of(offering, key, "all")] == ["user"]
    model.script(key, reply_of(noting("c2")), reply_of(words("2", "Done.")))
    assert client.responses.create(**request).output_text == "Done."
    assert [each["role"] for each in view_of(offering, key, "model")] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("how", ["status", "odd", "event", "disconnect"])
def test_an_error_in_a_later_round_of_a_stream_ends_it_with_an_error(
    client: openai.OpenAI, model: Model, offering: Service, key: str, how: str
) -> None:
    late = {
        "status": ScriptedReply(status=500, body=b'{\n  "error": {\n    "message": "broken"\n  }\n}'),
        "odd": ScriptedReply(status=500, body=b'{"detail": "broken"}'),
        "event": reply_of(words("2", "half a word"), break_after=5, break_with="error"),
        "disconnect": reply_of(words("2", "half a word"), break_after=5, break_with="disconnect"),
    }[how]
    model.script(key, reply_of(words("1", "one moment"), noting("c1")), late)
    text = error_text = ""
    request: dict[str, Any] = {"model": MODEL, "input": [user("go")], "user": key, "stream": True}
    is_failed = False
    try:
        for event in client.responses.create(**request, extra_headers={"X-Tersely-Session": key}):
            text += event.delta if event.type == "response.output_text.delta" else ""
            is_failed = event.type in {"response.failed", "error"}
    except openai.APIError as error:
        is_failed, error_text = True, error.message
    assert is_failed
    assert {"status": "broken", "odd": "the upstream refused"}.get(how, error_text) == error_text
    assert text.startswith("one moment")
    kept = view_of(offering, key, "all")
    assert [each["role"] for each in kept][:2] == ["user", "assistant"]
    assert "manage_scratchpad" not in json.dumps(view_of(offering, key, "client"))


@pytest.mark.parametrize("streams", [False, True])
def test_a_later_round_that_overflows_is_tried_with_less(
    client: openai.OpenAI, model: Model, key: str, streams: bool
) -> None:
    message = "Your input exceeds the context window of this model. Please adjust your input and try again."
    body = json.dumps({"error": {"message": message, "code": "context_length_exceeded", "param": "input"}}).encode()
    history: list[dict[str, Any]] = []
    for number in range(6):
        history += [user(f"question {number} {key} " + "word " * 300)]
        model.script(key, reply_of(words(f"h{number}", f"answer {number} " + "word " * 300)))
        history += echo(ask(client, streams, input=history, user=key))
    model.script(
        key, reply_of(thought("1"), noting("c1")), ScriptedReply(status=400, body=body), reply_of(words("2", "Less."))
    )
    assert ask(client, streams, input=[*history, user("and now")], user=key).output_text == "Less."
    *_, second, third = [each["input"] for each in model.bodies(key)]
    assert len(third) < len(second)
    assert third[-3:] == second[-3:]
    assert kinds(third)[-3:] == ["reasoning", "function_call", "function_call_output"]


async def test_partial_reply_is_stored_when_the_client_leaves(offering: Service, model: Model, key: str) -> None:
    model.script(
        key, reply_of(thought("1"), words("1", "Wait."), noting("c1")), reply_of(words("2", "never"), first_delay=5)
    )
    body = json.dumps({"model": MODEL, "input": [user("go")], "user": key, "stream": True}).encode()
    async with wire(offering) as there:
        await there.send(request_bytes(body, path="/v1/responses", X_Tersely_Session=key))
        await there.until(b"Wait.")
        await there.until(b": keep-alive")

    async def is_kept() -> bool:
        return [each["role"] for each in view_of(offering, key, "all")] == ["user", "assistant"]

    await eventually(is_kept)
    kept = view_of(offering, key, "all")[1]
    assert [item["id"] for item in kept["raw"]["output"]] == ["rs_1", "msg_1"]
    assert kept["finish"] == "client_left"
    model.script(key, reply_of(words("3", "Back.")))
    answer = await post(
        offering,
        json.dumps({"model": MODEL, "input": [user("more")], "user": key}).encode(),
        path="/v1/responses",
        X_Tersely_Session=key,
    )
    assert answer.status == 200
    assert kinds(sent(model, key, -1)) == ["message", "reasoning", "message", "message"]


async def test_long_own_round_sends_heartbeats(offering: Service, model: Model, key: str) -> None:
    long = called("c1", PAD[0], {"action": "append", "content": "x" * 400})
    model.script(key, reply_of(thought("1"), long, delay=0.05, chunk_chars=20), reply_of(words("2", "Ok.")))
    body = json.dumps({"model": MODEL, "input": [user(f"go {key}")], "user": key, "stream": True}).encode()
    answer = await post(offering, body, path="/v1/responses")
    assert b": keep-alive" in answer.body
    assert b"rs_1" not in answer.body
    assert b"xxx" not in answer.body
    assert answer.body.index(b"response.in_progress") < answer.body.index(b": keep-alive") < answer.body.index(b"Ok.")
