"""Read what a context needs: from the request that carries the history, and from the store.

What is read is a snapshot of one moment. Nothing in the store changes because a context is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile

import msgspec
from msgspec import structs

from tersely.dialects.dialect import Dialect
from tersely.domain.history.history import (
    Entry,
    Epoch,
    EpochInputs,
    InjectedBlock,
    Snapshot,
)
from tersely.domain.history.links import PlacedMessage
from tersely.domain.history.sessions import Session
from tersely.domain.messages import (
    INSTRUCTION_ROLES,
    is_outside_messages,
)
from tersely.domain.tokens import MESSAGE_OVERHEAD
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_config import ContextConfig, TokenBudget
from tersely.service.context.entries import Restore, new_entries, resent_entries, stored_duplicates, stored_entries
from tersely.service.context.epoch_inputs import load_epoch_inputs
from tersely.service.context.history import BlockMessage, History, epoch_of
from tersely.service.context.injected_blocks import injected_in_request, injected_in_store, stored_blocks
from tersely.service.context.stored_messages import read_stored, restore_reply, stored_instruction
from tersely.service.memos.selection import (
    choose_for_entries,
    memo_limit,
    memos_in_epoch,
    without_memos,
)
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages
from tersely.store.history.messages import StoredMessage, TailRow
from tersely.strategies.epochs.policies import StartEpoch
from tersely.strategies.planning import (
    decide,
)
from tersely.strategies.presets import Full, Strategy

# A stored history that is planned again (after an edit, or under another configuration) is read back to these limits.
# Older messages are known by the summaries, log entries and references that are still valid.
STALE_TOKENS = 400_000
STALE_MESSAGES = 5_000


async def load_history(
    connection: Connection,
    tenant: str,
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    config: ContextConfig,
    budget: TokenBudget,
    *,
    restore: Restore | None = None,
    needs_epoch_inputs: bool = False,
    snapshots_at: Callable[[Snapshot], Sequence[Snapshot]] | None = None,
    counts: Sequence[int] | None = None,
) -> History:
    """Read what the context needs, in the caller's transaction. The cost depends on the length of the tail.

    ``restore`` puts the model's own text back into the client's echo of a reply. ``needs_epoch_inputs``: the caller
    starts an epoch in any case. ``snapshots_at`` returns the snapshots at which an epoch may have become due, in order,
    ending with the present: the first that needs an epoch is used. ``counts`` are the tokens of the request's messages
    as they will be stored; without them tokens are estimated.
    """
    session = match.session
    if match.is_delta and session is not None:
        loaded = await _load_stored(connection, tenant, session, match, incoming, dialect, config, budget, counts)
    else:
        restore = restore or partial(restore_reply, dialect)
        loaded = await _load_resent(connection, tenant, match, incoming, dialect, config, budget, restore)
    snapshot, epoch_start = await run_in_thread_if_large(
        incoming.size, _first_due, match, loaded, budget, config, snapshots_at
    )
    history = History(
        snapshot=snapshot,
        epoch_start=epoch_start,
        epoch_inputs=EpochInputs(),
        is_verbatim=not match.is_delta and _are_as_resent([*loaded.kept, *loaded.entries], incoming),
        instructions=loaded.instructions,
        blocks=loaded.blocks,
    )
    return await with_epoch_inputs(connection, tenant, match, history, config, needs_epoch_inputs=needs_epoch_inputs)


async def with_epoch_inputs(
    connection: Connection,
    tenant: str,
    match: SessionMatch,
    history: History,
    config: ContextConfig,
    *,
    needs_epoch_inputs: bool = False,
) -> History:
    """Return ``history`` with the inputs of the epoch that it starts, if it starts one. ``needs_epoch_inputs``: see
    `load_history`.
    """
    session, epoch_start = match.session, history.epoch_start
    # Instructions are put into an epoch that otherwise stays as it is.
    is_planned = epoch_start is not None and epoch_start.reason != "instructions"
    if session is None or not (needs_epoch_inputs or is_planned):
        return history
    snapshot, inputs = history.snapshot, await load_epoch_inputs(connection, tenant, match, config.strategy)
    if needs_epoch_inputs or session.plan is not None:
        snapshot, inputs = await _choose_memos_again(connection, tenant, session, config.strategy, snapshot, inputs)
    return structs.replace(history, snapshot=snapshot, epoch_inputs=inputs)


class _LoadedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a context: ``kept`` before the cut, ``entries`` from there on, and the epoch that they belong to.

    ``instructions`` and ``blocks`` are stored ones that the request does not bring.
    """

    epoch: Epoch | None
    cut: int
    entries: Sequence[Entry]
    kept: Sequence[Entry]
    injected: tuple[InjectedBlock, ...]
    instructions: tuple[bytes, ...] = ()
    blocks: tuple[BlockMessage, ...] = ()


