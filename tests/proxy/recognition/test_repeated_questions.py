"""Asking again what was dropped or taken back: a new turn, whatever its words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tests.conftest import Database
from tests.support.dialect_wires import WIRES, Spoken, Wire, listed
from tests.support.http import Answered, post
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

NAME = re.compile(r"(question|answer) <([\w-]+)>")


class Answers:
    """A model that answers the newest question by its name, each time with a new number or always the same."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.are_numbered = True
        self._count = 0
        model.state.script = self._answer

    def _answer(self, received: ReceivedRequest) -> ScriptedReply:
        name = [name for kind, name in self._spoken(received) if kind == "question"][-1]
        self._count += 1
        return ScriptedReply(message={"content": f"answer <{name}-{self._count if self.are_numbered else 'same'}>"})

    @staticmethod
    def _spoken(received: ReceivedRequest) -> list[Spoken]:
        return NAME.findall(json.dumps(received.request))

    @property
    def last_sent(self) -> list[Spoken]:
        """The questions and replies of the newest request upstream."""
        return self._spoken(self.model.last)


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    with scripted() as running:
        yield Answers(running)


@pytest.fixture(scope="module", params=["live", "replicas"])
def replicas(request: pytest.FixtureRequest, store: Database, answers: Answers) -> Iterator[tuple[Service, Service]]:
    """The service that is asked, and that where turns are hidden: one that keeps sessions live, or two that build each
    call from its whole history.
    """
    url = answers.model.url
    if request.param == "live":
        with serve(store, url) as running:
            yield running, running
    else:
        with serve(store, url, live_sessions="off") as asked, serve(store, url, live_sessions="off") as other:
            yield asked, other


@pytest.fixture
def answering(replicas: tuple[Service, Service]) -> Service:
    return replicas[0]


@pytest.fixture
def elsewhere(replicas: tuple[Service, Service]) -> Service:
    return replicas[1]


@pytest.fixture(scope="module")
def commanded(store: Database, answers: Answers) -> Iterator[Service]:
    with serve(store, answers.model.url, chat_commands="on") as running:
        yield running


@pytest.fixture(params=list(WIRES))
def dialect(request: pytest.FixtureRequest) -> Wire:
    return WIRES[request.param]


def answer_in(answered: Answered) -> str:
    """The reply's words, also of a stream in pieces."""
    body = answered.body.decode()
    if found := re.findall(r"answer <[\w-]+>", body):
        return str(found[0])
    pieces = re.findall(r'"(?:text|content|delta)": ?"((?:[^"\\]|\\.)*)"', body)
    return str(re.findall(r"answer <[\w-]+>", "".join(pieces))[0])


class Talk:
    """A client that resends its history, or sends what is new under a session of its own."""

    def __init__(
        self, service: Service, elsewhere: Service, dialect: Wire, key: str, *, sends_all: bool, streams: bool
    ) -> None:
        """Turns are hidden at the replica ``elsewhere``."""
        self.service, self.elsewhere, self.dialect, self.key = service, elsewhere, dialect, key
        self.sends_all, self.streams = sends_all, streams
        self.history: list[Spoken] = []
        self.session = ""

    async def ask(self, name: str) -> str:
        """Ask; the name of the answer."""
        question: Spoken = ("user", f"question <{name}>")
        headers: dict[str, Any] = {} if self.sends_all else {"X_Tersely_Session": self.key}
        messages = [*self.history, question] if self.sends_all else [question]
        answered = await self.dialect.send(self.service, messages, stream=self.streams, **headers)
        assert answered.status == 200, answered.body
        assert self.session in {"", answered.session}
        self.session = answered.session
        text = answer_in(answered)
        self.history += [question, ("assistant", text)]
        return str(NAME.findall(text)[0][1])

    def forget(self) -> None:
        """Forget the last turn, as a client does that asks again."""
        del self.history[-2:]

    async def hide(self, how: str, turn: int) -> None:
        path = {"drop": f"turns/t{turn}/drop", "undo": "undo", "remove": f"turns/t{turn}"}[how]
        method = "DELETE" if how == "remove" else "POST"
        done = await post(self.elsewhere, b"", method=method, path=f"/api/sessions/{self.session}/{path}")
        assert done.status in {200, 204}, done.body


