"""Shadows: what a strategy that is only tried out would have sent at each call of a session, as figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime

from tersely.domain.history.history import Epoch
from tersely.domain.history.shadows import describe_shadow
from tersely.store.db.connection import Connection
from tersely.store.history.sessions import read_epoch, write_epoch
from tersely.store.ops.calls import GROUPS, GroupBy

# Of plain input, where a model has no price: written to a cache, and read from it.
WRITE, READ = 1.25, 0.1

HERE = "tenant_id = $1 AND session_id = $2"
STATE = f"SELECT strategy, last_call, plan, sent FROM shadows WHERE {HERE}"
# Calls that were answered, after the last one that was judged.
EARLIER = f"""
SELECT EXISTS (
    SELECT FROM calls WHERE {HERE} AND number > $3 AND number < $4 AND finished_at IS NOT NULL AND status < 400
)
"""
# Before any row of a shadow, as removals of content do: two orders of locks could wait for each other.
HOLD_SESSION = "SELECT edits FROM sessions WHERE tenant_id = $1 AND id = $2 FOR KEY SHARE"
# Two processes may judge calls of one session at a time: the later one of them finds another state.
ADVANCE = """
INSERT INTO shadows (tenant_id, session_id, strategy, last_call, plan, sent, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (tenant_id, session_id) DO UPDATE SET strategy = excluded.strategy, last_call = excluded.last_call,
    plan = excluded.plan, sent = excluded.sent, updated_at = excluded.updated_at
WHERE shadows.last_call = $8
RETURNING last_call
"""
FORGET = f"UPDATE shadows SET plan = $3, sent = ''::bytea, updated_at = $4 WHERE {HERE}"
COLUMNS = (
    "number, strategy, epoch, tokens, cached_tokens, full_tokens, full_cached, cost, full_cost, referring, lost, "
    "pointing, lost_pointing, edits, ready, full_ready, created_at"
)
ADD = f"""
INSERT INTO shadow_calls (tenant_id, session_id, {COLUMNS})
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
ON CONFLICT DO NOTHING
"""
COUNTED = (
    "tokens", "cached_tokens", "full_tokens", "full_cached", "referring", "lost", "pointing", "lost_pointing", "edits",
    "ready", "full_ready",
)  # fmt: skip
SUMS = f"""
    count(*) AS calls, {", ".join(f"coalesce(sum(f.{name}), 0)::bigint AS {name}" for name in COUNTED)},
    coalesce(sum(f.cost) FILTER (WHERE f.full_cost IS NOT NULL), 0)::float8 AS cost,
    coalesce(sum(f.full_cost) FILTER (WHERE f.cost IS NOT NULL), 0)::float8 AS full_cost,
    count(*) FILTER (WHERE f.cost IS NOT NULL AND f.full_cost IS NOT NULL) AS priced_calls,
    count(*) FILTER (WHERE f.lost_pointing > 0 OR f.ready < f.full_ready) AS missing_calls
"""
# A session may have tried several strategies one after the other; its figures are those of the last one.
OF_SESSIONS = f"""
SELECT f.session_id, max(s.strategy) AS strategy, {SUMS} FROM shadows AS s
JOIN shadow_calls AS last ON last.tenant_id = s.tenant_id AND last.session_id = s.session_id
    AND last.number = s.last_call
JOIN shadow_calls AS f ON f.tenant_id = s.tenant_id AND f.session_id = s.session_id AND f.strategy = last.strategy
WHERE s.tenant_id = $1 AND s.session_id = ANY($2::text[]) GROUP BY f.session_id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowState:
    """The state from which a session's shadow continues.

    ``strategy`` is a configuration text, ``last_call`` the last call that was judged, ``epoch`` that of the contexts
    which were never sent, ``sent`` the messages of the last of them.
    """

    strategy: str
    last_call: int
    epoch: Epoch
    sent: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCall:
    """The context that a shadow would have sent at a call, and its use by the reply.

    ``cached_tokens`` of ``tokens`` repeat the context before. ``full_tokens`` and ``full_cached`` are those of the
    request that was sent. Costs are in USD, None without a known price. The counts of tool calls are those of
    `tersely.domain.history.context_use`; ``full_ready``: edits whose text stood in the request that was sent.
    """

    number: int
    strategy: str
    epoch: int
    tokens: int
    cached_tokens: int
    full_tokens: int
    full_cached: int
    cost: float | None
    full_cost: float | None
    referring: int
    lost: int
    pointing: int
    lost_pointing: int
    edits: int
    ready: int
    full_ready: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSums:
    """Sums over judged calls; costs over the ``priced_calls`` among them.

    ``missing_calls`` used something that would have been missing: a name that they point at, or a text that they edit.
    """

    calls: int
    tokens: int
    cached_tokens: int
    full_tokens: int
    full_cached: int
    referring: int
    lost: int
    pointing: int
    lost_pointing: int
    edits: int
    ready: int
    full_ready: int
    cost: float
    full_cost: float
    priced_calls: int
    missing_calls: int

    def __add__(self, other: ShadowSums) -> ShadowSums:
        return ShadowSums(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    @property
    def relative_price(self) -> float | None:
        """The price relative to what was sent: of the costs, or of the tokens with a perfect cache where calls have no
        price; None where nothing was sent.
        """
        if self.priced_calls == self.calls and self.full_cost:
            return self.cost / self.full_cost
        sent = WRITE * (self.full_tokens - self.full_cached) + READ * self.full_cached
        return (WRITE * (self.tokens - self.cached_tokens) + READ * self.cached_tokens) / sent if sent else None

    def describe(self, whole: str) -> str:
        """Return the sums in one sentence about ``whole``."""
        return describe_shadow(self.relative_price, calls=self.calls, missing=self.missing_calls, whole=whole)


async def get(connection: Connection, tenant: str, session_id: str) -> ShadowState | None:
    """Return the state of a session's shadow; None before its first call."""
    row = await connection.fetchrow(STATE, tenant, session_id)
    if row is None:
        return None
    return ShadowState(
        strategy=row["strategy"], last_call=row["last_call"], epoch=read_epoch(row["plan"]), sent=row["sent"]
    )


async def waits_for_earlier(connection: Connection, tenant: str, session_id: str, *, after: int, before: int) -> bool:
    """Return whether an answered call between two numbers has not been judged."""
    return bool(await connection.fetchval(EARLIER, tenant, session_id, after, before))


async def advance(
    connection: Connection,
    tenant: str,
    session_id: str,
    state: ShadowState,
    call: ShadowCall,
    *,
    expected: int,
    edits: int,
    now: datetime,
) -> bool:
    """Store the figures of a call and the state after it; False, and nothing is stored, unless ``expected`` is the last
    call that was judged (0: none), and the history has had no more than ``edits`` since: the state may quote messages
    that were removed. To be called in a transaction.
    """
    edited = await connection.fetchval(HOLD_SESSION, tenant, session_id)
    if edited is None or edited > edits:
        return False
    plan = write_epoch(state.epoch)
    moved = await connection.fetchval(
        ADVANCE, tenant, session_id, state.strategy, state.last_call, plan, state.sent, now, expected
    )
    if moved is None:
        return False
    await connection.execute(ADD, tenant, session_id, *astuple(call))
    return True


async def forget(
    connection: Connection, tenant: str, session_id: str, forgetting: Callable[[Epoch], Epoch], now: datetime
) -> None:
    """Replace the epoch of a session's shadow by what ``forgetting`` leaves of it, and forget which messages it sent.
    The session must be locked.
    """
    state = await get(connection, tenant, session_id)
    if state is not None:
        await connection.execute(FORGET, tenant, session_id, write_epoch(forgetting(state.epoch)), now)


async def of_session(connection: Connection, tenant: str, session_id: str) -> tuple[str, ShadowSums] | None:
    """Return the strategy that was tried last in a session, and the sums of the calls that were judged with it; None
    without any.
    """
    return (await of_sessions(connection, tenant, [session_id])).get(session_id)


async def of_sessions(
    connection: Connection, tenant: str, session_ids: Sequence[str]
) -> dict[str, tuple[str, ShadowSums]]:
    """Return the same for those of the sessions that have any."""
    rows = [dict(row) for row in await connection.fetch(OF_SESSIONS, tenant, list(session_ids))]
    return {row.pop("session_id"): (row.pop("strategy"), ShadowSums(**row)) for row in rows}


async def sums(
    connection: Connection, tenant: str, *, since: datetime, until: datetime, by: GroupBy
) -> dict[str, dict[str, ShadowSums]]:
    """Return sums over the judged calls from ``since`` until before ``until``, by the key of their calls and then by
    the strategy that was tried.
    """
    key = GROUPS[by].replace("created_at", "calls.created_at").replace("client", "calls.client")
    sql = f"""
        SELECT {"calls.strategy" if by == "strategy" else key} AS key, f.strategy, {SUMS} FROM shadow_calls AS f
        JOIN calls ON calls.tenant_id = f.tenant_id AND calls.session_id = f.session_id AND calls.number = f.number
        WHERE f.tenant_id = $1 AND f.created_at >= $2 AND f.created_at < $3 GROUP BY 1, 2 ORDER BY 1, 2
    """
    found: dict[str, dict[str, ShadowSums]] = {}
    for row in [dict(row) for row in await connection.fetch(sql, tenant, since, until)]:
        key_of_row, strategy = row.pop("key"), row.pop("strategy")
        found.setdefault(key_of_row, {})[strategy] = ShadowSums(**row)
    return found
