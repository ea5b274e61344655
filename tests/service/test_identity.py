"""The session of a request, on the real store, with two workers where requests race."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedModel, ScriptedReply, run_scripted
from tersely.service.common.auth import new_key
from tersely.store.db.connection import Database as Pool
from tersely.store.ops import keys
from tests.conftest import Database
from tests.support.chat_messages import system, user
from tests.support.http import Answered
from tests.support.rows import StoredMessage, query, stored_messages
from tests.support.services import Worker, run_worker

Wire = dict[str, Any]


class Upstream:
    """Answers ``reply N to WORDS``, or a scripted reply; holds back the replies to the words that `hold` names."""

    def __init__(self) -> None:
        self.scripted: dict[str, list[ScriptedReply]] = defaultdict(list)
        self.gates: dict[str, list[asyncio.Event]] = defaultdict(list)
        self.seen: dict[str, list[list[Wire]]] = defaultdict(list)
        self.model = ScriptedModel(script=self._answer)

    async def _answer(self, received: ReceivedRequest) -> ScriptedReply:
        assert received.request is not None
        messages: list[Wire] = received.request["messages"]
        words = str(messages[-1]["content"])
        self.seen[words].append(messages)
        scripted_reply = self.scripted[words].pop(0) if self.scripted[words] else None
        if self.gates[words]:
            await self.gates[words].pop(0).wait()
        return scripted_reply or ScriptedReply(message={"content": f"This is reply {received.number} to {words}"})

    def hold(self, words: str) -> asyncio.Event:
        """The next reply to ``words`` waits for this."""
        self.gates[words].append(asyncio.Event())
        return self.gates[words][-1]

    def tell(self, words: str, content: str) -> None:
        """The next reply to ``words``."""
        self.scripted[words].append(ScriptedReply(message={"content": content}))

    def fail(self, words: str) -> None:
        """The next request that ends with ``words`` fails."""
        self.scripted[words].append(ScriptedReply(status=500, body=b'{"error":{"message":"no","type":"server_error"}}'))

    async def wait_for(self, words: str, times: int = 1) -> None:
        """Until ``words`` have arrived so often."""
        async with asyncio.timeout(10):
            while len(self.seen[words]) < times:
                await asyncio.sleep(0.005)


class Service:
    """Two workers on one database; requests take turns between them."""

    def __init__(self, database: Database, upstream: Upstream, workers: Sequence[Worker]) -> None:
        self.database = database
        self.upstream = upstream
        self.workers = workers
        self._next = 0

    async def ask(self, *messages: Wire, expect: int = 200, **headers: str) -> Answered:
        self._next += 1
        worker = self.workers[self._next % len(self.workers)]
        answered = await worker.post({"model": "gpt-4o", "messages": messages}, **headers)
        assert answered.status == expect, answered.body
        return answered

    async def live(self, session: str) -> list[str]:
        """The client's view of a session."""
        return [words(each) for each in await stored_messages(self.database, session) if each.status == "live"]

    async def turns(self, session: str) -> list[int]:
        stored = await stored_messages(self.database, session)
        return [each.turn for each in stored if each.status == "live" and each.turn]

    async def sessions(self) -> dict[str, str | None]:
        """Every session with its parent."""
        rows = await query(self.database, "SELECT id, parent FROM sessions ORDER BY created_at, id")
        return {row["id"]: row["parent"] for row in rows}

    async def settled(self, count: int) -> list[StoredMessage]:
        """All messages, once there are so many."""
        async with asyncio.timeout(10):
            while len(stored := await stored_messages(self.database)) < count:
                await asyncio.sleep(0.01)
        return stored


def words(stored: StoredMessage) -> str:
    return str(stored.message["content"])


def reply_of(answered: Answered, choice: int = 0) -> Wire:
    """The reply as a client puts it into its history."""
    message = json.loads(answered.body)["choices"][choice]["message"]
    return {"role": "assistant", "content": message["content"]}


@asynccontextmanager
async def running(database: Database, workers: int = 2, **settings: Any) -> AsyncIterator[Service]:
    upstream = Upstream()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_scripted(model=upstream.model))
        started = [
            await stack.enter_async_context(run_worker(database, server.base_url, **settings)) for _ in range(workers)
        ]
        yield Service(database, upstream, started)


@pytest.fixture
async def service(database: Database) -> AsyncIterator[Service]:
    async with running(database) as started:
        yield started


# Tersely's own header


