"""Accumulate one content block of a streamed reply: the model's view and the client's view."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from tersely.dialects.anthropic.content import string_member
from tersely.dialects.anthropic.write import MALFORMED, PARTIAL
from tersely.dialects.dialect import ReplyChoice
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.pieces import PieceFilter
from tersely.domain.text.tags import TagKinds, TagStripper

ASSISTANT = b'"assistant"'


class StringDelta(msgspec.Struct, forbid_unknown_fields=True):
    """A delta with a single string, the usual case."""

    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""


class GrowingBlock:
    """A block that began with ``start`` and grows by deltas.

    A delta's strings are added to the member of the same name, whatever its type; two kinds are special: the JSON of
    a call's input comes in pieces of text, citations one by one.
    """

    __slots__ = (
        "_citations",
        "_grown",
        "_input",
        "_shown",
        "_start",
        "is_finished",
        "is_left_out",
        "is_open",
        "is_visible",
        "sieve",
    )

    def __init__(self, start: dict[str, bytes], tags: TagKinds) -> None:
        self._start = start
        self._grown: dict[str, list[str]] = defaultdict(list)
        self._input: list[str] = []
        self._citations: list[bytes] = []
        self._shown: list[str] = []
        self.sieve = PieceFilter(tags) if tags and string_member(start, "type") == "text" else None
        self.is_open = True
        self.is_finished = False
        self.is_left_out = False
        self.is_visible = self.sieve is None

    def grow(self, delta: dict[str, bytes]) -> None:
        """Add a ``delta``."""
        for key, value in delta.items():
            if key == "partial_json":
                self._input.append(string_member(delta, key))
            elif key == "citation":
                self._citations.append(value)
            elif key != "type" and value.startswith(b'"'):
                self._grown[key].append(string_member(delta, key))
            elif key != "type":
                self._start[key] = value

    def grow_by(self, delta: StringDelta) -> str:
        """Add a ``delta`` of a known kind; the words in it."""
        if delta.text:
            self._grown["text"].append(delta.text)
        elif delta.partial_json:
            self._input.append(delta.partial_json)
        elif delta.thinking:
            self._grown["thinking"].append(delta.thinking)
        elif delta.signature:
            self._grown["signature"].append(delta.signature)
        return delta.text

    def show(self, text: str) -> None:
        """Note what the client is shown; a block is visible from its first word on."""
        self._shown.append(text)
        self.is_visible = self.is_visible or bool(text.strip())

    def finish(self) -> None:
        """Close the block and decide whether the client sees it at all."""
        self.is_finished = self.is_visible = True
        self.is_left_out = self.is_gone

    @property
    def stripper(self) -> TagStripper | None:
        """Return the tags that were stripped from a text block; None for any other block."""
        return self.sieve.stripper if self.sieve else None

    @property
    def text(self) -> str:
        """Return the words of a text block."""
        return string_member(self._start, "text") + "".join(self._grown["text"])

    @property
    def shown(self) -> str:
        """Return the part of the block that the client has been shown."""
        return self.text if self.sieve is None else "".join(self._shown)

    @property
    def is_cut(self) -> bool:
        """True if the client is shown a shortened block."""
        return self.shown != self.text

    @property
    def is_gone(self) -> bool:
        """True if stripping left the block empty.

        The provider refuses empty texts. The client sends back what it was shown, so it is not shown any.
        """
        return self.is_cut and not self.shown.strip()

    def write(self, text: str | None = None) -> bytes:
        """Return the block so far, or with another ``text``."""
        members = dict(self._start)
        for key, pieces in self._grown.items():
            if pieces:
                members[key] = raw_json.dump(string_member(self._start, key) + "".join(pieces))
        if self._citations:
            earlier = members.get("citations", b"null")
            before = raw_json.split_array(earlier) if earlier.startswith(b"[") else []
            members["citations"] = raw_json.join_array([*before, *self._citations])
        if "input" in members:
            self._write_input(members)
        if text is not None:
            members["text"] = raw_json.dump(text)
        return raw_json.join_object(members)

    def _write_input(self, members: dict[str, bytes]) -> None:
        message = "".join(self._input)
        if self.is_open:
            members[PARTIAL] = raw_json.dump(message)
        elif message:
            raw = message.encode("utf-8", "surrogatepass")
            try:
                is_json = raw_json.load(raw) is not None
            except ValueError:
                is_json = False
            members |= {"input": raw} if is_json else {MALFORMED: raw_json.dump(message)}


def container_of(members: dict[str, bytes]) -> str:
    return string_member(object_of(members.get("container")), "id")


def choice_of(blocks: list[GrowingBlock], finish: str) -> ReplyChoice:
    """Return the choice of ``blocks``."""
    raws = [block.write() for block in blocks]
    message = raw_json.join_object({"role": ASSISTANT, "content": raw_json.join_array(raws)})
    shown = message
    if any(block.is_cut for block in blocks):
        left = [
            block.write(block.shown) if block.is_cut else raw
            for block, raw in zip(blocks, raws, strict=True)
            if not block.is_gone
        ]
        shown = raw_json.join_object({"role": ASSISTANT, "content": raw_json.join_array(left)})
    strippers = [block.stripper for block in blocks if block.stripper is not None]
    states = [stripper.state for stripper in strippers if stripper.state is not None]
    return ReplyChoice(
        index=0,
        model_message=message,
        client_message=shown,
        terse=tuple(entry for stripper in strippers for entry in stripper.terse),
        state=states[-1] if states else None,
        finish_reason=finish,
    )


def object_of(raw: bytes | None) -> dict[str, bytes]:
    """Return the members of a JSON object; an empty dict for anything else."""
    try:
        return raw_json.split_object(raw or b"{}")
    except ValueError:
        return {}
