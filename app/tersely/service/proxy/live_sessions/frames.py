"""The upstream body of a live session whose dialect moves cache breakpoints from call to call.

A breakpoint stands at the end of the last message, so that message is written differently at the next call. The
messages in front of it are not: their written form is kept, and a placeholder stands for it while the dialect writes
the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tersely.dialects.anthropic.caching import has_escaped_letter, may_carry_breakpoint
from tersely.dialects.dialect import Dialect, RequestPatch
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.service.common.tokens import content_digest
from tersely.service.context.sent_contexts import body_parts
from tersely.service.proxy.live_sessions.pieces import Pieces, with_piece

# In a message that carries a breakpoint.
MARK = b'"cache_control"'
# A client that marks older messages than these has its whole request read.
MAX_VOLATILE = 8
# How many shapes of the newest messages are remembered for one conversation.
MAX_SHAPES = 2


class WrittenBody(msgspec.Struct, frozen=True, gc=False):
    """A body, the elements of its message list that were written for this call, and its instructions beside them.

    ``front`` is a digest of its tools and of the elements up to the first one behind the head.
    """

    pieces: Pieces
    elements: list[bytes]
    instructions: bytes
    front: bytes


# A message with a list of blocks, of which the last one alone may carry a breakpoint.
_MESSAGE = re.compile(rb'\{"role":"(user|assistant)","content":\[')
_AT_END = re.compile(rb'"cache_control":(\{[^{}]*\})\}\]\}')

_Shape = tuple[tuple[bytes, bytes], ...]


class _BodyEnds(msgspec.Struct, frozen=True, gc=False):
    """The bytes of a body before the messages that stay the same, and after its newest ones."""

    before: bytes
    after: bytes
    instructions: bytes
    front: bytes


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The parts of an upstream body that stay the same from call to call.

    ``body`` is the client's without messages, with tools of ours; ``front`` are the messages up to the first one behind
    the head, of which ``frozen`` end with the head; ``middle`` is the written form of the messages behind them, in
    pieces, for which ``placeholder`` stands. ``has_breakpoints``: Tersely sets breakpoints of its own, in the form of
    the client's newest. ``described``: the front of the body that the description of the call has. ``around``: what was
    written around messages of a shape.
    """

    body: bytes
    front: tuple[bytes, ...]
    frozen: int
    front_elements: int
    middle: Pieces
    placeholder: bytes
    instructions: str | None
    has_breakpoints: bool
    described: bytes = b""
    around: dict[_Shape, _BodyEnds] = msgspec.field(default_factory=dict)

    def write(self, dialect: Dialect, tail: Sequence[bytes]) -> WrittenBody | None:
        """Return the body with the messages ``tail`` behind those that are known; None where they are not written one
        by one.
        """
        shape = _shape_of(tail)
        known = None if shape is None else self.around.get(shape)
        if known is not None:
            pieces = (known.before, *self.middle, b"," + b",".join(tail), known.after)
            return WrittenBody(pieces, list(tail), known.instructions, known.front)
        messages = [*self.front, self.placeholder, *tail]
        ends = {self.frozen, len(messages)} if self.has_breakpoints else set()
        try:
            body = dialect.write_request(
                self.body,
                RequestPatch(
                    messages=messages,
                    instructions=self.instructions,
                    breakpoints=tuple(sorted(end - 1 for end in ends if end)),
                ),
            )
            elements, instructions, tools = body_parts(body, dialect.name)
        except (InvalidRequest, ValueError):
            return None
        written = elements[self.front_elements + 1 :]
        before, placeholder, after = body.partition(self.placeholder)
        if len(written) != len(tail) or not placeholder or elements[self.front_elements] != self.placeholder:
            return None
        front = content_digest(b"\n".join([tools, *elements[: self.front_elements]]))
        added = b"," + b",".join(tail)
        # Breakpoints depend on where others are. A new one at the end depends on the blocks there.
        is_marked = not self.has_breakpoints or MARK in tail[-1]
        if shape is not None and is_marked and written == list(tail) and after.startswith(added):
            if len(self.around) >= MAX_SHAPES:
                self.around.clear()
            self.around[shape] = _BodyEnds(before, after[len(added) :], instructions, front)
        return WrittenBody((before, *self.middle, after), written, instructions, front)

    @property
    def size(self) -> int:
        """Bytes of memory, about; what is remembered around the messages is as long as the rest of the body."""
        return (1 + MAX_SHAPES) * (len(self.body) + sum(map(len, self.front))) + sum(map(len, self.middle))

    def with_middle(self, elements: Sequence[bytes]) -> Frame:
        """Return the frame with more messages that stay as they were written."""
        if not elements:
            return self
        return msgspec.structs.replace(self, middle=with_piece(self.middle, b"," + b",".join(elements)))


def _shape_of(messages: Sequence[bytes]) -> _Shape | None:
    """Return the roles and breakpoints of messages, which decide how the dialect writes them and what is around them.

    None where that also depends on their contents: neighbours of one role may become one message.
    """
    found: list[tuple[bytes, bytes]] = []
    role = b""
    for raw in messages:
        beginning = _MESSAGE.match(raw)
        if beginning is None or beginning[1] == role or not raw.endswith(b"]}") or has_escaped_letter(raw):
            return None
        role = beginning[1]
        count = raw.count(MARK)
        mark = _AT_END.fullmatch(raw, raw.rfind(MARK)) if count else None
        if count and (count > 1 or mark is None):
            return None
        found.append((role, mark[1] if mark is not None else b""))
    return tuple(found)


def placeholder_of(name: str) -> bytes:
    """Return a message that stands for others; ``name`` is in no message."""
    content = [{"type": "text", "text": name}]
    return raw_json.dump({"role": "assistant", "content": content})


def count_volatile(raws: Sequence[bytes], dialect: str) -> int | None:
    """Return how many of the last messages of a request the next one may bring with other breakpoints; None: too many.

    ``raws`` are its messages without instructions.
    """
    if dialect != "anthropic":
        return 0
    marked = next((index for index, raw in enumerate(raws) if may_carry_breakpoint(raw)), len(raws) - 1)
    count = len(raws) - marked
    return count if count <= MAX_VOLATILE else None


def step_back(body: bytes, end: int, raws: Sequence[bytes]) -> int | None:
    """Return the end of the array element in front of the elements ``raws``, the last of which ends at ``end``."""
    for raw in reversed(raws):
        if not body.endswith(raw, 0, end):
            return None
        end -= len(raw)
        while end and body[end - 1 : end] in (b" ", b"\t", b"\r", b"\n"):
            end -= 1
        if body[end - 1 : end] != b",":
            return None
        end -= 1
        while end and body[end - 1 : end] in (b" ", b"\t", b"\r", b"\n"):
            end -= 1
    return end
