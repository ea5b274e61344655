"""A filter of events: bytes in, bytes out, whatever the cuts, and unknown events kept apart."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from tersely.dialects.dialect import UNCHANGED, ClientView, Reply
from tersely.dialects.event_filter import EventFilter
from tersely.dialects.undescribed import UnreadPayloads, payloads_as_json, read_known_reply, readable, split_safely
from tersely.dialects.wire.sse import SseEvent
from tersely.domain.messages import Message, Text

STREAM = b"data: one\n\n: comment\n\ndata: two\n\ndata: [three]\n\n"


class Doubling(EventFilter):
    """Sends each event twice and holds the last one back; ``[`` is an unknown form."""

    def __init__(self, *, is_changing: bool, max_event: int = 1000) -> None:
        super().__init__(is_changing=is_changing, max_event=max_event)
        self._held = b""

    @override
    def _is_plain(self, block: bytes) -> bool:
        return False

    @override
    def _read_plain(self, block: bytes) -> None:
        raise AssertionError("nothing is plain")

    @override
    def _reply(self) -> Reply:
        return Reply(id="r")

    @override
    def _forward(self, event: SseEvent) -> bytes:
        if event.data and event.data.startswith(b"["):
            raise ValueError("unknown")
        out, self._held = self._held, event.raw * (2 if event.data else 1)
        return out

    @override
    def _release(self) -> bytes:
        out, self._held = self._held, b""
        return out


def run(reader: EventFilter, chunks: list[bytes]) -> bytes:
    return b"".join([*map(reader.feed, chunks), reader.close()])


@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted))
def test_output_does_not_depend_on_the_cuts(cuts: list[int]) -> None:
    edges = [0, *cuts, len(STREAM)]
    chunks = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert run(Doubling(is_changing=True), chunks) == run(Doubling(is_changing=True), [STREAM])
    assert run(Doubling(is_changing=False), chunks) == STREAM


def test_unknown_event_passes_unchanged_after_the_held_back_ones_and_is_kept() -> None:
    reader = Doubling(is_changing=True)
    out = run(reader, [STREAM])
    assert out.endswith(b"data: two\n\ndata: two\n\ndata: [three]\n\n")
    assert reader.reply == Reply(id="r", unread=(b"[three]",))


def test_event_over_the_limit_passes_unread() -> None:
    reader = Doubling(is_changing=True, max_event=64)
    chunks = [b"data: one\n\n", b"data: " + b"x" * 70, b"\n\n"]
    assert run(reader, chunks) == b"data: one\n\n" + b"".join(chunks)


def test_reply_of_an_unknown_form_is_read_without_the_parts_that_fail() -> None:
    def read(raw: bytes) -> Message:
        if b"bad" in raw:
            raise ValueError("bad")
        return Message(role="assistant", parts=(Text(text=raw.decode()),), raw=raw)

    assert not read_known_reply(read, bytes, b"good").is_malformed
    mended = read_known_reply(read, lambda raw: raw.replace(b"bad", b""), b"bad good")
    assert (mended.text, mended.raw, mended.is_malformed) == (" good", b"bad good", True)
    lost = read_known_reply(read, bytes, b"bad")
    assert (len(lost.parts), lost.raw, lost.is_malformed) == (1, b"bad", True)
    assert readable(read, [b"a", b"bad", b"c"]) == [b"a", b"c"]


def test_failing_split_passes_the_body_unread() -> None:
    def fail(body: bytes, view: ClientView) -> tuple[bytes, Reply]:
        raise KeyError((body, view))

    assert split_safely(fail)(b"{}", UNCHANGED) == (b"{}", Reply(unread=(b"{}",)))
    assert split_safely(fail)(b" ", UNCHANGED) == (b" ", Reply())


def test_unread_payloads_become_one_json_text() -> None:
    unread = UnreadPayloads()
    for payload in (b'{"a":1}', b" ", b"text", b"\xff"):
        unread.add(payload)
    assert unread.payloads == [b'{"a":1}', b"text", b"\xff"]
    assert payloads_as_json(unread.payloads) == b'[{"a":1},"text",{"base64":"/w=="}]'
    assert payloads_as_json([b'{"a":1}']) == b'{"a":1}'