async def _load_resent(
    connection: Connection,
    tenant: str,
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    config: ContextConfig,
    budget: TokenBudget,
    restore: Restore,
) -> _LoadedMessages:
    """Take the messages from a request that carries its whole history."""
    epoch = epoch_of(match, config)
    cut = max(match.expanded_from, config.first_seq(epoch))
    if (turn := _turn_across(match, incoming, epoch, cut)) is not None:
        epoch = await _with_turn(connection, tenant, match, epoch, cut, turn)
    kept_rows = await _kept_rows(connection, tenant, match, epoch, cut)
    duplicates = await stored_duplicates(connection, tenant, match, incoming, dialect, kept_rows)
    entries, kept = await run_in_thread_if_large(
        incoming.size,
        resent_entries,
        match,
        incoming,
        dialect,
        restore,
        kept_rows,
        duplicates,
        _kept_seqs(epoch),
        cut,
        budget.now,
    )
    return _LoadedMessages(
        epoch=epoch, cut=cut, entries=entries, kept=kept, injected=injected_in_request(match, incoming)
    )


async def _load_stored(
    connection: Connection,
    tenant: str,
    session: Session,
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    config: ContextConfig,
    budget: TokenBudget,
    counts: Sequence[int] | None,
) -> _LoadedMessages:
    """Read the messages from the store, for a request that brings only new ones."""
    epoch = epoch_of(match, config)
    cut = max(match.expanded_from, config.first_seq(epoch))
    cut = await first_seq_to_load(connection, tenant, session, config, cut)
    is_partly_read = cut > (epoch.cut if epoch is not None else 1)
    if is_partly_read:
        epoch = await _epoch_from_newest(connection, tenant, session, epoch, cut, budget.now)
    stored = await messages.live_from(connection, tenant, session.id, cut, last=session.last_seq)
    if match.decision.kind == "retry" and (answered := match.decision.answered) is not None:
        stored = [each for each in stored if each.position <= answered.position]
    if superseded := set(match.decision.superseded):
        calls = {each.call for each in stored if each.seq in superseded and each.call}
        stored = [
            each for each in stored if each.seq not in superseded and (each.client_visible or each.call not in calls)
        ]
    if epoch is not None and _begins_behind_clear(epoch, cut) and (turn := _turn_of_delta(match, stored)):
        epoch = await _with_turn(connection, tenant, match, epoch, cut, turn)
    kept, epoch = await _kept_messages(connection, tenant, session, stored, epoch, cut)
    is_kept = {each.seq for each in kept}
    size = _bytes_of(stored)
    new = new_entries(match, incoming, budget.now, counts)
    calling = await _calls_before(connection, tenant, session, kept, stored, dialect) if cut > 1 else []
    before = sorted((*kept, *calling), key=lambda each: each.position) if calling else kept
    shown = await run_in_thread_if_large(size, stored_entries, [*before, *stored], dialect, new)
    outside = await _stored_outside(connection, tenant, session, match, incoming)
    alone = [row for row in outside if row.role not in INSTRUCTION_ROLES]
    tail = [each for each in stored if each.seq not in is_kept]
    blocks = await run_in_thread_if_large(size, stored_blocks, alone, tail, match, cut, dialect)
    hidden: list[StoredMessage] = []
    if session.edited or (epoch is not None and epoch.is_stale):
        hidden = await messages.hidden_texts(connection, tenant, session.id)
    if epoch is not None and epoch.cut > 1 and (is_partly_read or not epoch.has_injected):
        # Clients inject blocks into their first messages.
        hidden = [*await messages.first_questions(connection, tenant, session.id, epoch.cut), *hidden]
    kept_entries = [entry for entry in shown if entry.seq in is_kept]
    is_before = {each.seq for each in before}
    entries = [entry for entry in shown if entry.seq not in is_before]
    injected = await run_in_thread_if_large(
        size, injected_in_store, epoch, blocks, hidden, [*kept_entries, *entries], match, incoming, dialect
    )
    return _LoadedMessages(
        epoch=epoch,
        cut=cut,
        entries=entries,
        kept=kept_entries,
        injected=injected,
        instructions=tuple(stored_instruction(row, dialect) for row in outside if row.role in INSTRUCTION_ROLES),
        blocks=tuple(blocks),
    )