async def test_session_header_names_the_session_and_permits_deltas(service: Service) -> None:
    first = await service.ask(system("Be brief."), user("one"), X_Tersely_Session="mine")
    second = await service.ask(user("two"), X_Tersely_Session="mine")
    assert (first.session, first.source, second.session, second.source) == ("mine", "header", "mine", "header")
    assert service.upstream.seen["two"] == [[system("Be brief."), user("one"), reply_of(first), user("two")]]
    assert await service.live("mine") == [
        "Be brief.",
        "one",
        reply_of(first)["content"],
        "two",
        reply_of(second)["content"],
    ]
    assert await service.turns("mine") == [1, 1, 2, 2]


async def test_whole_history_under_the_session_header_is_reconciled(service: Service) -> None:
    first = await service.ask(user("one"), X_Tersely_Session="mine")
    second = await service.ask(user("one"), reply_of(first), user("two"), X_Tersely_Session="mine")
    assert await service.live("mine") == ["one", reply_of(first)["content"], "two", reply_of(second)["content"]]
    assert service.upstream.seen["two"] == [[user("one"), reply_of(first), user("two")]]


async def test_our_own_header_wins_over_a_history_of_another_session(service: Service) -> None:
    first = await service.ask(user("one"))
    other = await service.ask(user("one"), reply_of(first), user("two"), X_Tersely_Session="mine")
    assert other.session == "mine"
    assert await service.live(first.session) == ["one", reply_of(first)["content"]]


async def test_equal_delta_is_a_retry_only_if_unanswered_or_marked(
    service: Service,
) -> None:
    service.upstream.fail("one")
    await service.ask(user("one"), expect=500, X_Tersely_Session="mine")
    again = await service.ask(user("one"), X_Tersely_Session="mine")
    assert await service.live("mine") == ["one", reply_of(again)["content"]]
    retried = await service.ask(user("one"), X_Tersely_Session="mine", X_Stainless_Retry_Count="1")
    assert await service.live("mine") == ["one", reply_of(retried)["content"]]
    meant = await service.ask(user("one"), X_Tersely_Session="mine")
    assert await service.live("mine") == ["one", reply_of(retried)["content"], "one", reply_of(meant)["content"]]


async def test_session_stored_from_deltas_is_recognised_by_its_whole_history(service: Service) -> None:
    first = await service.ask(user("one"), X_Tersely_Session="mine")
    second = await service.ask(user("two"), X_Tersely_Session="mine")
    third = await service.ask(user("one"), reply_of(first), user("two"), reply_of(second), user("three"))
    assert (third.session, third.source) == ("mine", "lineage")


async def test_delta_is_not_matched_to_another_session_of_equal_text(service: Service) -> None:
    await service.ask(user("one"), X_Tersely_Session="mine")
    second = await service.ask(user("two"), X_Tersely_Session="mine")
    # Somebody else's history happens to consist of the second turn alone: its reply is ours all the same.
    service.upstream.tell("two", reply_of(second)["content"])
    other = await service.ask(user("two"))
    going_on = await service.ask(user("two"), reply_of(other), user("three"))
    assert going_on.session == other.session != "mine"


async def test_concurrent_messages_under_our_own_header_keep_their_replies_beside_them(service: Service) -> None:
    await service.ask(user("one"), X_Tersely_Session="mine")
    held = service.upstream.hold("slow")
    slow = asyncio.create_task(service.ask(user("slow"), X_Tersely_Session="mine"))
    await service.upstream.wait_for("slow")
    await service.settled(3)
    quick = await service.ask(user("quick"), X_Tersely_Session="mine")
    held.set()
    late = await slow
    live = await service.live("mine")
    assert live[2:] == ["slow", reply_of(late)["content"], "quick", reply_of(quick)["content"]]
    assert await service.turns("mine") == [1, 1, 2, 2, 3, 3]


async def test_first_messages_that_race_under_our_own_header_are_all_kept(service: Service) -> None:
    questions = [f"question {number}" for number in range(8)]
    await asyncio.gather(*(service.ask(user(each), X_Tersely_Session="mine") for each in questions))
    stored = await stored_messages(service.database, "mine")
    assert sorted(words(each) for each in stored if each.role == "user") == questions
    assert sorted(each.seq for each in stored) == [*range(1, 17)]
    by_turn = defaultdict(list)
    for each in stored:
        assert each.status == "live"
        by_turn[each.turn].append(words(each))
    assert all(answer.endswith(f" to {question}") for question, answer in by_turn.values())


# Clients' own ids


