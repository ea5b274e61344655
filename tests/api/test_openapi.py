"""The document in the repository is the one that the code gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel

from tersely.api.openapi.document import openapi_document
from tersely.api.rest.schemas.calls import CallPage, EpochPage
from tersely.api.rest.schemas.contexts import ContextOut
from tersely.api.rest.schemas.messages import MessagePage
from tersely.api.rest.schemas.notes import ScratchpadOut, StateOut, StatePage, TersePage
from tersely.api.rest.schemas.search import SearchOut
from tersely.api.rest.schemas.sessions import SessionOut
from tersely.api.rest.schemas.stats import EventPage, StatsOut
from tersely.api.rest.schemas.transfer import ExportOut
from tersely.api.rest.schemas.turns import TurnOut, TurnPage
from tersely.api.routes import PREFIXES, find_target
from tersely.composition.application import build
from tersely.dialects.dialect import ErrorDescription
from tersely.dialects.registry import DIALECTS
from tersely.settings import Settings
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
                    body_schema = body["content"]["application/json"]["schema"]
                    name = body_schema.get("anyOf", [body_schema])[0]["$ref"].rsplit("/", 1)[
                        1
                    ]  # a body may be optional
                    schema = document["components"]["schemas"][name]
                    assert schema["examples"], where
                    assert schema["additionalProperties"] is False, where


def test_the_proxy_s_headers_are_the_contract_s(document: dict) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]
    request_headers = {parameter["name"] for parameter in chat["parameters"]}
    request_headers.add(document["components"]["securitySchemes"]["TerselyKey"]["name"])
    answered = set(chat["responses"]["200"]["headers"])
    assert {
        "X-Tersely-Session",
        "X-Tersely-Strategy",
        "X-Tersely-Epoch",
        "X-Tersely-Bypass",
        "X-Tersely-Key",
    } == request_headers
    assert {"X-Tersely-Session-Source", "X-Tersely-Context", "X-Tersely-Tokens-After"} < answered
    if CONTRACT.is_file():
        named = set(re.findall(r"X-Tersely-[A-Za-z-]+", CONTRACT.read_text()))
        assert named == request_headers | answered


# A path's parameters in an address.
FILLED = {"id": "resp_1", "model": "m-1", "path": "embeddings/x"}


def test_each_described_route_of_the_proxy_is_one(document: dict) -> None:
    described = {(path, method) for path, way in document["paths"].items() for method in way if is_proxy(path)}
    assert ("/", "head") in described
    for path, method in described - {("/", "head")}:
        address = path.format(**FILLED)
        target = find_target(method.upper(), address, address, {})
        operation = document["paths"][path][method]
        assert target is not None, path
        assert target.is_call == ("X-Tersely-Session" in operation["responses"]["200"]["headers"]), path
        assert target.streams == ("streamGenerateContent" in path)
        error = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        body = json.loads(
            DIALECTS[target.dialect].error_body(ErrorDescription(message="no", type="invalid_request_error"))
        )
        assert is_valid(body, document["components"]["schemas"][error]), path
        others = {"OpenAIError", "AnthropicError", "GeminiError"} - {error}
        assert not any(is_valid(body, document["components"]["schemas"][other]) for other in others), path


def is_valid(body: object, schema: dict) -> bool:
    return bool(OAS31Validator(schema).is_valid(body))


def is_proxy(path: str) -> bool:
    return path == "/" or path.startswith(PREFIXES)


ADDRESSES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses"),
    ("POST", "/v1/responses/compact"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("POST", "/v1/embeddings"),
    ("DELETE", "/v1/files/f"),
    ("POST", "/v1beta/models/m:generateContent"),
    ("POST", "/v1beta/models/m:streamGenerateContent"),
    ("POST", "/v1beta/models/m:countTokens"),
    ("GET", "/v1beta/models"),
    ("GET", "/v1beta/models/m"),
    ("POST", "/upload/v1beta/files"),
    ("POST", "/upload/v1/files"),
    ("GET", "/download/v1beta/files/f:download"),
    ("POST", "/v1internal:generateContent"),
    ("POST", "/v1internal:streamGenerateContent"),
    ("POST", "/v1internal:countTokens"),
]


@pytest.mark.parametrize(("method", "address"), ADDRESSES)
def test_each_route_of_the_proxy_is_described(document: dict, method: str, address: str) -> None:
    target = find_target(method, address, address, {})
    assert target is not None
    fitting = [
        path
        for path, operations in document["paths"].items()
        if method.lower() in operations and re.fullmatch(as_pattern(path), address)
    ]
    assert fitting
    if target.reply_id:
        assert any("{id}" in path for path in fitting)
    if target.is_call:
        assert any("{path}" not in path for path in fitting)


def as_pattern(path: str) -> str:
    """Return a pattern that matches a described path."""
    pattern = re.escape(path)
    for name, fits in (("path", ".+"), ("model", "[^/:]+"), ("id", "[^/]+")):
        pattern = pattern.replace(rf"\{{{name}\}}", fits)
    return pattern


def test_every_dialect_s_calls_are_described() -> None:
    targets = [find_target("POST", address, address, {}) for _, address in ADDRESSES]
    assert {target.dialect for target in targets if target is not None} == set(DIALECTS)


def test_the_document_is_valid(document: dict) -> None:
    OpenAPIV31SpecValidator(document).validate()
    for operations in document["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "example" in body:
                assert is_valid(body["example"], body["schema"])


def test_operation_ids_are_plain_and_each_status_has_one_type_of_answer(document: dict) -> None:
    operations = [each for way in document["paths"].values() for each in way.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    for operation in operations:
        assert re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", operation["operationId"])
        assert "_api_" not in operation["operationId"]
        for status, response in operation["responses"].items():
            assert len(response.get("content", {})) <= 1, (operation["operationId"], status)


def test_keys_are_security_schemes_and_open_routes_need_none(document: dict) -> None:
    assert document["servers"][0]["url"] == "/"
    schemes = document["components"]["securitySchemes"]
    assert {name for each in document["security"] for name in each} == set(schemes) == {"TerselyKey", "BearerKey"}
    open_paths = {
        path for path, way in document["paths"].items() for each in way.values() if each.get("security") == []
    }
    assert open_paths == {"/", "/healthz", "/readyz", "/metrics"}


async def test_somebody_is_there_and_no_websocket(api: Api) -> None:
    assert (await api.http.head("/")).status_code == 200
    upgrade = {"connection": "upgrade", "upgrade": "websocket"}
    refused = await api.http.get("/v1/responses", headers=upgrade)
    assert refused.status_code == 426
    assert refused.json()["error"]["message"]


def test_references_lead_somewhere(document: dict) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names <= set(document["components"]["schemas"])


async def test_document_is_served_with_its_pages(api: Api) -> None:
    served = await api.http.get("/openapi.json")
    assert served.json()["paths"]["/v1/chat/completions"]["post"]["tags"] == ["proxy"]
    listed = (await api.http.get("/docs")).text
    for path, methods in served.json()["paths"].items():
        for method, operation in methods.items():
            assert f'href="/docs/{operation["operationId"]}"' in listed, (method, path)
            page = await api.http.get(f"/docs/{operation['operationId']}")
            assert page.status_code == 200, (method, path)
            assert path in page.text
            for parameter in operation.get("parameters", ()):
                assert f'name="{parameter["name"]}"' in page.text
    assert (await api.http.get("/docs/nothing")).status_code == 404


async def test_answers_have_the_described_shape(api: Api) -> None:
    """Every answer of a session with something in it validates against its model."""

    await api.append("s", {"role": "user", "content": "q"}, {"role": "assistant", "content": "a <terse>b</terse>"})
    shapes: dict[str, type[BaseModel]] = {
        "": SessionOut,
        "/messages": MessagePage,
        "/messages?view=all": MessagePage,
        "/turns": TurnPage,
        "/turns/t1": TurnOut,
        "/terse": TersePage,
        "/export": ExportOut,
        "/stats": StatsOut,
        "/events": EventPage,
        "/state": StateOut,
        "/state/history": StatePage,
        "/scratchpad": ScratchpadOut,
        "/calls": CallPage,
        "/epochs": EpochPage,
    }
    for path, model in shapes.items():
        answer = (await api.http.get(f"/api/sessions/s{path}")).json()
        model.model_validate(answer)
        assert set(answer) <= set(model.model_fields), path
    requests: list[tuple[str, dict[str, str], type[BaseModel]]] = [
        ("context", {}, ContextOut),
        ("search", {"mode": "search", "query": "q"}, SearchOut),
    ]
    for path, options, model in requests:
        answer = (await api.http.post(f"/api/sessions/s/{path}", json=options)).json()
        assert set(answer) == set(model.model_validate(answer).model_fields_set), path
