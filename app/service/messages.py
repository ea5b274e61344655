"""Messages over REST: appended as they are, listed as they were."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import blake2b
from typing import Literal

from app.dialects import raw_json
from app.dialects.dialect import Dialect, ReplyChoice
from app.dialects.registry import DIALECTS
from app.domain.errors import InvalidRequest, NotFound, StoreUnavailable
from app.domain.extraction import Extract
from app.domain.history import Entry
from app.domain.lineage import append
from app.domain.messages import Message
from app.domain.positions import Exceptional, Positions
from app.domain.sessions import Session
from app.service import tokens
from app.service.arrival import arrive
from app.service.calls import check_session_id
from app.service.contexts import Recipe
from app.service.memo_choice import choose, most_of
from app.service.recipes import Recipes
from app.store import messages as store
from app.store import positions, sessions, turns
from app.store.artifacts import spilled
from app.store.connection import Connection, Database
from app.store.messages import StoredMessage
from app.store.positions import ExceptionRow
from app.store.writer import Writer
from app.store.writes import NewSession, Outcome, RequestWrite, Said
from app.strategies.activity_log import derive_terse
from app.strategies.presets import Slim

_log = logging.getLogger(__name__)

View = Literal["client", "model", "all"]

MAX_MESSAGES = 10_000
MAX_KEY = 256
# A page holds so many bytes of messages, and at least one message; the next cursor goes on from there.
PAGE_BYTES = 8 * 1024 * 1024
# Seconds that reading a page may take.
LIMIT = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Where messages came to stand. ``turn`` is that of the last one; None for instructions alone."""

    first_seq: int
    last_seq: int
    turn: int | None
    was_stored_before: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Messages to be appended: as the client sees them, and what replies carry beside that."""

    shown: tuple[Message, ...]
    model: tuple[Message, ...]
    said: dict[int, Said]


class Messages:
    """Appending and listing, within a tenant."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        recipes: Recipes,
        *,
        keep_up: Callable[[str, str, str], Awaitable[None]],
        clock: Callable[[], datetime],
    ) -> None:
        """``keep_up`` (tenant, session id, dialect) starts an epoch where what was appended asks for one."""
        self._database = database
        self._keep_up = keep_up
        self._writer = writer
        self._recipes = recipes
        self._clock = clock

    async def append(
        self, tenant: str, session_id: str, raws: Sequence[bytes], *, dialect: str, key: str | None
    ) -> Appended:
        """Append messages in wire form to a session, which is made if it is new.

        Instructions (system, developer) replace those that the session has. Raises `InvalidRequest` for a message
        that cannot be understood, `Conflict` when ``key`` was used for other messages.
        """
        check_session_id(session_id, "session id")
        check_key(key)
        how = dialect_of(dialect)
        read = read_messages(raws, how)
        now = self._clock()
        async with self._database.transaction(tenant) as connection:
            session = await sessions.get(connection, tenant, session_id)
            turn = await turns.last_turn(connection, tenant, session_id) if session else 0
            replaced: list[int] = []
            if session and any(message.is_instruction for message in read):
                replaced = [row.seq for row in await store.instructions(connection, tenant, session_id)]
            recipe = self._recipes.choose(session=session)
            brought = await _bring_memos(connection, tenant, read, how, recipe)
        batch = _take_out(read, how, recipe, now)
        arrival = arrive(batch.shown)
        write = RequestWrite(
            tenant=tenant,
            session_id=session_id,
            create=None if session else NewSession(),
            mode="append",
            dialect=how.name,
            incoming=arrival.incoming,
            raws=[message.raw for message in batch.shown],
            tokens=await tokens.count_messages(batch.model, ""),
            decision=append(
                arrival.incoming,
                last_seq=session.last_seq if session else 0,
                turns=session.turns if session else 0,
                turn=turn,
                superseded=replaced,
            ),
            session=session,
            now=now,
            is_call=False,
            key=key,
            key_digest=_digest(raws, how),
            said={**batch.said, **brought},
            spill=partial(spilled, arrival.messages),
            replaces_instructions=any(message.is_instruction for message in read),
        )
        await self._writer.write(write)
        try:
            await self._keep_up(tenant, session_id, how.name)
        except StoreUnavailable as error:
            # The messages are stored; the next append, or the next call, will see to the epoch.
            _log.warning("an epoch was not started: %s", error)
        return _appended(write.outcome, has_links=bool(arrival.links))

    async def page(
        self, tenant: str, session_id: str, *, view: View, after: int, limit: int
    ) -> tuple[list[StoredMessage], int | None]:
        """Messages in the order of the view after the one with sequence number ``after``, and where to go on."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            seqs = await _seqs_of_page(connection, tenant, session, view, after, limit + 1)
            fitting = await _within(connection, tenant, session_id, seqs[:limit])
            found = {m.seq: m for m in await store.content(connection, tenant, session_id, fitting)}
        more = len(seqs) > len(fitting)
        return [found[seq] for seq in fitting if seq in found], fitting[-1] if more else None


def check_key(key: str | None) -> None:
    """Raise `InvalidRequest` for an unusable idempotency key."""
    if key is not None and not (0 < len(key) <= MAX_KEY and key.isprintable()):
        raise InvalidRequest(f"Idempotency-Key must be 1 to {MAX_KEY} printable characters", field="Idempotency-Key")


def dialect_of(name: str) -> Dialect:
    """The dialect of that name. Raises `InvalidRequest`."""
    found = next((dialect for known, dialect in DIALECTS.items() if known == name), None)
    if found is None:
        raise InvalidRequest(f"dialect must be one of {', '.join(DIALECTS)}, not {name[:40]!r}", field="dialect")
    return found


def read_messages(raws: Sequence[bytes], dialect: Dialect) -> list[Message]:
    """Messages from their wire form. Raises `InvalidRequest` naming the one that cannot be understood."""
    if len(raws) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages at once, not {len(raws)}", field="messages")
    found: list[Message] = []
    for index, raw in enumerate(raws):
        try:
            found.append(dialect.read_message(raw))
        except InvalidRequest as error:
            raise InvalidRequest(error.detail, field=f"messages[{index}]") from error
    return found


def hides(view: View, row: ExceptionRow) -> bool:
    """Whether a view leaves a message out."""
    return row.status != "live" or not (row.client_visible if view == "client" else row.model_visible)


def _digest(raws: Sequence[bytes], dialect: Dialect) -> bytes:
    joined = raw_json.join_array([raw_json.dump(dialect.name), *raws])
    return blake2b(joined, digest_size=16).digest()


async def _bring_memos(
    connection: Connection, tenant: str, read: Sequence[Message], dialect: Dialect, recipe: Recipe
) -> dict[int, Said]:
    """The memos that the newest user's message brings along, as in a call; by its index."""
    most = most_of(recipe.strategy)
    newest = next((index for index in reversed(range(len(read))) if read[index].starts_turn), None)
    if not most or newest is None or not read[newest].text:
        return {}
    (text,) = await choose(connection, tenant, [read[newest].text], most=most)
    return {newest: Said(model_raw=dialect.with_prefix(read[newest].raw, text))} if text else {}


