"""`/readyz`: whether calls can be served, told within a second whatever the database does."""

from __future__ import annotations

import pytest

from tests.conftest import Database
from tests.support.http import post
from tests.support.relay import relay
from tests.support.services import many, serve
from tests.support.upstreams import Model


@pytest.mark.parametrize("fault", ["cut", "freeze"])
async def test_ready_while_calls_go_through(store: Database, model: Model, fault: str) -> None:
    with many(relay(store)) as (way,), serve(store, model.url, dsn=way.dsn) as service:

        async def ask(path: str) -> tuple[int, object]:
            answer = await post(service, b"", path=path, method="GET")
            assert answer.seconds < 1.2
            return answer.status, answer.json

        assert await ask("/readyz") == (200, {"status": "ready", "database": "ready"})
        assert await ask("/readyz?strict=1") == (200, {"status": "ready", "database": "ready"})
        getattr(way, fault)()
        for _ in range(3):
            assert await ask("/readyz") == (200, {"status": "ready", "database": "away"})
            assert await ask("/readyz?strict=1") == (503, {"status": "database away"})
        way.restore()


@pytest.mark.parametrize("settings", [{"fail_open": "off"}, {"auth": "keys"}])
async def test_not_ready_where_calls_would_be_refused(store: Database, model: Model, settings: dict[str, str]) -> None:
    with many(relay(store)) as (way,), serve(store, model.url, dsn=way.dsn, **settings) as service:
        assert (await post(service, b"", path="/readyz", method="GET")).status == 200
        way.freeze()
        away = await post(service, b"", path="/readyz", method="GET")
        assert (away.status, away.headers["retry-after"]) == (503, "2")
        assert away.seconds < 1.2
        way.restore()