async def _kept_messages(
    connection: Connection,
    tenant: str,
    session: Session,
    stored: Sequence[StoredMessage],
    epoch: Epoch | None,
    cut: int,
) -> tuple[Sequence[StoredMessage], Epoch | None]:
    """Return the messages that the epoch keeps before ``cut``, and the epoch.

    Questions that were cut while their replies were under way are kept from now on, with their replies.
    """
    kept = await _kept_content(connection, tenant, session.id, epoch, cut)
    if epoch is None or not (questions := await _questions_of_late(connection, tenant, session, stored, cut)):
        return kept, epoch
    known = {each.seq for each in kept}
    kept = sorted((*kept, *(each for each in questions if each.seq not in known)), key=lambda each: each.position)
    return kept, structs.replace(epoch, kept=tuple(sorted({*epoch.kept, *(each.seq for each in questions)})))


async def _calls_before(
    connection: Connection,
    tenant: str,
    session: Session,
    kept: Sequence[StoredMessage],
    stored: Sequence[StoredMessage],
    dialect: Dialect,
) -> list[StoredMessage]:
    """Return the messages from before the cut with the calls to which ``kept`` messages, or those that ``stored``
    begins with, bring results.

    When the epoch started they were loaded: only beside its call does a result have the same form again.
    """
    leading = takewhile(lambda each: each.role != "assistant", stored)
    read = {each.seq: read_stored(each, dialect).message for each in (*kept, *leading)}
    calls = {call.id for message in read.values() for call in message.calls}
    lone = [seq for seq, message in read.items() if any(each.call_id not in calls for each in message.results)]
    if not lone:
        return []
    found = await messages.replies_before(connection, tenant, session.id, lone)
    return [each for each in found if each.seq not in read]


async def _stored_outside(
    connection: Connection, tenant: str, session: Session, match: SessionMatch, incoming: IncomingHistory
) -> list[StoredMessage]:
    """Return stored instructions and messages of injected blocks that the request neither brings nor replaces."""
    known = {placed.seq for placed in match.decision.placed} | set(match.decision.superseded)
    kinds = {is_outside_messages(message.raw) for message in incoming.messages if message.is_instruction}
    if kinds and all(row.row.is_link or row.row.seq in known for row in match.rows):
        return []
    rows = await messages.instructions(connection, tenant, session.id)
    return [
        row
        for row in rows
        if row.seq not in known and not (row.role in INSTRUCTION_ROLES and is_outside_messages(row.raw) in kinds)
    ]


async def _questions_of_late(
    connection: Connection, tenant: str, session: Session, stored: Sequence[StoredMessage], cut: int
) -> list[StoredMessage]:
    """Return questions before ``cut`` whose replies are stored, in order of position, before the first message of
    ``stored``.
    """
    first = min((each.seq for each in stored), default=0)
    late = [each.seq for each in takewhile(lambda each: each.seq != first, stored) if each.role == "assistant"]
    if not late:
        return []
    questions = await messages.questions_of(connection, tenant, session.id, late)
    return [each for each in questions if each.seq < cut]


