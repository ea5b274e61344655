"""Keeps a session's epoch up with what is appended over REST, so that building a context costs the same in every one.

In the proxy an epoch starts with the call that needs it. A session that is only appended to makes no calls: without
this, the first context of a long one would have to read it whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from weakref import WeakValueDictionary

from app.dialects.dialect import Dialect
from app.domain.context import Report
from app.domain.errors import Conflict, ContextTooLarge, NotFound
from app.domain.lineage import append
from app.domain.models import known_window
from app.domain.sessions import Session
from app.service import contexts
from app.service.arrival import arrive
from app.service.contexts import Circumstances, History, Recipe
from app.service.identity import Found
from app.service.messages import dialect_of
from app.service.recipes import Recipes
from app.service.standing import fixed_tokens
from app.store import epochs, sessions, summaries
from app.store.connection import Connection, Database
from app.store.sessions import write_epoch
from app.store.writes import NewEpoch
from app.strategies.compositions import needs_of
from app.strategies.epochs import Advance, Auto, Reason
from app.strategies.presets import Slim, Tiered, Window

# Seconds. What is read is bounded by the watermark and by one append.
LIMIT = 15.0
# How often a session may move on while an epoch is being planned for it.
ATTEMPTS = 8

Beside = Callable[[Connection], Awaitable[object]]


class EpochKeeper:
    """Starts epochs outside calls: where a tail has outgrown the high watermark, and at somebody's word."""

    def __init__(self, database: Database, recipes: Recipes, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._recipes = recipes
        self._clock = clock
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def keep_up(self, tenant: str, session_id: str, dialect: str) -> None:
        """Start an epoch if the session's tail asks for one; a session that moves on meanwhile is left alone.

        What `trim` and `compact` cut depends on a call: on its model's window, and on who pays for the summary.
        """
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                return
            recipe = self._recipes.as_called(session)
            if not isinstance(recipe.policy, Auto) or not isinstance(recipe.strategy, Slim | Window | Tiered):
                return
            high = needs_of(recipe.strategy).high or recipe.policy.high
            if await epochs.tail_tokens(connection, tenant, session) <= high:
                return
            history, around = await self._load(connection, tenant, session, dialect_of(dialect), recipe)
        if history.advance is not None:
            try:
                await self._start(tenant, session, history, recipe, around)
            except ContextTooLarge:
                return

    async def begin(
        self,
        tenant: str,
        session_id: str,
        reason: Reason,
        *,
        dialect: str = "openai_chat",
        strategy: str | None = None,
        epoch: str | None = None,
        beside: Beside | None = None,
    ) -> Report:
        """Start an epoch for ``reason``; its report. ``strategy`` and ``epoch`` are those of the calls to come, where
        they are not the session's. ``beside`` is done together with it, or not at all.

        Those who ask at once are served one after the other. Raises `NotFound`, `ContextTooLarge`, and `Conflict` when
        the session moves on faster than this.
        """
        place = tenant, session_id
        async with self._locks.setdefault(place, asyncio.Lock()):
            return await self._begin(tenant, session_id, reason, dialect, strategy, epoch, beside)

    async def _begin(
        self,
        tenant: str,
        session_id: str,
        reason: Reason,
        dialect: str,
        strategy: str | None,
        epoch: str | None,
        beside: Beside | None,
    ) -> Report:
        for _ in range(ATTEMPTS):
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                session = await sessions.get(connection, tenant, session_id)
                if session is None:
                    raise NotFound("there is no such session")
                recipe = self._recipes.as_called(session, strategy=strategy, epoch=epoch)
                history, around = await self._load(connection, tenant, session, dialect_of(dialect), recipe)
            report = await self._start(
                tenant, session, replace(history, advance=Advance(reason=reason)), recipe, around, beside
            )
            if report is not None:
                return report
        raise Conflict("the session is in use: try again")

    async def _load(
        self, connection: Connection, tenant: str, session: Session, dialect: Dialect, recipe: Recipe
    ) -> tuple[History, Circumstances]:
        decision = append((), last_seq=session.last_seq, turns=session.turns, turn=session.turns)
        found = Found(
            session_id=session.id, session=session, source="header", decision=decision, rows=(), is_delta=True
        )
        model = await summaries.last_model(connection, tenant, session.id)
        fixed = await fixed_tokens(connection, tenant, session, recipe, model=model)
        around = Circumstances(fixed_tokens=fixed, window=None, now=self._clock(), model_window=known_window(model))
        history = await contexts.load(
            connection, tenant, found, arrive(()), dialect, recipe, around, needs_material=True
        )
        return history, around

    async def _start(
        self,
        tenant: str,
        session: Session,
        history: History,
        recipe: Recipe,
        around: Circumstances,
        beside: Beside | None = None,
    ) -> Report | None:
        """The report of the epoch that was started; None when the session has moved on."""
        built = await asyncio.to_thread(contexts.make, history, recipe, around, "")
        report = built.context.report
        new = NewEpoch(
            epoch=built.context.epoch,
            plan=write_epoch(built.context.epoch),
            tokens_before=report.tokens_before,
            tokens_after=report.tokens_after,
            derived=built.derived,
        )
        async with self._database.transaction(tenant, limit=LIMIT) as connection:
            is_started = await epochs.start(connection, tenant, session, new, around.now)
            if is_started and beside is not None:
                await beside(connection)
        return report if is_started else None
