"""The document in the repository is the one that the code gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from app.api.openapi import openapi_document
from app.main import build
from app.settings import Settings
from tests.api.conftest import Api

COMMITTED = Path(__file__).resolve().parents[2] / "openapi" / "openapi.json"
CONTRACT = Path(__file__).resolve().parents[1].parent.parent / "shared" / "CONTRACT.md"


@pytest.fixture
def document() -> Any:
    return json.loads(openapi_document(build(Settings(), database_url="postgresql://").rest))


def test_the_committed_document_is_current() -> None:
    generated = openapi_document(build(Settings(), database_url="postgresql://").rest)
    assert COMMITTED.read_bytes() == generated, "run `make openapi`"


def test_every_route_is_described(document: dict) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["tags"], where
            if path.startswith("/api/"):
                assert {"401", "404", "422", "503"} <= set(operation["responses"]), where
                assert list(operation["responses"]["422"]["content"]) == ["application/problem+json"], where
                body = operation.get("requestBody")
                if body:
                    said = body["content"]["application/json"]["schema"]
                    name = said.get("anyOf", [said])[0]["$ref"].rsplit("/", 1)[1]  # a body may be optional
                    schema = document["components"]["schemas"][name]
                    assert schema["examples"], where
                    assert schema["additionalProperties"] is False, where


def test_the_proxy_s_headers_are_the_contract_s(document: dict) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]
    asked = {parameter["name"] for parameter in chat["parameters"]}
    answered = set(chat["responses"]["200"]["headers"])
    assert {"X-Tersely-Session", "X-Tersely-Strategy", "X-Tersely-Epoch", "X-Tersely-Bypass", "X-Tersely-Key"} == asked
    assert {"X-Tersely-Session-Source", "X-Tersely-Context", "X-Tersely-Tokens-After"} < answered
    if CONTRACT.is_file():
        named = set(re.findall(r"X-Tersely-[A-Za-z-]+", CONTRACT.read_text()))
        assert named == asked | answered


def test_references_lead_somewhere(document: dict) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names <= set(document["components"]["schemas"])


async def test_it_is_served_with_its_pages(api: Api) -> None:
    served = await api.http.get("/openapi.json")
    assert served.json()["paths"]["/v1/chat/completions"]["post"]["tags"] == ["proxy"]
    assert "swagger" in (await api.http.get("/docs")).text.lower()


async def test_answers_have_the_described_shape(api: Api) -> None:
    """Every answer of a session with something in it validates against its model."""
    from app.api.rest import schemas

    await api.append("s", {"role": "user", "content": "q"}, {"role": "assistant", "content": "a <terse>b</terse>"})
    shapes: dict[str, type[BaseModel]] = {
        "": schemas.SessionOut,
        "/messages": schemas.MessagePage,
        "/messages?view=all": schemas.MessagePage,
        "/turns": schemas.TurnPage,
        "/turns/t1": schemas.TurnOut,
        "/terse": schemas.TersePage,
        "/export": schemas.ExportOut,
        "/stats": schemas.StatsOut,
        "/events": schemas.EventPage,
        "/state": schemas.StateOut,
        "/state/history": schemas.StatePage,
        "/scratchpad": schemas.ScratchpadOut,
    }
    for path, model in shapes.items():
        answer = (await api.http.get(f"/api/sessions/s{path}")).json()
        model.model_validate(answer)
        assert set(answer) <= set(model.model_fields), path
    asked: list[tuple[str, dict[str, str], type[BaseModel]]] = [
        ("context", {}, schemas.ContextOut),
        ("search", {"mode": "search", "query": "q"}, schemas.SearchOut),
    ]
    for path, wish, model in asked:
        answer = (await api.http.post(f"/api/sessions/s/{path}", json=wish)).json()
        assert set(answer) == set(model.model_validate(answer).model_fields_set), path
