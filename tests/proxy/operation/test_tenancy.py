"""Tenants with keys: each sees its own, whoever asks, whatever the session is called."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

import pytest

from tersely.service.common import auth
from tersely.store.db.connection import Database as Store
from tersely.store.ops import keys
from tests.support.http import body_of, post
from tests.support.loops import eventually
from tests.support.rows import query
from tests.support.services import Service
from tests.support.tenants import Tenant, tenant
from tests.support.upstreams import Model


async def owners(service: Service, session: str) -> dict[str, int]:
    rows = await query(
        service, "SELECT tenant_id, count(*) AS n FROM messages WHERE session_id = $1 GROUP BY tenant_id", session
    )
    return {row["tenant_id"]: row["n"] for row in rows}


async def test_one_session_id_is_two_sessions_for_two_tenants(locked: Service, model: Model, keyring: Store, key: str):
    ours, theirs = await tenant(keyring), await tenant(keyring)

    for who in (ours, theirs):
        answer = await post(
            locked,
            body_of(f"the secret of {who.name}", user=f"{key}-{who.name}"),
            X_Tersely_Key=who.key,
            X_Tersely_Session=key,
        )
        assert answer.status == 200

    assert await owners(locked, key) == {ours.name: 2, theirs.name: 2}
    delta = await post(locked, body_of("and?", user=f"{key}-2"), X_Tersely_Key=ours.key, X_Tersely_Session=key)
    assert delta.status == 200
    sent = model.requests(f"{key}-2")[-1].body.decode()
    assert ours.name in sent
    assert theirs.name not in sent


async def test_a_history_of_another_tenant_is_a_new_session(locked: Service, keyring: Store, key: str):
    ours, theirs = await tenant(keyring), await tenant(keyring)
    question = f"what is the meaning of {key}, in a few well chosen words"
    first = await post(locked, body_of(question), X_Tersely_Key=ours.key)
    spoken = first.json["choices"][0]["message"]
    resent = body_of({"role": "user", "content": question}, {"role": "assistant", "content": spoken["content"]}, "more")

    other = await post(locked, resent, X_Tersely_Key=theirs.key)
    same = await post(locked, resent, X_Tersely_Key=ours.key)

    assert other.session != first.session
    assert other.headers["x-tersely-session-source"] == "new"
    assert (same.session, same.headers["x-tersely-session-source"]) == (first.session, "lineage")


async def test_a_call_and_its_context_are_not_found_by_another_tenant(locked: Service, keyring: Store, key: str):
    ours, theirs = await tenant(keyring), await tenant(keyring)
    await post(locked, body_of(f"secret {key}"), X_Tersely_Key=ours.key, X_Tersely_Session=key)

    for path in ("calls/1", "calls/1/context", "calls", "epochs"):
        address = f"/api/sessions/{key}/{path}"
        own = await post(locked, b"", method="GET", path=address, X_Tersely_Key=ours.key)
        others = await post(locked, b"", method="GET", path=address, X_Tersely_Key=theirs.key)
        assert (own.status, others.status) == (200, 404), path
    for path in ("/api/calls", "/api/events?since=2026-01-01T00:00:00Z", "/api/savings"):
        listed = await post(locked, b"", method="GET", path=path, X_Tersely_Key=theirs.key)
        assert listed.status == 200
        assert key.encode() not in listed.body
    found = await post(locked, json.dumps({"query": key}).encode(), path="/api/search", X_Tersely_Key=theirs.key)
    assert found.status == 200
    assert b"secret" not in found.body


async def test_keys_in_any_of_their_headers(locked: Service, model: Model, keyring: Store, key: str):
    who = await tenant(keyring)
    for headers in (
        {"Authorization": f"Bearer {who.key}"},
        {"x-api-key": who.key},
        {"X-Tersely-Key": who.key, "Authorization": "Bearer sk-upstream"},
    ):
        answer = await post(locked, body_of("hello", user=key), X_Tersely_Session=key, **headers)
        assert answer.status == 200
        sent = model.requests(key)[-1].headers
        assert who.key not in str(sent)
        assert sent.get("Authorization") == ("Bearer sk-upstream" if len(headers) == 2 else None)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer sk-upstream"},
        {"X-Tersely-Key": "nonsense"},
        {"X-Tersely-Key": "tsk_0123456789abcdef_" + "x" * 43},
        {"X-Tersely-Key": "tsk_'; DROP TABLE keys; --_" + "x" * 43},
        {"Authorization": "Basic dHNrXw=="},
        {"X-Tersely-Key": "tsk_" + "0" * 5000},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_without_a_right_key_nothing_goes(
    locked: Service, model: Model, key: str, headers: dict[str, str], path: str
):
    calls = model.state.calls

    answer = await post(locked, body_of("let me in", user=key), path=path, X_Tersely_Session=key, **headers)

    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json["error"]["code"] == "invalid_api_key"
    assert model.state.calls == calls
    assert await owners(locked, key) == {}


async def test_the_right_id_with_a_wrong_secret(locked: Service, keyring: Store):
    who = await tenant(keyring)
    assert (await post(locked, body_of("x"), X_Tersely_Key=who.key)).status == 200
    assert (await post(locked, body_of("x"), X_Tersely_Key=who.key[:-1] + "!")).status == 401
    wrong = who.key[:-1] + ("a" if who.key[-1] != "a" else "b")
    assert (await post(locked, body_of("x"), X_Tersely_Key=wrong)).status == 401


async def test_a_revoked_key_stops_working(locked: Service, keyring: Store):
    who, other = await tenant(keyring), await tenant(keyring)
    assert (await post(locked, body_of("x"), X_Tersely_Key=who.key)).status == 200
    assert not await keys.revoke(keyring, other.name, who.key_id, datetime.now(UTC))
    assert (await post(locked, body_of("x"), X_Tersely_Key=who.key)).status == 200

    assert await keys.revoke(keyring, who.name, who.key_id, datetime.now(UTC))

    async def is_out() -> bool:
        return (await post(locked, body_of("x"), X_Tersely_Key=who.key)).status == 401

    # Two seconds, times three for a busy machine.
    await eventually(is_out, 6)
    assert (await post(locked, body_of("x"), X_Tersely_Key=other.key)).status == 200


async def test_a_key_that_was_revoked_while_nobody_used_it_does_not_work_once(locked: Service, keyring: Store):
    who = await tenant(keyring)
    assert (await post(locked, body_of("x"), X_Tersely_Key=who.key)).status == 200
    assert await keys.revoke(keyring, who.name, who.key_id, datetime.now(UTC))
    await asyncio.sleep(auth.CHECK_AT_LAST + 0.1)
    assert (await post(locked, body_of("x"), X_Tersely_Key=who.key)).status == 401


async def test_many_tenants_at_once_stay_apart(locked: Service, model: Model, keyring: Store, key: str):
    tenants = [await tenant(keyring) for _ in range(8)]

    async def talk(who: Tenant) -> None:
        for number in range(4):
            user = f"{key}-{who.name}-{number}"
            answer = await post(
                locked, body_of(f"{who.name} says {number}", user=user), X_Tersely_Key=who.key, X_Tersely_Session=key
            )
            assert answer.status == 200
            sent = model.requests(user)[-1].body.decode()
            assert not [other for other in tenants if other is not who and other.name in sent.replace(user, "")]

    await asyncio.gather(*map(talk, tenants))

    assert await owners(locked, key) == {who.name: 8 for who in tenants}
