"""Write a context as messages in wire form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tersely.dialects.dialect import Dialect
from tersely.domain.history.context import Context, ContextMessage
from tersely.domain.history.history import (
    AFTER_ALL_MESSAGES,
    Epoch,
    HeadMessage,
)
from tersely.domain.messages import (
    Message,
    ToolResult,
    with_injected_text,
)
from tersely.service.context.hidden_messages import first_hidden
from tersely.service.context.history import BlockMessage, History
from tersely.service.context.sent_contexts import ADDED, FULL, INSTRUCTIONS, REPEATS, SHORTENED, MessageSource
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch


class RenderedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """All messages of a request in wire form. The first ``frozen`` are the instructions and the head.

    ``sources`` names the origin of each message.
    """

    messages: list[bytes]
    frozen: int = 0
    sources: list[MessageSource] = msgspec.field(default_factory=list)

    def breakpoints(self) -> tuple[int, ...]:
        """Return the indexes of the messages after which a prompt cache is worthwhile: the last of the head, and the
        last of all.
        """
        ends = {self.frozen, len(self.messages)}
        return tuple(sorted(end - 1 for end in ends if end))


def render_messages(
    context: Context, dialect: Dialect, history: History, incoming: IncomingHistory, match: SessionMatch
) -> RenderedMessages:
    """Render all messages of a request: instructions first, then the context.

    Instructions inside a history stay in front of the message that they preceded, so that the prefix of the prompt does
    not change. If their place was cut, system and developer text moves to the front, even if the message that it
    preceded is kept: once that message is no longer loaded, its place is unknown. Blocks that a client injected there
    as a user message go away with the messages around them.
    """
    leading, placed_before, trailing = _place_instructions(incoming, match, history.blocks)
    is_cut = context.epoch.cut > 1
    seqs = _instruction_seqs(incoming, match, history.blocks)
    rendered: list[MessageSource] = []
    head = 0
    for message in context.messages:
        if isinstance(message, HeadMessage) or message.seq < context.epoch.cut:
            head = len(rendered) + 1
        else:
            preceding = placed_before.pop(message.seq, ())
            # The head contains the instructions directly in front of the first message of the tail.
            is_first = is_cut and head == len(rendered)
            rendered += [_instruction_source(each, seqs) for each in preceding if each.is_instruction or not is_first]
        rendered += [_source(message, raw, context.epoch) for raw in render(message, dialect)]
    hoisted = [message for seq in sorted(placed_before) for message in placed_before[seq] if message.is_instruction]
    instructions = _without_repeats([*leading, *hoisted]) if is_cut or hoisted else leading
    front = [
        *(_instruction_source(each, seqs) for each in instructions),
        *(MessageSource(raw, 0, 0, INSTRUCTIONS) for raw in history.instructions),
    ]
    sources = [*front, *rendered, *(_instruction_source(each, seqs) for each in trailing)]
    return RenderedMessages(messages=[source.raw for source in sources], frozen=len(front) + head, sources=sources)


def _source(message: ContextMessage, raw: bytes, epoch: Epoch) -> MessageSource:
    """Return the source of a rendered message."""
    if isinstance(message, HeadMessage):
        return MessageSource(raw, 0, ADDED, message.layer)
    layer = REPEATS if message.is_folded else ""
    if message.prefix:
        layer = next((prefix.layer for prefix in epoch.prefixes if prefix.seq == message.seq), "memos")
    return MessageSource(raw, message.seq, SHORTENED if message.is_shortened else FULL, layer)


def _instruction_source(message: Message, seqs: Mapping[int, int]) -> MessageSource:
    return MessageSource(message.raw, seqs.get(id(message), 0), FULL, INSTRUCTIONS)


def _instruction_seqs(incoming: IncomingHistory, match: SessionMatch, stored: Sequence[BlockMessage]) -> dict[int, int]:
    """Map instructions and blocks (by the identity of the object) to their sequence numbers."""
    given = zip(incoming.messages, incoming.identities, match.decision.placed, strict=True)
    seqs = {id(message): placed.seq for message, identity, placed in given if not identity.is_link}
    return seqs | {id(block.message): block.seq for block in stored}


def _without_repeats(instructions: Sequence[Message]) -> list[Message]:
    """Return instructions in order, without repetitions.

    Of equal instructions with text the first is kept, so that later ones do not change the prompt before them. Of equal
    ones without text, which only change settings, the last is kept.
    """
    first: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    for index, message in enumerate(instructions):
        first.setdefault(message.raw, index)
        last[message.raw] = index
    return [
        message for index, message in enumerate(instructions) if index == (first if message.text else last)[message.raw]
    ]


def _place_instructions(
    incoming: IncomingHistory, match: SessionMatch, stored: Sequence[BlockMessage]
) -> tuple[list[Message], dict[int, list[Message]], list[Message]]:
    """Sort instructions: those at the beginning, those in front of a message (by its sequence number), those at the
    end.

    Messages of blocks alone are treated like instructions. ``stored`` are those that the request does not contain.
    """
    firsts = first_hidden(match)
    leading: list[Message] = []
    placed_before: dict[int, list[Message]] = {}
    waiting: list[Message] = []
    is_leading = True
    for each in stored:
        if each.before == AFTER_ALL_MESSAGES:
            waiting.append(each.message)
        elif each.before:
            placed_before.setdefault(each.before, []).append(each.message)
    for message, identity, placed in zip(incoming.messages, incoming.identities, match.decision.placed, strict=True):
        if not identity.is_link:
            is_leading = is_leading and message.is_instruction
            if is_leading:
                leading.append(message)
            elif not placed.is_new and placed.position < match.expanded_from:
                placed_before.setdefault(0, []).append(message)  # the message that it preceded is not rendered
            else:
                waiting.append(message)
            continue
        is_leading = False
        # Providers refuse a message between a tool call and its result. A message that is hidden has no place.
        if waiting and message.role != "tool" and placed.status == "live":
            placed_before.setdefault(firsts.get(placed.seq, placed.seq), []).extend(waiting)
            waiting = []
    return leading, placed_before, waiting


def render(message: ContextMessage, dialect: Dialect) -> list[bytes]:
    """Render one message of a context: the client's bytes as they are or patched; other messages are written."""
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
    """Return the raw message with the current texts of its parts. Everything else stays unchanged."""
    raw = message.raw
    results = {result.call_id: result.text for result in message.results}
    if results:
        raw = dialect.with_results(raw, results)
    if message.starts_turn and message.text != dialect.read_message(raw).text:
        raw = dialect.with_text(raw, with_injected_text(message).text)
    return raw


def _one_result_each(message: Message) -> list[Message]:
    """Split a message of several tool results, for dialects with one result in each message."""
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if message.role != "tool" or len(results) < 2:
        return [message]
    return [Message(role="tool", parts=(result,), raw=b"") for result in results]
