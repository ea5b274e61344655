"""`tersely replay` in every dialect: what its lines become, and a small conversation through the whole thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.registry import DIALECTS
from tersely.domain.messages import Dialect
from tersely.fakellm.scripted import ScriptedReply
from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tersely.fakellm.scripted.gemini import GCA, GEMINI
from tersely.fakellm.scripted.openai_chat import CHAT
from tersely.fakellm.scripted.openai_responses import RESPONSES
from tersely.fakellm.scripted.replies import ScriptedExchange, TokenCounts, WireFormat
from tersely.replay.checks import compare_reply
from tersely.replay.model import ExpectedReply, tagged
from tersely.replay.play import Variant
from tersely.transcripts.answers import read_answer
from tersely.transcripts.conversations import BadTranscript, ReplyForm
from tersely.transcripts.replies import bits, has_calls, last_text, with_last_text
from tersely.transcripts.wire_forms import recognise, steps_of
from tests.conftest import SHARED_DATA, Database
from tests.support.replays import play
from tests.support.services import FROM_THE_START

RECORDINGS = sorted((SHARED_DATA / "clients").glob("*/requests.jsonl"))
WIRE = SHARED_DATA / "wire" / "index.jsonl"
SMALL_EPOCHS = '{"high": 1500, "low": 700}'
WIRES: Mapping[Dialect, WireFormat] = {
    "openai_chat": CHAT,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
    "gemini_gca": GCA,
    "openai_responses": RESPONSES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn: the user's question, the model's words with its calls, all at once, and its reply."""

    question: str
    words: str
    calls: tuple[str, ...]
    reply: str


def _chat(turns: Sequence[Turn]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Look after the mill."}]
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn.question, "x_ts": number})
        if turn.calls:
            ids = [f"call_{number}_{place}" for place in range(len(turn.calls))]
            made = [
                {"id": i, "type": "function", "function": {"name": "look", "arguments": json.dumps({"path": path})}}
                for i, path in zip(ids, turn.calls, strict=True)
            ]
            messages.append({"role": "assistant", "content": turn.words or None, "tool_calls": made})
            messages += [
                {"role": "tool", "tool_call_id": i, "content": found(path)}
                for i, path in zip(ids, turn.calls, strict=True)
            ]
        messages.append({"role": "assistant", "content": turn.reply})
    return {"id": "mill", "meta": {"x": 1}, "messages": messages}


def _anthropic(turns: Sequence[Turn]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.question, "x_ts": 1}]})
        if turn.calls:
            thought = {"type": "thinking", "thinking": "Where to look?", "signature": f"sig{number}"}
            words = [{"type": "text", "text": turn.words}] if turn.words else []
            ids = [f"toolu_{number}_{place}" for place in range(len(turn.calls))]
            uses = [
                {"type": "tool_use", "id": i, "name": "look", "input": {"path": path}}
                for i, path in zip(ids, turn.calls, strict=True)
            ]
            messages.append({"role": "assistant", "content": [thought, *words, *uses]})
            results = [
                {"type": "tool_result", "tool_use_id": i, "content": found(path)}
                for i, path in zip(ids, turn.calls, strict=True)
            ]
            messages.append({"role": "user", "content": results})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.reply}]})
    return {"system": "Look after the mill.", "max_tokens": 100, "messages": messages}


def _contents(turns: Sequence[Turn]) -> dict[str, Any]:
    contents: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        contents.append({"role": "user", "parts": [{"text": turn.question}]})
        if turn.calls:
            words = [{"text": turn.words}] if turn.words else []
            made: list[dict[str, Any]] = [
                {"functionCall": {"id": f"f{number}_{place}", "name": "look", "args": {"path": path}}}
                for place, path in enumerate(turn.calls)
            ]
            made[0] = {**made[0], "thoughtSignature": "c2ln"}
            contents.append({"role": "model", "parts": [*words, *made]})
            results = [
                {"functionResponse": {"id": f"f{number}_{place}", "name": "look", "response": {"output": found(path)}}}
                for place, path in enumerate(turn.calls)
            ]
            contents.append({"role": "user", "parts": results})
        contents.append({"role": "model", "parts": [{"text": turn.reply}]})
    return {"systemInstruction": {"parts": [{"text": "Look after the mill."}]}, "contents": contents}


def _gca(turns: Sequence[Turn]) -> dict[str, Any]:
    return {"project": "mill", "request": _contents(turns)}


