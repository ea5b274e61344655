"""Pages of a tenant's sessions with their statistics, in several orders.

An order has a coarse rank, which an index keeps, and the exact value: rows sort exactly within one rank. See the
migration that adds the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from tersely.domain.history.sessions import Session
from tersely.store.db.connection import Connection
from tersely.store.history.sessions import COLUMNS, session_from

Sort = Literal["last_call", "saved", "tokens", "created"]
FIGURES = (
    "title, client, models, tokens_saved, input_tokens, cached_tokens, output_tokens, cost_sent, cost_full, "
    "priced_calls"
)
HOST = """(
    SELECT host FROM calls c WHERE c.tenant_id = $1 AND c.session_id = sessions.id ORDER BY c.number DESC LIMIT 1
) AS host"""
# Sort -> its rank, its exact value, and their types.
ORDERS: dict[Sort, tuple[str, str, str, str]] = {
    "last_call": ("call_hour", "last_call_at", "timestamptz", "timestamptz"),
    "saved": ("saved_rank", "tokens_saved", "smallint", "bigint"),
    "tokens": ("tokens_rank", "tokens", "smallint", "bigint"),
    "created": ("created_at", "created_at", "timestamptz", "timestamptz"),
}
CHILDREN = """
SELECT parent, count(*) AS children FROM sessions WHERE tenant_id = $1 AND parent = ANY($2::text[]) GROUP BY parent
"""
FIGURES_OF = f"SELECT {COLUMNS}, {FIGURES}, {HOST} FROM sessions WHERE tenant_id = $1 AND id = $2"


class ListedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session with sums over its calls. Costs are in USD, over the ``priced_calls``.

    ``host`` is that of the last call (empty: the default host; None: none, or not known). ``rank`` and ``value`` are
    those of the order in which it was listed.
    """

    session: Session
    title: str | None
    client: str | None
    models: tuple[str, ...]
    tokens_saved: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_sent: float
    cost_full: float
    priced_calls: int
    host: str | None = None
    rank: object = None
    value: object = None


class SessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filters of a list of sessions; None: no filter. ``query`` is searched for in titles. ``tops``: only sessions
    without a parent.
    """

    parent: str | None = None
    client_id: str | None = None
    query: str | None = None
    client: str | None = None
    model: str | None = None
    strategy: str | None = None
    since: datetime | None = None
    tops: bool = False


class SessionCursor(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a session in an order; without ``rank``, among sessions without a value in that order."""

    rank: object
    value: object
    id: str


async def page(
    connection: Connection,
    tenant: str,
    session_filter: SessionFilter,
    *,
    sort: Sort,
    after: SessionCursor | None,
    limit: int,
) -> list[ListedSession]:
    """A page of the tenant's sessions behind a cursor."""
    rank, value, rank_type, value_type = ORDERS[sort]
    found: list[ListedSession] = []
    if after is None or after.rank is not None:
        rules, given = _rules(tenant, session_filter)
        if after is not None:
            n = len(given)
            rules.append(f"{rank} <= ${n + 1}::{rank_type}")
            rules.append(f"({rank}, {value}, id) < (${n + 1}, ${n + 2}::{value_type}, ${n + 3}::text)")
            given += [after.rank, after.value, after.id]
        nulls = " NULLS LAST" if sort == "last_call" else ""
        sql = (
            f"SELECT {COLUMNS}, {FIGURES}, {HOST}, {rank} AS rank, {value} AS value FROM sessions "
            f"WHERE {' AND '.join(rules)} AND {rank} IS NOT NULL "
            f"ORDER BY {rank} DESC{nulls}, {value} DESC, id DESC LIMIT {int(limit)}"
        )
        found = [_listed_from(dict(row)) for row in await connection.fetch(sql, *given)]
        after = None
    if sort == "last_call" and len(found) < limit:
        rules, given = _rules(tenant, session_filter)
        if after is not None:
            given.append(after.id)
            rules.append(f"id < ${len(given)}")
        sql = (
            f"SELECT {COLUMNS}, {FIGURES}, {HOST}, NULL AS rank, NULL AS value FROM sessions "
            f"WHERE {' AND '.join(rules)} AND {rank} IS NULL ORDER BY id DESC LIMIT {int(limit - len(found))}"
        )
        found += [_listed_from(dict(row)) for row in await connection.fetch(sql, *given)]
    return found


def _rules(tenant: str, session_filter: SessionFilter) -> tuple[list[str], list[object]]:
    """The conditions that are asked for, and their parameters: the planner sees no others."""
    rules = ["tenant_id = $1"]
    parameters: list[object] = [tenant]

    def add(rule: str, value: object) -> None:
        if value is not None:
            parameters.append(value)
            rules.append(rule.replace("?", f"${len(parameters)}"))

    add("parent = ?", session_filter.parent)
    add("client_id = ?", session_filter.client_id)
    add("client = ?", session_filter.client)
    add("? = ANY(models)", session_filter.model)
    add(
        "coalesce(strategy, last_strategy) LIKE ?", session_filter.strategy and f"%{_escaped(session_filter.strategy)}%"
    )
    add("last_call_at >= ?", session_filter.since)
    if session_filter.query is not None:
        parameters += [f"%{_escaped(session_filter.query)}%", session_filter.query]
        rules.append(f"(title ILIKE ${len(parameters) - 1} OR id = ${len(parameters)})")
    if session_filter.tops:
        rules.append("parent IS NULL")
    return rules, parameters


async def get(connection: Connection, tenant: str, session_id: str) -> ListedSession | None:
    """One session with its figures."""
    row = await connection.fetchrow(FIGURES_OF, tenant, session_id)
    return None if row is None else _listed_from({**dict(row), "rank": None, "value": None})


async def children(connection: Connection, tenant: str, parents: list[str]) -> dict[str, int]:
    """Parent -> how many sessions are its children."""
    return {row["parent"]: row["children"] for row in await connection.fetch(CHILDREN, tenant, parents)}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _listed_from(row: Mapping[str, Any]) -> ListedSession:
    figures = {name: row[name] for name in FIGURES.split(", ")}
    models = tuple(row["models"])
    return ListedSession(
        session=session_from(row),
        host=row["host"],
        rank=row["rank"],
        value=row["value"],
        **{**figures, "models": models},
    )