def _first_due(
    match: SessionMatch,
    loaded: _LoadedMessages,
    budget: TokenBudget,
    config: ContextConfig,
    snapshots_at: Callable[[Snapshot], Sequence[Snapshot]] | None = None,
) -> tuple[Snapshot, StartEpoch | None]:
    """Return the first snapshot at which an epoch is due, with the decision; else the last snapshot and None."""
    present = _snapshot(match, loaded, budget, config)
    moments = (present,) if snapshots_at is None else snapshots_at(present)
    for snapshot in moments:
        decision = decide(snapshot, strategy=config.strategy, policy=config.policy, now=budget.now)
        if isinstance(decision, StartEpoch):
            return snapshot, decision
    return moments[-1], None


async def first_seq_to_load(
    connection: Connection, tenant: str, session: Session, config: ContextConfig, cut: int
) -> int:
    """Return the first sequence number to load. A history that is planned again is read only as far as the limits
    allow.
    """
    plan = session.plan
    is_anew = plan is None or config.plans_anew(plan)
    if not is_anew or (plan is not None and cut > plan.cut):
        return cut
    if isinstance(config.strategy, Full) and (plan is None or not plan.must_rebuild):
        return cut  # `full` shows everything
    if session.last_seq - cut < STALE_MESSAGES and session.tokens <= STALE_TOKENS:
        return cut
    return await first_seq_replanned(connection, tenant, session, since=cut)


async def _epoch_from_newest(
    connection: Connection, tenant: str, session: Session, epoch: Epoch | None, cut: int, now: datetime
) -> Epoch:
    """Return an epoch that must be rebuilt and begins at ``cut``, with the pinned messages before it."""
    pinned = await messages.pinned_before(connection, tenant, session.id, cut)
    if epoch is None:
        epoch = Epoch(
            number=0, cut=cut, head=(), kept=(), reason="", fingerprint="", references=(), created_at=now,
            cleared_at=session.cleared_at,
        )  # fmt: skip
    kept = tuple(sorted({*epoch.kept, *pinned}))
    return structs.replace(epoch.marked_for_rebuild(), cut=cut, kept=kept, older_tokens=max(1, epoch.older_tokens))


async def first_seq_replanned(connection: Connection, tenant: str, session: Session, since: int | None = None) -> int:
    """Return the first sequence number to read of a session that is planned again, at least ``since`` (None:
    `cleared_at`).
    """
    first = session.cleared_at if since is None else since
    return await messages.newest_within(
        connection, tenant, session.id, since=first, tokens=STALE_TOKENS, limit=STALE_MESSAGES
    )


def load_resent(
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    config: ContextConfig,
    budget: TokenBudget,
    restore: Restore,
) -> History | None:
    """Return what `load_history` returns for a resent history, but for the inputs of an epoch that starts (see
    `with_epoch_inputs`); None if that needs a query.
    """
    epoch = epoch_of(match, config)
    if epoch is None or match.is_delta:
        return None
    cut = config.first_seq(epoch)
    if _missing_kept(match, epoch, cut):
        return None
    if _turn_across(match, incoming, epoch, cut) is not None:
        return None
    entries, kept = resent_entries(match, incoming, dialect, restore, (), {}, _kept_seqs(epoch), cut, budget.now)
    injected = injected_in_request(match, incoming)
    loaded = _LoadedMessages(epoch=epoch, cut=cut, entries=entries, kept=kept, injected=injected)
    snapshot, epoch_start = _first_due(match, loaded, budget, config)
    return History(
        snapshot=snapshot,
        epoch_start=epoch_start,
        epoch_inputs=EpochInputs(),
        is_verbatim=_are_as_resent([*kept, *entries], incoming),
    )


