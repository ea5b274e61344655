"""Preview the context of a session's next call, with its report. Nothing in the store changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from typing_extensions import override

from tersely.dialects.dialect import Dialect, RequestPatch
from tersely.domain.errors import NotFound
from tersely.domain.history.context import Report, TurnReport
from tersely.domain.history.readable import read_context
from tersely.domain.history.reconciliation import append_messages
from tersely.domain.history.sessions import Session
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.building import BuiltContext, build
from tersely.service.context.context_config import ContextConfig, instructions_in
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.fixed_tokens import budget_outside_calls
from tersely.service.context.history import History
from tersely.service.context.loading import load_history
from tersely.service.context.memo_layer import ConnectionSource, with_memos
from tersely.service.context.rendering import render_messages
from tersely.service.context.retrieval import Retriever
from tersely.service.context.stored_messages import restore_reply
from tersely.service.recognition.incoming_history import IncomingHistory, hash_history
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.service.sessions.messages import dialect_of, read_messages
from tersely.service.sessions.sessions import as_setting
from tersely.store.commit import turns
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages as store
from tersely.store.history import sessions
from tersely.store.notes import summaries
from tersely.strategies.planning import report_cut_turns
from tersely.strategies.presets import Tiered, strategy_name
from tersely.strategies.reduction.levels import LevelSize, measure_levels

# The number of newest turns in a report; for the others it only has their number.
MAX_TURNS = 200
# Seconds; of a session without an epoch everything is read.
LIMIT = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRequest:
    """The options of a preview.

    ``max_tokens`` is the window that the context must fit into, including instructions; without it the model's own
    window counts, if it is known. ``messages`` follow the stored ones. ``tools``: Tersely's tools that the model will
    have; None: as in the session's calls.
    """

    dialect: str = "openai_chat"
    strategy: object = None
    epoch: object = None
    model: str = ""
    max_tokens: int | None = None
    messages: Sequence[bytes] = ()
    tools: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A context in wire form. ``instructions`` go before ``messages`` and include Tersely's own text.

    ``text`` is the text of the instructions. ``turns_omitted`` counts turns that the report does not list;
    ``retrieved`` are the turns that were retrieved for their relevance; ``levels`` are those of `tiered`.
    """

    instructions: tuple[bytes, ...]
    messages: tuple[bytes, ...]
    text: str | None
    report: Report
    turns: tuple[TurnReport, ...]
    turns_omitted: int
    retrieved: tuple[int, ...]
    strategy: str
    levels: tuple[LevelSize, ...] = ()


TrialEdit = Callable[[Connection], Awaitable[object]]


class _RolledBack(Exception):
    """Ends a transaction without what it changed."""


class _TransactionSource(ConnectionSource):
    """Reads within one transaction, and so what it has changed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @override
    @asynccontextmanager
    async def reading(self, tenant: str, *, limit: float | None = None) -> AsyncIterator[Connection]:
        """Return the transaction's connection."""
        yield self._connection


