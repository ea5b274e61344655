"""Write a context as messages in wire form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tersely.dialects.dialect import Dialect
from tersely.domain.history.context import Context, ContextMessage
from tersely.domain.history.history import (
    AFTER_ALL_MESSAGES,
    HeadMessage,
)
from tersely.domain.messages import (
    Message,
    ToolResult,
    with_injected_text,
)
from tersely.service.context.hidden_messages import first_hidden
from tersely.service.context.history import BlockMessage, History
from tersely.service.context.sent_contexts import ADDED, FULL, INSTRUCTIONS, SHORTENED, Source
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedMessages:
    """All messages of a request in wire form, of which the first ``frozen`` are the instructions and the head.

    ``sources`` says of each where it comes from.
    """

    messages: list[bytes]
    frozen: int = 0
    sources: list[Source] = field(default_factory=list)

    def breakpoints(self) -> tuple[int, ...]:
        """Behind which messages the prompt is worth caching: the last of the head's, and of all."""
        ends = {self.frozen, len(self.messages)}
        return tuple(sorted(end - 1 for end in ends if end))


def render_messages(
    context: Context, dialect: Dialect, history: History, arrival: IncomingHistory, found: SessionMatch
) -> RenderedMessages:
    """All messages of a request in wire form: instructions first, then the context.

    Instructions in the middle of a history stay where they are, before the message that they preceded, so that
    the prefix stays the prefix. Of those whose place was cut, system and developer text goes in front, also where the
    message itself is kept: once the cut is behind the rows that are loaded, nothing tells any more which message they
    preceded. What a client injected there as the user goes with the messages around it.
    """
    leading, asides, trailing = _asides(arrival, found, history.blocks)
    is_cut = context.epoch.cut > 1
    seqs = _seqs_of_asides(arrival, found, history.blocks)
    rendered: list[Source] = []
    head = 0
    for message in context.messages:
        if isinstance(message, HeadMessage) or message.seq < context.epoch.cut:
            head = len(rendered) + 1
        else:
            beside = asides.pop(message.seq, ())
            # What the cut left behind directly in front of the tail is in the head.
            is_first = is_cut and head == len(rendered)
            rendered += [_aside(each, seqs) for each in beside if each.is_instruction or not is_first]
        rendered += [_source(message, raw) for raw in render(message, dialect)]
    hoisted = [message for seq in sorted(asides) for message in asides[seq] if message.is_instruction]
    standing = _without_repeats([*leading, *hoisted]) if is_cut or hoisted else leading
    front = [
        *(_aside(each, seqs) for each in standing),
        *(Source(raw, 0, 0, INSTRUCTIONS) for raw in history.instructions),
    ]
    sources = [*front, *rendered, *(_aside(each, seqs) for each in trailing)]
    return RenderedMessages(messages=[source.raw for source in sources], frozen=len(front) + head, sources=sources)


def _source(message: ContextMessage, raw: bytes) -> Source:
    """Where a rendered message comes from."""
    if isinstance(message, HeadMessage):
        return Source(raw, 0, ADDED, message.layer)
    return Source(raw, message.seq, SHORTENED if message.is_shortened else FULL, "memos" if message.prefix else "")


def _aside(message: Message, seqs: Mapping[int, int]) -> Source:
    return Source(message.raw, seqs.get(id(message), 0), FULL, INSTRUCTIONS)


def _seqs_of_asides(arrival: IncomingHistory, found: SessionMatch, stored: Sequence[BlockMessage]) -> dict[int, int]:
    """Sequence numbers of instructions and blocks, by the identity of the message."""
    given = zip(arrival.messages, arrival.incoming, found.decision.placed, strict=True)
    seqs = {id(message): placed.seq for message, incoming, placed in given if not incoming.is_link}
    return seqs | {id(block.message): block.seq for block in stored}


def _without_repeats(instructions: Sequence[Message]) -> list[Message]:
    """Return instructions in order, each once.

    Of equal ones with words the first stays, so that later ones change nothing in front of them; of equal ones without
    words, which only set something, the last.
    """
    first: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    for index, message in enumerate(instructions):
        first.setdefault(message.raw, index)
        last[message.raw] = index
    return [
        message for index, message in enumerate(instructions) if index == (first if message.text else last)[message.raw]
    ]


def _asides(
    arrival: IncomingHistory, found: SessionMatch, stored: Sequence[BlockMessage]
) -> tuple[list[Message], dict[int, list[Message]], list[Message]]:
    """Instructions that lead, those that precede a message (by its sequence number), and those at the end.

    Blocks that are messages of their own are treated like instructions. ``stored`` are those that the request does not
    bring.
    """
    firsts = first_hidden(found)
    leading: list[Message] = []
    asides: dict[int, list[Message]] = {}
    waiting: list[Message] = []
    is_leading = True
    for each in stored:
        if each.before == AFTER_ALL_MESSAGES:
            waiting.append(each.message)
        elif each.before:
            asides.setdefault(each.before, []).append(each.message)
    for message, incoming, placed in zip(arrival.messages, arrival.incoming, found.decision.placed, strict=True):
        if not incoming.is_link:
            is_leading = is_leading and message.is_instruction
            if is_leading:
                leading.append(message)
            elif not placed.is_new and placed.position < found.start:
                asides.setdefault(0, []).append(message)  # what it preceded was not laid out
            else:
                waiting.append(message)
            continue
        is_leading = False
        # Nothing may stand between a call and its result.
        if waiting and message.role != "tool":
            asides.setdefault(firsts.get(placed.seq, placed.seq), []).extend(waiting)
            waiting = []
    return leading, asides, waiting


def render(message: ContextMessage, dialect: Dialect) -> list[bytes]:
    """A message of a context in wire form: the client's as it came or patched, the others written."""
    if isinstance(message, HeadMessage):
        return [dialect.write_text(message.role, message.text)]
    raw = message.message.raw
    if raw and not message.is_shortened and not message.prefix:
        return [raw]
    if raw:
        wire = [_shortened(message.message, dialect) if message.is_shortened else raw]
    else:
        wire = [dialect.write_message(each) for each in _one_result_each(with_injected_text(message.message))]
    return [dialect.with_prefix(wire[0], message.prefix), *wire[1:]] if message.prefix else wire


def _shortened(message: Message, dialect: Dialect) -> bytes:
    """The raw form of a message with the texts that its parts have now; all else stays as it came."""
    raw = message.raw
    results = {result.call_id: result.text for result in message.results}
    if results:
        raw = dialect.with_results(raw, results)
    if message.starts_turn and message.text != dialect.read_message(raw).text:
        raw = dialect.with_text(raw, with_injected_text(message).text)
    return raw


def _one_result_each(message: Message) -> list[Message]:
    """A message of several results as several messages, for dialects in which a message carries one."""
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if message.role != "tool" or len(results) < 2:
        return [message]
    return [Message(role="tool", parts=(result,), raw=b"") for result in results]
