"""Memos in front of users' messages: the same in previews and calls, frozen for an epoch, chosen anew with the next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.chat_messages import user
from tests.support.services import Service, serve
from tests.support.upstreams import MODEL, Model

STRATEGIES = (
    "full",
    "slim",
    '{"name": "slim", "recent_turns": 2}',
    "window",
    '{"name": "window", "context_size": 2}',
    '{"name": "window", "memos": 0}',
    '{"name": "trim", "max_context_turns": 3}',
    '{"name": "compact", "keep_recent": 2, "max_messages": 4}',
    "tiered",
)
EPOCHS = ("auto", "every_request", '{"stride": 2}')
INSTRUCTIONS = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def service(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url, tools="off") as running:
        yield running


class Session:
    """A session of its own name, driven over REST and by calls that carry what is new alone."""

    def __init__(self, service: Service, model: Model, key: str, strategy: str, epoch: str) -> None:
        self.path = f"{service.url}/api/sessions/{key}"
        self._service = service
        self._model = model
        self._key = key
        made = httpx.post(f"{service.url}/api/sessions", json={"id": key, "strategy": strategy, "epoch": epoch})
        assert made.status_code == 201, made.text

    def preview(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        shown = httpx.post(f"{self.path}/context", json={"model": MODEL, "messages": list(messages)})
        assert shown.status_code == 200, shown.text
        instructions = shown.json()["instructions"]
        return [*([{"role": "system", "content": instructions}] if instructions else []), *shown.json()["messages"]]

    def call(self, *messages: dict[str, Any], reply: str = "Done.", **more: Any) -> list[dict[str, Any]]:
        """Return the messages that the model was sent."""
        self._model.script(self._key, ScriptedReply(message={"role": "assistant", "content": reply}, **more))
        body = {"model": MODEL, "user": self._key, "messages": list(messages)}
        headers = {"x-tersely-session": self._key, "authorization": "Bearer k"}
        answer = httpx.post(f"{self._service.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return self.sent()

    def sent(self) -> list[dict[str, Any]]:
        request = self._model.requests(self._key)[-1].request
        assert request is not None
        return list(request["messages"])

    def append(self, *messages: dict[str, Any]) -> None:
        assert httpx.post(f"{self.path}/messages", json={"messages": list(messages)}).status_code == 201

    def act(self, path: str, **body: Any) -> None:
        assert httpx.post(f"{self.path}/{path}", json=body).status_code == 200


def save(service: Service, content: str) -> str:
    saved = httpx.post(f"{service.url}/api/memos", json={"content": content, "tags": ["pets"]})
    assert saved.status_code == 201
    return str(saved.json()["id"])


def delete(service: Service, memo: str) -> None:
    assert httpx.delete(f"{service.url}/api/memos/{memo}").status_code == 204


@pytest.fixture
def animal(key: str) -> str:
    """A word that no other test has."""
    return f"walrus{key}"


@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_preview_equals_the_sent_context(
    service: Service, model: Model, key: str, animal: str, strategy: str, epoch: str
) -> None:
    talk = Session(service, model, key, strategy, epoch)
    save(service, f"{animal} is at 9911")
    has_memos = "window" in strategy and '"memos": 0' not in strategy
    for turn in range(5):
        if turn == 3:
            save(service, f"a second {animal} service was added")
        words = f"which {animal} port is it in turn {turn}?" if turn % 2 == 0 else f"go on {turn}"
        new = [INSTRUCTIONS, user(words)]
        shown = talk.preview(*new)
        assert shown == talk.preview(*new)
        assert talk.call(*new, reply=f"Answer {turn}: " + "word " * 60) == shown
        assert ("9911" in shown[-1]["content"]) == (has_memos and turn % 2 == 0)
    talk.append(user(f"the {animal} port again?"))
    shown = talk.preview(INSTRUCTIONS)
    assert ("9911" in shown[-1]["content"]) == has_memos
    assert talk.call(INSTRUCTIONS, user(f"the {animal} port again?")) == shown


@pytest.mark.parametrize("strategy", ["slim", "window", "trim", "compact", "tiered"])
def test_the_preview_equals_the_sent_context_after_an_overflow(
    service: Service, model: Model, key: str, strategy: str
) -> None:
    talk = Session(service, model, key, strategy, "auto")
    for turn in range(4):
        talk.call(user(f"{turn} " + "word " * 600), reply=f"Answer {turn} " + "word " * 600)
    talk.call(user("go on"), reply="This is as far as", finish_reason="model_context_window_exceeded")
    shown = talk.preview(user("and on"))
    assert talk.call(user("and on")) == shown
    assert len(shown) < 10


def test_memos_are_fixed_within_an_epoch_and_chosen_again_with_the_next(
    service: Service, model: Model, key: str, animal: str
) -> None:
    talk = Session(service, model, key, '{"name": "window", "context_size": 10}', "auto")
    first = save(service, f"{animal} is at 9911")
    talk.call(user("begin"))
    before = talk.call(user(f"the {animal} port?"))
    assert "9911" in before[-1]["content"]
    delete(service, first)
    save(service, f"{animal} is at 9922")
    after = talk.call(user(f"go on with the {animal}"))
    assert after[: len(before)] == before
    assert "9922" in after[-1]["content"]
    assert "9911" not in after[-1]["content"]

    talk.act("turns/t1/drop")  # an edit of history starts an epoch
    shown = talk.preview(user("and on"))
    anew = talk.call(user("and on"))
    assert anew == shown
    questions = [message["content"] for message in anew if message["role"] == "user"]
    assert len([text for text in questions if animal in text]) == 2
    assert "9911" not in json.dumps(anew)
    assert json.dumps(anew).count("9922") == 2
    later = talk.call(user("more"))
    assert later[: len(anew)] == anew

    httpx.patch(talk.path, json={"strategy": "full"})
    assert "9922" not in json.dumps(talk.call(user("and more")))


def test_rest_contexts_contain_memos_that_stay(service: Service, model: Model, key: str, animal: str) -> None:
    talk = Session(service, model, key, "window", "auto")
    memo = save(service, f"{animal} is at 9911")
    talk.append(user("hello"), {"role": "assistant", "content": "Hello."}, user(f"the {animal} port?"))
    shown = talk.preview()
    assert shown[-1]["content"].count("9911") == 1
    assert talk.preview() == shown
    delete(service, memo)
    talk.append({"role": "assistant", "content": "It is open."})
    assert talk.preview()[: len(shown)] == shown
    assert "9911" not in json.dumps(httpx.get(f"{talk.path}/messages").json())
    assert "9911" in json.dumps(httpx.get(f"{talk.path}/messages", params={"view": "model"}).json())
    talk.act("compact")
    assert "9911" not in json.dumps(talk.preview(user("well?")))


def test_copied_session_has_the_same_context(service: Service, model: Model, key: str, animal: str) -> None:
    talk = Session(service, model, key, "window", "auto")
    first = save(service, f"{animal} is at 9911")
    talk.call(user(f"the {animal}?"))
    delete(service, first)
    save(service, f"{animal} is at 9922")
    talk.act("compact")
    talk.call(user(f"the other {animal}?"))
    exported = httpx.get(f"{talk.path}/export").content
    imported = httpx.post(
        f"{service.url}/api/sessions/import",
        content=b'{"id":"copy-%b",' % key.encode() + exported[1:],
        headers={"content-type": "application/json"},
    )
    assert imported.status_code == 201, imported.text
    shown = talk.preview(user("go on"))
    talk.path = f"{service.url}/api/sessions/copy-{key}"
    assert talk.preview(user("go on")) == shown
    assert json.dumps(shown).count("9922") == 2
    assert "9911" not in json.dumps(shown)


def test_memos_and_the_message_are_one_blank_line_apart(service: Service, model: Model, key: str, animal: str) -> None:
    talk = Session(service, model, key, "window", "auto")
    save(service, f"{animal} is at 9911")
    sent = talk.call(user(f"the {animal} port?"))
    assert sent[-1]["content"].endswith(f"[End of the memos]\n\nthe {animal} port?")
    parts = talk.call({"role": "user", "content": [{"type": "text", "text": f"the {animal} again"}]})[-1]["content"]
    assert [part["text"][-12:] for part in parts] == ["f the memos]", f"the {animal} again"[-12:]]


def test_a_client_that_resends_its_history_is_shown_the_same(
    service: Service, model: Model, key: str, animal: str
) -> None:
    first = save(service, f"{animal} is at 9911")
    headers = {"x-tersely-strategy": "window", "x-tersely-epoch": "auto", "authorization": "Bearer k"}
    history: list[dict[str, Any]] = []

    def call(text: str) -> list[dict[str, Any]]:
        model.script(key, ScriptedReply(message={"role": "assistant", "content": f"To {text}"}))
        history.append(user(text))
        body = {"model": MODEL, "user": key, "messages": history}
        answer = httpx.post(f"{service.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        history.append(answer.json()["choices"][0]["message"])
        session.append(answer.headers["x-tersely-session"])
        request = model.requests(key)[-1].request
        assert request is not None
        return list(request["messages"])

    session: list[str] = []
    one = call(f"the {animal}?")
    assert "9911" in one[-1]["content"]
    delete(service, first)
    save(service, f"{animal} is at 9922")
    two = call(f"and the other {animal}?")
    assert two[: len(one)] == one
    assert "9922" in two[-1]["content"]
    assert httpx.post(f"{service.url}/api/sessions/{session[0]}/turns/t2/drop").status_code == 200
    three = call(f"the third {animal}?")
    assert "9911" not in json.dumps(three)
    assert json.dumps(three).count("9922") == 2
    four = call("go on")
    assert four[: len(three)] == three
    assert "9922" not in four[-1]["content"]
    assert len(set(session)) == 1
    assert not any("[End of the memos]" in str(message) for message in history)


DIALECTS: dict[str, dict[str, Any]] = {
    "openai_chat": {"role": "user", "content": "{}"},
    "openai_responses": {"type": "message", "role": "user", "content": "{}"},
    "anthropic": {"role": "user", "content": [{"type": "text", "text": "{}"}]},
    "gemini": {"role": "user", "parts": [{"text": "{}"}]},
}


@pytest.mark.parametrize("shown_in", DIALECTS)
@pytest.mark.parametrize("said_in", DIALECTS)
def test_memos_stay_with_a_message_in_every_dialect(
    service: Service, key: str, animal: str, said_in: str, shown_in: str
) -> None:
    save(service, f"{animal} is at 9911")
    path = f"{service.url}/api/sessions/{key}"
    assert httpx.post(f"{service.url}/api/sessions", json={"id": key, "strategy": "window"}).status_code == 201
    message = json.loads(json.dumps(DIALECTS[said_in]).replace("{}", f"the {animal}?"))
    stored = httpx.post(f"{path}/messages", json={"dialect": said_in, "messages": [message]})
    assert stored.status_code == 201, stored.text
    shown = httpx.post(f"{path}/context", json={"dialect": shown_in}).json()["messages"]
    text = json.dumps(shown[-1])
    assert text.count("9911") == 1
    assert text.index("9911") < text.index(f"the {animal}?")
    assert httpx.post(f"{path}/compact").status_code == 200
    assert json.dumps(httpx.post(f"{path}/context", json={"dialect": shown_in}).json()["messages"][-1]) == text
    items = httpx.get(f"{path}/messages").json()["items"]
    assert [item["raw"] for item in items] == [message]


@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("strategy", ["slim", "window", "tiered", '{"name": "trim", "max_context_turns": 3}'])
@pytest.mark.parametrize("dialect", ["anthropic", "openai_responses", "gemini"])
def test_memos_count_in_contexts_of_other_dialects(
    service: Service, model: Model, key: str, dialect: str, strategy: str, epoch: str
) -> None:
    """The question is stored with its memos in front, in the dialect of the call."""
    save(service, "Kittens of the flock: " + "they like warm milk and quiet rooms, " * 60)
    session = Session(service, model, key, strategy, epoch)
    for _ in range(2):
        session.call(user("What do the kittens of the flock like?"))
    reports = {
        each: httpx.post(f"{session.path}/context", json={"model": MODEL, "dialect": each}).json()["report"]
        for each in ("openai_chat", dialect)
    }
    own, other = reports["openai_chat"], reports[dialect]
    for counts in (other["layers"], other["turns"]):
        assert all(each["tokens"] >= 0 for each in counts), other
    assert own["tokens_before"] > 0
    assert abs(other["tokens_after"] - own["tokens_after"]) <= 0.1 * own["tokens_after"] + 20, reports
