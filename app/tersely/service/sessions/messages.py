"""Messages over REST: appended as they are, listed as they were."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from typing import Literal

from tersely.dialects.detection import detect_dialect
from tersely.dialects.dialect import ClientView, Dialect, ReplyChoice
from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest, NotFound, StoreUnavailable
from tersely.domain.history.links import MessageIdentity
from tersely.domain.history.message_numbers import MessageNumbers, NumberingException
from tersely.domain.history.reconciliation import Reconciliation, append_messages
from tersely.domain.history.sessions import Session, check_session_id
from tersely.domain.messages import INSTRUCTION_ROLES, Message, is_outside_messages
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.text.tags import TagKinds
from tersely.domain.times import EARLIEST
from tersely.service.common import tokens
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_config import ContextConfig
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.memos.selection import choose_memos, memo_limit
from tersely.service.recognition.incoming_history import hash_history
from tersely.store.commit.records import HiddenReplyParts, NewSession, RequestOutcome, RequestWrite
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages as store
from tersely.store.history import numbering, sessions
from tersely.store.history.artifacts import spilled
from tersely.store.history.messages import StoredMessage
from tersely.store.history.numbering import ExceptionRow

_log = logging.getLogger(__name__)

View = Literal["client", "model", "all"]

MAX_MESSAGES = 10_000
MAX_KEY = 256
# How far ahead of this service's clock a caller's clock may run.
MAX_AHEAD = timedelta(minutes=5)
_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
)
# Bytes of a page, which holds at least one message. The next cursor continues from there.
PAGE_BYTES = 8 * 1024 * 1024
# Seconds that reading a page may take.
LIMIT = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    """The positions of appended messages. ``turn`` is the last one's; None for instructions alone."""

    first_seq: int
    last_seq: int
    turn: int | None
    was_stored_before: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedBatch:
    """Appended messages, by their sequence numbers.

    ``model`` is that of the session's calls if the caller names it; ``credentials`` are the caller's headers for it.
    """

    first_seq: int
    last_seq: int
    dialect: DialectName
    model: str = ""
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StrippedReply:
    """Messages to append: as the client sees them, and the hidden parts of replies."""

    shown: tuple[Message, ...]
    model: tuple[Message, ...]
    hidden_parts: dict[int, HiddenReplyParts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SessionState:
    """The state of a session that appending reads; ``session`` is None for a new one.

    ``last_link`` is the last link, ``turn`` its turn, ``superseded`` are the sequence numbers of instructions that the
    new messages replace, ``memos`` the memos that come with a new message, by its index, and ``tags`` the kinds of tags
    to strip.
    """

    session: Session | None
    config: ContextConfig
    last_link: int = 0
    turn: int = 0
    superseded: Sequence[int] = ()
    memos: Mapping[int, HiddenReplyParts]
    tags: TagKinds

    def append(self, identities: Sequence[MessageIdentity]) -> Reconciliation:
        """Return the positions of new messages behind those of the session."""
        return append_messages(
            identities,
            last_seq=self.session.last_seq if self.session else 0,
            turns=self.session.turns if self.session else 0,
            turn=self.turn,
            follows_seq=self.last_link,
            superseded=self.superseded,
        )


class Messages:
    """Appending and listing, within a tenant."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        configs: ContextConfigs,
        *,
        advance_epoch: Callable[[str, str, AppendedBatch], Awaitable[None]],
        clock: Callable[[], datetime],
    ) -> None:
        """``advance_epoch`` (tenant, session id, batch) starts an epoch if the appended messages need one."""
        self._database = database
        self._advance_epoch = advance_epoch
        self._writer = writer
        self._configs = configs
        self._clock = clock

    async def append(
        self,
        tenant: str,
        session_id: str,
        raws: Sequence[bytes],
        *,
        dialect: str | None,
        key: str | None,
        times: Sequence[str] | None = None,
        model: str = "",
    ) -> AppendResult:
        """Append messages in wire form to a session, which is created if it does not exist.

        Instructions (system, developer) replace the session's earlier ones. ``times`` are RFC 3339 times with a zone,
        one for each message; None: now. ``dialect`` None: detected. ``model`` is that of the session's calls, if the
        agent makes them itself.

        Raises `InvalidRequest` for an invalid message or time, `Conflict` if ``key`` was used for other messages.
        """
        check_session_id(session_id, "session id")
        check_key(key)
        size = sum(map(len, raws))
        target = await _named_or_detected(dialect, raws, size)
        read = await run_in_thread_if_large(size, read_messages, raws, target)
        now = self._clock()
        created = () if times is None else read_times(times, len(raws), now)
        await self._database.flush(tenant, session_id)
        before = await self._read_state(tenant, session_id, read, target)
        session = before.session
        batch = await run_in_thread_if_large(size, _take_out, read, target, before.tags)
        incoming = await run_in_thread_if_large(size, hash_history, batch.shown)
        write = RequestWrite(
            tenant=tenant,
            session_id=session_id,
            create=None if session else NewSession(),
            mode="append",
            dialect=target.name,
            incoming=incoming.identities,
            raws=[message.raw for message in batch.shown],
            size=size,
            tokens=await tokens.count_messages(batch.model, ""),
            decision=before.append(incoming.identities),
            session=session,
            now=now,
            times=created,
            is_call=False,
            key=key,
            key_digest=await run_in_thread_if_large(size, _digest, raws, target, created),
            hidden_parts={**batch.hidden_parts, **before.memos},
            spill=partial(spilled, incoming.messages),
            replaces_instructions=any(message.is_instruction for message in read),
        )
        outcome = await self._writer.write(write)
        done = _appended(outcome, has_links=bool(incoming.links))
        if incoming.links and not done.was_stored_before:
            new = AppendedBatch(first_seq=done.first_seq, last_seq=done.last_seq, dialect=target.name, model=model)
            await self._advance_epoch_or_warn(tenant, session_id, new)
        return done

    async def _read_state(
        self, tenant: str, session_id: str, read: Sequence[Message], dialect: Dialect
    ) -> _SessionState:
        async with self._database.transaction(tenant) as connection:
            session = await sessions.get(connection, tenant, session_id)
            config = self._configs.choose_outside_calls(session) if session else self._configs.default
            memos = await _bring_memos(connection, tenant, read, dialect, config)
            if session is None:
                return _SessionState(session=None, config=config, memos=memos, tags=config.hidden_tags)
            superseded: list[int] = []
            kinds = {is_outside_messages(message.raw) for message in read if message.is_instruction}
            if kinds:
                stored = await store.instructions(connection, tenant, session_id)
                given = [row for row in stored if row.role in INSTRUCTION_ROLES]
                superseded = [row.seq for row in given if is_outside_messages(row.raw) in kinds]
            tags = config.hidden_tags
            if any(message.role == "assistant" for message in read):
                tags |= await _kinds_shown(connection, tenant, session, config)
            last, turn = await store.last_link(connection, tenant, session_id)
            return _SessionState(
                session=session,
                config=config,
                last_link=last,
                turn=turn,
                superseded=superseded,
                memos=memos,
                tags=tags,
            )

    async def _advance_epoch_or_warn(self, tenant: str, session_id: str, batch: AppendedBatch) -> None:
        try:
            await self._advance_epoch(tenant, session_id, batch)
        except StoreUnavailable as error:
            # The messages are stored; the next append, or the next call, will see to the epoch.
            _log.warning("an epoch was not started: %s", error)

    async def page(
        self, tenant: str, session_id: str, *, view: View, after: int, limit: int
    ) -> tuple[list[StoredMessage], int | None]:
        """Return messages in the order of the view after sequence number ``after``, and where to continue."""
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


async def _named_or_detected(name: str | None, raws: Sequence[bytes], size: int) -> Dialect:
    """Return the dialect of that name; None: the one that the messages are written in. Raises `InvalidRequest`."""
    if name is not None:
        return dialect_of(name)
    return DIALECTS[await run_in_thread_if_large(size, detect_dialect, raws, field="messages")]


def dialect_of(name: str) -> Dialect:
    """Return the dialect of that name. Raises `InvalidRequest`."""
    found = next((dialect for known, dialect in DIALECTS.items() if known == name), None)
    if found is None:
        raise InvalidRequest(f"dialect must be one of {', '.join(DIALECTS)}, not {name[:40]!r}", field="dialect")
    return found


def read_messages(raws: Sequence[bytes], dialect: Dialect) -> list[Message]:
    """Read messages from their wire form. Raises `InvalidRequest` with the index of an invalid one."""
    if len(raws) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages at once, not {len(raws)}", field="messages")
    found: list[Message] = []
    for index, raw in enumerate(raws):
        try:
            found.append(dialect.read_message(raw))
        except InvalidRequest as error:
            raise InvalidRequest(error.detail, field=f"messages[{index}]") from error
    return found


def is_hidden_in_view(view: View, row: ExceptionRow) -> bool:
    """Return whether a view leaves a message out."""
    if view == "client":
        is_live = row.status == "live" or (row.status == "dropped" and not row.model_visible)
        return not (is_live and row.client_visible)
    return row.status != "live" or not row.model_visible


def read_times(times: Sequence[str], count: int, now: datetime) -> tuple[datetime, ...]:
    """Parse one RFC 3339 time for each of ``count`` messages. Raises `InvalidRequest` naming the index.

    A time up to `MAX_AHEAD` ahead of ``now`` is accepted, as the caller's clock may run ahead; a later one, or one
    before 1970, is refused. Times need not ascend: the order of the messages is the order of the history.
    """
    if len(times) != count:
        raise InvalidRequest(
            f"created_at must hold one time per message: {count} messages, {len(times)} times", field="created_at"
        )
    return tuple(_read_time(text, f"created_at[{index}]", now) for index, text in enumerate(times))


def _read_time(text: str, field: str, now: datetime) -> datetime:
    try:
        at = datetime.fromisoformat(text.upper()).astimezone(UTC) if _RFC_3339.fullmatch(text) else None
    except (ValueError, OverflowError):
        at = None
    if at is None:
        raise InvalidRequest(
            f"{field} must be a time with a zone as in RFC 3339, such as 2024-01-15T10:30:00Z, not {text[:40]!r}",
            field=field,
        )
    if at > now + MAX_AHEAD:
        raise InvalidRequest(f"{field} must not be in the future: {text[:40]}", field=field)
    if at < EARLIEST:
        raise InvalidRequest(f"{field} must not be before 1970: {text[:40]}", field=field)
    return at


def _digest(raws: Sequence[bytes], dialect: Dialect, times: Sequence[datetime] = ()) -> bytes:
    written = [raw_json.dump(at.isoformat()) for at in times]
    joined = raw_json.join_array([raw_json.dump(dialect.name), *raws, *written])
    return blake2b(joined, digest_size=16).digest()


async def _bring_memos(
    connection: Connection, tenant: str, read: Sequence[Message], dialect: Dialect, config: ContextConfig
) -> dict[int, HiddenReplyParts]:
    """Return the memos that the newest user's message brings along, as in a call; by its index."""
    most = memo_limit(config.strategy)
    newest = next((index for index in reversed(range(len(read))) if read[index].starts_turn), None)
    if not most or newest is None or not read[newest].text:
        return {}
    (text,) = await choose_memos(connection, tenant, [read[newest].text], limit=most)
    return {newest: HiddenReplyParts(model_raw=dialect.with_prefix(read[newest].raw, text))} if text else {}


async def _kinds_shown(connection: Connection, tenant: str, session: Session, config: ContextConfig) -> TagKinds:
    """Return the kinds of tags that the session's context shows the model: see `contexts.kinds_shown`."""
    kept = session.plan.kept if session.plan else ()
    since = config.first_seq(session.plan)
    terse, state = await store.stripped_kinds(connection, tenant, session.id, since=since, kept=kept)
    return TagKinds(terse=terse, state=state)


def _take_out(read: Sequence[Message], dialect: Dialect, tags: TagKinds) -> _StrippedReply:
    """Take out of replies what models put there for Tersely, as the proxy does."""
    shown = list(read)
    hidden_parts: dict[int, HiddenReplyParts] = {}
    if tags:
        for index, message in enumerate(read):
            if message.role == "assistant":
                reply = split_appended_reply(message.raw, dialect, tags)
                if reply.client_message != message.raw:
                    shown[index] = dialect.read_message(reply.client_message)
                    terse = tuple((text, "model") for text in reply.terse)
                    hidden_parts[index] = HiddenReplyParts(model_raw=message.raw, terse=terse, state=reply.state)
    return _StrippedReply(shown=tuple(shown), model=tuple(read), hidden_parts=hidden_parts)


def split_appended_reply(raw: bytes, dialect: Dialect, tags: TagKinds) -> ReplyChoice:
    """Return a reply as the client sees it, with the stripped parts."""
    choices = dialect.split_reply(dialect.as_reply(raw), ClientView(tags=tags))[1].choices
    return choices[0] if choices else ReplyChoice(index=0, model_message=raw, client_message=raw)


def _appended(outcome: RequestOutcome | None, *, has_links: bool) -> AppendResult:
    assert outcome is not None  # the writer sets it before it reports a finished write
    return AppendResult(
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
    rows = await numbering.exceptions(connection, tenant, session.id)
    order = MessageNumbers(
        session.last_seq,
        [
            NumberingException(seq=row.seq, position=row.position, is_hidden=is_hidden_in_view(view, row))
            for row in rows
        ],
    )
    position = next((row.position for row in rows if row.seq == after), float(after))
    start = order.count_up_to(position, after) if after else 0
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
