"""Limits in the OpenAPI document are those of the code: the last value within each is accepted, the next refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Api, serve
from tests.conftest import Database

DOCUMENT = json.loads((Path(__file__).resolve().parents[2] / "openapi" / "openapi.json").read_text())
ADMIN_KEY = "an-admin-key-of-the-tests"
SESSION = "described"
# Texts of a form that a text of any length does not have: days, times, turn ids, cursors.
FORMED = {"day", "created_at", "turnId", "after", "since", "until", "strategy", "epoch", "tools", "text", "parent"}
# Lists beyond this are tried by the tests of large requests.
LONGEST_LIST = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """A value of one field of an operation, at its limit or just beyond."""

    method: str
    path: str
    where: str
    field: str
    value: Any
    is_within: bool

    def describe(self) -> str:
        size = len(self.value) if isinstance(self.value, str | list) else self.value
        return f"{self.method} {self.path} {self.field}={size}"


def values(schema: dict[str, Any], field: str) -> Iterator[tuple[Any, bool]]:
    """Yield values at the limits of a field, each with whether it is within."""
    for kind in schema.get("anyOf", [schema]):
        limits = {**schema, **kind}
        if kind.get("type") in ("integer", "number"):
            for name, beyond in (("maximum", 1), ("minimum", -1)):
                if name in limits:
                    edge = int(limits[name])
                    yield edge, True
                    # The next number is not always another one in JSON's floats.
                    yield edge + beyond * max(1, abs(edge) // 2**52), False
        if kind.get("type") == "string" and "maxLength" in limits and not kind.get("format"):
            if field not in FORMED:
                yield "a" * limits["maxLength"], True
            yield "a" * (limits["maxLength"] + 1), False
            if limits.get("minLength"):
                yield "a" * (limits["minLength"] - 1), False
        if kind.get("type") == "array" and limits.get("maxItems", LONGEST_LIST + 1) <= LONGEST_LIST:
            longest = limits["items"].get("maxLength", 8)
            items = [f"{number:02}" + "a" * (longest - 2) for number in range(limits["maxItems"] + 1)]
            if field not in FORMED:
                yield items[:-1], True
                if "maxLength" in limits["items"]:
                    yield [items[0] + "a"], False
            yield items, False


def cases() -> Iterator[Case]:
    for path, operations in DOCUMENT["paths"].items():
        if not path.startswith("/api/"):
            continue
        for method, operation in operations.items():
            for each in operation.get("parameters", []):
                for value, is_within in values(each["schema"], each["name"]):
                    yield Case(method=method, path=path, where=each["in"], field=each["name"], value=value,
                               is_within=is_within)  # fmt: skip
            body = operation.get("requestBody")
            if body:
                schema = body["content"]["application/json"]["schema"]
                name = schema.get("anyOf", [schema])[0]["$ref"].rsplit("/", 1)[1]
                for field, described in DOCUMENT["components"]["schemas"][name]["properties"].items():
                    for value, is_within in values(described, field):
                        yield Case(method=method, path=path, where="body", field=field, value=value,
                                   is_within=is_within)  # fmt: skip


@pytest.fixture
async def ready(database: Database) -> AsyncIterator[Api]:
    async with serve(database.dsn, admin_key=ADMIN_KEY) as running:
        await running.append(SESSION, {"role": "user", "content": "hello"})
        await running.append(SESSION, {"role": "assistant", "content": "hello to you"})
        yield running


async def answer_to(case: Case, api: Api) -> tuple[int, str]:
    """The status of the answer, and the field that it finds fault with."""
    places = {"session_id": SESSION, "seq": "1", "number": "1", "turn": "t1", "tenant": "default", "key_id": "a" * 16}
    query = {case.field: case.value} if case.where == "query" else {}
    headers = {"x-tersely-admin-key": ADMIN_KEY, "authorization": f"Bearer {ADMIN_KEY}"}
    if case.where == "path":
        places[case.field] = str(case.value)
    elif case.where == "header":
        headers[case.field] = case.value
    body = None
    if "requestBody" in DOCUMENT["paths"][case.path][case.method]:
        schema = DOCUMENT["paths"][case.path][case.method]["requestBody"]["content"]["application/json"]["schema"]
        name = schema.get("anyOf", [schema])[0]["$ref"].rsplit("/", 1)[1]
        body = dict(DOCUMENT["components"]["schemas"][name]["examples"][0])
        if case.where == "body":
            body[case.field] = case.value
    for name, value in places.items():
        if f"{{{name}}}" in case.path:
            case = Case(**{**case.__dict__, "path": case.path.replace(f"{{{name}}}", value)})
    done = await api.http.request(case.method, case.path, params=query, headers=headers, json=body)
    problem = done.json() if "problem" in done.headers.get("content-type", "") else {}
    return done.status_code, str(problem.get("field", ""))


async def test_values_at_the_described_limits_are_accepted_and_those_beyond_refused(ready: Api) -> None:
    wrong = []
    tried = 0
    for case in cases():
        if "/events" in case.path and case.is_within:
            continue  # a stream without an end
        tried += 1
        status, field = await answer_to(case, ready)
        is_refused = status in (413, 422) and case.field.lower() in field.lower()
        if is_refused == case.is_within or status >= 500:
            wrong.append(f"{case.describe()}: {status} {field}")
    assert not wrong
    assert tried > 200
