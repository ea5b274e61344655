"""Keeps a session's epoch up with what is appended over REST, so that building a context costs the same in every one.

In the proxy an epoch starts with the call that needs it. A session that is only appended to makes no calls: without
this, the first context of a long one would have to read it whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from app.domain.errors import ContextTooLarge
from app.domain.lineage import append
from app.service import contexts
from app.service.arrival import arrive
from app.service.contexts import Circumstances
from app.service.identity import Found
from app.service.messages import dialect_of
from app.service.recipes import Recipes
from app.store import epochs, sessions
from app.store.connection import Database
from app.store.sessions import write_epoch
from app.store.writes import NewEpoch
from app.strategies.epochs import Auto

# Seconds. What is read is bounded by the watermark and by one append.
LIMIT = 15.0


class EpochKeeper:
    """Starts epochs for sessions whose tail has outgrown the high watermark."""

    def __init__(self, database: Database, recipes: Recipes, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._recipes = recipes
        self._clock = clock

    async def keep_up(self, tenant: str, session_id: str, dialect: str) -> None:
        """Start an epoch if the session's tail asks for one; a session that moves on meanwhile is left alone."""
        how = dialect_of(dialect)
        now = self._clock()
        arrival = arrive(())
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                return
            recipe = self._recipes.choose(session=session)
            if not isinstance(recipe.policy, Auto) or not recipe.extract.terse:
                return
            if await epochs.tail_tokens(connection, tenant, session) <= recipe.policy.high:
                return
            decision = append((), last_seq=session.last_seq, turns=session.turns, turn=session.turns)
            found = Found(
                session_id=session_id, session=session, source="header", decision=decision, rows=(), is_delta=True
            )
            around = Circumstances(fixed_tokens=0, window=None, now=now)
            history = await contexts.load(connection, tenant, found, arrival, how, recipe, around)
        if history.advance is None:
            return
        try:
            built = await asyncio.to_thread(contexts.make, history, recipe, around, "")
        except ContextTooLarge:
            return
        report = built.context.report
        new = NewEpoch(
            epoch=built.context.epoch,
            plan=write_epoch(built.context.epoch),
            tokens_before=report.tokens_before,
            tokens_after=report.tokens_after,
            derived=built.derived,
        )
        async with self._database.transaction(tenant, limit=LIMIT) as connection:
            await epochs.start(connection, tenant, session, new, now)
