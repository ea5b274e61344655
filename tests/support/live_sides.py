"""The same services twice, with live sessions and without: what they send and store must be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import asyncpg
import httpx

from tests.conftest import Database, Server, new_database
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

# Headers that are never the same twice.
UNEQUAL = {"x-tersely-session", "x-tersely-overhead-ms", "x-tersely-request-id"}
# What is stored, without what differs from run to run: ids that are made up, and times.
TABLES = {
    "messages": "seq, turn, tokens, place, role, status, dialect, client_visible, model_visible, pinned, priority, "
    "finish, call, follows, digest, chain, raw, model_raw, model_prefix, model_suffix, model_middle, newest_turn",
    "calls": "number, turn, model, client, strategy, epoch, cut, tokens_before, tokens_after, input_tokens, "
    "cached_tokens, output_tokens, status, weight, sent, last_seq, tools, cost_sent, cost_full, host",
    "terse": "turn, seq, number, role, source, text",
    "states": "seq, number, source, text",
    "epochs": "number, cut, reason, head_tokens, tokens_before, tokens_after",
    "reply_ids": "seq, id, keeper, usage, conversation",
    "attributes": "digest, kind, raw",
    "artifacts": "sha256, seq, call_id, chars",
    "appends": "digest, first_seq, last_seq, turn",
}
SESSIONS = (
    "strategy, epoch_policy, last_seq, turns, tokens, version, edits, edited, calls, epoch, cut, open_chain, "
    "last_strategy, last_epoch_policy"
)


@dataclass
class Side:
    """A model host, a database, and the services in front of it. ``at`` is the one that is called."""

    model: Model
    services: list[Service]
    http: httpx.Client
    at: int = 0

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.http.request(method, f"{self.services[self.at].url}{path}", **more)

    def hits(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for service in self.services:
            for line in self.http.get(f"{service.url}/metrics").text.splitlines():
                if line.startswith("tersely_live_calls_total{"):
                    name, _, value = line.rpartition(" ")
                    found[name.split('"')[1]] += int(float(value))
        return found


@contextmanager
def sides(
    server: Server, *, replicas: int = 1, is_forgetful: bool = False, **settings: Any
) -> Iterator[tuple[Side, Side]]:
    """The same services twice: with live sessions, and without. ``is_forgetful``: their hosts keep no replies."""
    with ExitStack() as stack:
        made = []
        for live in ("64", "off"):
            model = stack.enter_context(scripted(is_forgetful=is_forgetful))
            database = stack.enter_context(new_database(server))
            services = [
                stack.enter_context(serve(database, model.url, live_sessions=live, **settings)) for _ in range(replicas)
            ]
            made.append(Side(model, services, stack.enter_context(httpx.Client(timeout=60))))
        yield made[0], made[1]


class Clock:
    """The same time for both sides but for microseconds, so that no minute ends between them."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 1, 12, 0, 10, tzinfo=UTC)
        self.ticks = count(1)

    def __call__(self) -> datetime:
        return self.now + timedelta(microseconds=next(self.ticks))


# Of messages in order of their numbers, the newest turn falls at none (`tersely.store.history.turn_rows`).
FALLING_TURNS = """
SELECT seq FROM (
    SELECT seq, coalesce(newest_turn, turn) AS newest, newest_turn,
        lag(coalesce(newest_turn, turn)) OVER (PARTITION BY tenant_id, session_id ORDER BY seq) AS before
    FROM messages
) AS m WHERE newest < before OR newest_turn <= 0
"""


async def stored(database: Database) -> list[Any]:
    """Everything that is stored, session by session in the order in which they were made."""
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        assert not await connection.fetch(FALLING_TURNS)
        found: list[Any] = []
        for session in await connection.fetch(f"SELECT id, {SESSIONS} FROM sessions ORDER BY created_at, id"):
            found.append(("session", *list(session.values())[1:]))
            for table, columns in TABLES.items():
                # Descriptions of what was sent may name the same bytes in different ways.
                where = "session_id = $1" + (" AND kind <> 'sent'" if table == "attributes" else "")
                rows = await connection.fetch(f"SELECT {columns} FROM {table} WHERE {where}", session["id"])
                found += sorted(((table, *row.values()) for row in rows), key=repr)
        return found
    finally:
        await connection.close()
