"""Every strategy through the whole service: what reaches the model, and what the client never notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.domain.past_topics import MARKS, REFERENCES, conversation
from tests.support.chat_messages import user
from tests.support.services import Service, serve
from tests.support.upstreams import MODEL, Model

STATE = "### STATE\nGoal: ship\nContext: src/app.py\nResolved: none\nTechnical Anchors: 8484"


@pytest.fixture(scope="module")
def service(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url) as running:
        yield running


def say(content: str) -> ScriptedReply:
    return ScriptedReply(message={"role": "assistant", "content": content})


class Client:
    """A client that resends its whole history."""

    def __init__(self, service: Service, model: Model, name: str, strategy: str, epoch: str = "every_request") -> None:
        self.history: list[dict[str, Any]] = []
        self._service = service
        self._model = model
        self._key = model.script(name)
        self._headers = {"x-tersely-strategy": strategy, "x-tersely-epoch": epoch, "authorization": "Bearer k"}
        self.session = ""
        self.sent: dict[str, Any] = {}

    def ask(self, *messages: dict[str, Any], reply: str | dict[str, Any], **more: Any) -> dict[str, Any]:
        """One call; what the model was sent, as JSON."""
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        self._model.script(self._key, ScriptedReply(message=message))
        self.history += messages
        body = {"model": MODEL, "user": self._key, "messages": self.history, **more}
        answer = httpx.post(f"{self._service.base_url}/chat/completions", json=body, headers=self._headers, timeout=60)
        assert answer.status_code == 200, answer.text
        self.session = answer.headers["x-tersely-session"]
        self.history.append(answer.json()["choices"][0]["message"])
        sent = self._model.requests(self._key)[-1].request
        assert sent is not None
        self.sent = sent
        return sent


def test_window_strips_the_state_and_shows_it_to_the_model_alone(service: Service, model: Model) -> None:
    client = Client(service, model, "w1", '{"name": "window", "context_size": 1}')
    first = client.ask(user("begin"), reply=f"Hello.\n\n{STATE}")
    assert "### STATE" in first["messages"][0]["content"]  # the guidelines ask for it
    assert client.history[-1]["content"] == "Hello."
    second = client.ask(user("go on"), reply="fine")
    texts = [message["content"] for message in second["messages"]]
    assert any("Technical Anchors: 8484" in text for text in texts[1:-1])
    assert texts[-1] == "go on"
    assert "begin" not in texts
    state = httpx.get(f"{service.url}/api/sessions/{client.session}/state").json()
    assert state["text"].startswith("Goal: ship")


def test_under_auto_a_state_is_where_the_model_wrote_it_until_the_next_epoch(service: Service, model: Model) -> None:
    client = Client(service, model, "w4", '{"name": "window", "context_size": 1}', '{"high": 1500, "low": 500}')
    client.ask(user("begin"), reply=f"Hello.\n\n{STATE}")
    sent = client.ask(user("go on"), reply="fine")
    holding = [m["role"] for m in sent["messages"] if "Technical Anchors: 8484" in m["content"]]
    assert holding == ["assistant"]
    assert not any("Context -- State" in message["content"] for message in sent["messages"])
    for number in range(6):
        sent = client.ask(user(f"turn {number} " + "word " * 200), reply="fine")
    texts = [message["content"] for message in sent["messages"]]
    assert "begin" not in texts
    (state,) = [text for text in texts if "Technical Anchors: 8484" in text]
    assert "Context -- State" in state


def test_the_scratchpad_is_a_layer_after_the_state(service: Service, model: Model) -> None:
    client = Client(service, model, "w2", "window")
    client.ask(user("begin"), reply=f"Hello.\n\n{STATE}")
    url = f"{service.url}/api/sessions/{client.session}/scratchpad"
    assert httpx.put(url, json={"text": "- [ ] test it"}).status_code == 200
    sent = client.ask(user("go on"), reply="fine")
    texts = [message["content"] for message in sent["messages"]]
    places = [next(i for i, text in enumerate(texts) if mark in text) for mark in ("Anchors: 8484", "- [ ] test it")]
    assert places == sorted(places)


def test_memos_stand_in_front_of_the_message_that_they_bear_on_and_stay_there(service: Service, model: Model) -> None:
    memo = {"content": "The flux capacitor needs 1.21 gigawatts.", "tags": ["gotcha"]}
    assert httpx.post(f"{service.url}/api/memos", json=memo).status_code == 201
    client = Client(service, model, "w3", "window", "auto")
    first = client.ask(user("how much power does the flux capacitor need?"), reply="a lot")
    shown = first["messages"][-1]["content"]
    assert "1.21 gigawatts" in shown
    assert shown.endswith("how much power does the flux capacitor need?")
    second = client.ask(user("continue"), reply="fine")
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert second["messages"][-1] == user("continue")
    stored = httpx.get(f"{service.url}/api/sessions/{client.session}/messages").json()["items"]
    assert not any("gigawatts" in str(item) for item in stored)


def test_trim_asks_for_an_answer_after_max_steps_and_forbids_tools(service: Service, model: Model) -> None:
    client = Client(service, model, "t1", '{"name": "trim", "max_steps": 2}', "auto")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    sent = client.ask(user("do it"), reply={"role": "assistant", "content": None, "tool_calls": [call]}, tools=tools)
    assert "tool_choice" not in sent
    again = {**call, "id": "c2"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "one"}
    sent = client.ask(result, reply={"role": "assistant", "content": None, "tool_calls": [again]}, tools=tools)
    assert "tool_choice" not in sent
    sent = client.ask({"role": "tool", "tool_call_id": "c2", "content": "two"}, reply="done", tools=tools)
    assert sent["tool_choice"] == "none"
    assert sent["tools"][: len(tools)] == tools
    assert "without further tools" in sent["messages"][-1]["content"]
    sent = client.ask(user("thanks"), reply="ok", tools=tools)
    assert "tool_choice" not in sent
    assert not any("without further tools" in str(message["content"]) for message in sent["messages"])


def test_compact_puts_a_checkpoint_in_front(service: Service, model: Model) -> None:
    strategy = '{"name": "compact", "max_tokens": 2000, "reserve_tokens": 127000, "keep_recent_tokens": 500}'
    client = Client(service, model, "c1", strategy, "auto")
    for turn in range(8):
        client.ask(user(f"question {turn} " + "word " * 120), reply=f"answer {turn} " + "word " * 120)
    texts = [str(message["content"]) for message in client.sent["messages"]]
    assert texts[0].startswith("[Previous conversation summary]")
    assert len(texts) < 12
    session = httpx.get(f"{service.url}/api/sessions/{client.session}").json()
    assert session["messages"] == 16


def test_tiered_retrieves_a_past_topic(service: Service, model: Model) -> None:
    strategy = '{"name": "tiered", "total_budget": 3000, "session_budget": 500, "working_budget": 700}'
    client = Client(service, model, "r1", strategy, "auto")
    client.ask(user("the kraken parser drops tentacles in kraken_parser.py"), reply="off by one in kraken_parser.py")
    for turn in range(40):
        client.ask(user(f"unrelated chat number {turn} " + "lorem " * 90), reply="ipsum " * 90)
    assert not any("kraken" in str(message) for message in client.sent["messages"][4:])
    sent = client.ask(user("does the kraken parser still drop tentacles?" + " hm" * 1500), reply="no")
    texts = [str(message["content"]) for message in sent["messages"]]
    assert any(text.startswith("the kraken parser drops tentacles in") for text in texts)
    assert sum(len(text) for text in texts) < 14_000


def ask_delta(service: Service, model: Model, session: str, text: str, strategy: str, epoch: str) -> str:
    """Return the model's input, as one text, when a client sends a session nothing but ``text``."""
    key = model.script(session)
    model.script(key, say("Well."))
    headers = {"x-tersely-session": session, "x-tersely-strategy": strategy, "x-tersely-epoch": epoch}
    body = {"model": MODEL, "user": key, "messages": [user(text)]}
    answer = httpx.post(
        f"{service.base_url}/chat/completions", json=body, headers={**headers, "authorization": "Bearer k"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return model.requests(key)[-1].body.decode()


def test_tiered_retrieves_every_past_topic_of_the_question(service: Service, model: Model) -> None:
    strategy = '{"name": "tiered", "total_budget": 6000, "session_budget": 1000, "working_budget": 2000}'
    filled = httpx.post(f"{service.url}/api/sessions/topics/messages", json={"messages": conversation()})
    assert filled.status_code == 201, filled.text
    found = {
        reference: MARKS[topic] in ask_delta(service, model, "topics", reference, strategy, "every_request")
        for reference, topic in REFERENCES
    }
    assert [reference for reference, is_found in found.items() if not is_found] == []


@pytest.mark.parametrize("epoch", ["every_request", "auto"])
def test_tiered_keeps_working_memory_for_short_follow_ups(service: Service, model: Model, epoch: str) -> None:
    """13,000 tokens are over the 80 % of the total at which working memory could be cleared."""
    for number, text in enumerate(("continue", "yes", "go on", "Please fix that", "ok, do it", "weiter")):
        session = f"follow-{epoch}-{number}"
        messages = [
            {"role": role, "content": f"{role} {turn} about the parser " + "word " * 1_300}
            for turn in range(5)
            for role in ("user", "assistant")
        ]
        assert (
            httpx.post(f"{service.url}/api/sessions/{session}/messages", json={"messages": messages}).status_code == 201
        )
        sent = ask_delta(service, model, session, text, "tiered", epoch)
        assert "assistant 4 about the parser" in sent
        assert "user 4 about the parser" in sent


def test_tiered_clears_working_memory_for_a_new_task_that_the_user_announces(service: Service, model: Model) -> None:
    for words, is_cleared in ((1_300, True), (20, False)):
        messages = [
            {"role": role, "content": f"{role} {turn} about the parser " + "word " * words}
            for turn in range(5)
            for role in ("user", "assistant")
        ]
        session = f"new-{words}"
        assert (
            httpx.post(f"{service.url}/api/sessions/{session}/messages", json={"messages": messages}).status_code == 201
        )
        text = "New task: write a sonnet about autumn."
        sent = ask_delta(service, model, session, text, "tiered", "every_request")
        # Without pressure on the budget nothing is cleared.
        assert ("user 4 about the parser" not in sent) == is_cleared


@pytest.mark.parametrize("strategy", ["full", "slim", "window", "trim", "compact", "tiered"])
def test_a_first_call_is_answered_under_every_strategy(service: Service, model: Model, strategy: str) -> None:
    client = Client(service, model, f"f-{strategy}", strategy, "auto")
    sent = client.ask(user("hello"), reply="hi")
    assert sent["messages"][-1] == user("hello")


@pytest.mark.parametrize("strategy", ["full", "slim", "window", "trim", "compact", "tiered"])
def test_cleared_context_contains_only_new_messages(service: Service, model: Model, strategy: str) -> None:
    client = Client(service, model, f"clear-{strategy}", strategy, "auto")
    client.ask(user("the secret is xyzzy"), reply="noted: xyzzy")
    client.ask(user("say it"), reply="xyzzy")
    answer = httpx.post(f"{service.url}/api/sessions/{client.session}/clear", json={"strategy": strategy})
    assert answer.status_code == 200
    assert answer.json()["report"]["epoch"]["reason"] == "clear"
    before = client.session
    sent = client.ask(user("what now?"), reply="hello")
    assert "xyzzy" not in str(sent["messages"])
    assert sent["messages"][-1] == user("what now?")
    sent = client.ask(user("and now?"), reply="hello again")
    assert "xyzzy" not in str(sent["messages"])
    assert [m["content"] for m in sent["messages"][-3:]] == ["what now?", "hello", "and now?"]
    assert client.session == before
    found = httpx.post(f"{service.url}/api/sessions/{before}/search", json={"mode": "search", "query": "xyzzy"}).json()
    assert "the secret is xyzzy" in found["text"]


@pytest.mark.parametrize("strategy", ["slim", "window", "trim", "compact", "tiered"])
def test_compacting_now_leaves_a_valid_shorter_context(service: Service, model: Model, strategy: str) -> None:
    client = Client(service, model, f"compact-{strategy}", strategy, "auto")
    for turn in range(9):
        client.ask(user(f"question {turn} about src/part_{turn}.py " + "word " * 300), reply="answer " + "word " * 300)
    whole = sum(len(str(message)) for message in client.history)
    answer = httpx.post(f"{service.url}/api/sessions/{client.session}/compact", json={"strategy": strategy})
    assert answer.status_code == 200, answer.text
    assert answer.json()["report"]["epoch"]["reason"] == "compact"
    if strategy in {"trim", "compact"}:
        assert answer.json()["summary"]["result"] == "extractive"
    sent = client.ask(user("go on"), reply="fine")
    assert sum(len(str(message)) for message in sent["messages"]) < 0.75 * whole
    assert sent["messages"][-1] == user("go on")


def test_unknown_sessions_and_another_tenants_are_404(service: Service) -> None:
    for verb in ("compact", "clear", "state/rebuild"):
        assert httpx.post(f"{service.url}/api/sessions/nobodys/{verb}").status_code == 404


def test_a_rebuild_without_a_model_leaves_the_models_block(service: Service, model: Model) -> None:
    client = Client(service, model, "rebuild", "window", "auto")
    client.ask(user("ship src/app.py"), reply=f"ok\n\n{STATE}")
    answer = httpx.post(f"{service.url}/api/sessions/{client.session}/state/rebuild", json={})
    assert answer.status_code == 409, "without a model, the model's own block stays"
    kept = httpx.get(f"{service.url}/api/sessions/{client.session}/state").json()
    assert kept["source"] == "model"


@pytest.mark.parametrize("epoch", ["every_request", "auto"])
def test_tiered_tells_of_every_turn_also_after_many_epochs(service: Service, model: Model, epoch: str) -> None:
    strategy = '{"name": "tiered", "total_budget": 2000, "working_budget": 500, "session_budget": 1000}'
    client = Client(service, model, f"tiered-memory-{epoch}", strategy, epoch)
    filler = "and so on and so forth " * 40
    for turn in range(12):
        client.ask(user(f"Turn the crank of engine{turn}. {filler}"), reply=f"Engine{turn} runs. {filler}")
    memory = next(m["content"] for m in client.sent["messages"] if "Session Memory" in str(m["content"]))
    for turn in range(8):
        assert f"[t{turn + 1}]" in memory or f"crank of engine{turn}." in str(client.sent["messages"])
    figures = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{service.url}/metrics").text.splitlines() if line[:1] != "#"
    )
    for level in ("permanent", "session", "working", "volatile"):
        for name in ("tersely_level_tokens", "tersely_level_messages"):
            assert float(figures[f'{name}_count{{level="{level}"}}']) >= 12
    assert float(figures['tersely_level_tokens_sum{level="working"}']) > 0


def test_compactions_are_among_the_events_with_their_counts(service: Service, model: Model) -> None:
    client = Client(service, model, "events", "trim", "auto")
    for turn in range(4):
        client.ask(user(f"question {turn} " + "word " * 300), reply="answer " + "word " * 300)
    url = f"{service.url}/api/sessions/{client.session}"
    assert httpx.post(f"{url}/compact", json={"strategy": "trim"}).status_code == 200
    events = httpx.get(f"{url}/events").json()["items"]
    start, of_memory = [each for each in events if each["type"] == "compaction_start"]
    end, _ = [each for each in events if each["type"] == "compaction_end"]
    assert (start["purpose"], start["messages"], end["result"]) == ("ahead", 6, "extractive")
    assert (of_memory["purpose"], of_memory["messages"]) == ("trim", 6)
    assert end["tokens_after"] < end["tokens_before"] == start["tokens_before"]
    assert [each["reason"] for each in events if each["type"] == "epoch"][-1] == "compact"
    page = httpx.get(f"{url}/events", params={"limit": 1}).json()
    assert httpx.get(f"{url}/events", params={"after": page["next"]}).json()["items"] == events[1:]
