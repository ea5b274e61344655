"""Find the blocks that clients inject into messages, and the places of those that are messages of their own."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.dialects.dialect import Dialect
from tersely.domain.history.history import (
    AFTER_ALL_MESSAGES,
    Entry,
    Epoch,
    InjectedBlock,
)
from tersely.domain.messages import (
    Injected,
)
from tersely.service.common import tokens
from tersely.service.context.hidden_messages import first_hidden
from tersely.service.context.history import BlockMessage, epoch_of_history
from tersely.service.context.stored_messages import stored_message
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.history.messages import StoredMessage
from tersely.strategies.head.injection import newest_versions


def injected_in_request(match: SessionMatch, incoming: IncomingHistory) -> tuple[InjectedBlock, ...]:
    """Return the newest version of each block in a resent history, in order.

    A history by reference may have been expanded from its middle. Then the blocks in the epoch's head come first.
    """
    epoch = epoch_of_history(match)
    stated = epoch.injected if epoch is not None else ()
    in_head = {block.text: block for block in stated}
    blocks = list(stated) if match.expanded_from > 1 else []
    following: dict[int, int] | None = None
    placed = match.decision.placed
    for index, message in enumerate(incoming.messages):
        if not message.injected:
            continue
        is_alone = not incoming.identities[index].is_link
        if is_alone:
            following = _messages_behind(incoming, match) if following is None else following
        seq = following.get(index, 0) if is_alone and following is not None else placed[index].seq
        if not is_alone and placed[index].status != "live":
            seq = 0
        for block in message.injected:
            known = in_head.get(block.text)
            number = seq or (known.seq if known is not None else 0)
            blocks.append(_placed_block(block, number, is_alone=is_alone))
    return newest_versions(blocks) if blocks else ()


def _messages_behind(incoming: IncomingHistory, match: SessionMatch) -> dict[int, int]:
    """Map each message of blocks alone to the sequence number of the message that `render_messages` puts after it.

    `AFTER_ALL_MESSAGES` where no message follows; 0 where the block is not rendered.
    """
    firsts = first_hidden(match)
    behind: dict[int, int] = {}
    waiting: list[int] = []
    for index, (identity, placed) in enumerate(zip(incoming.identities, match.decision.placed, strict=True)):
        if identity.is_link:
            if waiting and identity.role != "tool" and placed.status == "live":
                behind |= dict.fromkeys(waiting, firsts.get(placed.seq, placed.seq))
                waiting = []
        elif not placed.is_new and placed.position < match.expanded_from:
            behind[index] = 0
        elif not incoming.messages[index].is_instruction:
            waiting.append(index)
    return behind | dict.fromkeys(waiting, AFTER_ALL_MESSAGES)


def stored_blocks(
    alone: Sequence[StoredMessage], tail: Sequence[StoredMessage], match: SessionMatch, cut: int, dialect: Dialect
) -> list[BlockMessage]:
    """Return the stored messages that consist of blocks alone, in order. ``tail``: the stored messages from
    ``cut`` on.
    """
    positions = [(each.position, each.seq) for each in tail]
    positions += [(each.position, each.seq) for each in match.decision.placed if each.turn > 0 and each.is_new]
    found_blocks: list[BlockMessage] = []
    for row in alone:
        message = stored_message(row, dialect)
        if message is None:
            continue
        before = next((seq for position, seq in positions if position > row.position), AFTER_ALL_MESSAGES)
        is_cut = cut > 1 and bool(positions) and before == positions[0][1]
        found_blocks.append(BlockMessage(message=message, seq=row.seq, before=0 if is_cut else before))
    return found_blocks


def injected_in_store(
    epoch: Epoch | None,
    blocks: Sequence[BlockMessage],
    hidden: Sequence[StoredMessage],
    entries: Sequence[Entry],
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
) -> tuple[InjectedBlock, ...]:
    """Return the newest version of each block, in order, for a request that carries only new messages.

    The blocks of messages that were cut are known from the epoch's head. ``hidden`` are further messages that no
    context shows.
    """
    # (message, its number, the number of the message that shows the blocks, whether the blocks are a message of their
    # own)
    sources = [(each.message, each.seq, each.before, True) for each in blocks]
    hidden_messages = ((stored_message(row, dialect), row.seq) for row in hidden)
    sources += [(message, seq, seq, False) for message, seq in hidden_messages if message is not None]
    sources += [(entry.message, entry.seq, entry.seq, False) for entry in entries]
    behind = _messages_behind(incoming, match)
    sources += [(incoming.messages[index], match.decision.placed[index].seq, behind[index], True) for index in behind]
    known = [(block.seq, block) for block in epoch.injected] if epoch is not None else []
    brought = [
        (seq, _placed_block(block, shown_by, is_alone=is_alone))
        for message, seq, shown_by, is_alone in sources
        for block in message.injected
    ]
    return newest_versions(block for _, block in sorted((*known, *brought), key=lambda source: source[0]))


def _placed_block(block: Injected, seq: int, *, is_alone: bool) -> InjectedBlock:
    count = tokens.count_block(block.text)
    return InjectedBlock(key=block.key, text=block.text, tokens=count, seq=seq, is_alone=is_alone)