def named(*pairs: tuple[str, str]) -> list[Spoken]:
    return [entry for question, answer in pairs for entry in (("question", question), ("answer", answer))]


@pytest.mark.parametrize("numbered", [True, False], ids=["other answers", "equal answers"])
@pytest.mark.parametrize("how", ["drop", "undo", "remove"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sends_all", [True, False], ids=["resent", "delta"])
async def test_question_after_hidden_turns_starts_a_new_turn(
    answering: Service,
    elsewhere: Service,
    answers: Answers,
    dialect: Wire,
    key: str,
    sends_all: bool,
    streams: bool,
    how: str,
    numbered: bool,
) -> None:
    answers.are_numbered = numbered
    talk = Talk(answering, elsewhere, dialect, key, sends_all=sends_all, streams=streams)
    one, two = await talk.ask(f"one-{key}"), await talk.ask("two")
    turn = 2
    for _ in range(3):
        await talk.hide(how, turn)
        talk.forget()
        two = await talk.ask("two")
        assert answers.last_sent == [*named((f"one-{key}", one)), ("question", "two")]
        assert await listed(answering, talk.session) == named((f"one-{key}", one), ("two", two))
        turn += 1

    three = await talk.ask("three")
    assert answers.last_sent == [*named((f"one-{key}", one), ("two", two)), ("question", "three")]
    await talk.ask("two")
    assert answers.last_sent == [
        *named((f"one-{key}", one), ("two", two), ("three", three)),
        ("question", "two"),
    ]


async def test_sixty_tries(answering: Service, elsewhere: Service, answers: Answers, key: str) -> None:
    answers.are_numbered = True
    for number in range(60):
        talk = Talk(answering, elsewhere, WIRES["openai_chat"], "", sends_all=True, streams=bool(number % 2))
        one = await talk.ask(f"one-{key}-{number}")
        await talk.ask("two")
        await talk.hide("undo" if number % 3 else "drop", 2)
        talk.forget()
        two = await talk.ask("two")
        assert answers.last_sent[-1] == ("question", "two")
        assert await listed(answering, talk.session) == named((f"one-{key}-{number}", one), ("two", two))
        await talk.ask("three")
        assert answers.last_sent[2:4] == named(("two", two))


@pytest.mark.parametrize("numbered", [True, False], ids=["other answers", "equal answers"])
async def test_undone_in_the_chat(
    commanded: Service, answers: Answers, dialect: Wire, key: str, numbered: bool
) -> None:
    answers.are_numbered = numbered
    talk = Talk(commanded, commanded, dialect, key, sends_all=True, streams=False)
    one = await talk.ask(f"one-{key}")
    for number in range(3):
        if number % 2:  # some clients drop what was undone and what undid it, others go on sending both
            talk.history = talk.history[:2]
        await talk.ask("two")
        command = await dialect.send(commanded, [*talk.history, ("user", "/undo")])
        assert command.headers["x-tersely-context"] == "command"
        answer_text = max(re.findall(r'"((?:[^"\\]|\\.)*)"', command.body.decode()), key=len)
        talk.history += [("user", "/undo"), ("assistant", json.loads(f'"{answer_text}"'))]
    two = await talk.ask("two")
    assert answers.last_sent == [*named((f"one-{key}", one)), ("question", "two")]
    assert await listed(commanded, talk.session) == named((f"one-{key}", one), ("two", two))
    three = await talk.ask("three")
    assert answers.last_sent == [*named((f"one-{key}", one), ("two", two)), ("question", "three")]
    assert await listed(commanded, talk.session) == named((f"one-{key}", one), ("two", two), ("three", three))


@pytest.mark.parametrize("numbered", [True, False], ids=["other answers", "equal answers"])
@pytest.mark.parametrize("how", ["drop", "undo"])
async def test_histories_by_id(answering: Service, answers: Answers, key: str, how: str, numbered: bool) -> None:
    answers.are_numbered = numbered
    responses = WIRES["openai_responses"]

    async def ask(name: str, before: str) -> tuple[str, str, str]:
        more: dict[str, Any] = {"previous_response_id": before} if before else {}
        answered = await post(answering, responses.body(f"question <{name}>", **more), path=responses.path)
        assert answered.status == 200, answered.body
        return answered.json["id"], NAME.findall(answer_in(answered))[0][1], answered.session

    first, one, session = await ask(f"one-{key}", "")
    last = ""
    for turn in range(2, 5):
        last, two, _ = await ask("two", first)
        assert answers.last_sent[-1] == ("question", "two")
        assert await listed(answering, session) == named((f"one-{key}", one), ("two", two))
        path = f"turns/t{turn}/drop" if how == "drop" else "undo"
        assert (await post(answering, b"", path=f"/api/sessions/{session}/{path}")).status == 200
    last, two, _ = await ask("two", first)
    await ask("three", last)
    sent = answers.last_sent
    assert sent[-1] == ("question", "three")
    assert [name for kind, name in await listed(answering, session) if kind == "question"] == [
        f"one-{key}",
        "two",
        "three",
    ]


async def test_client_that_resends_a_hidden_turn_continues_without_it(
    answering: Service, elsewhere: Service, answers: Answers, dialect: Wire, key: str
) -> None:
    answers.are_numbered = True
    talk = Talk(answering, elsewhere, dialect, key, sends_all=True, streams=False)
    one, _, three = await talk.ask(f"one-{key}"), await talk.ask("two"), await talk.ask("three")
    await talk.hide("drop", 2)
    four = await talk.ask("four")
    assert answers.last_sent == [*named((f"one-{key}", one), ("three", three)), ("question", "four")]
    two = await talk.ask("two")
    assert answers.last_sent[-1] == ("question", "two")
    await talk.ask("five")
    expected = named((f"one-{key}", one), ("three", three), ("four", four), ("two", two))
    assert answers.last_sent == [*expected, ("question", "five")]


async def test_completion_again_in_the_middle_leaves_the_hidden_turn_hidden(
    answering: Service, elsewhere: Service, answers: Answers, dialect: Wire, key: str
) -> None:
    """The client's own history holds the dropped turn and, later, the same words again."""
    answers.are_numbered = False
    talk = Talk(answering, elsewhere, dialect, key, sends_all=True, streams=False)
    one, _ = await talk.ask(f"one-{key}"), await talk.ask("two")
    await talk.hide("undo", 2)
    two = await talk.ask("two")  # behind the one that was taken back, which the client still holds
    three = await talk.ask("three")
    assert answers.last_sent == [*named((f"one-{key}", one), ("two", two)), ("question", "three")]
    assert await listed(answering, talk.session) == named((f"one-{key}", one), ("two", two), ("three", three))


async def test_removed_turns_stay_away_where_their_question_is_asked_again(
    answering: Service, elsewhere: Service, answers: Answers, dialect: Wire, key: str
) -> None:
    """A client that still sends turns which were hidden does not bring them back by the words of a later question."""
    answers.are_numbered = True
    talk = Talk(answering, elsewhere, dialect, key, sends_all=True, streams=False)
    one, _, _ = await talk.ask(f"one-{key}"), await talk.ask("same"), await talk.ask("same")
    behind_third = list(talk.history)
    await talk.ask("four")
    await talk.hide("drop", 4)
    await talk.ask("same")
    await talk.hide("remove", 3)
    talk.history = behind_third
    again = await talk.ask("same")
    await talk.hide("remove", 2)
    five = await talk.ask("five")
    assert answers.last_sent == [*named((f"one-{key}", one), ("same", again)), ("question", "five")]
    assert await listed(answering, talk.session) == named((f"one-{key}", one), ("same", again), ("five", five))