def _responses(turns: Sequence[Turn]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": turn.question}]})
        if turn.calls:
            items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": "gAAA"})
            if turn.words:
                items.append(_message(f"msg_{number}w", turn.words))
            ids = [f"call_{number}_{place}" for place in range(len(turn.calls))]
            for i, path in zip(ids, turn.calls, strict=True):
                function = {"call_id": i, "name": "look", "arguments": json.dumps({"path": path})}
                items.append({"type": "function_call", "id": "fc_" + i, **function})
            items += [
                {"type": "function_call_output", "call_id": i, "output": found(path)}
                for i, path in zip(ids, turn.calls, strict=True)
            ]
        items.append(_message(f"msg_{number}", turn.reply))
    return {"instructions": "Look after the mill.", "input": items}


def _message(item_id: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": [part]}


def found(path: str) -> str:
    """Return the result of a tool: long enough for a cut to be worth it."""
    return "\n".join(f"{n}: {path} turns the wheel by {n * 37} and keeps gear_{n} in order" for n in range(24))


LINES: Mapping[Dialect, Callable[[Sequence[Turn]], dict[str, Any]]] = {
    "openai_chat": _chat,
    "anthropic": _anthropic,
    "gemini": _contents,
    "gemini_gca": _gca,
    "openai_responses": _responses,
}

TALK = tuple(
    Turn(
        question=f"Question {number}: what does src/wheel_{number}.py do?",
        words="I will look at it." if number % 2 else "",
        calls=(f"src/wheel_{number}.py", f"docs/gear_{number}.md")[: number % 3],
        reply=f"It turns gear {number}.\n\nAnd it stops at {number * 7} degrees.",
    )
    for number in range(6)
)

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30).filter(
    lambda text: bool(text.strip()) and "<" not in text
)
turns = st.lists(
    st.builds(Turn, question=texts, words=st.one_of(st.just(""), texts), calls=st.lists(texts, max_size=3).map(tuple),
              reply=texts),
    min_size=1, max_size=4,
)  # fmt: skip
dialects = st.sampled_from(sorted(LINES))


def _wants(talk: Sequence[Turn]) -> list[tuple[str, int]]:
    """The text and the number of calls of each thing that the model says."""
    replies: list[tuple[str, int]] = []
    for turn in talk:
        replies += [(turn.words, len(turn.calls))] if turn.calls else []
        replies.append((turn.reply, 0))
    return replies


# Forms


@given(dialects, turns)
def test_each_reply_is_a_step_and_its_request_holds_all_before_it(dialect: Dialect, talk: list[Turn]) -> None:
    line = json.loads(json.dumps(LINES[dialect](talk)))
    assert recognise(line) == dialect or all(not turn.calls for turn in talk)
    steps = steps_of(line, dialect)
    assert [step.dialect for step in steps] == [dialect] * len(steps)
    replies = [
        ("".join(words for kind, words in bits(step.reply or {}, dialect) if kind == "content"),
         sum(kind == "tool call" for kind, _ in bits(step.reply or {}, dialect)))
        for step in steps
    ]  # fmt: skip
    assert replies == _wants(talk)
    before: list[bytes] = []
    for step in steps:
        request = step.request(ReplyForm(model="m", is_streamed=True))
        assert WIRES[dialect].check(json.loads(request.body)) is None
        assert b"x_ts" not in request.body
        read = DIALECTS[dialect].read_request(request.body)
        assert read.unreadable is None
        raws = [message.raw for message in read.messages]
        assert raws[: len(before)] == before
        assert not before or DIALECTS[dialect].read_message(raws[len(before)]).role == "assistant"
        before = raws


@given(dialects, turns, st.booleans(), st.integers(min_value=1, max_value=9))
def test_a_providers_stream_is_assembled(dialect: Dialect, talk: list[Turn], is_streamed: bool, size: int) -> None:
    for step in steps_of(json.loads(json.dumps(LINES[dialect](talk))), dialect):
        reply = step.reply or {}
        message = {key: value for key, value in reply.items() if key != "role"}
        exchange = ScriptedExchange(
            request={}, reply=ScriptedReply(message=message, chunk_chars=size),
            counted=TokenCounts(input=1, cached=0, output=1), id="i", model="m",
        )  # fmt: skip
        wire = WIRES[dialect]
        body = b"".join(wire.events(exchange)) if is_streamed else wire.whole(exchange)
        got, _ = read_answer(dialect, body, is_streamed=is_streamed)
        assert list(compare_reply(got, reply, dialect)) == []


@given(dialects, turns, st.integers())
def test_tags_are_added_to_the_last_text_and_to_nothing_else(dialect: Dialect, talk: list[Turn], seed: int) -> None:
    for step in steps_of(json.loads(json.dumps(LINES[dialect](talk))), dialect):
        reply = step.reply or {}
        expected = ExpectedReply(message=reply, seed=(seed,), share=1.0, dialect=dialect)
        changed = tagged(reply, expected, "End with <terse>...</terse>.")
        text = last_text(reply, dialect)
        if text is None or changed == reply:
            assert changed == reply
            continue
        assert "<terse>" in (last_text(changed, dialect) or "")
        assert with_last_text(changed, dialect, text) == reply
        assert has_calls(changed, dialect) == has_calls(reply, dialect)


def test_a_named_dialect_goes_before_the_shape() -> None:
    plain = {"messages": [{"role": "user", "content": "Hello."}]}
    assert recognise(plain) == "openai_chat"
    assert recognise(plain, "anthropic") == "anthropic"
    assert recognise({**plain, "dialect": "anthropic"}, "openai_chat") == "anthropic"
    with pytest.raises(BadTranscript, match="no such dialect: 'latin'"):
        recognise({**plain, "dialect": "latin"})
    with pytest.raises(BadTranscript, match="gemini has contents; it has messages"):
        recognise(plain, "gemini")


def test_chunks_of_one_reply_of_gemini_are_one_reply() -> None:
    contents = [{"role": "user", "parts": [{"text": "a"}]}, *({"role": "model", "parts": [{"text": t}]} for t in "bc")]
    (step,) = steps_of({"contents": contents}, "gemini")
    assert step.reply == {"role": "model", "parts": [{"text": "b"}, {"text": "c"}]}


# Through the whole thing


@pytest.mark.parametrize("dialect", LINES)
async def test_a_conversation_comes_through_in_its_dialect(
    dialect: Dialect, database: Database, tmp_path: Path
) -> None:
    path = tmp_path / f"{dialect}.jsonl"
    path.write_text(json.dumps({**LINES[dialect](TALK), "dialect": dialect}) + "\n")
    strategies = [
        Variant(strategy="full", epoch="auto"),
        Variant(strategy="slim", epoch=SMALL_EPOCHS),
        Variant(strategy="tiered", epoch="every_request"),
    ]
    full, slim, tiered = await play(database, [path], *strategies)
    for result in (full, slim, tiered):
        assert [str(failure) for failure in result.failures] == []
        assert (result.tally.conversations, result.tally.calls, result.tally.beside) == (1, len(_wants(TALK)), 0)
    assert full.tally.model.tokens == full.tally.client.tokens
    assert full.tally.model.own == (0.0, 0.0)
    assert slim.tally.epochs > 1
    assert slim.tally.model.own[0] > 0.0
    assert slim.tally.losses.referring == full.tally.losses.referring > 0


async def test_plain_text_keeps_its_form_within_an_epoch(database: Database, tmp_path: Path) -> None:
    """A string cannot carry a mark of Anthropic's cache, and marks move from call to call."""
    texts = [(role, f"{role} {number}: caf\u00e9") for number in range(12) for role in ("user", "assistant")]
    path = tmp_path / "plain.jsonl"
    plain = {"system": "Be kind.", "messages": [{"role": role, "content": text} for role, text in texts]}
    path.write_text(json.dumps({**plain, "dialect": "anthropic"}) + "\n")
    strategies = [Variant(strategy=name, epoch="auto") for name in ("full", "slim", "window")]
    for result in await play(database, [path], *strategies):
        assert [str(failure) for failure in result.failures] == []
        assert result.tally.calls == 12


async def test_altered_reply_is_reported(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tersely.replay.model.with_tag", lambda text, seed, share: text.replace("degrees", "inches"))
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(_anthropic(TALK[:1])) + "\n")
    (result,) = await play(database, [path], Variant(strategy="slim", epoch=FROM_THE_START))
    failures = [str(failure) for failure in result.failures]
    assert any("content differs" in each and "inches" in each for each in failures), failures


# Real recordings


@pytest.mark.skipif(not RECORDINGS, reason="no recorded clients here (see tests/conftest.py)")
async def test_recorded_clients_are_refused_nothing_and_stored_verbatim(database: Database) -> None:
    results = await play(database, RECORDINGS, Variant(strategy="slim", epoch="auto"))
    assert [str(failure) for result in results for failure in result.failures] == []
    assert len(results) == 20
    assert sum(result.tally.calls + result.tally.beside for result in results) == 303
    assert sum(result.tally.calls for result in results) > 240


@pytest.mark.skipif(not WIRE.exists(), reason="no recorded traffic here (see tests/conftest.py)")
async def test_recorded_traffic_of_every_provider_comes_through(database: Database) -> None:
    (result,) = await play(database, [WIRE], Variant(strategy="slim", epoch="auto"))
    assert [str(failure) for failure in result.failures] == []
    assert result.tally.calls > 350
