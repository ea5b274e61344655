"""Place injected blocks in a context: the newest version of each occurs once, in its message or in the head.

Clients put project instructions, environment, skills and reminders into the same messages as the user's text. A cut
removes the text and keeps the blocks: a block whose message leaves the context moves to the head (docs/decisions.md). A
head is frozen. A version that arrives during an epoch is in the tail, and replaces the older one in the head when the
next epoch starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from tersely.domain.history.chain import is_additive
from tersely.domain.history.history import AFTER_ALL_MESSAGES, Entry, Epoch, HeadMessage, InjectedBlock, Snapshot
from tersely.domain.tokens import count_text_message, estimate_text
from tersely.strategies.pipeline import Draft
from tersely.strategies.prompts import INJECTED_ACK

LAYER = "injected"

ADDITIVE_BLOCKS = 256
ADDITIVE_TOKENS = 32_000
"""Bounds of the blocks that no later version replaces. Beyond them, the oldest count as words of their messages."""


def newest_versions(blocks: Iterable[InjectedBlock]) -> tuple[InjectedBlock, ...]:
    """Return the newest version of each block, in order. ``blocks`` are those of a history, the newest last.

    Of blocks that no later version replaces, only the newest within `ADDITIVE_BLOCKS` and `ADDITIVE_TOKENS` count.
    """
    newest: dict[str, InjectedBlock] = {}
    for block in blocks:
        newest.pop(block.key, None)
        newest[block.key] = block
    count = tokens = 0
    for key in reversed([key for key in newest if is_additive(key)]):
        count, tokens = count + 1, tokens + newest[key].tokens
        if count > ADDITIVE_BLOCKS or tokens > ADDITIVE_TOKENS:
            del newest[key]
    return tuple(newest.values())


def blocks_for_head(injected: Sequence[InjectedBlock], draft: Draft) -> tuple[InjectedBlock, ...]:
    """Return the newest blocks that no message of ``draft`` shows."""
    missing = _not_shown(injected, draft.entries, _numbers_behind_blocks(draft.tail, draft.cut))
    return tuple(replace(block, seq=0) if block.is_alone else block for block in missing)


def must_restate(snapshot: Snapshot) -> bool:
    """Return whether the head of the snapshot's epoch disagrees with the blocks that the client sends.

    It does if the client rewrote, added or removed a block in a message that the epoch cut. A block in the head that
    newer ones replaced within the bounds of `newest_versions` stays there until the next epoch.
    """
    epoch = snapshot.epoch
    if epoch is None or not (snapshot.injected or epoch.injected):
        return False
    keys = {block.key for block in snapshot.injected}
    missing_keys = {block.key for block in epoch.injected} - keys
    if missing_keys:
        within_bounds = newest_versions((*epoch.injected, *snapshot.injected))
        if any(block.key in missing_keys for block in within_bounds):
            return True
    in_head = {block.text for block in epoch.injected}
    missing = [block for block in snapshot.injected if block.text not in in_head]
    if not missing:
        return False
    kept = set(epoch.kept)
    shown = [entry for entry in (*snapshot.kept, *snapshot.entries) if entry.seq >= epoch.cut or entry.seq in kept]
    behind = _numbers_behind_blocks([entry for entry in shown if entry.seq >= epoch.cut], epoch.cut)
    return any(True for _ in _not_shown(missing, shown, behind))


def _numbers_behind_blocks(tail: Sequence[Entry], cut: int) -> set[int]:
    """Return the messages that directly follow a message of injected blocks alone.

    Blocks directly in front of the tail belong to the part that was cut.
    """
    numbers = {entry.seq for entry in tail}
    return numbers - {tail[0].seq} if tail and cut > 1 else numbers


def _not_shown(
    injected: Iterable[InjectedBlock], entries: Iterable[Entry], behind: Collection[int]
) -> Iterable[InjectedBlock]:
    texts = {block.text for entry in entries for block in entry.message.injected}
    for block in injected:
        is_beside = block.is_alone and (block.seq == AFTER_ALL_MESSAGES or block.seq in behind)
        if not is_beside and block.text not in texts:
            yield block


def write_blocks(epoch: Epoch) -> tuple[HeadMessage, ...]:
    """Return the messages that repeat an epoch's injected blocks, word for word; none without blocks."""
    if not epoch.injected:
        return ()
    text = "\n\n".join(block.text.strip() for block in epoch.injected)
    overhead = count_text_message("", estimate_text)
    tokens = overhead + sum(block.tokens for block in epoch.injected)
    return (
        HeadMessage(layer=LAYER, role="user", text=text, tokens=tokens),
        HeadMessage(
            layer=LAYER,
            role="assistant",
            text=INJECTED_ACK,
            tokens=count_text_message(INJECTED_ACK, estimate_text),
        ),
    )


def count_other_blocks(snapshot: Snapshot, epoch: Epoch) -> int:
    """Count the tokens of the newest blocks that are in their client's messages and not in the head."""
    in_head = {block.text for block in epoch.injected}
    return sum(block.tokens for block in snapshot.injected if block.text not in in_head)