def _take_out(read: Sequence[Message], dialect: Dialect, recipe: Recipe, now: datetime) -> _Batch:
    """Take out of replies what the strategy asks models to put there, as the proxy does."""
    shown = list(read)
    said: dict[int, Said] = {}
    if recipe.extract:
        for index, message in enumerate(read):
            if message.role == "assistant":
                reply = split_reply(message.raw, dialect, recipe.extract)
                if reply.client_message != message.raw:
                    shown[index] = dialect.read_message(reply.client_message)
                    terse = tuple((text, "model") for text in reply.terse)
                    said[index] = Said(model_raw=message.raw, terse=terse, state=reply.state)
    if isinstance(recipe.strategy, Slim) and recipe.strategy.derive_terse:
        for index, text in _derived(read, said, now):
            said[index] = Said(model_raw=said[index].model_raw if index in said else None, terse=((text, "derived"),))
    return _Batch(shown=tuple(shown), model=tuple(read), said=said)


def split_reply(raw: bytes, dialect: Dialect, extract: Extract) -> ReplyChoice:
    """A reply as the client sees it, with what was taken out of it."""
    choices = dialect.split_reply(dialect.as_reply(raw), extract)[1].choices
    return choices[0] if choices else ReplyChoice(index=0, model_message=raw, client_message=raw)


def _derived(read: Sequence[Message], said: dict[int, Said], now: datetime) -> list[tuple[int, str]]:
    """Log entries made without a model, by the index of the reply: for turns that end without a tag."""
    found: list[tuple[int, str]] = []
    start = 0
    for end in range(1, len(read) + 1):
        if end < len(read) and not read[end].starts_turn:
            continue
        turn = [index for index in range(start, end) if not read[index].is_instruction]
        start = end
        last = max((index for index in turn if read[index].role == "assistant"), default=None)
        if last is None or read[last].calls or not read[last].parts:
            continue
        if any(index in said and said[index].terse for index in turn):
            continue
        entries = [
            Entry(seq=index + 1, turn=1, message=read[index], tokens=0, created_at=now)
            for index in turn
            if index <= last
        ]
        found.append((last, derive_terse(entries).text))
    return found


def _appended(outcome: Outcome | None, *, has_links: bool) -> Appended:
    assert outcome is not None  # the writer sets it before it says that a write is done
    return Appended(
        first_seq=outcome.first_seq,
        last_seq=outcome.last_seq,
        turn=outcome.turn if has_links else None,
        was_stored_before=outcome.was_stored_before,
    )


async def _seqs_of_page(
    connection: Connection, tenant: str, session: Session, view: View, after: int, limit: int
) -> list[int]:
    if view == "all":
        return list(range(after + 1, min(after + limit, session.last_seq) + 1))
    rows = await positions.exceptions(connection, tenant, session.id)
    order = Positions(
        session.last_seq,
        [Exceptional(seq=row.seq, place=row.place, is_hidden=hides(view, row)) for row in rows],
    )
    place = next((row.place for row in rows if row.seq == after), float(after))
    start = order.up_to(place, after) if after else 0
    return list(order.seqs(start + 1, start + limit))


async def _within(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> list[int]:
    """As many of ``seqs`` as a page may hold."""
    sizes = await store.sizes(connection, tenant, session_id, seqs)
    kept: list[int] = []
    room = PAGE_BYTES
    for seq in seqs:
        room -= sizes.get(seq, 0)
        if kept and room < 0:
            break
        kept.append(seq)
    return kept
