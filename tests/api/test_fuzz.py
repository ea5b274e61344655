"""Generated requests to every operation of the OpenAPI document: no server error, and only what the document describes.

The short form, with the same examples at every run; `HYPOTHESIS_PROFILE=random` looks for others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tersely.api.openapi.proxy_routes import ALTERNATIVES
from tests.conftest import Database
from tests.support.services import Service, serve
from tests.support.upstreams import scripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DOCUMENT = json.loads((Path(__file__).resolve().parents[2] / "openapi" / "openapi.json").read_bytes())
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
ALTERNATIVES_OF = {
    (path, method): operation["responses"].get("200", {}).get(ALTERNATIVES, {})
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
}
"""Media types that an operation answers with if it is asked to: the document describes one type for each status."""
EXAMPLES = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "random" else 6
TURNS = [{"role": "user", "content": "Which port?"}, {"role": "assistant", "content": "8484 <terse>port</terse>"}]


@pytest.fixture(scope="module")
def service(store: Database) -> Iterator[Service]:
    """A service with a session for requests that hit one."""
    with scripted() as model, serve(store, model.url) as running:
        httpx.post(f"{running.url}/api/sessions/0/messages", json={"messages": TURNS}, timeout=30)
        yield running


def takes_wrong_values(operation: dict) -> bool:
    """Return whether requests can be wrong in more than their path, which is free text nearly everywhere."""
    return "requestBody" in operation or any(each["in"] == "query" for each in operation.get("parameters", []))


CASES = [
    pytest.param(method.upper(), path, mode, id=f"{operation['operationId']}-{mode.value}")
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or takes_wrong_values(operation)
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_an_operation_answers_as_described(service: Service, method: str, path: str, mode: GenerationMode) -> None:
    statuses: list[int] = []

    @given(case=SCHEMA[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    def send(case: schemathesis.Case) -> None:
        response = case.call(base_url=service.url, timeout=30)
        statuses.append(response.status_code)
        media_type = response.headers.get("content-type", [""])[0].partition(";")[0]
        is_alternative = media_type in ALTERNATIVES_OF[path, method.lower()]
        case.validate_response(response, checks=list(CHECKS[:2] if is_alternative else CHECKS))

    send()
    assert statuses, "no request was sent"
    assert max(statuses) < 500


def test_every_operation_is_tried() -> None:
    tried = {(case.values[0], case.values[1]) for case in CASES}
    assert len(tried) == sum(map(len, DOCUMENT["paths"].values())) > 80
