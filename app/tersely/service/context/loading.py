"""Read what a context needs: from the request that carries the history, and from the store.

What is read is a snapshot of one moment. Nothing in the store changes because a context is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import takewhile

from msgspec import structs

from tersely.dialects.dialect import Dialect
from tersely.domain.history.history import (
    Entry,
    Epoch,
    EpochInputs,
    InjectedBlock,
    Snapshot,
)
from tersely.domain.history.sessions import Session
from tersely.domain.messages import (
    INSTRUCTION_ROLES,
    is_outside_messages,
)
from tersely.domain.tokens import MESSAGE_OVERHEAD
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_config import ContextConfig, TokenBudget
from tersely.service.context.entries import Restore, new_entries, resent_entries, stored_duplicates, stored_entries
from tersely.service.context.epoch_inputs import load_material
from tersely.service.context.history import BlockMessage, History, epoch_of
from tersely.service.context.injected_blocks import injected_in_request, injected_in_store, stored_blocks
from tersely.service.context.stored_messages import restore_reply, stored_instruction
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
from tersely.strategies.epochs.policies import Advance
from tersely.strategies.planning import (
    decide,
)
from tersely.strategies.presets import Full, Strategy

# Of a stored history that is planned anew (after an edit, or under another configuration), so much of the newest is
# looked at. What is older is known by the summaries, log entries and references that still count.
STALE_TOKENS = 400_000


STALE_MESSAGES = 5_000


async def load_history(
    connection: Connection,
    tenant: str,
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    recipe: ContextConfig,
    around: TokenBudget,
    *,
    restore: Restore | None = None,
    needs_material: bool = False,
    moments: Callable[[Snapshot], Sequence[Snapshot]] | None = None,
    counts: Sequence[int] | None = None,
) -> History:
    """Read what the context needs, in the caller's transaction. The cost depends on the tail.

    ``restore`` puts the model's own words back into the client's echo of a reply. ``needs_material``: the caller starts
    an epoch in any case. ``moments`` gives the snapshots at which an epoch may have become due, in order, the last one
    being the present: the first of them that asks for an epoch is the history. ``counts`` are the tokens of the
    messages that have arrived, as they will be stored; without them they are estimated.
    """
    session = found.session
    epoch = epoch_of(found, recipe)
    cut = max(found.start, recipe.first_seq(epoch))
    stored_instructions: tuple[bytes, ...] = ()
    blocks: list[BlockMessage] = []
    if found.is_delta and session is not None:
        cut = await first_seq_to_load(connection, tenant, session, recipe, cut)
        is_partly_read = cut > (epoch.cut if epoch is not None else 1)
        if is_partly_read:
            epoch = await _from_newest(connection, tenant, session, epoch, cut, around.now)
        stored = await messages.live_from(connection, tenant, session.id, cut, last=session.last_seq)
        if found.decision.kind == "retry" and (answered := found.decision.answered) is not None:
            stored = [each for each in stored if each.position <= answered.position]
        kept = await _kept_content(connection, tenant, session.id, epoch, cut)
        if epoch is not None and (questions := await _questions_of_late(connection, tenant, session, stored, cut)):
            # They were cut while their replies were under way: they stand with them from now on.
            known = {each.seq for each in kept}
            kept = sorted(
                (*kept, *(each for each in questions if each.seq not in known)), key=lambda each: each.position
            )
            epoch = structs.replace(epoch, kept=tuple(sorted({*epoch.kept, *(each.seq for each in questions)})))
        new = new_entries(found, arrival, around.now, counts)
        size = _bytes_of(stored)
        shown = await run_in_thread_if_large(size, stored_entries, [*kept, *stored], dialect, new)
        is_kept = {each.seq for each in kept}
        entries = [entry for entry in shown if entry.seq not in is_kept]
        kept_entries = [entry for entry in shown if entry.seq in is_kept]
        known = {placed.seq for placed in found.decision.placed} | set(found.decision.superseded)
        kinds = {is_outside_messages(message.raw) for message in arrival.messages if message.is_instruction}
        beside: list[StoredMessage] = []
        if not kinds or any(not row.row.is_link and row.row.seq not in known for row in found.rows):
            beside = await messages.instructions(connection, tenant, session.id)
        given = [row for row in beside if row.role in INSTRUCTION_ROLES and row.seq not in known]
        given = [row for row in given if is_outside_messages(row.raw) not in kinds]
        stored_instructions = tuple(stored_instruction(row, dialect) for row in given)
        alone = [row for row in beside if row.role not in INSTRUCTION_ROLES and row.seq not in known]
        tail = [each for each in stored if each.seq not in is_kept]
        blocks = await run_in_thread_if_large(size, stored_blocks, alone, tail, found, cut, dialect)
        hidden: list[StoredMessage] = []
        if session.edited or (epoch is not None and epoch.is_stale):
            hidden = await messages.hidden_texts(connection, tenant, session.id)
        if epoch is not None and epoch.cut > 1 and (is_partly_read or not epoch.has_injected):
            # Clients put what they inject into their first messages.
            hidden = [*await messages.first_questions(connection, tenant, session.id, epoch.cut), *hidden]
        injected = await run_in_thread_if_large(
            size, injected_in_store, epoch, blocks, hidden, [*kept_entries, *entries], found, arrival, dialect
        )
    else:
        kept_rows = await _kept_rows(connection, tenant, found, epoch, cut)
        duplicates = await stored_duplicates(connection, tenant, found, arrival, dialect, kept_rows)
        restore = restore or partial(restore_reply, dialect)
        entries, kept_entries = await run_in_thread_if_large(
            arrival.size, resent_entries, found, arrival, dialect, restore, kept_rows, duplicates, cut, around.now
        )
        injected = injected_in_request(found, arrival)
    snapshot = await run_in_thread_if_large(
        arrival.size, _snapshot, found, entries, kept_entries, cut, around, recipe, injected, epoch
    )
    snapshot, advance = _first_due(moments(snapshot) if moments else (snapshot,), recipe, around.now)
    material = EpochInputs()
    if (needs_material or advance is not None) and session is not None:
        material = await load_material(connection, tenant, found, recipe.strategy)
        if needs_material or session.plan is not None:
            snapshot, material = await _choose_memos_again(
                connection, tenant, session, recipe.strategy, snapshot, material
            )
    return History(
        snapshot=snapshot,
        advance=advance,
        material=material,
        is_verbatim=not found.is_delta and _are_resent([*kept_entries, *entries], arrival),
        instructions=stored_instructions,
        blocks=tuple(blocks),
    )


async def _questions_of_late(
    connection: Connection, tenant: str, session: Session, stored: Sequence[StoredMessage], cut: int
) -> list[StoredMessage]:
    """Return the questions before ``cut`` of replies that stand, in order, before the first of ``stored`` by number."""
    first = min((each.seq for each in stored), default=0)
    late = [each.seq for each in takewhile(lambda each: each.seq != first, stored) if each.role == "assistant"]
    if not late:
        return []
    questions = await messages.questions_of(connection, tenant, session.id, late)
    return [each for each in questions if each.seq < cut]


def _first_due(moments: Sequence[Snapshot], recipe: ContextConfig, now: datetime) -> tuple[Snapshot, Advance | None]:
    """Return the first of ``moments`` at which an epoch is due, with the decision; else the last one."""
    for snapshot in moments:
        decision = decide(snapshot, strategy=recipe.strategy, policy=recipe.policy, now=now)
        if isinstance(decision, Advance):
            return snapshot, decision
    return moments[-1], None


async def first_seq_to_load(
    connection: Connection, tenant: str, session: Session, recipe: ContextConfig, cut: int
) -> int:
    """From where on to load: of what is planned anew no more than the newest messages."""
    plan = session.plan
    is_anew = plan is None or recipe.plans_anew(plan)
    if not is_anew or (plan is not None and cut > plan.cut):
        return cut
    if isinstance(recipe.strategy, Full) and (plan is None or not plan.must_rebuild):
        return cut  # it shows everything
    if session.last_seq - cut < STALE_MESSAGES and session.tokens <= STALE_TOKENS:
        return cut
    return await first_seq_replanned(connection, tenant, session, since=cut)


async def _from_newest(
    connection: Connection, tenant: str, session: Session, epoch: Epoch | None, cut: int, now: datetime
) -> Epoch:
    """Return a void epoch that begins at ``cut``, with what is pinned before it, for a session that had cut less."""
    pinned = await messages.pinned_before(connection, tenant, session.id, cut)
    if epoch is None:
        epoch = Epoch(
            number=0, cut=cut, head=(), kept=(), reason="", fingerprint="", references=(), created_at=now,
            cleared_at=session.cleared_at,
        )  # fmt: skip
    kept = tuple(sorted({*epoch.kept, *pinned}))
    return structs.replace(epoch.marked_for_rebuild(), cut=cut, kept=kept, older_tokens=max(1, epoch.older_tokens))


async def first_seq_replanned(connection: Connection, tenant: str, session: Session, since: int | None = None) -> int:
    """From where on a session is looked at that is planned anew, at the earliest ``since`` (None: the floor)."""
    first = session.cleared_at if since is None else since
    return await messages.newest_within(
        connection, tenant, session.id, since=first, tokens=STALE_TOKENS, limit=STALE_MESSAGES
    )


def load_resent(
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    recipe: ContextConfig,
    around: TokenBudget,
    restore: Restore,
) -> History | None:
    """What `load` would give for a history that was resent, where that takes no look at the database; else None."""
    epoch = epoch_of(found, recipe)
    if epoch is None or found.is_delta:
        return None
    cut = recipe.first_seq(epoch)
    if _missing_kept(found, epoch, cut):
        return None
    entries, kept = resent_entries(found, arrival, dialect, restore, (), {}, cut, around.now)
    snapshot = _snapshot(found, entries, kept, cut, around, recipe, injected_in_request(found, arrival), epoch)
    if isinstance(decide(snapshot, strategy=recipe.strategy, policy=recipe.policy, now=around.now), Advance):
        return None
    return History(
        snapshot=snapshot,
        advance=None,
        material=EpochInputs(),
        is_verbatim=_are_resent([*kept, *entries], arrival),
    )


def _snapshot(
    found: SessionMatch,
    entries: Sequence[Entry],
    kept: Sequence[Entry],
    cut: int,
    around: TokenBudget,
    recipe: ContextConfig,
    injected: tuple[InjectedBlock, ...],
    epoch: Epoch | None,
) -> Snapshot:
    session = found.session
    if injected:
        newest = {block.text: block.tokens for block in injected}
        entries, kept = _count_apart(entries, newest), _count_apart(kept, newest)
    return Snapshot(
        entries=tuple(memos_in_epoch(entries, recipe.strategy, epoch)),
        kept=tuple(memos_in_epoch(kept, recipe.strategy, epoch)),
        epoch=epoch,
        fixed_tokens=around.fixed_tokens + sum(block.tokens for block in injected),
        injected=injected,
        window=around.window,
        model_window=around.model_window,
        edited=found.decision.kind == "edited"
        or (session is not None and session.edited)
        or (epoch is not None and epoch.is_stale),
        ran_out=epoch is not None and _ran_out(found, epoch),
        calls=session.calls if session else 0,
        last_call_at=_latest(session.last_call_at if session else None, around.last_call_at),
        older_tokens=0 if epoch is None or cut == 1 else _older_tokens(epoch, entries),
        read_back=recipe.read_back,
    )


def _count_apart(entries: Sequence[Entry], newest: dict[str, int]) -> list[Entry]:
    """Take the tokens of the newest blocks off the entries that hold them; each block is taken out of ``newest``."""
    counted: list[Entry] = []
    for entry in reversed(entries):
        apart = sum(newest.pop(block.text, 0) for block in entry.message.injected) if entry.message.injected else 0
        counted.append(replace(entry, tokens=max(MESSAGE_OVERHEAD, entry.tokens - apart)) if apart else entry)
    return counted[::-1]


def _latest(*times: datetime | None) -> datetime | None:
    return max((time for time in times if time is not None), default=None)


async def _choose_memos_again(
    connection: Connection, tenant: str, session: Session, strategy: Strategy, snapshot: Snapshot, material: EpochInputs
) -> tuple[Snapshot, EpochInputs]:
    """Memos chosen anew for the stored messages. A session's first call goes on with those that are there: what was
    shown before it is its beginning.
    """
    if not memo_limit(strategy):
        return snapshot, material
    settled = session.last_seq
    stored = [entry for entry in (*snapshot.kept, *snapshot.entries) if entry.seq <= settled]
    memos = await choose_for_entries(connection, tenant, stored, strategy)
    bare = {entry.seq: without_memos(entry) for entry in stored}
    snapshot = replace(
        snapshot,
        kept=tuple(bare.get(entry.seq, entry) for entry in snapshot.kept),
        entries=tuple(bare.get(entry.seq, entry) for entry in snapshot.entries),
    )
    return snapshot, replace(material, memos=memos, memos_chosen_to=settled)


def _ran_out(found: SessionMatch, epoch: Epoch) -> bool:
    """Whether the newest reply broke off because the model's window was full, and no epoch has started since."""
    replies = (row for row in reversed(found.rows) if row.row.role == "assistant" and row.row.status == "live")
    newest = next(replies, None)
    return newest is not None and newest.ran_out and newest.created_at > epoch.created_at


