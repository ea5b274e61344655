"""Mode ``relevant`` for questions about the whole conversation: turns of the whole session, in time order."""

from __future__ import annotations

from typing import Any

from tersely.domain.search.overview import ROOM
from tests.api.conftest import Api

QUESTION = "Can you summarize how my plans for the garden developed?"
TOPICS = ("the garden beds and tomatoes", "the garden pond and frogs", "the garden fence and paint")


async def find(api: Api, session: str, **options: object) -> Any:
    body = {"mode": "relevant", "query": QUESTION, **options}
    answer = await api.http.post(f"/api/sessions/{session}/search", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def talk(api: Api, session: str, turns: int) -> None:
    for start in range(0, turns, 50):
        messages = []
        for turn in range(start, min(start + 50, turns)):
            topic = TOPICS[turn * len(TOPICS) // turns]
            messages.append({"role": "user", "content": f"Plan {turn} for {topic}."})
            messages.append({"role": "assistant", "content": f"About {topic}: " + "a long answer follows here. " * 20})
        await api.append(session, *messages)


async def test_an_overview_shows_turns_in_order_by_a_few_lines(api: Api) -> None:
    await talk(api, "garden", 9)
    found = await find(api, "garden")
    lines = found["text"].splitlines()
    assert lines[0] == "--- overview: 9 turns of 18 messages, in order ---"
    assert lines[1] == "[user t1] Plan 0 for the garden beds and tomatoes."
    assert lines[2].startswith("[assistant t1] About the garden beds and tomatoes: a long answer")
    assert lines[2].endswith(" ...")
    assert [line.split("]")[0] for line in lines[1:]] == [
        f"[{role} t{turn}" for turn in range(1, 10) for role in ("user", "assistant")
    ]
    assert (found["total"], found["truncated"]) == (18, False)
    (excerpt,) = found["excerpts"]
    assert (excerpt["first"], excerpt["last"]) == (1, 18)
    called = await api.http.post(
        "/api/sessions/garden/tools/context_search", json={"arguments": {"mode": "relevant", "query": QUESTION}}
    )
    assert called.json()["text"] == found["text"]


async def test_a_long_session_is_covered_within_the_room(api: Api) -> None:
    await talk(api, "long", 300)
    found = await find(api, "long")
    assert len(found["text"]) <= ROOM + 200
    assert found["truncated"]
    assert found["text"].splitlines()[-1] == "--- not everything is shown: mode 'turn' shows a turn whole ---"
    turns = [int(message["turn"][1:]) for excerpt in found["excerpts"] for message in excerpt["messages"]]
    assert turns == sorted(turns)
    assert {turn * 3 // 301 for turn in turns} == {0, 1, 2}
    few = await find(api, "long", first=3)
    assert len({message["turn"] for excerpt in few["excerpts"] for message in excerpt["messages"]}) == 3


async def test_dropped_turns_are_not_in_an_overview(api: Api) -> None:
    await talk(api, "mine", 6)
    await api.http.post("/api/sessions/mine/turns/t2/drop")
    text = (await find(api, "mine"))["text"]
    assert "Plan 1" not in text
    assert "Plan 2" in text
    assert (await find(api, "mine", first=0))["text"] == "No messages found."


async def test_an_overview_of_nothing_related_finds_nothing(api: Api) -> None:
    await api.append("empty", {"role": "user", "content": "zebra"}, {"role": "assistant", "content": "giraffe"})
    found = await find(api, "empty")
    assert (found["text"], found["excerpts"], found["total"]) == ("No messages found.", [], 2)