def _snapshot(match: SessionMatch, loaded: _LoadedMessages, budget: TokenBudget, config: ContextConfig) -> Snapshot:
    session, epoch, injected = match.session, loaded.epoch, loaded.injected
    entries, kept = count_apart(loaded.entries, loaded.kept, injected)
    return Snapshot(
        entries=tuple(memos_in_epoch(entries, config.strategy, epoch)),
        kept=tuple(memos_in_epoch(kept, config.strategy, epoch)),
        epoch=epoch,
        fixed_tokens=budget.fixed_tokens + sum(block.tokens for block in injected),
        tool_tokens=budget.tool_tokens,
        injected=injected,
        window=budget.window,
        model_window=budget.model_window,
        edited=match.decision.kind == "edited"
        or (session is not None and session.edited)
        or (epoch is not None and epoch.is_stale),
        ran_out=epoch is not None and _ran_out(match, epoch),
        calls=session.calls if session else 0,
        last_call_at=_latest(session.last_call_at if session else None, budget.last_call_at),
        older_tokens=0 if epoch is None or loaded.cut == 1 else count_older_tokens(epoch, entries),
        read_back=config.read_back,
        instructions=config.instructions,
        folds_repeats=config.folds_repeats,
    )


def count_apart(
    entries: Sequence[Entry], kept: Sequence[Entry], injected: Sequence[InjectedBlock]
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Return both with the tokens of the newest blocks subtracted: they count as instructions."""
    newest = {block.text: block.tokens for block in injected}
    if not newest:
        return tuple(entries), tuple(kept)
    return tuple(_count_apart(entries, newest)), tuple(_count_apart(kept, newest))


def _count_apart(entries: Sequence[Entry], newest: dict[str, int]) -> list[Entry]:
    """Subtract the tokens of the newest blocks from the entries that hold them. Removes each block from ``newest``."""
    counted: list[Entry] = []
    for entry in reversed(entries):
        apart = sum(newest.pop(block.text, 0) for block in entry.message.injected) if entry.message.injected else 0
        counted.append(structs.replace(entry, tokens=max(MESSAGE_OVERHEAD, entry.tokens - apart)) if apart else entry)
    return counted[::-1]


def _latest(*times: datetime | None) -> datetime | None:
    return max((time for time in times if time is not None), default=None)


async def _choose_memos_again(
    connection: Connection, tenant: str, session: Session, strategy: Strategy, snapshot: Snapshot, inputs: EpochInputs
) -> tuple[Snapshot, EpochInputs]:
    """Choose memos again for the stored messages. A session's first call keeps the memos that it was shown."""
    if not memo_limit(strategy):
        return snapshot, inputs
    stored_to = session.last_seq
    stored = [entry for entry in (*snapshot.kept, *snapshot.entries) if entry.seq <= stored_to]
    memos = await choose_for_entries(connection, tenant, stored, strategy)
    bare = {entry.seq: without_memos(entry) for entry in stored}
    snapshot = structs.replace(
        snapshot,
        kept=tuple(bare.get(entry.seq, entry) for entry in snapshot.kept),
        entries=tuple(bare.get(entry.seq, entry) for entry in snapshot.entries),
    )
    return snapshot, structs.replace(inputs, memos=memos, memos_chosen_to=stored_to)


def _ran_out(match: SessionMatch, epoch: Epoch) -> bool:
    """Return whether the newest reply ended because the model's window was full, and no epoch has started since."""
    replies = (row for row in reversed(match.rows) if row.row.role == "assistant" and row.row.status == "live")
    newest = next(replies, None)
    return newest is not None and newest.ran_out and newest.created_at > epoch.created_at


def count_older_tokens(epoch: Epoch, entries: Sequence[Entry]) -> int:
    """Return the tokens of live messages before ``entries``, some of which may be from before the epoch's cut."""
    again = sum(entry.tokens for entry in entries if entry.seq < epoch.cut)
    # Some counts were estimates and are exact by now. Where messages are left, the result is at least 1.
    return max(1, epoch.older_tokens - again) if again else epoch.older_tokens


def _begins_behind_clear(epoch: Epoch, cut: int) -> bool:
    """Return whether the loaded messages begin where the session was cleared last."""
    return 1 < cut == epoch.cleared_at


def _turn_across(match: SessionMatch, incoming: IncomingHistory, epoch: Epoch | None, cut: int) -> int | None:
    """Return the turn that was cleared and goes on behind the ``cut`` (0: the last one before it); None if there is
    none.

    After a clear, clients go on with open calls, and ask their last question again.
    """
    if epoch is None or not _begins_behind_clear(epoch, cut):
        return None
    last: PlacedMessage | None = None
    for identity, placed in zip(incoming.identities, match.decision.placed, strict=True):
        if not identity.is_link or placed.status != "live":
            continue
        if placed.is_new or placed.seq >= cut:
            return None if identity.starts_turn else placed.turn
        last = placed
    return last.turn if last is not None and last.seq else 0


def _turn_of_delta(match: SessionMatch, stored: Sequence[StoredMessage]) -> int:
    """Return the turn of the first message behind a cut, ``stored`` or new, or of a question that is asked again (0:
    there is none).
    """
    if stored:
        return stored[0].turn
    new = next((placed.turn for placed in match.decision.placed if placed.is_new and placed.turn), 0)
    answered = match.decision.answered if match.decision.kind == "retry" else None
    return new or (answered.turn if answered is not None else 0)


async def _with_turn(
    connection: Connection, tenant: str, match: SessionMatch, epoch: Epoch | None, cut: int, turn: int
) -> Epoch | None:
    """Return the epoch, which keeps what a clear took of a ``turn`` that goes on: results need their calls, and the
    model needs the question.
    """
    if epoch is None or match.session is None:
        return epoch
    seqs = await messages.of_turn_before(connection, tenant, match.session.id, cut, turn=turn)
    return structs.replace(epoch, kept=tuple(sorted({*epoch.kept, *seqs})))


def _kept_seqs(epoch: Epoch | None) -> frozenset[int]:
    return frozenset(epoch.kept) if epoch is not None else frozenset()


def _missing_kept(match: SessionMatch, epoch: Epoch, cut: int) -> list[int]:
    loaded = {row.row.seq for row in (*match.rows, *match.hidden)}
    return [seq for seq in epoch.kept if seq < cut and seq not in loaded]


def _are_as_resent(entries: Sequence[Entry], incoming: IncomingHistory) -> bool:
    links = incoming.links
    return len(entries) == len(links) and all(
        entry.message is incoming.messages[index] for entry, index in zip(entries, links, strict=True)
    )


async def _kept_rows(
    connection: Connection, tenant: str, match: SessionMatch, epoch: Epoch | None, cut: int
) -> list[TailRow]:
    if match.session is None or epoch is None:
        return []
    missing = _missing_kept(match, epoch, cut)
    return await messages.rows_of(connection, tenant, match.session.id, missing) if missing else []


async def _kept_content(
    connection: Connection, tenant: str, session_id: str, epoch: Epoch | None, cut: int
) -> list[StoredMessage]:
    seqs = [seq for seq in epoch.kept if seq < cut] if epoch else []
    return await messages.content(connection, tenant, session_id, seqs) if seqs else []


def _bytes_of(stored: Sequence[StoredMessage]) -> int:
    return sum(len(message.raw) for message in stored)


async def after_overflow(
    database: Database, tenant: str, match: SessionMatch, history: History, config: ContextConfig, budget: TokenBudget
) -> History:
    """Return the same history for another attempt, after the upstream refused the context as too long."""
    snapshot, inputs = history.snapshot, history.epoch_inputs
    if history.epoch_start is None and match.session is not None:
        async with database.transaction(tenant) as connection:
            inputs = await load_epoch_inputs(connection, tenant, match, config.strategy)
            if match.session.plan is not None:
                snapshot, inputs = await _choose_memos_again(
                    connection, tenant, match.session, config.strategy, snapshot, inputs
                )
    return structs.replace(
        history,
        snapshot=structs.replace(snapshot, window=budget.window),
        epoch_start=StartEpoch(reason="overflow"),
        epoch_inputs=inputs,
        overflows=history.overflows + 1,
    )
