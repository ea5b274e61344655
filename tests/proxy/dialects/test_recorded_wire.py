"""Recorded replies of real providers through the whole proxy, over sockets, into a real store.

Byte for byte where nothing is taken out; and with tags and state blocks planted into the model's words, as if these had
never been there. The recordings are not part of the project; without them these tests are skipped.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import pytest

from tersely.dialects.dialect import UNCHANGED, Reply
from tersely.dialects.registry import DIALECTS
from tersely.domain.messages import Dialect as DialectName
from tersely.store.history.model_views import model_raw
from tests.conftest import Database
from tests.dialects.recordings import MISSING, WIRE, cut
from tests.support.http import Answered, post
from tests.support.rows import query
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import RawUpstream, http_head

NAMES: dict[str, DialectName] = {
    "openai.chat": "openai_chat",
    "openai-compat.chat": "openai_chat",
    "openai.responses": "openai_responses",
    "anthropic.messages": "anthropic",
    "gemini.generateContent": "gemini",
    "gemini.streamGenerateContent": "gemini",
}
PATHS = {"openai_chat": "/v1/chat/completions", "openai_responses": "/v1/responses", "anthropic": "/v1/messages"}
TEXT = rb'"(?:[^"\\]|\\.)*"'
EVENT = re.compile(rb".*?(?:\r?\n){2}", re.DOTALL)
# An empty reply in the history; a result that belongs to no call.
MENDED = ("llm__test_tools_streaming_test_tools_streaming_variant_", "_tools_call_with_tool_result_stream")
# One character of a JSON string; one written as a pair of escapes is not cut in two.
CHARACTER = re.compile(rb"\\u[dD][89abAB]..\\u....|\\u....|\\.|[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A reply, and the request that it was given to, as far as that was recorded."""

    name: str
    dialect: DialectName
    streams: bool
    content_type: str
    body: bytes
    request: bytes
    path: str


@cache
def recordings() -> tuple[Recording, ...]:
    """All of them, in order."""
    index = WIRE / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()] if index.exists() else []
    return tuple(map(_recording, lines))


def _recording(line: dict[str, Any]) -> Recording:
    dialect = NAMES[line["api"]]
    url = urlsplit(line["url"])
    path = PATHS.get(dialect) or f"/v1beta{url.path[url.path.index('/models/') :]}"
    return Recording(
        name=line["file"],
        dialect=dialect,
        streams=line["stream"],
        content_type=line["content_type"] or "application/json",
        body=(WIRE / line["file"]).read_bytes(),
        request=(WIRE / line["request_file"]).read_bytes() if "request_file" in line else _asking(dialect, line),
        path=f"{path}?{url.query}" if url.query else path,
    )


def _asking(dialect: DialectName, line: dict[str, Any]) -> bytes:
    if dialect == "gemini":
        return b'{"contents":[{"role":"user","parts":[{"text":"hello"}]}]}'
    words: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    more = {"stream_options": {"include_usage": True}} if line["stream"] and dialect == "openai_chat" else {}
    question = {"input": "hello"} if dialect == "openai_responses" else words
    return json.dumps({"model": "m", "max_tokens": 9, "stream": line["stream"], **question, **more}).encode()


pytestmark = pytest.mark.skipif(not recordings(), reason=MISSING)
by_dialect = pytest.mark.parametrize("dialect", sorted(set(NAMES.values())))