async def test_a_clients_own_id_becomes_the_sessions_and_its_other_histories_are_children(service: Service) -> None:
    first = await service.ask(user("one"), X_Session_Id="abc")
    other = await service.ask(user("something else"), X_Session_Id="abc")
    going_on = await service.ask(user("one"), reply_of(first), user("two"), X_Session_Id="abc")
    child = await service.ask(user("something else"), reply_of(other), user("more"), X_Session_Id="abc")
    assert (first.session, first.source) == ("abc", "new")
    assert (going_on.session, going_on.source) == ("abc", "header")
    assert child.session == other.session != "abc"
    assert await service.sessions() == {"abc": None, other.session: "abc"}


async def test_an_id_in_the_body_counts_too(service: Service) -> None:
    body = {"model": "gpt-4o", "session_id": "abc"}
    first = await service.workers[0].post({**body, "messages": [user("one")]})
    second = await service.workers[1].post({**body, "messages": [user("one"), reply_of(first), user("two")]})
    assert (first.session, second.session, second.source) == ("abc", "abc", "body")


async def test_a_key_for_the_prompt_cache_names_no_session(service: Service) -> None:
    body = {"model": "gpt-4o", "prompt_cache_key": "one for all of an application"}
    first = await service.workers[0].post({**body, "messages": [user("one")]})
    other = await service.workers[1].post({**body, "messages": [user("one")]})
    second = await service.workers[1].post({**body, "messages": [user("one"), reply_of(first), user("two")]})
    assert (first.source, other.source) == ("new", "new")
    assert first.session != other.session
    assert second.source == "lineage"
    assert await service.sessions() == {first.session: None, other.session: None}


async def test_one_id_for_everything_does_not_mix_conversations_that_start_at_once(service: Service) -> None:
    questions = [f"question {number}" for number in range(8)]
    answers = await asyncio.gather(*(service.ask(user(each), X_Session_Id="app") for each in questions))
    found = await service.sessions()
    assert len(found) == 8
    assert {parent for session, parent in found.items() if session != "app"} == {"app"}
    for question, answer in zip(questions, answers, strict=True):
        later = await service.ask(user(question), reply_of(answer), user("more"), X_Session_Id="app")
        assert (await service.live(later.session))[:3] == [question, reply_of(answer)["content"], "more"]
    assert len(await service.sessions()) == 8


async def test_the_same_conversation_under_another_id_is_another_session(service: Service) -> None:
    first = await service.ask(user("one"), X_Session_Id="abc")
    fork = await service.ask(user("one"), reply_of(first), user("two"), X_Session_Id="fork")
    assert (fork.session, fork.source) == ("fork", "new")
    assert await service.live("abc") == ["one", reply_of(first)["content"]]


async def test_a_subagent_is_a_child_of_the_session_that_it_names(service: Service) -> None:
    await service.ask(user("one"), X_Session_Id="abc")
    await service.ask(user("task"), X_Session_Id="sub", X_Parent_Session_Id="abc")
    assert await service.sessions() == {"abc": None, "sub": "abc"}


async def test_a_side_call_under_an_id_is_no_turn(service: Service) -> None:
    first = await service.ask(user("one"), X_Session_Id="abc")
    title = await service.ask(system("You are a title generator. Be brief."), user("one"), X_Session_Id="abc")
    assert (title.session, title.source) == ("", "")
    assert await service.live("abc") == ["one", reply_of(first)["content"]]


# Lineage


async def test_sessions_that_begin_with_the_same_words_stay_two(service: Service) -> None:
    first = await service.ask(user("hello"))
    second = await service.ask(user("hello"))
    assert first.session != second.session
    one = await service.ask(user("hello"), reply_of(first), user("one"))
    two = await service.ask(user("hello"), reply_of(second), user("two"))
    assert (one.session, two.session) == (first.session, second.session)
    assert (one.source, two.source) == ("lineage", "lineage")


async def test_sessions_with_the_same_words_and_the_same_replies_stay_two(service: Service) -> None:
    for _ in range(2):
        service.upstream.tell("hello", "Ok.")
    first, second = await service.ask(user("hello")), await service.ask(user("hello"))
    one = await service.ask(user("hello"), reply_of(first), user("one"))
    two = await service.ask(user("hello"), reply_of(second), user("two"))
    assert {one.session, two.session} == {first.session, second.session}
    again = await service.ask(user("hello"), reply_of(first), user("one"), reply_of(one), user("more"))
    assert again.session == one.session


