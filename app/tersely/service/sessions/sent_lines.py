"""The context that a call sent, from its description and what is stored: the bytes and the line of each message.

Only values, no queries. A context may have a million messages: callers run these functions in a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tersely.dialects.wire import raw_json
from tersely.domain.history.context import TurnReport
from tersely.domain.history.history import Epoch
from tersely.service.common import tokens
from tersely.service.context.sent_contexts import REPEATS
from tersely.service.sessions.call_infos import ALTERED, DELETED
from tersely.store.history.messages import StoredMessage
from tersely.store.history.patches import apply_patch
from tersely.store.history.sent_contexts import MAX_ELEMENTS, SHORTENED, SentContext, SentMessage, checksum, unpack
from tersely.store.ops.calls import CallRow, MessageRow
from tersely.strategies.planning import report_cut_turns

# No model takes so much: it is no call's description, but an imported one of few bytes that stands for very many.
MAX_BYTES = 256 * 1024 * 1024
LineKind = Literal["full", "truncated", "terse", "summary", "left_out", "added"]
_HIDDEN = {
    "superseded": "the client replaced it",
    "dropped": "dropped from every context",
    "undone": "taken back",
    "removed": "removed for good",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLine:
    """One message and its form in a context.

    ``seq`` is the stored message (None: Tersely added this one), ``index`` its position in the message list that was
    sent (None: it was not sent). ``layer`` names what Tersely added.
    """

    seq: int | None
    turn: int | None
    role: str
    kept: LineKind
    reason: str
    tokens: int
    index: int | None = None
    layer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltContext:
    """The context of a call: its elements, the bytes of each (None: they are not available, ``reason`` says why)."""

    dialect: str = ""
    elements: Sequence[SentMessage] = ()
    instructions: bytes | None = None
    raws: Sequence[bytes] | None = None
    reason: str | None = None
    rounds: tuple[int, ...] = ()


def elements_of(sent: SentContext, blocks: Sequence[bytes]) -> list[SentMessage]:
    """Return the elements of a description; ``blocks`` are its packed elements, all but the last ones.

    Raises `msgspec.DecodeError` for blocks that are no elements.
    """
    elements: list[SentMessage] = []
    for packed in (*blocks, sent.rest):
        elements += unpack(packed, MAX_ELEMENTS - len(elements), version=sent.version)
    return elements


def needs_of(elements: Sequence[SentMessage]) -> tuple[list[bytes], list[int]]:
    """Return the literals and the stored messages that elements are made of, each once."""
    literals = dict.fromkeys(each.literal for each in elements if each.literal)
    seqs = dict.fromkeys(each.seq for each in elements if each.seq and not each.literal)
    return list(literals), list(seqs)


def rebuild(
    sent: SentContext,
    elements: Sequence[SentMessage],
    stored: Sequence[StoredMessage],
    literals: Mapping[bytes, bytes],
) -> RebuiltContext:
    """Rebuild what a call sent."""
    raws, reason = _bytes_of_all(elements, {each.seq: each for each in stored}, literals)
    if reason is None and (checksum(raws) != sent.checksum or len(raws) != sent.count):
        reason = ALTERED
    return RebuiltContext(
        dialect=sent.dialect,
        elements=elements,
        instructions=literals.get(sent.instructions) if sent.instructions and reason is None else None,
        raws=raws if reason is None else None,
        reason=reason,
        rounds=sent.rounds,
    )


def text_of_instructions(raw: bytes) -> str:
    """Return the text of instructions beside a list of messages, whatever their dialect; empty if unreadable."""
    try:
        return "\n\n".join(_texts(raw_json.load(raw)))
    except (ValueError, RecursionError):
        return ""


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from _texts(each)
        case dict():
            yield from _texts(value.get("text", value.get("parts")))
        case _:
            pass


def _bytes_of_all(
    elements: Sequence[SentMessage], stored: Mapping[int, StoredMessage], literals: Mapping[bytes, bytes]
) -> tuple[list[bytes], str | None]:
    """Return the bytes of the elements, and why there are no more of them; None if these are all."""
    raws: list[bytes] = []
    size = 0
    for element in elements:
        try:
            raw = _bytes_of(element, stored, literals)
        except ValueError:
            return raws, ALTERED
        if raw is None:
            return raws, DELETED
        size += len(raw)
        if size > MAX_BYTES:
            return raws, ALTERED
        raws.append(raw)
    return raws, None


def _bytes_of(
    element: SentMessage, stored: Mapping[int, StoredMessage], literals: Mapping[bytes, bytes]
) -> bytes | None:
    if element.literal:
        return literals.get(element.literal)
    message = stored.get(element.seq)
    if message is None or message.status == "removed":
        return None
    if not element.patch:
        return message.raw
    # A message that was edited may have no model's view any more: then the checksum tells.
    raw = message.model_raw if element.is_of_model and message.model_raw is not None else message.raw
    return apply_patch(raw, element.patch)


class LineOrder:
    """The lines of a context by their keys, in order: of a stored message its sequence number, of an added one
    -1 - its index.

    An added message stands in front of the first stored one that was sent behind it.
    """

    def __init__(self, elements: Sequence[SentMessage], seqs: Sequence[int]) -> None:
        """``seqs``: the stored messages in the order of the history."""
        known = set(seqs)
        self.sent: dict[int, tuple[int, SentMessage]] = {}
        added: deque[int] = deque()
        for index, element in enumerate(elements):
            is_known = False
            for seq in (element.seq, *element.also) if element.also else (element.seq,):
                if seq in known:
                    is_known = True
                    self.sent.setdefault(seq, (index, element))
            if not is_known:
                added.append(index)
        self.keys: list[int] = []
        for seq in seqs:
            if added and seq in self.sent:
                while added and added[0] < self.sent[seq][0]:
                    self.keys.append(-1 - added.popleft())
            self.keys.append(seq)
        self.keys += [-1 - index for index in added]

    def missing_instructions(self, rows: Sequence[MessageRow]) -> list[int]:
        """Return the stored instructions that are not in the list of messages that was sent."""
        return [stored.seq for stored in rows if stored.turn == 0 and stored.seq not in self.sent]


def lines_of(
    order: LineOrder,
    keys: Sequence[int],
    rows: Sequence[MessageRow],
    rebuilt: RebuiltContext,
    row: CallRow,
    epoch: Epoch | None,
    beside: Collection[int],
) -> tuple[ContextLine, ...]:
    """Return the lines of ``keys``. ``rows`` has the stored messages among them; ``beside`` are those that were sent
    beside the list.
    """
    known = {stored.seq: stored for stored in rows}
    # The same for every turn before the cut, and asked for once: a session may have thousands.
    cut = report_cut_turns(epoch, [0])[0] if epoch is not None and epoch.number == row.epoch else None
    lines: list[ContextLine] = []
    for key in keys:
        if key < 0:
            lines.append(_added(-1 - key, rebuilt.elements[-1 - key], rebuilt.raws or ()))
        elif key in beside:
            lines.append(_beside(known[key]))
        elif key in known:
            at = order.sent.get(key)
            lines.append(_sent(known[key], *at, row) if at is not None else _not_sent(known[key], row, cut))
    return tuple(lines)


def _added(index: int, element: SentMessage, raws: Sequence[bytes]) -> ContextLine:
    layer = element.layer or "added"
    count = tokens.count_short(raws[index].decode("utf-8", "replace")[:20_000]) if index < len(raws) else 0
    reason = {
        "tool_round": "said in an earlier round of this call",
        "instructions": "instructions",
        "added": "needed by the provider's format",
    }.get(layer, f"added by Tersely: {layer.replace('_', ' ')}")
    return ContextLine(
        seq=None, turn=None, role="", kept="added", reason=reason, tokens=count, index=index, layer=layer
    )


def _beside(stored: MessageRow) -> ContextLine:
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept="full", reason="instructions, beside the messages",
        tokens=stored.tokens,
    )  # fmt: skip


def _sent(stored: MessageRow, index: int, element: SentMessage, row: CallRow) -> ContextLine:
    kept: LineKind = "truncated" if element.shows == SHORTENED else "full"
    if stored.turn == 0:
        reason = "instructions"
    elif kept == "truncated":
        reason = "shortened: text that stands above" if element.layer == REPEATS else "shortened"
    elif stored.seq < row.cut:
        reason = "kept before the cut"
    else:
        reason = "recent"
    if element.layer == "memos":
        reason += ", with text of Tersely's in front"
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept=kept, reason=reason, tokens=stored.tokens, index=index
    )


def _not_sent(stored: MessageRow, row: CallRow, cut: TurnReport | None) -> ContextLine:
    """``cut``: the report on turns before the cut; None where their epoch is not known."""
    kept: LineKind = "left_out"
    if stored.status in _HIDDEN:
        reason = _HIDDEN[stored.status]
    elif not stored.model_visible:
        reason = "hidden from the model"
    elif stored.turn == 0:
        reason = "not part of this request"
    elif stored.seq < row.cut and cut is not None:
        kept, reason = cut.kept, cut.reason
    elif stored.seq < row.cut:
        reason = "before the cut"
    else:
        reason = "not part of this request"
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept=kept, reason=reason, tokens=stored.tokens
    )


def reply_line(stored: MessageRow) -> ContextLine:
    """Return the line of a message that a reply was stored as."""
    reason = _HIDDEN.get(stored.status, "the model's reply")
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept="full", reason=reason, tokens=stored.tokens
    )