@pytest.fixture(scope="module")
def slim(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """Looks for tags, and adds no words of its own."""
    with serve(store, raw.url, instructions="off") as running:
        yield running


@pytest.fixture(scope="module")
def window(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """Looks for state blocks, and offers tools: what is said may be one round of several."""
    with serve(store, raw.url, strategy="window", epoch=FROM_THE_START, instructions="off") as running:
        yield running


async def play(
    service: Service, raw: RawUpstream, recording: Recording, body: bytes, session: str, dice: random.Random
) -> Answered:
    """Ask for the recording; ``body`` is sent for it, in pieces."""
    size = dice.choice([3, 61, 211, 1400, 10**9])
    if size < 61 and len(body) > 4000:
        pieces = cut(body, [dice.randrange(len(body)) for _ in range(40)])
    else:
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
    raw.answer(http_head(recording.content_type, x_request_id=session), *pieces)
    answer = await post(service, recording.request, path=recording.path, X_Tersely_Session=session)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == recording.content_type
    assert answer.headers["x-request-id"] == session
    return answer


# Nothing is taken out


@by_dialect
@pytest.mark.parametrize("way", ["plain_behind_raw", "slim", "window"])
async def test_a_reply_comes_through_byte_for_byte(
    request: pytest.FixtureRequest, raw: RawUpstream, key: str, dialect: DialectName, way: str
) -> None:
    service = request.getfixturevalue(way)
    wrong = []
    for number, recording in enumerate(recordings()):
        if recording.dialect == dialect:
            answer = await play(service, raw, recording, recording.body, f"{key}-{number}", random.Random(number))
            if answer.body != recording.body:
                wrong.append(recording.name)
            if way == "plain_behind_raw" and not _is_changed(recording):
                assert raw.requests[-1].body == recording.request, recording.name
    assert wrong == []
    kept = await replies(service, key)
    for number, recording in enumerate(recordings()):
        if recording.dialect == dialect:
            by_model, shown = kept[f"{key}-{number}"]
            assert by_model == shown == spoken(recording, recording.body), recording.name


async def replies(service: Service, key: str) -> dict[str, tuple[bytes, bytes]]:
    """Of each session what the model said, and what the client was shown."""
    rows = await query(
        service,
        f"SELECT session_id, raw, coalesce({model_raw()}, raw) AS said FROM messages "
        "WHERE session_id LIKE $1 AND role = 'assistant' AND call > 0 AND status = 'live'",
        f"{key}-%",
    )
    return {row["session_id"]: (row["said"], row["raw"]) for row in rows}


def spoken(recording: Recording, body: bytes) -> bytes:
    """The message in a body, as its dialect puts it together."""
    return reply_in(recording, body).choices[0].model_message


def reply_in(recording: Recording, body: bytes) -> Reply:
    """A body, read."""
    dialect = DIALECTS[recording.dialect]
    if not recording.streams:
        return dialect.split_reply(body, UNCHANGED)[1]
    reader = dialect.open_stream(UNCHANGED)
    reader.feed(body)
    reader.close()
    return reader.reply


def _is_changed(recording: Recording) -> bool:
    """Return whether even a plain proxy changes the request: it asks for the usage, or mends it for strict hosts."""
    if any(name in recording.name for name in MENDED):
        return True
    asks_usage = b'"include_usage":true' in recording.request.replace(b" ", b"")
    return recording.dialect == "openai_chat" and recording.streams and not asks_usage


# Something is taken out


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A string of the model's words in an event: its place there, and what it says."""

    event: int
    start: int
    end: int
    text: str


@dataclass(slots=True)
class Planter:
    """Puts tags into a recorded stream: ``planted`` is what the host sends, ``expected`` what the client must get."""

    recording: Recording
    dice: random.Random

    def plant(self, makes: str) -> tuple[bytes, bytes] | None:
        """``makes``: tag or state. None where the recording has no place for it."""
        events = EVENT.findall(self.recording.body) if self.recording.streams else [self.recording.body]
        if self.recording.streams and b"".join(events) != self.recording.body:
            return None
        words = [word for number, event in enumerate(events) for word in self._words(number, event)]
        text = "".join(word.text for word in words)
        if b"groundingMetadata" in self.recording.body or len(reply_in(self.recording, b"".join(events)).choices) > 1:
            return None
        if not text or any(mark in text for mark in ("```", "~~~", "###", "<")) or text[-1].isspace():
            return None  # in a fence a tag is text, a heading ends a block, and line ends before one go with it
        if makes == "tag" and "`" in text:
            return None  # in a code span a tag is text
        if (
            b"logprobs" in self.recording.body and b'"token"' in self.recording.body
        ) or b"_citation" in self.recording.body:
            return None  # what counts the characters of the words is looked at by the tests of the dialects
        planted, expected = list(events), list(events)
        if makes == "state":
            self._plant_state(words, planted)
        elif not self._plant_tags(words, planted, expected):
            return None
        return self._finish(planted, text), self._finish(expected, text)

    def _words(self, number: int, event: bytes) -> list[Word]:
        key = {"openai_responses": b"delta", "openai_chat": b"content"}.get(self.recording.dialect, b"text")
        if not self.recording.streams and self.recording.dialect == "openai_responses":
            key = b"text"
        if not self._says_words(event):
            return []
        found = re.finditer(rb'"%b":\s*(%b)' % (key, TEXT), event)
        return [
            Word(event=number, start=match.start(1), end=match.end(1), text=json.loads(match[1])) for match in found
        ][: 1 if self.recording.dialect == "openai_responses" else None]

    def _says_words(self, event: bytes) -> bool:
        """Return whether the only strings under that name in an event are the model's words."""
        match self.recording.dialect:
            case "openai_chat":
                return event.count(b'"content"') == event.count(b'"choices"') == 1
            case "anthropic":
                return b'"text_delta"' in event or not (self.recording.streams or b'"tool' in event)
            case "openai_responses":
                return b'"response.output_text.delta"' in event or not self.recording.streams
            case _:
                others = (b'"thought"', b"functionCall", b"executableCode", b"grounding")
                return not any(other in event for other in others)

    def _is_bare(self, event: bytes) -> bool:
        """Return whether an event has nothing but words: without these, it would not be there."""
        match self.recording.dialect:
            case "openai_chat":
                members = json.loads(event.removeprefix(b"data:"))
                choice = members["choices"][0]
                return not members.get("usage") and choice.keys() | choice["delta"].keys() <= {
                    "index", "delta", "finish_reason", "logprobs", "content",
                } and not choice.get("finish_reason")  # fmt: skip
            case "gemini":
                return False
            case _:
                return True

    def _can_hold(self, word: Word) -> bool:
        """A tag beside what may be half a tag, or in blanks alone, is another matter."""
        return bool(word.text.strip()) and not set("<>/#\n\r") & set(word.text)

    def _plant_tags(self, words: list[Word], planted: list[bytes], expected: list[bytes]) -> bool:
        places = [word for word in words if self._can_hold(word)]
        # One to an event: more of them are written anew, and then blanks and escapes are the proxy's.
        by_event = {word.event: word for word in self.dice.sample(places, min(3, len(places)))}
        for word in by_event.values():
            event = planted[word.event]
            characters = CHARACTER.findall(event[word.start + 1 : word.end - 1])
            at = self.dice.randint(0, len(characters))
            inside = self.dice.choice([b"did x", b"", b"a < b", b"x\\ny", "é".encode(), b"\\u00e9"])
            first, second = b"".join(characters[:at]), b"".join(characters[at:])
            tag = b"<terse>" + inside + b"</terse>"
            cut_at = self.dice.randint(1, len(b"<terse>"))
            ends = b'"finishReason"' in event or b'"thoughtSignature"' in event
            splits = self.recording.streams and not ends and first and second and self.dice.random() < 0.7

            def with_words(text: bytes, event: bytes = event, word: Word = word) -> bytes:
                return event[: word.start] + b'"' + text + b'"' + event[word.end :]

            if splits:
                planted[word.event] = with_words(first + tag[:cut_at]) + with_words(tag[cut_at:] + second)
                expected[word.event] = with_words(first) + with_words(second)
            else:
                planted[word.event] = with_words(first + tag + second)
        return bool(by_event)

    def _plant_state(self, words: list[Word], planted: list[bytes]) -> None:
        """A block at the end of the words, in events of its own where there are any."""
        last = words[-1]
        event = planted[last.event]
        block = [b"\\n\\n### ST", b"ATE\\nGoal: x", b"\\nContext: y"]
        if not self.recording.streams:
            planted[last.event] = event[: last.end - 1] + b"".join(block) + event[last.end - 1 :]
            return
        if not self._is_bare(event):
            planted[last.event] = event[: last.end - 1] + b"".join(block) + event[last.end - 1 :]
            return
        clones = [event[: last.start] + b'"' + piece + b'"' + event[last.end :] for piece in block]
        planted[last.event] = event + b"".join(clones)

    def _finish(self, events: list[bytes], text: str) -> bytes:
        """Return the members that repeat the words, or number the events, in agreement with them."""
        body = b"".join(events)
        if self.recording.dialect != "openai_responses":
            return body
        if self.recording.streams:
            parts = (
                re.search(rb'"delta":\s*(%b)' % TEXT, event) for event in EVENT.findall(body) if self._says_words(event)
            )
            now = b'"' + b"".join(part[1][1:-1] for part in parts if part) + b'"'
            body = re.sub(
                rb'("text":\s*)(%b)' % TEXT,
                lambda each: each[1] + (now if json.loads(each[2]) == text else each[2]),
                body,
            )
            numbers = iter(range(10**6))
            body = re.sub(rb'("sequence_number":\s*)\d+', lambda each: each[1] + b"%d" % next(numbers), body)
        return body


@by_dialect
@pytest.mark.parametrize("makes", ["tag", "state"])
async def test_planted_tags_leave_no_trace(
    slim: Service, window: Service, raw: RawUpstream, key: str, dialect: DialectName, makes: str
) -> None:
    service = slim if makes == "tag" else window
    wrong, sent = [], {}
    for number, recording in enumerate(recordings()):
        dice = random.Random(number)
        found = Planter(recording, dice).plant(makes) if recording.dialect == dialect else None
        if found is None:
            continue
        planted, expected = found
        answer = await play(service, raw, recording, planted, f"{key}-{number}", dice)
        if answer.body != expected:
            wrong.append(recording.name)
        sent[f"{key}-{number}"] = recording, planted, expected
    assert wrong == []
    assert len(sent) > 10
    kept = await replies(service, key)
    for session, (recording, planted, expected) in sent.items():
        by_model, shown = kept[session]
        assert by_model == spoken(recording, planted), recording.name
        assert json.loads(shown) == json.loads(spoken(recording, expected)), recording.name
        mark = b"<terse>" if makes == "tag" else b"### STATE"
        assert mark in by_model
        assert mark not in shown