async def test_beginnings_that_are_under_way_at_once_stay_apart(service: Service) -> None:
    held = [service.upstream.hold("hello") for _ in range(2)]
    pending = [asyncio.create_task(service.ask(user("hello"))) for _ in range(2)]
    await service.upstream.wait_for("hello", 2)
    for gate in held:
        gate.set()
    first, second = await asyncio.gather(*pending)
    assert first.session != second.session


async def test_marked_retry_joins_the_session_of_the_running_call(service: Service) -> None:
    held = service.upstream.hold("hello")
    first = asyncio.create_task(service.ask(user("hello")))
    await service.upstream.wait_for("hello")
    await service.settled(1)
    second = await service.ask(user("hello"), X_Stainless_Retry_Count="1")
    held.set()
    assert (await first).session == second.session
    stored = await stored_messages(service.database, second.session)
    assert sorted((each.role, each.status, each.turn) for each in stored) == [
        ("assistant", "live", 1),
        ("assistant", "superseded", 1),
        ("user", "live", 1),
    ]
    assert await service.live(second.session) == ["hello", reply_of(second)["content"]], "the later request's reply"


async def test_failed_first_call_is_continued_by_its_retry(service: Service) -> None:
    service.upstream.fail("hello")
    await service.ask(user("hello"), expect=500)
    again = await service.ask(user("hello"))
    assert (again.source, len(await service.sessions())) == ("lineage", 1)
    assert await service.live(again.session) == ["hello", reply_of(again)["content"]]
    assert await service.turns(again.session) == [1, 1]


async def test_a_failed_later_turn_is_one_turn_when_it_is_sent_again(service: Service) -> None:
    first = await service.ask(user("one"))
    service.upstream.fail("two")
    await service.ask(user("one"), reply_of(first), user("two"), expect=500)
    again = await service.ask(user("one"), reply_of(first), user("two"))
    assert again.session == first.session
    assert await service.turns(first.session) == [1, 1, 2, 2]


async def test_a_history_of_replies_that_we_never_relayed_is_new(service: Service) -> None:
    canned = {"role": "assistant", "content": "A canned answer of an example, long enough to tell something."}
    first = await service.ask(user("example"), canned, user("one"))
    second = await service.ask(user("example"), canned, user("one"))
    assert first.session != second.session
    assert second.source == "new"


async def test_tenants_do_not_see_each_other(database: Database) -> None:
    async with running(database, auth="keys") as service:
        secrets = {tenant: await key_for(database, tenant) for tenant in ("north", "south")}
        for _ in range(4):
            service.upstream.tell("hello", "The same reply, word for word, to both of them.")
        first = {tenant: await service.ask(user("hello"), X_Tersely_Key=key) for tenant, key in secrets.items()}
        assert first["north"].session != first["south"].session
        history = [user("hello"), reply_of(first["north"]), user("more")]
        second = {tenant: await service.ask(*history, X_Tersely_Key=key) for tenant, key in secrets.items()}
        assert {tenant: each.session for tenant, each in second.items()} == {
            tenant: each.session for tenant, each in first.items()
        }
        # Nor by an id: the same one names a session of each.
        for tenant, key in secrets.items():
            await service.ask(user(f"from {tenant}"), X_Tersely_Key=key, X_Tersely_Session="same")
        assert service.upstream.seen["from south"] == [[user("from south")]]
        rows = await query(database, "SELECT tenant_id, count(*) AS n FROM sessions GROUP BY 1 ORDER BY 1")
        assert [(row["tenant_id"], row["n"]) for row in rows] == [("north", 2), ("south", 2)]


async def key_for(database: Database, tenant: str) -> str:
    key, stored = new_key(tenant, "test", now=datetime.now(UTC), key_id=f"{tenant}0000", secret=tenant[0] * 40)
    pool = Pool(dsn=database.dsn, size=1)
    await pool.open()
    try:
        await keys.add(pool, stored)
    finally:
        await pool.close()
    return key


# Anchors


async def test_a_rebuilt_history_is_found_by_its_newest_reply(service: Service) -> None:
    first = await service.ask(user("files: a"), user("one with a reminder"))
    second = await service.ask(user("files: a, b"), user("one"), reply_of(first), user("two with a reminder"))
    assert (second.session, second.source) == (first.session, "lineage")
    assert (await service.live(first.session))[:-1] == [
        "files: a, b",
        "one",
        reply_of(first)["content"],
        "two with a reminder",
    ]


