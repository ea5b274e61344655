"""From what is stored and what has just arrived to a context: load, decide, plan, build.

What is read here is a snapshot of one moment; nothing in the store changes because a context is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from types import MappingProxyType

from msgspec import structs

from tersely.dialects.dialect import Dialect, ToolOffer
from tersely.dialects.registry import DIALECTS
from tersely.domain.history.chain import CALLS_AS_TEXT
from tersely.domain.history.context import Context, ContextMessage
from tersely.domain.history.history import (
    AFTER_ALL_MESSAGES,
    ClientView,
    Entry,
    Epoch,
    EpochInputs,
    HeadMessage,
    InjectedBlock,
    Snapshot,
    TerseEntry,
)
from tersely.domain.history.isolation import StoredInDialect, isolate, share_messages, text_only
from tersely.domain.history.sessions import Session
from tersely.domain.history.tiers import ReadBack, read_back_tools
from tersely.domain.messages import (
    INSTRUCTION_ROLES,
    Injected,
    Message,
    ToolResult,
    is_outside_messages,
    with_injected_text,
)
from tersely.domain.text.state import StateBlock
from tersely.domain.text.tags import MARKERS, NOTHING, TagKinds
from tersely.domain.tokens import MESSAGE_OVERHEAD
from tersely.service.common import tokens
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.epoch_inputs import brought_back, left_behind, load_material
from tersely.service.context.sent_contexts import ADDED, FULL, INSTRUCTIONS, SHORTENED, Source
from tersely.service.context.visible_states import read_visible_states
from tersely.service.memos.selection import (
    choose_for_entries,
    memo_limit,
    memos_in_epoch,
    memos_in_message,
    with_memos_of,
    without_memos,
)
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages
from tersely.store.history.messages import StoredMessage, TailRow
from tersely.strategies.epochs.policies import Advance, Policy
from tersely.strategies.head.injection import newest_versions
from tersely.strategies.planning import (
    build_context,
    decide,
    first_seq_needed,
    needs_full_plan,
    plan_epoch,
    planning_basis,
    with_retrieved_turns,
)
from tersely.strategies.presets import Full, Slim, Strategy, Tiered, Window
from tersely.strategies.summaries.activity_log import derive_missing

# (the client's echo of a reply, the reply as the model said it, the dialect of that) -> the echo with the model's own
# words.
Restore = Callable[[Message, bytes, str], Message]
# (place, entry)
_Placed = tuple[float, Entry]
# Of a stored history that is planned anew (after an edit, or under another configuration), so much of the newest is
# looked at. What is older is known by the summaries, log entries and references that still count.
STALE_TOKENS = 400_000
STALE_MESSAGES = 5_000
# Stands where the client has nothing to echo.
_NOT_ECHOED = Message(role="user", parts=(), raw=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """How a context is to be built. ``instructions`` is Tersely's own text for the model, if any; ``offers`` are the
    tools of its own that it may offer the model.
    """

    strategy: Strategy
    policy: Policy
    instructions: str | None
    offers: tuple[ToolOffer, ...] = ()

    @property
    def way(self) -> ReadBack:
        """The tools by which the model gets back what the strategy shortens."""
        if isinstance(self.strategy, Slim | Full):
            return ""
        return read_back_tools({offer.name for offer in self.offers})

    @property
    def extract(self) -> TagKinds:
        """What replies may carry that the client must not see."""
        return TagKinds(terse=isinstance(self.strategy, Slim), state=isinstance(self.strategy, Window))

    def plans_anew(self, epoch: Epoch) -> bool:
        """Whether the next epoch has to look at what ``epoch`` cut."""
        return needs_full_plan(epoch, strategy=self.strategy, policy=self.policy)

    def reach(self, epoch: Epoch | None) -> int:
        """The first sequence number that has to be loaded."""
        return first_seq_needed(epoch, strategy=self.strategy, policy=self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage:
    """A stored message that consists of injected blocks alone, numbered ``seq``.

    ``before`` is the message of the tail behind it (`AFTER_ALL_MESSAGES`: none; 0: it was cut, and is not laid out).
    """

    message: Message
    seq: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was read for one context: the snapshot and, where an epoch starts, what its head is made of.

    ``is_verbatim``: the entries are the request's own messages, all of them and unaltered. ``instructions`` are the
    stored ones, for requests that bring none. ``blocks`` are stored messages that consist of blocks
    alone. ``overflows``: how often the upstream has refused what was built of it.
    """

    snapshot: Snapshot
    advance: Advance | None
    material: EpochInputs
    is_verbatim: bool
    instructions: tuple[bytes, ...] = ()
    blocks: tuple[BlockMessage, ...] = ()
    overflows: int = 0

    @property
    def size(self) -> int:
        """Bytes of the messages that were loaded."""
        return sum(len(entry.message.raw) for entry in self.snapshot.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltContext:
    """A context, and the epoch if one starts with it, with the log entries that were made for it and the states that
    were found in replies.
    """

    context: Context
    starts_epoch: bool
    derived: tuple[TerseEntry, ...] = ()
    states: tuple[StateBlock, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """What besides the history a decision looks at. Tokens of instructions and tools; the model's window less what is
    kept free in it, and the whole of it.

    ``last_call_at``: when the agent last went on with a session that no call of ours belongs to.
    """

    fixed_tokens: int
    window: int | None
    now: datetime
    model_window: int | None = None
    last_call_at: datetime | None = None


def epoch_of(found: SessionMatch, recipe: ContextConfig) -> Epoch | None:
    """The session's epoch, as it is for the history that the request carries and under its configuration."""
    return planning_basis(_epoch_of_history(found), strategy=recipe.strategy, policy=recipe.policy)


def _epoch_of_history(found: SessionMatch) -> Epoch | None:
    epoch = found.session.plan if found.session else None
    # What is only added to replaces instructions, if anything: no head tells of them.
    if epoch is None or found.decision.kind == "delta" or not (found.decision.superseded or found.decision.restored):
        return epoch
    back = brought_back(found)
    pinned = [row.row.seq for row in found.rows if row.pinned and row.row.seq in back]
    return epoch.without_messages(left_behind(found), back, pinned, last=found.decision.last_known)


def offers_in(epoch: Epoch | None, recipe: ContextConfig) -> list[ToolOffer]:
    """What a model is offered throughout an epoch: `context_search` only where there is something out of view."""
    is_cut = epoch is not None and (epoch.cut > 1 or any(tier.read_back for tier in epoch.tiers))
    return [offer for offer in recipe.offers if is_cut or offer.name != "context_search"]


async def load(
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
    cut = max(found.start, recipe.reach(epoch))
    stored_instructions: tuple[bytes, ...] = ()
    blocks: list[BlockMessage] = []
    if found.is_delta and session is not None:
        cut = await enough(connection, tenant, session, recipe, cut)
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
        new = _new_entries(found, arrival, around.now, counts)
        size = _bytes_of(stored)
        shown = await run_in_thread_if_large(size, _stored_entries, [*kept, *stored], dialect, new)
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
        stored_instructions = tuple(_stored_instruction(row, dialect) for row in given)
        alone = [row for row in beside if row.role not in INSTRUCTION_ROLES and row.seq not in known]
        tail = [each for each in stored if each.seq not in is_kept]
        blocks = await run_in_thread_if_large(size, _stored_blocks, alone, tail, found, cut, dialect)
        hidden: list[StoredMessage] = []
        if session.edited or (epoch is not None and epoch.is_stale):
            hidden = await messages.hidden_texts(connection, tenant, session.id)
        if epoch is not None and epoch.cut > 1 and (is_partly_read or not epoch.has_injected):
            # Clients put what they inject into their first messages.
            hidden = [*await messages.first_questions(connection, tenant, session.id, epoch.cut), *hidden]
        injected = await run_in_thread_if_large(
            size, _injected_in_store, epoch, blocks, hidden, [*kept_entries, *entries], found, arrival, dialect
        )
    else:
        kept_rows = await _kept_rows(connection, tenant, found, epoch, cut)
        twins = await _twins(connection, tenant, found, arrival, dialect, kept_rows)
        restore = restore or partial(restore_reply, dialect)
        entries, kept_entries = await run_in_thread_if_large(
            arrival.size, _resent_entries, found, arrival, dialect, restore, kept_rows, twins, cut, around.now
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
            snapshot, material = await _settle(connection, tenant, session, recipe.strategy, snapshot, material)
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


async def enough(connection: Connection, tenant: str, session: Session, recipe: ContextConfig, cut: int) -> int:
    """From where on to load: of what is planned anew no more than the newest messages."""
    plan = session.plan
    is_anew = plan is None or recipe.plans_anew(plan)
    if not is_anew or (plan is not None and cut > plan.cut):
        return cut
    if isinstance(recipe.strategy, Full) and (plan is None or not plan.must_rebuild):
        return cut  # it shows everything
    if session.last_seq - cut < STALE_MESSAGES and session.tokens <= STALE_TOKENS:
        return cut
    return await newest_looked_at(connection, tenant, session, since=cut)


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


async def newest_looked_at(connection: Connection, tenant: str, session: Session, since: int | None = None) -> int:
    """From where on a session is looked at that is planned anew, at the earliest ``since`` (None: the floor)."""
    first = session.cleared_at if since is None else since
    return await messages.newest_within(
        connection, tenant, session.id, since=first, tokens=STALE_TOKENS, limit=STALE_MESSAGES
    )


def of_resent(
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
    cut = recipe.reach(epoch)
    if _missing_kept(found, epoch, cut):
        return None
    entries, kept = _resent_entries(found, arrival, dialect, restore, (), {}, cut, around.now)
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
        read_back=recipe.way,
    )


def _count_apart(entries: Sequence[Entry], newest: dict[str, int]) -> list[Entry]:
    """Take the tokens of the newest blocks off the entries that hold them; each block is taken out of ``newest``."""
    counted: list[Entry] = []
    for entry in reversed(entries):
        apart = sum(newest.pop(block.text, 0) for block in entry.message.injected) if entry.message.injected else 0
        counted.append(replace(entry, tokens=max(MESSAGE_OVERHEAD, entry.tokens - apart)) if apart else entry)
    return counted[::-1]


def injected_in_request(found: SessionMatch, arrival: IncomingHistory) -> tuple[InjectedBlock, ...]:
    """Return the newest version of each block in a history that was resent, in order.

    A named history may have been laid out from its middle: then the blocks in the epoch's head come first.
    """
    epoch = _epoch_of_history(found)
    stated = epoch.injected if epoch is not None else ()
    in_head = {block.text: block for block in stated}
    blocks = list(stated) if found.start > 1 else []
    beside: dict[int, int] | None = None
    placed = found.decision.placed
    for index, message in enumerate(arrival.messages):
        if not message.injected:
            continue
        is_alone = not arrival.incoming[index].is_link
        if is_alone:
            beside = _messages_behind(arrival, found) if beside is None else beside
        seq = beside.get(index, 0) if is_alone and beside is not None else placed[index].seq
        if not is_alone and placed[index].status != "live":
            seq = 0
        for block in message.injected:
            known = in_head.get(block.text)
            number = seq or (known.seq if known is not None else 0)
            blocks.append(_placed_block(block, number, is_alone=is_alone))
    return newest_versions(blocks) if blocks else ()


def _messages_behind(arrival: IncomingHistory, found: SessionMatch) -> dict[int, int]:
    """Return the sequence number of the message that `render_messages` puts behind each message of blocks alone.

    `AFTER_ALL_MESSAGES` where nothing stands behind it; 0 where it is not laid out.
    """
    firsts = _first_hidden(found)
    behind: dict[int, int] = {}
    waiting: list[int] = []
    for index, (incoming, placed) in enumerate(zip(arrival.incoming, found.decision.placed, strict=True)):
        if incoming.is_link:
            if waiting and incoming.role != "tool":
                behind |= dict.fromkeys(waiting, firsts.get(placed.seq, placed.seq))
                waiting = []
        elif not placed.is_new and placed.position < found.start:
            behind[index] = 0
        elif not arrival.messages[index].is_instruction:
            waiting.append(index)
    return behind | dict.fromkeys(waiting, AFTER_ALL_MESSAGES)


def _stored_blocks(
    alone: Sequence[StoredMessage], tail: Sequence[StoredMessage], found: SessionMatch, cut: int, dialect: Dialect
) -> list[BlockMessage]:
    """Return the stored messages of blocks alone, in order. ``tail``: the stored messages from ``cut`` on."""
    places = [(each.position, each.seq) for each in tail]
    places += [(each.position, each.seq) for each in found.decision.placed if each.turn > 0 and each.is_new]
    found_blocks: list[BlockMessage] = []
    for row in alone:
        message = stored_message(row, dialect)
        if message is None:
            continue
        before = next((seq for place, seq in places if place > row.position), AFTER_ALL_MESSAGES)
        is_cut = cut > 1 and bool(places) and before == places[0][1]
        found_blocks.append(BlockMessage(message=message, seq=row.seq, before=0 if is_cut else before))
    return found_blocks


def _injected_in_store(
    epoch: Epoch | None,
    blocks: Sequence[BlockMessage],
    hidden: Sequence[StoredMessage],
    entries: Sequence[Entry],
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
) -> tuple[InjectedBlock, ...]:
    """Return the newest version of each block, in order, for a request that brings only what is new.

    Blocks of what was cut earlier are known by the head of the epoch. ``hidden`` are further messages that no context
    shows.
    """
    # (message, its number, the message that shows the blocks, whether the blocks are a message of their own)
    sources = [(each.message, each.seq, each.before, True) for each in blocks]
    hidden_messages = ((stored_message(row, dialect), row.seq) for row in hidden)
    sources += [(message, seq, seq, False) for message, seq in hidden_messages if message is not None]
    sources += [(entry.message, entry.seq, entry.seq, False) for entry in entries]
    behind = _messages_behind(arrival, found)
    sources += [(arrival.messages[index], found.decision.placed[index].seq, behind[index], True) for index in behind]
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


def _latest(*times: datetime | None) -> datetime | None:
    return max((time for time in times if time is not None), default=None)


async def _settle(
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


def _resent_entries(
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    restore: Restore,
    kept_rows: Sequence[TailRow],
    twins: Mapping[int, Entry],
    cut: int,
    now: datetime,
) -> tuple[list[Entry], list[Entry]]:
    """Entries of a history that the client resent whole: its own bytes, with the model's words put back, and at their
    places the messages that it knows nothing of.
    """
    rows = {row.row.seq: row for row in found.rows}
    views = _views_of_rounds(found, arrival, dialect, found.hidden)
    epoch = _epoch_of_history(found)
    kept_seqs = set(epoch.kept) if epoch else set()
    entries: list[_Placed] = []
    kept: list[_Placed] = []
    for message, incoming, placed in zip(arrival.messages, arrival.incoming, found.decision.placed, strict=True):
        if not incoming.is_link or placed.seq == 0 or placed.status != "live":
            continue
        if not (message.raw or message.parts):
            continue  # said in another dialect, without words
        row = rows.get(placed.seq)
        if placed.is_new or row is None:
            entries.append((placed.position, new_entry(message, placed.seq, placed.turn, now)))
        elif placed.seq >= cut:
            entries.append((placed.position, known_entry(message, row, restore, dialect, views)))
        elif placed.seq in kept_seqs:
            kept.append((placed.position, known_entry(message, row, restore, dialect, views)))
    for row in _live_hidden(found):
        if row.row.seq >= cut:
            entries += _hidden_entry(row, restore, dialect, views)
        elif row.row.seq in kept_seqs:
            kept += _hidden_entry(row, restore, dialect, views)
    return _in_order(entries), _in_order(kept) + _find_resent(found, arrival, dialect, kept_rows, restore, twins)


def _hidden_entry(row: TailRow, restore: Restore, dialect: Dialect, views: Mapping[int, ClientView]) -> list[_Placed]:
    """A hidden message at its place; nothing where it was said in a dialect that does not share its messages."""
    entry = known_entry(_NOT_ECHOED, row, restore, dialect, views)
    return [(row.row.position, entry)] if entry.message.parts else []


def _views_of_rounds(
    found: SessionMatch, arrival: IncomingHistory, dialect: Dialect, hidden: Sequence[TailRow]
) -> dict[int, ClientView]:
    """Call -> what the client was shown of it, for the calls that ``hidden`` messages belong to."""
    if not hidden:
        return {}
    calls = {row.row.call for row in hidden}
    views = dict.fromkeys(calls, ClientView(raw=b"", dialect=dialect.name))
    replies = {row.row.seq: row.row.call for row in found.rows if row.row.role == "assistant"}
    for message, placed in zip(arrival.messages, found.decision.placed, strict=True):
        if replies.get(placed.seq) in calls:
            views[replies[placed.seq]] = ClientView(raw=message.raw, dialect=dialect.name)
    return views


def _in_order(entries: list[_Placed]) -> list[Entry]:
    return [entry for _, entry in sorted(entries, key=lambda placed: (placed[0], placed[1].seq))]


def _live_hidden(found: SessionMatch) -> list[TailRow]:
    """Hidden messages of the history as the request has it: they go the way of the reply that they came with."""
    if not found.hidden:
        return []
    calls = {row.row.seq: row.row.call for row in found.rows}
    gone = {calls.get(seq) for seq in found.decision.superseded}
    back = {calls.get(seq) for seq in found.decision.restored}
    return [
        row
        for row in found.hidden
        if (row.row.call not in gone if row.row.status == "live" else row.row.call in back)
        and row.row.status in {"live", "superseded"}
    ]


async def _twins(
    connection: Connection,
    tenant: str,
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    rows: Sequence[TailRow],
) -> dict[int, Entry]:
    """Those of ``rows``, as they were stored, of which the request shows several that say the same before the rows at
    hand: which is which cannot be told there, and the ids in them must not come twice.
    """
    if found.session is None or not rows:
        return {}
    placed = found.decision.placed
    shown = Counter(arrival.incoming[index].digest for index in arrival.links if placed[index].seq == 0)
    seqs = [row.row.seq for row in rows if shown[row.row.digest] > 1]
    stored = await messages.content(connection, tenant, found.session.id, seqs) if seqs else []
    messages_there = ((each, stored_message(each, dialect)) for each in stored)
    return {each.seq: _stored_entry(each, message) for each, message in messages_there if message is not None}


def _find_resent(
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    rows: Sequence[TailRow],
    restore: Restore,
    twins: Mapping[int, Entry],
) -> list[Entry]:
    """Stored messages as the request shows them, in order; what it does not show is left out."""
    placed = found.decision.placed
    known = {placed[index].seq: index for index in arrival.links if placed[index].seq > 0}
    before = {arrival.incoming[index].digest: index for index in arrival.links if placed[index].seq == 0}
    views = _views_of_rounds(found, arrival, dialect, [row for row in (*found.hidden, *rows) if row.is_hidden])
    shown: list[Entry] = []
    for row in sorted(rows, key=lambda each: each.row.position):
        index = None if row.is_hidden else known.get(row.row.seq, before.get(row.row.digest))
        if row.row.status != "live":
            continue
        if row.is_hidden:
            shown += [entry for _, entry in _hidden_entry(row, restore, dialect, views)]
        elif row.row.seq not in known and row.row.seq in twins:
            shown.append(twins[row.row.seq])
        elif index is not None:
            shown.append(known_entry(arrival.messages[index], row, restore, dialect, views))
    return shown


async def entries_of(
    connection: Connection,
    tenant: str,
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    restore: Restore,
    seqs: Sequence[int],
) -> list[Entry]:
    """Stored messages from before the tail: the client's own bytes where it resent them, else as they were stored."""
    if found.session is None or not seqs:
        return []
    if found.is_delta or found.start:
        stored = await messages.content(connection, tenant, found.session.id, seqs)
        return _stored_entries(stored, dialect)
    rows = await messages.rows_of(connection, tenant, found.session.id, seqs)
    twins = await _twins(connection, tenant, found, arrival, dialect, rows)
    return _find_resent(found, arrival, dialect, rows, restore, twins)


def restore_reply(dialect: Dialect, echo: Message, model_raw: bytes, said_in: str) -> Message:
    """The client's echo of a reply with the model's own words put back; a user's message as the model was shown it, and
    so what the client does not know of: nothing, where that was said in a dialect which does not share its messages.

    ``said_in``: the dialect of these words.
    """
    if not share_messages(said_in, dialect.name):
        if not echo.raw:
            return _NOT_ECHOED
        text = DIALECTS[said_in].read_reply(model_raw).text  # type: ignore[index]
        return dialect.read_message(dialect.with_text(echo.raw, text))
    if echo.role == "user":
        return dialect.read_message(model_raw)
    if CALLS_AS_TEXT in echo.text:
        return echo  # a client that writes calls as text shows more than the reply's own words
    return dialect.read_message(dialect.restore_reply(echo.raw, model_raw))


def known_entry(
    message: Message,
    row: TailRow,
    restore: Restore,
    dialect: Dialect,
    views: Mapping[int, ClientView] = MappingProxyType({}),
) -> Entry:
    """``message`` is the client's echo. A reply that was said in rounds (calls of ``views``) was told to it as one:
    then nothing of the echo is what the model said last.
    """
    memos, view = "", None
    if row.model_raw is not None and row.row.role == "user" and not row.is_hidden:
        memos = memos_in_message(row.model_raw, row.dialect)
    if row.model_raw is not None and not memos:
        if row.row.role == "assistant":
            view = views.get(row.row.call) or ClientView(raw=message.raw, dialect=dialect.name)
        said = restore(_NOT_ECHOED, row.model_raw, row.dialect) if row.row.call in views else _NOT_ECHOED
        message = said if said.parts else restore(message, row.model_raw, row.dialect)
    entry = Entry(
        seq=row.row.seq,
        turn=row.row.turn,
        message=message,
        tokens=row.row.tokens,
        created_at=row.created_at,
        pinned=row.pinned,
        priority=row.priority,
        is_ours=row.is_hidden,
        client_view=view,
    )
    return with_memos_of(entry, memos)


def new_entry(message: Message, seq: int, turn: int, now: datetime) -> Entry:
    """The entry of a message that has just arrived; its tokens are estimated."""
    return Entry(seq=seq, turn=turn, message=message, tokens=tokens.estimate_message(message), created_at=now)


def _new_entries(
    found: SessionMatch, arrival: IncomingHistory, now: datetime, counts: Sequence[int] | None = None
) -> list[Entry]:
    entries: list[Entry] = []
    for index, (message, placed) in enumerate(zip(arrival.messages, found.decision.placed, strict=True)):
        if placed.turn > 0 and placed.is_new:
            entry = new_entry(message, placed.seq, placed.turn, now)
            entries.append(entry if counts is None else replace(entry, tokens=counts[index]))
    return entries


def _bytes_of(stored: Sequence[StoredMessage]) -> int:
    return sum(len(message.raw) for message in stored)


def _stored_entries(stored: Sequence[StoredMessage], dialect: Dialect, new: Sequence[Entry] = ()) -> list[Entry]:
    """Stored messages as the model saw them, with what crosses of other dialects, and the ``new`` ones behind them."""
    said = [read_stored(each, dialect) for each in stored]
    placed = isolate([*said, *(StoredInDialect(message=entry.message) for entry in new)])
    entries: list[Entry] = []
    hidden = {each.call for each in stored if not each.client_visible}
    replies = (each for each in stored if each.client_visible and each.role == "assistant" and each.call in hidden)
    views = {each.call: _view_of(each) for each in replies}
    theirs = (_stored_entry(each, own.message, views) for each, own in zip(stored, said, strict=True))
    for entry, shown in zip([*theirs, *new], placed, strict=True):
        for message in shown:
            same = message is entry.message
            count = entry.tokens if same else tokens.estimate_message(message)
            entries.append(entry if same else replace(entry, message=message, tokens=count))
    return entries


def _view_of(stored: StoredMessage) -> ClientView:
    return ClientView(raw=stored.raw if stored.client_visible else b"", dialect=stored.dialect)


def _stored_entry(stored: StoredMessage, message: Message, views: Mapping[int, ClientView] | None = None) -> Entry:
    """The stored message as ``message`` says it. ``views``: what the client was shown of calls in several rounds."""
    view = None
    if stored.model_raw is not None and stored.role == "assistant":
        view = (views or {}).get(stored.call) or _view_of(stored)
    entry = Entry(
        seq=stored.seq,
        turn=stored.turn,
        message=message,
        tokens=stored.tokens,
        created_at=stored.created_at,
        pinned=stored.pinned,
        priority=stored.priority,
        is_ours=not stored.client_visible,
        client_view=view,
    )
    if stored.model_raw is None or stored.role != "user" or not stored.client_visible:
        return entry
    return with_memos_of(entry, memos_in_message(stored.model_raw, stored.dialect))


def stored_message(stored: StoredMessage, dialect: Dialect) -> Message | None:
    """A stored message as the model saw it, without memos, in a form in which a provider takes it; of another
    dialect's the words, if there are any.
    """
    said = read_stored(stored, dialect)
    return said.message if said.is_own else text_only(said.message)


def read_stored(stored: StoredMessage, dialect: Dialect) -> StoredInDialect:
    """A stored message as the model saw it, without memos; of ``dialect`` in a form in which a provider takes it."""
    raw = stored.model_raw if stored.model_raw is not None and stored.role != "user" else stored.raw
    return _read_view(stored, raw, dialect)


def read_client_view(stored: StoredMessage, dialect: Dialect) -> StoredInDialect:
    """A stored message as its client was shown it; of ``dialect`` in a form in which a provider takes it."""
    return _read_view(stored, stored.raw, dialect)


def _read_view(stored: StoredMessage, raw: bytes, dialect: Dialect) -> StoredInDialect:
    if not share_messages(stored.dialect, dialect.name):
        own = DIALECTS[stored.dialect]  # type: ignore[index]
        return StoredInDialect(
            message=own.read_reply(raw) if stored.role == "assistant" else own.read_message(raw), is_own=False
        )
    return StoredInDialect(message=dialect.read_message(dialect.as_input(raw) if stored.role == "assistant" else raw))


def _stored_instruction(stored: StoredMessage, dialect: Dialect) -> bytes:
    """Instructions in wire form."""
    if share_messages(stored.dialect, dialect.name):
        return stored.raw
    text = DIALECTS[stored.dialect].read_message(stored.raw).text  # type: ignore[index]
    return dialect.write_text("system", text)


def make(history: History, recipe: ContextConfig, around: TokenBudget, model: str) -> BuiltContext:
    """The context: of the current epoch, or of the one that starts now. Raises `ContextTooLarge`."""
    snapshot = history.snapshot
    name = tokens.encoding_for(model)
    if history.advance is None and snapshot.epoch is not None:
        context = build_context(
            snapshot, snapshot.epoch, strategy=recipe.strategy, encode=partial(tokens.recount, name=name)
        )
        return BuiltContext(context=context, starts_epoch=False)
    advance = history.advance or Advance(reason="first")
    material = history.material
    states: tuple[StateBlock, ...] = ()
    if isinstance(recipe.strategy, Window) and (snapshot.epoch is None or snapshot.epoch.must_rebuild):
        states = read_visible_states((*snapshot.kept, *snapshot.entries))
        if states and states[-1].seq > material.state_seq:
            material = replace(material, state=states[-1].text, state_seq=states[-1].seq)
    epoch = plan_epoch(
        snapshot,
        material,
        strategy=recipe.strategy,
        policy=recipe.policy,
        advance=advance,
        now=around.now,
        encode=lambda text: tokens.count_text(text, name),
        overflows=history.overflows,
    )
    loaded = (*snapshot.kept, *snapshot.entries)
    gone = [entry for entry in loaded if entry.seq < epoch.cut]
    seen = sum(entry.tokens for entry in gone if entry not in snapshot.kept)
    epoch = structs.replace(epoch, older_tokens=snapshot.older_tokens + seen)
    derived: tuple[TerseEntry, ...] = ()
    if _tells_of_each_turn(recipe.strategy):
        running = {entry.turn for entry in loaded if entry.seq >= epoch.cut}
        derived = derive_missing([entry for entry in gone if entry.turn not in running], history.material.terse)
    whole = with_retrieved_turns(snapshot, history.material, epoch)
    context = build_context(whole, epoch, strategy=recipe.strategy, encode=partial(tokens.recount, name=name))
    more = count_offers(epoch, recipe) - count_offers(snapshot.epoch, recipe)
    return BuiltContext(context=_weighing(context, more), starts_epoch=True, derived=derived, states=states)


def _weighing(context: Context, more: int) -> Context:
    """The context with so many tokens more of tools: an epoch may be the first to offer one."""
    report = context.report
    layers = tuple(
        replace(layer, tokens=layer.tokens + more) if layer.name == "instructions" else layer for layer in report.layers
    )
    before, after = report.tokens_before + more, report.tokens_after + more
    return replace(context, report=replace(report, tokens_before=before, tokens_after=after, layers=layers))


def _tells_of_each_turn(strategy: Strategy) -> bool:
    """Whether what a turn came to is told in every later epoch: then it is stored when the turn is cut."""
    return strategy.derive_terse if isinstance(strategy, Slim) else isinstance(strategy, Tiered)


async def after_overflow(
    database: Database, tenant: str, found: SessionMatch, history: History, recipe: ContextConfig, around: TokenBudget
) -> History:
    """The same history after the upstream has refused the context as too long."""
    snapshot, material = history.snapshot, history.material
    if history.advance is None and found.session is not None:
        async with database.transaction(tenant) as connection:
            material = await load_material(connection, tenant, found, recipe.strategy)
            if found.session.plan is not None:
                snapshot, material = await _settle(
                    connection, tenant, found.session, recipe.strategy, snapshot, material
                )
    return replace(
        history,
        snapshot=replace(snapshot, window=around.window),
        advance=Advance(reason="overflow"),
        material=material,
        overflows=history.overflows + 1,
    )


def kinds_shown(messages: Iterable[ContextMessage], *, known: TagKinds) -> TagKinds:
    """What the model is shown in its own earlier replies that was taken out of them before the client saw them.

    The model goes on to write what it sees itself write, whatever the strategy asks for by now. A client that was
    shown a tag as text was shown it, however: where its view of a reply has as many, none was taken out. ``known``
    kinds are not looked for.
    """
    altered: dict[int, tuple[ClientView, list[str]]] = {}
    for message in messages:
        if isinstance(message, Entry) and (view := message.client_view) is not None:
            altered.setdefault(id(view), (view, []))[1].append(message.message.text)
    shown = NOTHING
    for marker, kind in MARKERS:
        if kind | known != known and any(_has_more(texts, view, marker) for view, texts in altered.values()):
            shown |= kind
    return shown


def _has_more(texts: Sequence[str], view: ClientView, marker: str) -> bool:
    count = sum(text.count(marker) for text in texts)
    if not count or not view.raw:
        return count > 0
    reply = DIALECTS[view.dialect].read_reply(view.raw)  # type: ignore[index]
    return count > reply.text.count(marker)


def count_offers(epoch: Epoch | None, recipe: ContextConfig) -> int:
    """Tokens of the tools that a model is offered throughout an epoch."""
    offers = offers_in(epoch, recipe)
    return sum(tokens.count_short(f"{offer.name}{offer.description}{offer.parameters}") for offer in offers)


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
    firsts = _first_hidden(found)
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


def _first_hidden(found: SessionMatch) -> dict[int, int]:
    """Of replies that were said in rounds the first message of theirs: where the client's own history goes on."""
    replies = {row.row.call: row.row for row in found.rows if row.row.role == "assistant"} if found.hidden else {}
    firsts: dict[int, int] = {}
    for row in sorted(_live_hidden(found), key=lambda each: each.row.position):
        reply = replies.get(row.row.call)
        if reply is not None and row.row.position < reply.position:
            firsts.setdefault(reply.seq, row.row.seq)
    return firsts


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
