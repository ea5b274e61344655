"""A client's release that sends something new: its calls pass, and the metrics say so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tersely.fakellm.scripted import ScriptedModel
from tests.conftest import Database
from tests.support.http import post
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

NEW = {
    "model": "m",
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "system", "content": "# Environment", "output_config": {"effort": "medium"}},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}, "of_tomorrow": 1}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "of_tomorrow": 1}]},
        {"role": "system", "content": [], "output_config": {"effort": "medium"}},
        {"role": "user", "content": [{"type": "text", "text": "go on"}], "of_tomorrow": {}},
    ],
}


@pytest.fixture(scope="module")
def lenient() -> Iterator[Model]:
    """The scripted model as `serve --upstream scripted` runs it."""
    with scripted() as model:
        model.state.takes_unknown = True
        yield model


@pytest.fixture(scope="module", params=["slim", "full"])
def there(request: pytest.FixtureRequest, store: Database, lenient: Model) -> Iterator[Service]:
    with serve(store, lenient.url, strategy=request.param) as running:
        yield running


async def _counted(service: Service) -> dict[str, float]:
    text = (await post(service, b"", method="GET", path="/metrics")).body.decode()
    found = re.findall(r'tersely_unknown_fields_total\{block="([^"]*)",dialect="anthropic"\} (\S+)', text)
    return {block: float(count) for block, count in found}


async def test_unknown_fields_pass_and_are_counted(there: Service, lenient: Model, key: str) -> None:
    before = await _counted(there)

    answer = await post(there, json.dumps(NEW).encode(), path="/v1/messages", X_Tersely_Session=key)

    assert answer.status == 200, answer.body
    after = await _counted(there)
    counted = {block: after[block] - before[block] for block in after if after[block] > before[block]}
    assert counted == {"tool_use": 1, "tool_result": 1, "message:user": 1}
    assert lenient.state.unknown.keys() == {(block, "of_tomorrow") for block in counted}
    sent = json.loads(lenient.last.body)["messages"]
    assert [message.get("output_config") for message in sent if message["role"] == "system"][:1] == [
        {"effort": "medium"}
    ]


async def test_the_strict_model_of_tests_still_refuses_them(plain: Service, model: Model, key: str) -> None:
    assert not ScriptedModel().takes_unknown
    answer = await post(plain, json.dumps(NEW).encode(), path="/v1/messages", X_Tersely_Session=key)
    assert answer.status == 400
    assert b"of_tomorrow: Extra inputs are not permitted" in answer.body