async def test_a_reply_that_two_sessions_got_tells_nothing_unless_an_older_one_does(service: Service) -> None:
    async def tell(opening: str) -> tuple[Answered, Answered]:
        service.upstream.tell("go", "The tests pass now, all of them.")
        first = await service.ask(user(opening))
        return first, await service.ask(user(opening), reply_of(first), user("go"))

    await tell("files: a")
    first, second = await tell("files: b")
    assert len(await service.sessions()) == 2
    unclear = await service.ask(user("rebuilt"), reply_of(second), user("more"))
    assert unclear.source == "new"
    settled = await service.ask(user("rebuilt"), reply_of(first), user("go"), reply_of(second), user("more"))
    assert (settled.session, settled.source) == (first.session, "lineage")


async def test_short_replies_are_no_anchors(service: Service) -> None:
    service.upstream.tell("one", "Ok.")
    first = await service.ask(user("one"))
    other = await service.ask(user("something else"), reply_of(first), user("two"))
    assert (other.source, other.session != first.session) == ("new", True)


async def test_client_that_continues_from_its_own_summary_is_recognised(service: Service) -> None:
    first = await service.ask(user("one"))
    question = user("Please provide a concise summary of our conversation so far, capturing the key points.")
    summary = await service.ask(user("one"), reply_of(first), question)
    assert summary.session == ""
    summary_text = f"Here is a summary of the conversation to date:\n{reply_of(summary)['content']}"
    second = await service.ask(user(summary_text), user("two"))
    assert (second.session, second.source) == (first.session, "lineage")
    assert await service.live(first.session) == [summary_text, "two", reply_of(second)["content"]]
    assert len(await service.sessions()) == 1


# Races


async def test_later_of_two_continuations_wins_and_each_keeps_its_context(service: Service) -> None:
    first = await service.ask(user("one"))
    before = [user("one"), reply_of(first)]
    held = service.upstream.hold("this way")
    slow = asyncio.create_task(service.ask(*before, user("this way")))
    await service.upstream.wait_for("this way")
    await service.settled(3)
    other = await service.ask(*before, user("that way"))
    held.set()
    late = await slow
    assert late.session == other.session == first.session
    assert service.upstream.seen["this way"] == [[*before, user("this way")]]
    assert service.upstream.seen["that way"] == [[*before, user("that way")]]
    assert await service.live(first.session) == [
        "one",
        reply_of(first)["content"],
        "that way",
        reply_of(other)["content"],
    ]
    # Nothing is lost: whoever was left behind may come back.
    back = await service.ask(*before, user("this way"), reply_of(late), user("on"))
    assert back.session == first.session
    assert (await service.live(first.session))[2:] == [
        "this way",
        reply_of(late)["content"],
        "on",
        reply_of(back)["content"],
    ]


@pytest.mark.parametrize("is_first_quicker", [True, False])
async def test_of_two_replies_to_one_request_the_later_requests_wins(
    service: Service, *, is_first_quicker: bool
) -> None:
    first = await service.ask(user("one"))
    history = [user("one"), reply_of(first), user("two")]
    held = [service.upstream.hold("two") for _ in range(2)]
    pending = []
    for number in (1, 2):
        pending.append(asyncio.create_task(service.ask(*history)))
        await service.upstream.wait_for("two", number)
        await asyncio.sleep(0.1)
    for number in (0, 1) if is_first_quicker else (1, 0):
        held[number].set()
        await pending[number]
    answers = [task.result() for task in pending]
    assert await service.live(first.session) == [
        "one",
        reply_of(first)["content"],
        "two",
        reply_of(answers[1])["content"],
    ]
    assert await service.turns(first.session) == [1, 1, 2, 2]
    # The client may have taken the other one all the same.
    third = await service.ask(*history, reply_of(answers[0]), user("three"))
    assert third.session == first.session
    assert (await service.live(first.session))[2:4] == ["two", reply_of(answers[0])["content"]]


async def test_a_client_may_go_on_from_any_of_several_choices(service: Service) -> None:
    first = await service.ask(user("one"))
    body: dict[str, Any] = {"model": "gpt-4o", "n": 2, "messages": [user("one"), reply_of(first), user("two")]}
    service.upstream.scripted["two"].append(ScriptedReply(body=two_choices(), status=200))
    both = await service.workers[0].post(body)
    stored = await stored_messages(service.database, first.session)
    assert [(words(each), each.status) for each in stored[-2:]] == [("Choice A.", "live"), ("Choice B.", "superseded")]
    third = await service.ask(*body["messages"], reply_of(both, 1), user("three"))
    assert third.session == first.session
    assert (await service.live(first.session))[2:5] == ["two", "Choice B.", "three"]


