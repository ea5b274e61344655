"""Characters that Postgres or a log cannot take: every route of the OpenAPI document refuses them, none breaks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tersely.domain.errors import InvalidRequest
from tests.api.conftest import Api, NewKey, serve
from tests.conftest import Database
from tests.support.stores import open_store

DOCUMENT = json.loads((Path(__file__).resolve().parents[2] / "openapi" / "openapi.json").read_text())
METHODS = ("get", "post", "put", "patch", "delete")
OPERATIONS = [
    (method, path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    if method in METHODS and path.startswith("/api")
]
ENCODED = {"nul": "%00", "nul inside": "a%00b", "bell": "a%07", "newline": "a%0ab", "escape": "%1b%5b0m"}
TEXTS = {"nul": "a\\u0000b", "lone surrogate": "a\\ud800b", "both": "\\u0000\\udfff"}


def filled(path: str, value: str = "t1") -> str:
    """The path with something in place of every parameter."""
    return re.sub(r"\{[^}]+\}", value, path)


def example(operation: dict[str, Any]) -> Any:
    """A valid body, where the operation takes one."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return None
    schema = content["schema"]
    reference = schema.get("anyOf", [schema])[0]["$ref"].rsplit("/", 1)[1]
    return DOCUMENT["components"]["schemas"][reference]["examples"][0]


@pytest.mark.parametrize("name", ENCODED)
async def test_in_a_path_they_are_422(api: Api, name: str) -> None:
    for method, path, operation in OPERATIONS:
        if "{" not in path:
            continue
        response = await api.http.request(method, filled(path, ENCODED[name]), json=example(operation))
        where = f"{method} {path}"
        assert response.status_code == 422, f"{where}: {response.status_code} {response.text}"
        assert response.headers["content-type"] == "application/problem+json", where


@pytest.mark.parametrize("name", ENCODED)
async def test_in_a_query_they_are_422(api: Api, name: str) -> None:
    for method, path, operation in OPERATIONS:
        for parameter in operation.get("parameters", []):
            if parameter["in"] != "query":
                continue
            target = f"{filled(path)}?{parameter['name']}={ENCODED[name]}"
            response = await api.http.request(method, target, json=example(operation))
            assert response.status_code == 422, f"{method} {target}: {response.status_code} {response.text}"


@pytest.mark.parametrize("name", TEXTS)
async def test_in_a_body_nothing_breaks(api: Api, name: str) -> None:
    """Content may hold any character; names and ids may not."""
    for method, path, operation in OPERATIONS:
        body = example(operation)
        for changed in _changed(body, "\0\0here\0\0") if body is not None else ():
            sent = json.dumps(changed).replace(json.dumps("\0\0here\0\0")[1:-1], TEXTS[name])
            response = await api.http.request(
                method, filled(path), content=sent.encode(), headers={"content-type": "application/json"}
            )
            assert response.status_code < 500, f"{method} {path} {sent}: {response.status_code}"


def _changed(value: Any, text: str) -> list[Any]:
    """Copies of a value, each with one of its strings (or its members' names) replaced."""
    if isinstance(value, str):
        return [text]
    if isinstance(value, list):
        return [[*value[:n], each, *value[n + 1 :]] for n, item in enumerate(value) for each in _changed(item, text)]
    if isinstance(value, dict):
        found: list[Any] = [{**value, name: each} for name, item in value.items() for each in _changed(item, text)]
        return [*found, {**value, text: "x"}]
    return []


@pytest.mark.parametrize("header", ["X-Tersely-Session", "X-Tersely-Strategy", "X-Tersely-Epoch", "X-Tersely-Key"])
@pytest.mark.parametrize("value", [b"a\xffb", b"\xed\xa0\x80", b"a\x7fb", "é".encode(), b"a" * 9000])
async def test_bad_characters_in_a_header_cause_no_server_error(api: Api, header: str, value: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1beta/models/m:generateContent"):
        response = await api.http.post(
            path, content=body, headers={b"content-type": b"application/json", header.encode(): value}
        )
        assert response.status_code in (400, 502), response.text  # 502: nobody is behind this service


async def test_in_a_key_or_an_idempotency_key(database: Database, new_tenant: NewKey) -> None:
    keys = await new_tenant("somebody")
    async with serve(database.dsn, auth="keys") as locked:
        for value in (b"tsk_\xff", b"tsk_" + b"\x7f" * 40):
            refused = await locked.http.get("/api/sessions", headers={b"x-tersely-key": value})
            assert refused.status_code == 401
        for value in (b"\xff\xfe", b"a\x7fb", b"\xed\xa0\x80"):
            answer = await locked.http.post(
                "/api/sessions/s/messages",
                json={"messages": [{"role": "user", "content": "x"}]},
                headers={b"idempotency-key": value, **{name.encode(): text.encode() for name, text in keys.items()}},
            )
            assert answer.status_code < 500


@pytest.mark.parametrize("value", ["%00", "a%00b", "%1b"])
@pytest.mark.parametrize(
    "path",
    ["/v1/models/{}", "/v1/responses/{}", "/v1/files/{}", "/v1beta/models/{}:generateContent", "/v1/messages/{}"],
)
async def test_in_a_providers_path_they_are_400(api: Api, path: str, value: str) -> None:
    response = await api.http.post(path.format(value), content=b'{"contents":[]}')
    assert response.status_code == 400
    assert response.json()["error"]


async def test_bad_characters_in_other_routes(api: Api) -> None:
    for path in ("/%00", "/docs%00", "/metrics?x=%00", "/nothing/%00", "/mcp?%00=1", "/api/%00", "/healthz%00"):
        response = await api.http.get(path)
        assert response.status_code in (200, 404, 405, 406, 422), f"{path}: {response.status_code}"
        assert quote("\0") not in response.text or response.status_code in (404, 422)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
async def test_unstorable_characters_are_the_callers_error(database: Database, text: str) -> None:
    """Whatever route brings such a text: it is the caller's fault, and the database is not away."""
    async with open_store(database) as store:
        with pytest.raises(InvalidRequest, match="character"):
            async with store.reading("default") as connection:
                await connection.fetchval("SELECT $1::text", text)
        await store.ping()