def _older_tokens(epoch: Epoch, entries: Sequence[Entry]) -> int:
    """What is live before ``entries``, of which some may be from before the epoch's cut."""
    again = sum(entry.tokens for entry in entries if entry.seq < epoch.cut)
    # Counts that were estimates then may be exact by now: where something is left, it is not nothing.
    return max(1, epoch.older_tokens - again) if again else epoch.older_tokens


def _missing_kept(found: SessionMatch, epoch: Epoch, cut: int) -> list[int]:
    loaded = {row.row.seq for row in (*found.rows, *found.hidden)}
    return [seq for seq in epoch.kept if seq < cut and seq not in loaded]


def _are_resent(entries: Sequence[Entry], arrival: IncomingHistory) -> bool:
    links = arrival.links
    return len(entries) == len(links) and all(
        entry.message is arrival.messages[index] for entry, index in zip(entries, links, strict=True)
    )


async def _kept_rows(
    connection: Connection, tenant: str, found: SessionMatch, epoch: Epoch | None, cut: int
) -> list[TailRow]:
    if found.session is None or epoch is None:
        return []
    missing = _missing_kept(found, epoch, cut)
    return await messages.rows_of(connection, tenant, found.session.id, missing) if missing else []


async def _kept_content(
    connection: Connection, tenant: str, session_id: str, epoch: Epoch | None, cut: int
) -> list[StoredMessage]:
    seqs = [seq for seq in epoch.kept if seq < cut] if epoch else []
    return await messages.content(connection, tenant, session_id, seqs) if seqs else []


def _bytes_of(stored: Sequence[StoredMessage]) -> int:
    return sum(len(message.raw) for message in stored)


async def after_overflow(
    database: Database, tenant: str, found: SessionMatch, history: History, recipe: ContextConfig, around: TokenBudget
) -> History:
    """The same history after the upstream has refused the context as too long."""
    snapshot, material = history.snapshot, history.material
    if history.advance is None and found.session is not None:
        async with database.transaction(tenant) as connection:
            material = await load_material(connection, tenant, found, recipe.strategy)
            if found.session.plan is not None:
                snapshot, material = await _choose_memos_again(
                    connection, tenant, found.session, recipe.strategy, snapshot, material
                )
    return replace(
        history,
        snapshot=replace(snapshot, window=around.window),
        advance=Advance(reason="overflow"),
        material=material,
        overflows=history.overflows + 1,
    )
