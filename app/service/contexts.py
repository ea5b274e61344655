"""From what is stored and what has just arrived to a context: load, decide, plan, build.

What is read here is a snapshot of one moment; nothing in the store changes because a context is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from app.dialects.dialect import Dialect, ToolOffer
from app.dialects.registry import DIALECTS
from app.domain.context import Context, ContextMessage
from app.domain.extraction import Extract
from app.domain.history import Entry, Epoch, HeadMessage, Material, Snapshot, TerseEntry
from app.domain.isolation import Said, isolate, share_messages, words_of
from app.domain.messages import Message, ToolResult
from app.domain.sessions import Session
from app.domain.tiers import Way, way_by
from app.service import tokens
from app.service.arrival import Arrival
from app.service.aside import aside
from app.service.identity import Found
from app.service.material import left_behind, load_material
from app.service.memo_choice import brought_along, choose_anew, in_force, most_of, with_memos_of, without_memos
from app.store import messages, turns
from app.store.connection import Connection, Database
from app.store.messages import StoredMessage, TailRow
from app.strategies.activity_log import derive_missing
from app.strategies.epochs import Advance, Policy
from app.strategies.planning import build, decide, load_from, plan_epoch, turns_to_load, with_retrieved
from app.strategies.presets import Full, Slim, Strategy, Tiered, Window

# (the client's echo of a reply, the reply as the model said it, the dialect of that) -> the echo with the model's own
# words.
Restore = Callable[[Message, bytes, str], Message]
# (place, entry)
_Placed = tuple[float, Entry]
# Of a history that is planned anew at somebody's word, so much of the newest is looked at. What is older is known by
# the summaries, log entries and references that still count.
STALE_TOKENS = 400_000
STALE_MESSAGES = 20_000
# Stands where the client has nothing to echo.
_NOT_ECHOED = Message(role="user", parts=(), raw=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a context is to be built. ``instructions`` is Tersely's own text for the model, if any; ``offers`` are the
    tools of its own that it may offer the model.
    """

    strategy: Strategy
    policy: Policy
    instructions: str | None
    offers: tuple[ToolOffer, ...] = ()

    @property
    def way(self) -> Way:
        """The tools by which the model gets back what the strategy shortens."""
        if isinstance(self.strategy, Slim | Full):
            return ""
        return way_by({offer.name for offer in self.offers})

    @property
    def extract(self) -> Extract:
        """What replies may carry that the client must not see."""
        return Extract(terse=isinstance(self.strategy, Slim), state=isinstance(self.strategy, Window))

    def reach(self, epoch: Epoch | None) -> int:
        """The first sequence number that has to be loaded."""
        return load_from(epoch, strategy=self.strategy, policy=self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was read for one context: the snapshot and, where an epoch starts, what its head is made of.

    ``is_verbatim``: the entries are the request's own messages, all of them and unaltered. ``instructions`` are the
    stored ones, for requests that bring none. ``overflows``: how often the upstream has refused what was built of it.
    """

    snapshot: Snapshot
    advance: Advance | None
    material: Material
    is_verbatim: bool
    instructions: tuple[bytes, ...] = ()
    overflows: int = 0

    @property
    def size(self) -> int:
        """Bytes of the messages that were loaded."""
        return sum(len(entry.message.raw) for entry in self.snapshot.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A context, and the epoch if one starts with it, with the log entries that were made for it."""

    context: Context
    starts_epoch: bool
    derived: tuple[TerseEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What besides the history a decision looks at. Tokens of instructions and tools; the model's window less what is
    kept free in it, and the whole of it.
    """

    fixed_tokens: int
    window: int | None
    now: datetime
    model_window: int | None = None


def epoch_of(found: Found) -> Epoch | None:
    """The session's epoch, as it is for the history that the request carries."""
    epoch = found.session.plan if found.session else None
    # What is only added to replaces instructions, if anything: no head tells of them.
    if epoch is None or found.decision.kind == "delta" or not (found.decision.superseded or found.decision.revived):
        return epoch
    back = set(found.decision.revived)
    pinned = [row.row.seq for row in found.rows if row.pinned and row.row.seq in back]
    answered = found.decision.answered
    last = answered.seq if answered is not None and answered.seq > 0 else None
    return epoch.without(left_behind(found), back, pinned, last=last)


def offers_in(epoch: Epoch | None, recipe: Recipe) -> list[ToolOffer]:
    """What a model is offered throughout an epoch: `context_search` only where there is something out of view."""
    is_cut = epoch is not None and (epoch.cut > 1 or any(tier.way for tier in epoch.tiers))
    return [offer for offer in recipe.offers if is_cut or offer.name != "context_search"]


async def load(
    connection: Connection,
    tenant: str,
    found: Found,
    arrival: Arrival,
    dialect: Dialect,
    recipe: Recipe,
    around: Circumstances,
    *,
    restore: Restore | None = None,
    needs_material: bool = False,
) -> History:
    """Read what the context needs, in the caller's transaction. The cost depends on the tail.

    ``restore`` puts the model's own words back into the client's echo of a reply. ``needs_material``: the caller starts
    an epoch in any case.
    """
    session = found.session
    epoch = epoch_of(found)
    cut = max(found.start, recipe.reach(epoch))
    stored_instructions: tuple[bytes, ...] = ()
    if found.is_delta and session is not None:
        cut = await enough(connection, tenant, session, recipe, cut)
        stored = await messages.live_from(connection, tenant, session.id, cut)
        if found.decision.kind == "retry" and (answered := found.decision.answered) is not None:
            stored = [each for each in stored if each.place <= answered.place]
        kept = await _kept_content(connection, tenant, session.id, epoch, cut)
        new = _new_entries(found, arrival, around.now)
        shown = await aside(_bytes_of(stored), _stored_entries, [*kept, *stored], dialect, new)
        is_kept = {each.seq for each in kept}
        entries = [entry for entry in shown if entry.seq not in is_kept]
        kept_entries = [entry for entry in shown if entry.seq in is_kept]
        if not any(not incoming.is_link for incoming in arrival.incoming):
            rows = await messages.instructions(connection, tenant, session.id)
            stored_instructions = tuple(_stored_instruction(row, dialect) for row in rows)
    else:
        kept_rows = await _kept_rows(connection, tenant, found, epoch, cut)
        twins = await _twins(connection, tenant, found, arrival, dialect, kept_rows)
        restore = restore or partial(restore_reply, dialect)
        entries, kept_entries = await aside(
            arrival.size, _resent_entries, found, arrival, restore, kept_rows, twins, cut, around.now
        )
    snapshot = _snapshot(found, entries, kept_entries, cut, around, recipe)
    advance = decide(snapshot, strategy=recipe.strategy, policy=recipe.policy, now=around.now)
    material = Material()
    if (needs_material or isinstance(advance, Advance)) and session is not None:
        material = await load_material(connection, tenant, found, recipe.strategy)
        if needs_material or session.plan is not None:
            snapshot, material = await _settle(connection, tenant, session, recipe.strategy, snapshot, material)
    return History(
        snapshot=snapshot,
        advance=advance if isinstance(advance, Advance) else None,
        material=material,
        is_verbatim=not found.is_delta and _are_resent([*kept_entries, *entries], arrival),
        instructions=stored_instructions,
    )


async def enough(connection: Connection, tenant: str, session: Session, recipe: Recipe, cut: int) -> int:
    """From where on to load, where the strategy could look back further than the epoch and may not have to."""
    if session.plan is None or cut >= session.plan.cut:
        return cut
    if session.plan.is_void:
        newest = await messages.newest_within(
            connection, tenant, session.id, since=cut, tokens=STALE_TOKENS, most=STALE_MESSAGES
        )
        return min(session.plan.cut, newest)
    wanted = turns_to_load(recipe.strategy)
    if wanted is None:
        return cut
    return min(session.plan.cut, await turns.first_of_last(connection, tenant, session, wanted))


def of_resent(
    found: Found, arrival: Arrival, recipe: Recipe, around: Circumstances, restore: Restore
) -> History | None:
    """What `load` would give for a history that was resent, where that takes no look at the database; else None."""
    epoch = epoch_of(found)
    if epoch is None or found.is_delta:
        return None
    cut = recipe.reach(epoch)
    if _missing_kept(found, epoch, cut):
        return None
    entries, kept = _resent_entries(found, arrival, restore, (), {}, cut, around.now)
    snapshot = _snapshot(found, entries, kept, cut, around, recipe)
    if isinstance(decide(snapshot, strategy=recipe.strategy, policy=recipe.policy, now=around.now), Advance):
        return None
    return History(
        snapshot=snapshot,
        advance=None,
        material=Material(),
        is_verbatim=_are_resent([*kept, *entries], arrival),
    )


def _snapshot(
    found: Found, entries: Sequence[Entry], kept: Sequence[Entry], cut: int, around: Circumstances, recipe: Recipe
) -> Snapshot:
    session = found.session
    epoch = epoch_of(found)
    return Snapshot(
        entries=tuple(in_force(entries, recipe.strategy, epoch)),
        kept=tuple(in_force(kept, recipe.strategy, epoch)),
        epoch=epoch,
        fixed_tokens=around.fixed_tokens,
        window=around.window,
        model_window=around.model_window,
        edited=found.decision.kind == "edited"
        or (session is not None and session.edited)
        or (epoch is not None and epoch.is_stale),
        ran_out=epoch is not None and _ran_out(found, epoch),
        calls=session.calls if session else 0,
        last_call_at=session.last_call_at if session else None,
        older_tokens=0 if epoch is None or cut == 1 else _older_tokens(epoch, entries),
        way=recipe.way,
    )


async def _settle(
    connection: Connection, tenant: str, session: Session, strategy: Strategy, snapshot: Snapshot, material: Material
) -> tuple[Snapshot, Material]:
    """Memos chosen anew for the stored messages. A session's first call goes on with those that are there: what was
    shown before it is its beginning.
    """
    if not most_of(strategy):
        return snapshot, material
    settled = session.last_seq
    stored = [entry for entry in (*snapshot.kept, *snapshot.entries) if entry.seq <= settled]
    memos = await choose_anew(connection, tenant, stored, strategy)
    bare = {entry.seq: without_memos(entry) for entry in stored}
    snapshot = replace(
        snapshot,
        kept=tuple(bare.get(entry.seq, entry) for entry in snapshot.kept),
        entries=tuple(bare.get(entry.seq, entry) for entry in snapshot.entries),
    )
    return snapshot, replace(material, memos=memos, settled=settled)


def _ran_out(found: Found, epoch: Epoch) -> bool:
    """Whether the newest reply broke off because the model's window was full, and no epoch has started since."""
    replies = (row for row in reversed(found.rows) if row.row.role == "assistant" and row.row.status == "live")
    newest = next(replies, None)
    return newest is not None and newest.ran_out and newest.created_at > epoch.created_at


def _older_tokens(epoch: Epoch, entries: Sequence[Entry]) -> int:
    """What is live before ``entries``, of which some may be from before the epoch's cut."""
    again = sum(entry.tokens for entry in entries if entry.seq < epoch.cut)
    # Counts that were estimates then may be exact by now: where something is left, it is not nothing.
    return max(1, epoch.older_tokens - again) if again else epoch.older_tokens


def _missing_kept(found: Found, epoch: Epoch, cut: int) -> list[int]:
    loaded = {row.row.seq for row in (*found.rows, *found.hidden)}
    return [seq for seq in epoch.kept if seq < cut and seq not in loaded]


def _are_resent(entries: Sequence[Entry], arrival: Arrival) -> bool:
    links = arrival.links
    return len(entries) == len(links) and all(
        entry.message is arrival.messages[index] for entry, index in zip(entries, links, strict=True)
    )


async def _kept_rows(connection: Connection, tenant: str, found: Found, epoch: Epoch | None, cut: int) -> list[TailRow]:
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
    found: Found,
    arrival: Arrival,
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
    accompanied = {row.row.call for row in found.hidden}
    epoch = epoch_of(found)
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
            entries.append((placed.place, _new_entry(message, placed.seq, placed.turn, now)))
        elif placed.seq >= cut:
            entries.append((placed.place, _known_entry(message, row, restore, accompanied)))
        elif placed.seq in kept_seqs:
            kept.append((placed.place, _known_entry(message, row, restore, accompanied)))
    for row in _live_hidden(found):
        if row.row.seq >= cut:
            entries += _hidden_entry(row, restore)
        elif row.row.seq in kept_seqs:
            kept += _hidden_entry(row, restore)
    return _in_order(entries), _in_order(kept) + _find_resent(found, arrival, kept_rows, restore, twins)


def _hidden_entry(row: TailRow, restore: Restore) -> list[_Placed]:
    """A hidden message at its place; nothing where it was said in a dialect that does not share its messages."""
    entry = _known_entry(_NOT_ECHOED, row, restore)
    return [(row.row.place, entry)] if entry.message.parts else []


def _in_order(entries: list[_Placed]) -> list[Entry]:
    return [entry for _, entry in sorted(entries, key=lambda placed: (placed[0], placed[1].seq))]


def _live_hidden(found: Found) -> list[TailRow]:
    """Hidden messages of the history as the request has it: they go the way of the reply that they came with."""
    if not found.hidden:
        return []
    calls = {row.row.seq: row.row.call for row in found.rows}
    gone = {calls.get(seq) for seq in found.decision.superseded}
    back = {calls.get(seq) for seq in found.decision.revived}
    return [
        row
        for row in found.hidden
        if (row.row.call not in gone if row.row.status == "live" else row.row.call in back)
        and row.row.status in {"live", "superseded"}
    ]


async def _twins(
    connection: Connection, tenant: str, found: Found, arrival: Arrival, dialect: Dialect, rows: Sequence[TailRow]
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
    found: Found, arrival: Arrival, rows: Sequence[TailRow], restore: Restore, twins: Mapping[int, Entry]
) -> list[Entry]:
    """Stored messages as the request shows them, in order; what it does not show is left out."""
    placed = found.decision.placed
    known = {placed[index].seq: index for index in arrival.links if placed[index].seq > 0}
    before = {arrival.incoming[index].digest: index for index in arrival.links if placed[index].seq == 0}
    accompanied = {row.row.call for row in (*found.hidden, *rows) if row.is_hidden}
    shown: list[Entry] = []
    for row in sorted(rows, key=lambda each: each.row.place):
        index = None if row.is_hidden else known.get(row.row.seq, before.get(row.row.digest))
        if row.row.status != "live":
            continue
        if row.is_hidden:
            shown += [entry for _, entry in _hidden_entry(row, restore)]
        elif row.row.seq not in known and row.row.seq in twins:
            shown.append(twins[row.row.seq])
        elif index is not None:
            shown.append(_known_entry(arrival.messages[index], row, restore, accompanied))
    return shown


async def entries_of(
    connection: Connection,
    tenant: str,
    found: Found,
    arrival: Arrival,
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
    return _find_resent(found, arrival, rows, restore, twins)


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
    return dialect.read_message(dialect.restore_reply(echo.raw, model_raw))


def _known_entry(message: Message, row: TailRow, restore: Restore, accompanied: Set[int] = frozenset()) -> Entry:
    """``message`` is the client's echo. A reply that was said in rounds (calls ``accompanied`` by hidden messages) was
    told to it as one: then nothing of the echo is what the model said last.
    """
    memos = ""
    if row.model_raw is not None and row.row.role == "user" and not row.is_hidden:
        memos = brought_along(row.model_raw, row.dialect)
    if row.model_raw is not None and not memos:
        said = restore(_NOT_ECHOED, row.model_raw, row.dialect) if row.row.call in accompanied else _NOT_ECHOED
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
    )
    return with_memos_of(entry, memos)


def _new_entry(message: Message, seq: int, turn: int, now: datetime) -> Entry:
    return Entry(seq=seq, turn=turn, message=message, tokens=tokens.estimate_message(message), created_at=now)


def _new_entries(found: Found, arrival: Arrival, now: datetime) -> list[Entry]:
    return [
        _new_entry(message, placed.seq, placed.turn, now)
        for message, placed in zip(arrival.messages, found.decision.placed, strict=True)
        if placed.turn > 0 and placed.is_new
    ]


def _bytes_of(stored: Sequence[StoredMessage]) -> int:
    return sum(len(message.raw) for message in stored)


def _stored_entries(stored: Sequence[StoredMessage], dialect: Dialect, new: Sequence[Entry] = ()) -> list[Entry]:
    """Stored messages as the model saw them, with what crosses of other dialects, and the ``new`` ones behind them."""
    said = [read_stored(each, dialect) for each in stored]
    placed = isolate([*said, *(Said(message=entry.message) for entry in new)])
    entries: list[Entry] = []
    theirs = (_stored_entry(each, own.message) for each, own in zip(stored, said, strict=True))
    for entry, shown in zip([*theirs, *new], placed, strict=True):
        for message in shown:
            same = message is entry.message
            count = entry.tokens if same else tokens.estimate_message(message)
            entries.append(entry if same else replace(entry, message=message, tokens=count))
    return entries


def _stored_entry(stored: StoredMessage, message: Message) -> Entry:
    """The stored message as ``message`` says it."""
    entry = Entry(
        seq=stored.seq,
        turn=stored.turn,
        message=message,
        tokens=stored.tokens,
        created_at=stored.created_at,
        pinned=stored.pinned,
        priority=stored.priority,
        is_ours=not stored.client_visible,
    )
    if stored.model_raw is None or stored.role != "user" or not stored.client_visible:
        return entry
    return with_memos_of(entry, brought_along(stored.model_raw, stored.dialect))


def stored_message(stored: StoredMessage, dialect: Dialect) -> Message | None:
    """A stored message as the model saw it, without memos, in a form in which a provider takes it; of another
    dialect's the words, if there are any.
    """
    said = read_stored(stored, dialect)
    return said.message if said.is_own else words_of(said.message)


def read_stored(stored: StoredMessage, dialect: Dialect) -> Said:
    """A stored message as the model saw it, without memos; of ``dialect`` in a form in which a provider takes it."""
    raw = stored.model_raw if stored.model_raw is not None and stored.role != "user" else stored.raw
    if not share_messages(stored.dialect, dialect.name):
        own = DIALECTS[stored.dialect]  # type: ignore[index]
        return Said(message=own.read_reply(raw) if stored.role == "assistant" else own.read_message(raw), is_own=False)
    return Said(message=dialect.read_message(dialect.as_input(raw) if stored.role == "assistant" else raw))


def _stored_instruction(stored: StoredMessage, dialect: Dialect) -> bytes:
    """Instructions in wire form."""
    if share_messages(stored.dialect, dialect.name):
        return stored.raw
    text = DIALECTS[stored.dialect].read_message(stored.raw).text  # type: ignore[index]
    return dialect.write_text("system", text)


def make(history: History, recipe: Recipe, around: Circumstances, model: str) -> Built:
    """The context: of the current epoch, or of the one that starts now. Raises `ContextTooLarge`."""
    snapshot = history.snapshot
    name = tokens.encoding_for(model)
    if history.advance is None and snapshot.epoch is not None:
        context = build(snapshot, snapshot.epoch, strategy=recipe.strategy, encode=partial(tokens.recount, name=name))
        return Built(context=context, starts_epoch=False)
    advance = history.advance or Advance(reason="first")
    epoch = plan_epoch(
        snapshot,
        history.material,
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
    epoch = replace(epoch, older_tokens=snapshot.older_tokens + seen)
    derived: tuple[TerseEntry, ...] = ()
    if _tells_of_each_turn(recipe.strategy):
        running = {entry.turn for entry in loaded if entry.seq >= epoch.cut}
        derived = derive_missing([entry for entry in gone if entry.turn not in running], history.material.terse)
    whole = with_retrieved(snapshot, history.material, epoch)
    context = build(whole, epoch, strategy=recipe.strategy, encode=partial(tokens.recount, name=name))
    more = count_offers(epoch, recipe) - count_offers(snapshot.epoch, recipe)
    return Built(context=_weighing(context, more), starts_epoch=True, derived=derived)


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
    database: Database, tenant: str, found: Found, history: History, recipe: Recipe, around: Circumstances
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


def count_offers(epoch: Epoch | None, recipe: Recipe) -> int:
    """Tokens of the tools that a model is offered throughout an epoch."""
    offers = offers_in(epoch, recipe)
    return sum(tokens.count_short(f"{offer.name}{offer.description}{offer.parameters}") for offer in offers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """All messages of a request in wire form, of which the first ``frozen`` are the instructions and the head."""

    messages: list[bytes]
    frozen: int = 0

    def breakpoints(self) -> tuple[int, ...]:
        """Behind which messages the prompt is worth caching: the last of the head's, and of all."""
        ends = {self.frozen, len(self.messages)}
        return tuple(sorted(end - 1 for end in ends if end))


def lay_out(context: Context, dialect: Dialect, history: History, arrival: Arrival, found: Found) -> LaidOut:
    """All messages of a request in wire form: instructions first, then the context.

    Instructions in the middle of a history stay where they are, before the message that they preceded, so that
    the prefix stays the prefix. Of those whose place was cut, system and developer text goes in front, also where the
    message itself is kept: once the cut is behind the rows that are loaded, nothing tells any more which message they
    preceded. What a client injected there as the user goes with the messages around it.
    """
    leading, asides, trailing = _asides(arrival, found)
    rendered: list[bytes] = []
    head = 0
    for message in context.messages:
        if isinstance(message, HeadMessage) or message.seq < context.epoch.cut:
            head = len(rendered) + 1
        else:
            rendered += [aside.raw for aside in asides.pop(message.seq, ())]
        rendered += render(message, dialect)
    hoisted = [message.raw for seq in sorted(asides) for message in asides[seq] if message.is_instruction]
    front = [*history.instructions, *leading, *hoisted]
    messages = [*front, *rendered, *(message.raw for message in trailing)]
    return LaidOut(messages=messages, frozen=len(front) + head)


def _asides(arrival: Arrival, found: Found) -> tuple[list[bytes], dict[int, list[Message]], list[Message]]:
    """Instructions that lead, those that precede a message (by its sequence number), and those at the end."""
    firsts = _first_hidden(found)
    leading: list[bytes] = []
    asides: dict[int, list[Message]] = {}
    waiting: list[Message] = []
    is_leading = True
    for message, incoming, placed in zip(arrival.messages, arrival.incoming, found.decision.placed, strict=True):
        if not incoming.is_link:
            if is_leading:
                leading.append(message.raw)
            elif not placed.is_new and placed.place < found.start:
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


def _first_hidden(found: Found) -> dict[int, int]:
    """Of replies that were said in rounds the first message of theirs: where the client's own history goes on."""
    replies = {row.row.call: row.row for row in found.rows if row.row.role == "assistant"} if found.hidden else {}
    firsts: dict[int, int] = {}
    for row in sorted(_live_hidden(found), key=lambda each: each.row.place):
        reply = replies.get(row.row.call)
        if reply is not None and row.row.place < reply.place:
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
        wire = [dialect.write_message(each) for each in _one_result_each(message.message)]
    return [dialect.with_prefix(wire[0], message.prefix), *wire[1:]] if message.prefix else wire


def _shortened(message: Message, dialect: Dialect) -> bytes:
    """The raw form of a message with the texts that its parts have now; all else stays as it came."""
    raw = message.raw
    results = {result.call_id: result.text for result in message.results}
    if results:
        raw = dialect.with_results(raw, results)
    if message.starts_turn and message.text != dialect.read_message(raw).text:
        raw = dialect.with_text(raw, message.text)
    return raw


def _one_result_each(message: Message) -> list[Message]:
    """A message of several results as several messages, for dialects in which a message carries one."""
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if message.role != "tool" or len(results) < 2:
        return [message]
    return [Message(role="tool", parts=(result,), raw=b"") for result in results]
