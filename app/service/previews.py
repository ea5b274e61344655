"""The context that a session's next call would get, with its report. Nothing in the store changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from app.dialects.dialect import Dialect
from app.domain.context import Report, TurnReport
from app.domain.errors import NotFound
from app.domain.lineage import append
from app.domain.models import known_window, usable_window
from app.domain.readable import read_context
from app.domain.sessions import Session
from app.service import contexts
from app.service.arrival import Arrival, arrive
from app.service.aside import aside
from app.service.calibrations import Calibrations
from app.service.contexts import Built, Circumstances, History, Recipe
from app.service.identity import Found
from app.service.memo_layer import with_memos
from app.service.messages import dialect_of, read_messages
from app.service.recipes import Recipes
from app.service.retrieval import Retriever
from app.service.sessions import as_setting
from app.service.standing import fixed_tokens
from app.store import messages as store
from app.store import sessions, summaries, turns
from app.store.connection import Connection, Database
from app.strategies.levels import LevelSize, measure_levels
from app.strategies.planning import report_cut_turns
from app.strategies.presets import Tiered, strategy_name

# A report tells about so many of the newest turns; of the others it gives the number.
MAX_TURNS = 200
# Seconds; of a session without an epoch everything is read.
LIMIT = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a preview is asked for. ``max_tokens`` is the window that the context must fit into, instructions
    included; without it the model's own window counts, where it is known. ``messages`` come after the stored ones.
    ``tools``: those of ours that the model will have; None: as in the session's calls.
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
    """A context in wire form. ``instructions`` go before ``messages``, Tersely's own text is part of them.

    ``text`` is what the instructions say. ``turns_omitted`` counts turns that the report does not list; ``retrieved``
    are the turns that were brought back for their relevance; ``levels`` are those of `tiered`.
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


class Previews:
    """Builds contexts as the proxy does, for whoever wants to look or to call the model on their own."""

    def __init__(
        self,
        database: Database,
        recipes: Recipes,
        calibrations: Calibrations,
        retriever: Retriever,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._recipes = recipes
        self._calibrations = calibrations
        self._retriever = retriever
        self._clock = clock

    async def build(self, tenant: str, session_id: str, wish: Wish) -> Preview:
        """Raises `NotFound`, `InvalidRequest`, and `ContextTooLarge` when nothing valid fits the window."""
        dialect = dialect_of(wish.dialect)
        strategy, epoch = as_setting(wish.strategy), as_setting(wish.epoch)
        self._recipes.check(strategy=strategy, epoch=epoch)
        arrival = arrive(read_messages(wish.messages, dialect))
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            recipe = self._recipes.as_called(session, strategy=strategy, epoch=epoch, tools=wish.tools)
            wish = replace(wish, model=wish.model or await summaries.last_model(connection, tenant, session_id))
            around = await self._circumstances(connection, tenant, session, arrival, recipe, wish)
            found = await _find(connection, tenant, session, arrival)
            history = await contexts.load(connection, tenant, found, arrival, dialect, recipe, around)
        restore = partial(contexts.restore_reply, dialect)
        history = await self._retriever.with_past(tenant, found, history, recipe.strategy, arrival, dialect, restore)
        history, _ = await with_memos(self._database, tenant, found, history, recipe.strategy, arrival, dialect)
        built = await aside(history.size, contexts.make, history, recipe, around, wish.model)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            told, omitted = await _turns(connection, tenant, session, built)
        instructions, laid_out = _lay_out(built, dialect, history, arrival, found, recipe)
        texts = [dialect.read_message(raw).text for raw in instructions]
        return Preview(
            instructions=tuple(instructions),
            messages=tuple(laid_out),
            text="\n\n".join(texts) if texts else None,
            report=built.context.report,
            turns=told,
            turns_omitted=omitted,
            retrieved=built.context.epoch.retrieved,
            strategy=strategy_name(recipe.strategy),
            levels=measure_levels(built.context) if isinstance(recipe.strategy, Tiered) else (),
        )

    async def _circumstances(
        self,
        connection: Connection,
        tenant: str,
        session: Session,
        arrival: Arrival,
        recipe: Recipe,
        wish: Wish,
    ) -> Circumstances:
        given = [m for m, i in zip(arrival.messages, arrival.incoming, strict=True) if not i.is_link]
        fixed = await fixed_tokens(connection, tenant, session, recipe, given, model=wish.model)
        window = wish.max_tokens
        if window is None and wish.model:
            known = usable_window(wish.model, None)
            window = None if known is None else int(known / self._calibrations.ratio(wish.model))
        return Circumstances(
            fixed_tokens=fixed,
            window=window,
            now=self._clock(),
            model_window=wish.max_tokens or known_window(wish.model),
        )


def as_text(preview: Preview, dialect: str) -> str:
    """A context as people read it; ``dialect`` is that of the wish."""
    read = dialect_of(dialect).read_message
    messages = [read(raw) for raw in (*preview.instructions, *preview.messages)]
    return read_context(messages, preview.report, preview.strategy)


async def _find(connection: Connection, tenant: str, session: Session, arrival: Arrival) -> Found:
    """What the given messages would be: the next ones of the session."""
    turn = await turns.last_turn(connection, tenant, session.id)
    decision = append(arrival.incoming, last_seq=session.last_seq, turns=session.turns, turn=turn)
    tail = await store.tail_rows(connection, tenant, session.id, session.cut)
    rows = [row for row in tail if not row.is_hidden]
    return Found(session_id=session.id, session=session, source="header", decision=decision, rows=rows, is_delta=True)


async def _turns(
    connection: Connection, tenant: str, session: Session, built: Built
) -> tuple[tuple[TurnReport, ...], int]:
    """What became of each live turn: of those that were loaded as reported, of earlier ones by the epoch's cut."""
    loaded = built.context.report.turns
    first = min((turn.turn for turn in loaded), default=session.turns + 1)
    start = max(1, first - MAX_TURNS)
    live = set(await turns.live_turns(connection, tenant, session.id, start, first - 1))
    earlier = report_cut_turns(built.context.epoch, sorted(live))
    told = (*earlier, *loaded)
    return told[-MAX_TURNS:], max(0, len(told) - MAX_TURNS) + start - 1


def _lay_out(
    built: Built, dialect: Dialect, history: History, arrival: Arrival, found: Found, recipe: Recipe
) -> tuple[list[bytes], list[bytes]]:
    """Leading instructions and everything else, exactly as the proxy would send them."""
    laid_out = contexts.lay_out(built.context, dialect, history, arrival, found).messages
    body = dialect.write_request(b"{}", messages=laid_out, instructions=recipe.instructions)
    whole = dialect.read_request(body).messages
    leading = next((place for place, message in enumerate(whole) if not message.is_instruction), len(whole))
    return [message.raw for message in whole[:leading]], [message.raw for message in whole[leading:]]
