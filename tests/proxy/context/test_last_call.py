"""A session is described by what its last call used, until its owner sets something else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from tersely.service.context.context_configs import ContextConfigs
from tersely.service.sessions.cleanup import Cleanup
from tersely.store.db import connection
from tests.conftest import Database
from tests.support.dialect_wires import WIRES
from tests.support.http import body_of, post
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import Model

WINDOW = '{ "name": "window",\n "context_size": 3 }'
SMALL = {"name": "window", "context_size": 3}
EPOCH = '{"stride": 4}'


async def call(service: Service, session: str, *, strategy: str | None = None, epoch: str | None = None) -> None:
    given = {"X_Tersely_Strategy": strategy, "X_Tersely_Epoch": epoch}
    headers = {name: value for name, value in given.items() if value is not None}
    answer = await post(service, body_of("Hello."), X_Tersely_Session=session, **headers)
    assert answer.status == 200, answer.body


def described(service: Service, session: str) -> dict[str, Any]:
    return dict(httpx.get(f"{service.url}/api/sessions/{session}").json())


def previewed(service: Service, session: str, **more: Any) -> str:
    built = httpx.post(f"{service.url}/api/sessions/{session}/context", json=more)
    assert built.status_code == 200, built.text
    return str(built.json()["strategy"])


def commanded(service: Service, session: str, text: str) -> str:
    answer = httpx.post(f"{service.url}/api/sessions/{session}/commands", json={"text": text})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


async def test_settings_of_the_last_call_are_shown_and_used_beside_calls(service: Service, key: str) -> None:
    await call(service, key, strategy=WINDOW.replace("\n", ""), epoch=EPOCH)
    shown = described(service, key)
    assert (shown["strategy"], shown["epoch"]) == (SMALL, {"stride": 4})
    assert (shown["last_call_strategy"], shown["last_call_epoch"]) == (SMALL, {"stride": 4})
    assert previewed(service, key) == "window"
    assert "strategy window" in commanded(service, key, "/context")
    assert '"context_size":3' in commanded(service, key, "/config").replace(" ", "")
    assert httpx.get(f"{service.url}/api/sessions", params={"limit": 1}).json()["items"][0]["strategy"] == SMALL


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", WIRES)
async def test_another_replica_shows_and_uses_the_settings_of_the_last_call(
    service: Service, store: Database, model: Model, key: str, dialect: str, stream: bool
) -> None:
    with serve(store, model.url) as other:
        for strategy in ("trim", "compact"):
            headers = {"X_Tersely_Strategy": strategy, "X_Tersely_Epoch": EPOCH}
            answer = await WIRES[dialect].send(service, "Hello.", stream=stream, X_Tersely_Session=key, **headers)
            assert answer.status == 200, answer.body
            shown = described(other, key)
            assert (shown["strategy"], shown["epoch"]) == (strategy, {"stride": 4})
            assert previewed(other, key) == strategy
            assert f"strategy {strategy}" in commanded(other, key, "/context")


async def test_a_call_without_a_header_follows_the_configuration_again(service: Service, key: str) -> None:
    await call(service, key, strategy="trim")
    assert previewed(service, key) == "trim"
    await call(service, key)
    assert (described(service, key)["strategy"], described(service, key)["last_call_strategy"]) == ("slim", None)
    assert previewed(service, key) == "slim"
    rows = await query(service, "SELECT strategy FROM calls WHERE session_id = $1 ORDER BY number", key)
    assert [row["strategy"] for row in rows] == ["trim", "slim"]


async def test_the_owner_s_setting_wins_from_then_on_but_over_a_call_s_own_header(service: Service, key: str) -> None:
    await call(service, key, strategy="trim")
    url = f"{service.url}/api/sessions/{key}"
    assert httpx.patch(url, json={"strategy": "compact"}).json()["strategy"] == "compact"
    assert previewed(service, key) == "compact"
    await call(service, key, strategy="tiered")
    rows = await query(service, "SELECT strategy FROM calls WHERE session_id = $1 ORDER BY number", key)
    assert [row["strategy"] for row in rows] == ["trim", "tiered"]
    shown = described(service, key)
    assert (shown["strategy"], shown["last_call_strategy"]) == ("compact", "tiered")
    assert previewed(service, key) == "compact"
    assert previewed(service, key, strategy="full") == "full"
    assert httpx.patch(url, json={"strategy": None}).json()["strategy"] == "tiered"
    assert previewed(service, key) == "tiered"


async def test_an_append_follows_the_last_call(service: Service, key: str) -> None:
    """Under `full` a literal tag is text; under `slim`, which is the default here, it is not."""
    await call(service, key, strategy="full")
    reply = {"role": "assistant", "content": "Write <terse>this</terse>."}
    messages = [{"role": "user", "content": "How?"}, reply]
    url = f"{service.url}/api/sessions/{key}/messages"
    assert httpx.post(url, json={"messages": messages}).status_code == 201
    assert httpx.get(url).json()["items"][-1]["raw"] == reply


async def test_a_copy_is_described_like_the_original(service: Service, key: str) -> None:
    await call(service, key, strategy="trim", epoch=EPOCH)
    exported = httpx.get(f"{service.url}/api/sessions/{key}/export").json()
    made = httpx.post(f"{service.url}/api/sessions/import", json={**exported, "id": f"{key}-copy"})
    assert made.status_code == 201, made.text
    assert (made.json()["strategy"], made.json()["epoch"]) == ("trim", {"stride": 4})
    exported["tersely"]["session"]["last_strategy"] = "fast"
    refused = httpx.post(f"{service.url}/api/sessions/import", json={**exported, "id": f"{key}-other"})
    assert refused.status_code == 422


@pytest.mark.parametrize(("strategy", "is_deleted"), [("trim", True), ("slim", False)])
async def test_cleanup_follows_the_strategy_of_the_last_call(
    service: Service, key: str, strategy: str, is_deleted: bool
) -> None:
    await call(service, key, strategy=strategy)
    database = connection.Database(dsn=service.database.dsn, size=2)
    await database.open()
    configs = ContextConfigs(strategy="slim", epoch="auto", references=None, instructions=True, derive_terse=True)
    now = datetime.now(UTC) + timedelta(days=31)
    await Cleanup(database, configs, clock=lambda: now).run()
    await database.close()
    status = httpx.get(f"{service.url}/api/sessions/{key}").status_code
    assert status == (404 if is_deleted else 200)
