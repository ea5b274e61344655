"""Tags for an earlier strategy are removed as long as the model's context shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tersely.dialects.dialect import UNCHANGED
from tersely.dialects.registry import dialect_named
from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import post
from tests.support.rows import messages_by_number, query
from tests.support.services import Service, serve
from tests.support.upstreams import MODEL, Model

TERSE = "<terse>did {}</terse>"
STATE = "\n\n### STATE\nGoal: {}"
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/gemini-2.5-pro:generateContent",
    "gemini_gca": "/v1internal:generateContent",
}
OTHERS = ("full", "window", "trim", "compact", "tiered")


@dataclass(slots=True)
class Client:
    """Speaks one dialect and resends what it was shown, or sends (``is_delta``) only what is new."""

    service: Service
    model: Model
    key: str
    dialect: str
    streams: bool = False
    is_delta: bool = False
    history: list[tuple[str, str]] = field(default_factory=list)
    answers: int = 0

    async def ask(self, reply: str, strategy: str, *, epoch: str = "auto") -> str:
        """Return the client's view of ``reply``, the model's own words."""
        self.answers += 1
        self.model.script(self.key, ScriptedReply(message={"role": "assistant", "content": reply}, chunk_chars=5))
        self.history.append(("user", f"Question {self.answers}."))
        path = PATHS[self.dialect]
        if self.streams and self.dialect.startswith("gemini"):
            path = path.replace(":generate", ":streamGenerate") + "?alt=sse"
        headers = {"X_Script": self.key, "X_Tersely_Strategy": strategy, "X_Tersely_Epoch": epoch}
        answer = await post(self.service, self._body(), path=path, X_Tersely_Session=self.key, **headers)
        assert answer.status == 200, answer.body
        shown = self._read(answer.body)
        self.history.append(("assistant", shown))
        return shown

    def _body(self) -> bytes:
        turns = self.history[-1:] if self.is_delta else self.history
        more = {"stream": True} if self.streams and not self.dialect.startswith("gemini") else {}
        if self.dialect.startswith("gemini"):
            named = {"user": "user", "assistant": "model"}
            inner = {"contents": [{"role": named[role], "parts": [{"text": text}]} for role, text in turns]}
            is_wrapped = self.dialect == "gemini_gca"
            return json.dumps(
                {"model": "gemini-2.5-pro", "project": "p", "request": inner} if is_wrapped else inner
            ).encode()
        listed = [{"role": role, "content": text} for role, text in turns]
        if self.dialect == "openai_responses":
            return json.dumps({"model": "gpt-5-mini", "input": listed, "store": False, **more}).encode()
        model = "claude-sonnet-4-5" if self.dialect == "anthropic" else MODEL
        limit = {"max_tokens": 900} if self.dialect == "anthropic" else {}
        return json.dumps({"model": model, "messages": listed, **limit, **more}).encode()

    def _read(self, body: bytes) -> str:
        dialect = dialect_named(self.dialect)
        if not self.streams:
            reply = dialect.split_reply(body, UNCHANGED)[1]
        else:
            reader = dialect.open_stream(UNCHANGED)
            reader.feed(body)
            reader.close()
            reply = reader.reply
        return str(dialect.read_reply(reply.choices[0].client_message).text)


@pytest.mark.parametrize("is_delta", [False, True], ids=["resent", "delta"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", PATHS)
async def test_tags_and_states_stay_hidden_after_a_switch_and_back(
    service: Service, model: Model, key: str, dialect: str, streams: bool, is_delta: bool
) -> None:
    client = Client(service, model, key, dialect, streams, is_delta)
    assert await client.ask(f"One.{TERSE.format(1)}", "slim") == "One."
    for number, strategy in enumerate(OTHERS, 2):
        assert await client.ask(f"{number}.{TERSE.format(number)}", strategy) == f"{number}."
    assert "<terse>did 3" in model.last.body.decode().replace("\\u003c", "<")  # the model sees itself write tags
    assert await client.ask(f"Window.{STATE.format('one')}", "window") == "Window."
    for number, strategy in enumerate(("full", "slim", "trim"), 10):
        reply = f"{number}.{TERSE.format(number)}{STATE.format(number)}"
        assert await client.ask(reply, strategy) == f"{number}."
    entries = await query(
        service, "SELECT convert_from(text, 'UTF8') AS text FROM terse WHERE source = 'model' AND session_id = $1", key
    )
    assert {row["text"] for row in entries} == {f"did {n}" for n in (1, 2, 3, 4, 5, 6, 10, 11, 12)}
    states = await query(service, "SELECT convert_from(text, 'UTF8') AS text FROM states WHERE session_id = $1", key)
    assert {row["text"] for row in states} == {f"Goal: {n}" for n in ("one", 10, 11, 12)}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strategy", OTHERS)
async def test_tags_in_ordinary_text_stay_visible(
    service: Service, model: Model, key: str, strategy: str, streams: bool
) -> None:
    client = Client(service, model, key, "openai_chat", streams)
    text = "Write <terse>what you did</terse> at the end."
    text += "" if strategy == "window" else "\n\n### STATE\nis a heading."
    for _ in range(3):
        assert await client.ask(text, strategy) == text


async def test_a_literal_state_beside_a_tag_is_still_text(service: Service, model: Model, key: str) -> None:
    client = Client(service, model, key, "openai_chat")
    for strategy in ("slim", "slim", "full", "trim"):
        shown = await client.ask(f"Format:{STATE.format('x')}{TERSE.format(1)}", strategy)
        assert shown == f"Format:{STATE.format('x')}"


async def test_once_the_context_shows_no_tag_any_more_a_tag_is_text(service: Service, model: Model, key: str) -> None:
    client = Client(service, model, key, "openai_chat")
    await client.ask(f"One.{TERSE.format(1)}", "slim")
    strategy = '{"name": "window", "context_size": 1}'
    for number in range(3):
        await client.ask(f"{number}.", strategy, epoch="every_request")
    tagged = f"Five.{TERSE.format(5)}"
    assert await client.ask(tagged, strategy, epoch="every_request") == tagged


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", PATHS)
async def test_tag_after_a_code_fence_is_stripped(
    service: Service, model: Model, key: str, dialect: str, streams: bool
) -> None:
    client = Client(service, model, key, dialect, streams)
    code = "See:\n```py\nprint('<terse>text</terse>')\n```"
    assert await client.ask(f"{code}{TERSE.format(1)}", "slim") == code
    inline = "Models write `<terse>...</terse>` last."
    assert await client.ask(f"{inline}{TERSE.format(2)}", "slim") == inline


@pytest.fixture(scope="module")
def offering(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url, strategy="compact", tools="query_db") as running:
        yield running


PAD = {"id": "c1", "type": "function", "function": {"name": "query_db", "arguments": '{"sql": "SELECT 1"}'}}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_tag_in_an_earlier_round_counts_too(offering: Service, model: Model, key: str, streams: bool) -> None:
    """The first round of a call of several says the tag, and only the model sees that round."""
    client = Client(offering, model, key, "openai_chat", streams)
    looking = {"role": "assistant", "content": f"Looking.{TERSE.format(1)}", "tool_calls": [PAD]}
    model.script(key, ScriptedReply(message=looking))
    assert "<terse>" not in await client.ask("Found.", "slim")
    assert len(await messages_by_number(offering, key)) > 2
    rounds = {"role": "assistant", "content": f"Again.{TERSE.format(2)}", "tool_calls": [PAD | {"id": "c2"}]}
    model.script(key, ScriptedReply(message=rounds))
    shown = await client.ask(f"Done.{TERSE.format(3)}", "trim")
    assert "<terse>" not in shown
    assert shown.startswith("Again.")
    assert shown.endswith("Done.")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_history_that_is_named_shows_tags_too(service: Service, model: Model, key: str, streams: bool) -> None:
    with openai.OpenAI(base_url=service.base_url, api_key="k", max_retries=0) as client:
        last = None
        for number, strategy in enumerate(("slim", "full", "trim", "slim", "compact")):
            tagged = {"role": "assistant", "content": f"{number}.{TERSE.format(number)}"}
            model.script(key, ScriptedReply(message=tagged))
            reply: Any = client.responses.create(
                model="gpt-5-mini",
                input=f"Question {number}.",
                previous_response_id=last,
                stream=streams,
                extra_headers={"X-Script": key, "X-Tersely-Strategy": strategy},
            )
            if streams:
                *_, end = reply
                reply = end.response
            assert reply.output_text == f"{number}."
            last = reply.id


def test_appended_reply_is_stripped_of_tags_that_its_context_shows(service: Service, key: str) -> None:
    url = f"{service.url}/api/sessions/{key}"
    httpx.post(f"{service.url}/api/sessions", json={"id": key, "strategy": "slim"})
    for number, strategy in enumerate(("slim", "full", "window", "trim")):
        httpx.patch(url, json={"strategy": strategy})
        state = STATE.format(number) if number > 1 else ""
        reply = {"role": "assistant", "content": f"{number}.{TERSE.format(number)}{state}"}
        question = {"role": "user", "content": f"Question {number}."}
        assert httpx.post(f"{url}/messages", json={"messages": [question, reply]}).status_code == 201
    items = httpx.get(f"{url}/messages", params={"view": "client"}).json()["items"]
    assert [item["raw"]["content"] for item in items if item["role"] == "assistant"] == [f"{n}." for n in range(4)]
    assert httpx.get(f"{url}/state").json()["text"] == "Goal: 3"
    other = httpx.post(f"{service.url}/api/sessions", json={"strategy": "full"}).json()["id"]
    literal = {"role": "assistant", "content": f"Write {TERSE.format(1)}."}
    messages = [{"role": "user", "content": "How?"}, literal] * 2
    httpx.post(f"{service.url}/api/sessions/{other}/messages", json={"messages": messages})
    items = httpx.get(f"{service.url}/api/sessions/{other}/messages").json()["items"]
    assert [item["raw"] for item in items if item["role"] == "assistant"] == [literal, literal]
