"""Cache breakpoints: the client's own stay, Tersely's come where there is room, and the rules of the API hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.anthropic.write import write_request
from tersely.dialects.dialect import RequestPatch
from tests.dialects.recordings import client_requests

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def text(words: str = "x", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def message(*blocks: dict[str, Any] | str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": blocks[0] if isinstance(blocks[0], str) else list(blocks)}


def write(messages: list[dict[str, Any]], breakpoints: list[int], **members: Any) -> dict[str, Any]:
    raws = [json.dumps(each).encode() for each in messages]
    body = json.dumps({**members, "messages": []}).encode()
    written: dict[str, Any] = json.loads(write_request(body, RequestPatch(messages=raws, breakpoints=breakpoints)))
    return written


def marks(written: dict[str, Any]) -> list[tuple[int, str]]:
    """Place and lifetime of each breakpoint, in the order of the prompt; -2: tools, -1: system."""
    found: list[tuple[int, str]] = []
    places = [(-2, written.get("tools", [])), (-1, written.get("system", []))]
    places += [(place, each.get("content")) for place, each in enumerate(written["messages"])]
    for place, blocks in places:
        for block in blocks if isinstance(blocks, list) else ():
            nested = block.get("content") if isinstance(block.get("content"), list) else ()
            controls = [each["cache_control"] for each in (*nested, block) if each.get("cache_control")]
            found += [(place, control.get("ttl", "5m")) for control in controls]
    return found


TALK = [message("a"), message(text("b"), role="assistant"), message("c"), message("d", role="assistant"), message("e")]


def test_the_ends_of_head_and_tail_are_marked():
    written = write(TALK, [1, 4])
    assert marks(written) == [(1, "5m"), (4, "5m")]
    assert written["messages"][4] == message(text("e", cache_control=EPHEMERAL))
    assert write(TALK, []) == {"messages": TALK}


def test_a_message_has_one_form_marked_or_not():
    """A string cannot carry a mark: it is a list from the first time, with every byte of its words."""
    later = [*TALK, message("f"), message(" "), message("g", role="system")]
    first, second = write(TALK, [1, 4], system="S"), write(later, [1, 5], system="S")
    assert [unmarked(each) for each in first["messages"]] == [unmarked(each) for each in second["messages"][:5]]
    assert first["messages"][0] == message(text("a"))
    assert second["messages"][6:] == later[6:]
    raw = b'{"role": "user", "content": "\\u00e9 \\ud800"}'
    written = write_request(b'{"messages":[]}', RequestPatch(messages=[raw, raw], breakpoints=[1]))
    assert written.startswith(b'{"messages":[{"role":"user","content":[{"type":"text","text":"\\u00e9 \\ud800"}]},')


def unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items() if key != "cache_control"}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


def test_tools_and_instructions_keep_theirs_when_there_is_a_head():
    tools = [{"name": "f"}, {"name": "g"}, {"name": "h", "defer_loading": True}]
    written = write([{"system": "S"}, *TALK], [2, 5], system="S", tools=tools)
    assert marks(written) == [(-2, "5m"), (-1, "5m"), (1, "5m"), (4, "5m")]
    assert [tool.get("cache_control") for tool in written["tools"]] == [None, EPHEMERAL, None]
    # The client's take places: what ends later is longer.
    own = [*TALK[:4], message(text("e", cache_control=HOUR), text("f"))]
    assert marks(write([{"system": "S"}, *own], [2, 5], system="S", tools=tools)) == [
        (-2, "1h"), (-1, "1h"), (1, "1h"), (4, "1h")]  # fmt: skip
    two = [text("S", cache_control=EPHEMERAL), text("T", cache_control=EPHEMERAL)]
    assert marks(write([{"system": two}, *TALK], [2, 5], tools=tools)) == [
        (-1, "5m"), (-1, "5m"), (1, "5m"), (4, "5m")]  # fmt: skip
    assert write([{"system": "S"}, *TALK], [], tools=tools)["tools"] == tools
    assert marks(write(TALK, [4], tools=[tools[2]])) == [(4, "5m")]


def test_instructions_are_marked_at_their_end():
    system = [text("S"), text("T")]
    written = write([{"system": system}, *TALK], [0, 5], system=system)
    assert written["system"] == [text("S"), text("T", cache_control=EPHEMERAL)]
    assert marks(written) == [(-1, "5m"), (4, "5m")]
    assert write([{"system": "S"}, *TALK], [0])["system"] == [text("S", cache_control=EPHEMERAL)]
    assert write(TALK, [])["messages"] == TALK


def test_the_clients_own_stay():
    own = [*TALK[:4], message(text("e", cache_control=HOUR), text("f"))]
    written = write([{"system": [text("S", cache_control=HOUR)]}, *own], [2, 5], tools=[{"cache_control": HOUR}])
    # Ours lives as long as the one behind it: a longer life may not stand behind a shorter one.
    assert marks(written) == [(-2, "1h"), (-1, "1h"), (1, "1h"), (4, "1h")]
    assert written["messages"][4] == own[4]


def test_there_are_never_more_than_four():
    full = [{"cache_control": EPHEMERAL}, {"name": "f"}, {"cache_control": EPHEMERAL}]
    system = {"system": [text("S", cache_control=EPHEMERAL)]}
    # One place is free: the longer prefix is worth more.
    assert marks(write([system, *TALK], [1, 5], tools=full)) == [(-2, "5m"), (-2, "5m"), (-1, "5m"), (4, "5m")]
    four = {"system": [text("S", cache_control=EPHEMERAL), text("T", cache_control=EPHEMERAL)]}
    assert marks(write([four, *TALK], [1, 5], tools=full)) == [(-2, "5m")] * 2 + [(-1, "5m")] * 2


def test_breakpoints_with_an_escaped_name_count():
    raws = [json.dumps(message(text(cache_control=EPHEMERAL))).replace("cache_", "cache\\u005f").encode()] * 3
    body = b'{"system":[{"type":"text","text":"x","c\\u0061che_control":{"type":"ephemeral"}}],"messages":[]}'
    leading = [b'{"system":' + body.partition(b":")[2].partition(b',"messages"')[0] + b"}"]
    written = json.loads(write_request(body, RequestPatch(messages=leading + raws, breakpoints=[1, 3])))
    assert marks(written) == [(-1, "5m"), (0, "5m"), (1, "5m"), (2, "5m")]
    shortened = json.loads(write_request(body, RequestPatch(messages=[*leading, *raws, *raws], breakpoints=[6])))
    assert len(marks(shortened)) == 4


def test_automatic_caching_takes_a_place_and_marks_the_end():
    written = write(TALK, [1, 4], cache_control=EPHEMERAL)
    assert marks(written) == [(1, "5m")]
    assert written["cache_control"] == EPHEMERAL


def test_old_marks_of_stored_messages_go():
    """Each was the newest once, when it was sent."""
    stored = [message(text(str(n), cache_control=EPHEMERAL)) for n in range(6)]
    inner = {"type": "tool_result", "tool_use_id": "c", "content": [text("r", cache_control=EPHEMERAL)]}
    written = write([{"system": [text("S", cache_control=EPHEMERAL)]}, message(inner), *stored], [])
    assert marks(written) == [(-1, "5m"), (4, "5m"), (5, "5m"), (6, "5m")]
    assert written["messages"][1] == message(text("0"))


@pytest.mark.parametrize(
    ("blocks", "place"),
    [
        ([text("a"), {"type": "thinking", "thinking": "", "signature": "s"}], 0),
        ([text("a"), {"type": "redacted_thinking", "data": "x"}, text(" ")], 0),
        ([text("a"), {"type": "brand_new"}], 0),
        ([text("a"), {"type": "tool_use", "id": "c", "name": "f", "input": {}}], 1),
        ([{"type": "thinking", "thinking": "", "signature": "s"}], None),
    ],
)
def test_blocks_that_cannot_carry_one(blocks: list[dict[str, Any]], place: int | None):
    written = write([message("q"), message(*blocks, role="assistant")], [1])
    marked = [n for n, block in enumerate(written["messages"][1]["content"]) if "cache_control" in block]
    assert marked == ([] if place is None else [place])


def test_instructions_between_the_messages_and_messages_without_content_carry_none():
    written = write([message("a"), message("later", role="system")], [0, 1])
    assert marks(written) == [(0, "5m")]
    assert marks(write([message("a"), {"role": "user"}], [1])) == []


def test_places_move_with_the_messages():
    """An opening is put in front, results are joined."""
    calls = [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in "ab"]
    results = [message({"type": "tool_result", "tool_use_id": each, "content": "ok"}) for each in "ab"]
    written = write([message(*calls, role="assistant"), *results, message("u")], [2, 3])
    assert marks(written) == [(2, "5m"), (3, "5m")]
    assert [len(each["content"]) for each in written["messages"][1:3]] == [2, 2]
    assert "cache_control" in written["messages"][2]["content"][1]


CONTROL = st.sampled_from([None, None, EPHEMERAL, HOUR])


@given(st.lists(CONTROL, max_size=2), st.lists(CONTROL, max_size=3), st.lists(CONTROL, min_size=1, max_size=8),
       st.lists(st.integers(0, 7), max_size=3))  # fmt: skip
def test_cache_breakpoints_follow_the_rules(
    tools: list[Any], system: list[Any], controls: list[Any], places: list[int]
):
    every = [*tools, *system, *controls]
    lives = sorted((each for each in every if each), key=lambda each: "ttl" not in each)[:4]
    own = iter([*lives, *[None] * len(every)])
    marked = [next(own) if each else None for each in every]  # at most four, the longer lives first: as it has to be
    blocks = [text("x", cache_control=each) if each else text() for each in marked]
    ours_tools, ours_system = blocks[: len(tools)], blocks[len(tools) : len(tools) + len(system)]
    talk = [message(each) for each in blocks[len(tools) + len(system) :]]
    leading = [{"system": ours_system}] if ours_system else []
    places = [place for place in places if place < len(leading) + len(talk)]
    found = marks(write([*leading, *talk], places, tools=ours_tools))
    assert len(found) <= 4
    assert [life for _, life in found] == sorted(life for _, life in found)
    before = marks({"tools": ours_tools, "system": ours_system, "messages": talk})
    assert [each for each in found if each in before] == before


def test_requests_of_real_clients_keep_the_rules():
    found = client_requests("/v1/messages")
    if not found:
        pytest.skip("the recorded clients are not there")
    for client, number, body in found:
        leading = [{"system": body["system"]}] if "system" in body else []
        messages = [*leading, *body["messages"]]
        members = {key: value for key, value in body.items() if key != "messages"}
        written = write(messages, [len(leading), len(messages) - 1], **members)
        total = len(marks(written)) + ("cache_control" in body)
        assert total <= 4, (client, number)
        assert total >= min(4, len(marks(body))), (client, number)