def two_choices() -> bytes:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        for index, content in enumerate(("Choice A.", "Choice B."))
    ]
    return json.dumps({"id": "c", "object": "chat.completion", "choices": choices}).encode()


async def test_interrupted_reply_is_stored_and_histories_with_or_without_it_continue(service: Service) -> None:
    first = await service.ask(user("one"))
    history = [user("one"), reply_of(first), user("two")]
    text = "A long reply of which the client sees the beginning"
    service.upstream.scripted["two"].append(
        ScriptedReply(message={"content": text}, pieces=[text[:20], text[20:]], break_after=2, break_with="stall")
    )
    worker = service.workers[0]
    body = {"model": "gpt-4o", "stream": True, "messages": history}
    async with worker.http.post(f"{worker.base_url}/v1/chat/completions", json=body) as response:
        async for chunk in response.content.iter_any():
            if text[:20].encode() in chunk:
                break
        response.close()
    stored = await service.settled(4)
    assert (words(stored[-1]), stored[-1].finish, stored[-1].status) == (text[:20], "client_left", "live")
    partly = {"role": "assistant", "content": text[:20]}
    with_it = await service.ask(*history, partly, user("three"))
    assert with_it.session == first.session
    assert await service.turns(first.session) == [1, 1, 2, 2, 3, 3]
    without = await service.ask(*history, user("four"))
    assert without.session == first.session
    assert (await service.live(first.session))[2:4] == ["two", "four"]


async def test_a_fan_out_of_one_history_loses_nothing(service: Service) -> None:
    first = await service.ask(user("one"))
    before = [user("one"), reply_of(first)]
    questions = [f"way {number}" for number in range(12)]
    answers = await asyncio.gather(*(service.ask(*before, user(each)) for each in questions))
    assert {each.session for each in answers} == {first.session}
    for each in questions:
        assert service.upstream.seen[each] == [[*before, user(each)]]
    stored = await stored_messages(service.database, first.session)
    assert sorted(each.seq for each in stored) == [*range(1, 27)]
    assert sorted(words(each) for each in stored if each.relayed) == sorted(
        reply_of(each)["content"] for each in (first, *answers)
    )
    live = await service.live(first.session)
    assert len(live) == 4
    assert live[3].endswith(f" to {live[2]}"), "the reply that is live answers the question that is"


# Contexts of rebuilt histories


def is_subsequence(some: Sequence[Wire], all_of_them: Sequence[Wire]) -> bool:
    rest = iter(all_of_them)
    return all(each in rest for each in some)


def pad(text: str) -> str:
    return f"{text}: " + "words that fill the window " * 12


def check_context(got: Sequence[Wire], sent: Sequence[Wire]) -> None:
    """Check that the client's messages that are left stand in their order, and that its last one is the last."""
    own = [each for each in got if each in sent]
    assert is_subsequence(own, sent)
    assert got[-1] == sent[-1]


async def test_contexts_of_a_history_that_is_rebuilt_at_each_turn_keep_its_order(database: Database) -> None:
    async with running(database, strategy="slim", epoch='{"high": 1500, "low": 700}') as service:
        known: list[Wire] = []
        found = set()
        for number in range(24):
            front = [user(pad("an example")), user(pad(f"files as of {number // 4}"))]
            sent = [*front, *known, user(f"{pad(f'question {number}')} with a reminder")]
            answered = await service.ask(*sent)
            check_context(service.upstream.seen[sent[-1]["content"]][-1], sent)
            found.add(answered.session)
            known += [user(pad(f"question {number}")), reply_of(answered)]
        assert len(found) == 1
        epochs = await query(database, "SELECT number, reason, cut FROM epochs ORDER BY number")
        assert max(row["cut"] for row in epochs) > 1, "something was cut"


async def test_contexts_after_a_clients_own_compaction_keep_its_order(database: Database) -> None:
    async with running(database, strategy="slim", epoch='{"high": 1500, "low": 700}') as service:
        history: list[Wire] = []
        found = set()
        for number in range(24):
            history.append(user(pad(f"question {number}")))
            if number % 5 == 4:
                history = [user(f"Summary:\n{pad(f'what was said until {number}')}"), *history[-5:]]
            answered = await service.ask(*history)
            check_context(service.upstream.seen[history[-1]["content"]][-1], history)
            history.append(reply_of(answered))
            found.add(answered.session)
        assert len(found) == 1
