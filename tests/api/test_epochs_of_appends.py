"""A session that is only appended to keeps its epoch up: the first context of a long one costs what any other does."""

import time

import pytest

MESSAGE = "some words about the work that was done on module number "


async def fill(api, session: str, count: int, batch: int = 500) -> None:
    messages = [
        {"role": "assistant" if n % 2 else "user", "content": f"{MESSAGE}{n} " + "and so on " * 40}
        for n in range(count)
    ]
    for start in range(0, count, batch):
        answer = await api.http.post(
            f"/api/sessions/{session}/messages", json={"messages": messages[start : start + batch]}
        )
        assert answer.status_code == 201


async def test_appending_past_the_high_watermark_starts_an_epoch(api):
    await fill(api, "long", 600)

    events = (await api.http.get("/api/sessions/long/events")).json()["items"]
    context = (await api.http.post("/api/sessions/long/context", json={})).json()

    assert events, "no epoch was started"
    assert context["report"]["epoch"]["cut"] > 1
    assert context["report"]["tokens_after"] < 32_000
    assert context["messages"][0]["content"].startswith("[Context -- Activity Log]")


@pytest.mark.parametrize(("strategy", "limit"), [("window", 32_000), ("tiered", 12_800)])
async def test_other_strategies_keep_up_too(api, strategy, limit):
    await api.http.post("/api/sessions", json={"id": strategy, "strategy": strategy})
    await fill(api, strategy, 600)

    listed = (await api.http.get(f"/api/sessions/{strategy}/events")).json()["items"]
    events = [event for event in listed if event["type"] == "epoch"]
    context = (await api.http.post(f"/api/sessions/{strategy}/context", json={})).json()

    assert events, "no epoch was started"
    assert context["report"]["epoch"]["number"] == events[-1]["number"]
    assert context["report"]["epoch"]["cut"] > 1
    assert context["report"]["tokens_after"] < limit


async def test_short_sessions_are_left_alone(api):
    await fill(api, "short", 10)

    assert (await api.http.get("/api/sessions/short/events")).json()["items"] == []
    assert (await api.http.post("/api/sessions/short/context", json={})).json()["report"]["epoch"]["cut"] == 1


async def test_a_context_costs_the_same_in_a_session_of_many_times_the_length(api):
    await fill(api, "medium", 600)
    await fill(api, "large", 6_000)

    async def measure(session: str) -> float:
        times = []
        for _ in range(7):
            started = time.process_time()
            assert (await api.http.post(f"/api/sessions/{session}/context", json={})).status_code == 200
            times.append(time.process_time() - started)
        return sorted(times)[3]

    medium, large = await measure("medium"), await measure("large")

    # What is compared is about equal; what read everything would be ten times as much.
    assert large < 3 * medium