class Previews:
    """Build contexts as the proxy does, to look at or to call a model without the proxy."""

    def __init__(
        self,
        database: Database,
        configs: ContextConfigs,
        calibrations: Calibrations,
        retriever: Retriever,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._configs = configs
        self._calibrations = calibrations
        self._retriever = retriever
        self._clock = clock

    async def build(self, tenant: str, session_id: str, request: PreviewRequest) -> Preview:
        """Raises `NotFound`, `InvalidRequest`, and `ContextTooLarge` when nothing valid fits the window."""
        return await self._build(self._database, tenant, session_id, request)

    async def build_after(self, tenant: str, session_id: str, change: TrialEdit) -> Preview:
        """Preview the context after ``change``, which is made in a transaction that is rolled back.

        Raises as `build`, and whatever ``change`` raises.
        """
        found: list[Preview] = []
        with suppress(_RolledBack):
            async with self._database.edit(tenant, session_id, limit=LIMIT) as connection:
                await change(connection)
                found.append(await self._build(_TransactionSource(connection), tenant, session_id, PreviewRequest()))
                raise _RolledBack
        return found[0]

    async def _build(self, source: ConnectionSource, tenant: str, session_id: str, request: PreviewRequest) -> Preview:
        dialect = dialect_of(request.dialect)
        strategy, epoch = as_setting(request.strategy), as_setting(request.epoch)
        self._configs.check(strategy=strategy, epoch=epoch)
        incoming = hash_history(read_messages(request.messages, dialect))
        counts = await tokens.count_messages(incoming.messages, "")
        async with source.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            config = self._configs.choose_for_preview(session, strategy=strategy, epoch=epoch, tools=request.tools)
            if not request.model:
                request = replace(request, model=(await summaries.last_call(connection, tenant, session_id)).model)
            budget = await budget_outside_calls(
                connection,
                tenant,
                session,
                config,
                self._calibrations,
                model=request.model,
                now=self._clock(),
                given=[message for message in incoming.messages if message.is_instruction],
                max_tokens=request.max_tokens,
                last_call_at=await store.newest_at(connection, tenant, session_id),
            )
            found = await _find(connection, tenant, session, incoming)
            history = await load_history(connection, tenant, found, incoming, dialect, config, budget, counts=counts)
        restore = partial(restore_reply, dialect)
        history = await self._retriever.with_past(tenant, found, history, config.strategy, incoming, dialect, restore)
        history, _ = await with_memos(source, tenant, found, history, config.strategy, incoming, dialect)
        built = await run_in_thread_if_large(history.size, build, history, config, budget, request.model)
        async with source.reading(tenant, limit=LIMIT) as connection:
            reports, omitted = await _turns(connection, tenant, session, built)
        instructions, messages = _render(built, dialect, history, incoming, found, config)
        texts = [dialect.read_message(raw).text for raw in instructions]
        return Preview(
            instructions=tuple(instructions),
            messages=tuple(messages),
            text="\n\n".join(texts) if texts else None,
            report=built.context.report,
            turns=reports,
            turns_omitted=omitted,
            retrieved=built.context.epoch.retrieved,
            strategy=strategy_name(config.strategy),
            levels=measure_levels(built.context) if isinstance(config.strategy, Tiered) else (),
        )


def as_text(preview: Preview, dialect: str) -> str:
    """Return a context as readable text; ``dialect`` is that of the request."""
    read = dialect_of(dialect).read_message
    messages = [read(raw) for raw in (*preview.instructions, *preview.messages)]
    return read_context(messages, preview.report, preview.strategy)


async def _find(connection: Connection, tenant: str, session: Session, incoming: IncomingHistory) -> SessionMatch:
    """Match the given messages as the next ones of the session."""
    _, turn = await store.last_link(connection, tenant, session.id)
    decision = append_messages(incoming.identities, last_seq=session.last_seq, turns=session.turns, turn=turn)
    tail = await store.tail_rows(connection, tenant, session.id, session.cut, last=session.last_seq)
    rows = [row for row in tail if not row.is_hidden]
    return SessionMatch(
        session_id=session.id, session=session, source="header", decision=decision, rows=rows, is_delta=True
    )


async def _turns(
    connection: Connection, tenant: str, session: Session, built: BuiltContext
) -> tuple[tuple[TurnReport, ...], int]:
    """Report each live turn: loaded ones as reported, earlier ones by the epoch's cut."""
    loaded = built.context.report.turns
    known = {turn.turn for turn in loaded}
    start = max(1, session.turns - MAX_TURNS + 1)
    live = set(await turns.live_turns(connection, tenant, session.id, start, session.turns))
    cut = report_cut_turns(built.context.epoch, sorted(live - known))
    reports = sorted((*cut, *loaded), key=lambda turn: turn.turn)
    before = start - 1 - sum(turn < start for turn in known)
    return tuple(reports[-MAX_TURNS:]), max(0, len(reports) - MAX_TURNS) + max(0, before)


def _render(
    built: BuiltContext,
    dialect: Dialect,
    history: History,
    incoming: IncomingHistory,
    found: SessionMatch,
    config: ContextConfig,
) -> tuple[list[bytes], list[bytes]]:
    """Return leading instructions and all other messages, exactly as the proxy would send them."""
    messages = render_messages(built.context, dialect, history, incoming, found).messages
    front = instructions_in(built.context.epoch, config)
    body = dialect.write_request(b"{}", RequestPatch(messages=messages, instructions=front))
    whole = dialect.read_request(body).messages
    leading = next((index for index, message in enumerate(whole) if not message.is_instruction), len(whole))
    return [message.raw for message in whole[:leading]], [message.raw for message in whole[leading:]]
