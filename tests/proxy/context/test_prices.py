"""A call is stored with its cost: the price is that of its model, and each kind of input has a price of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.services import Service, serve
from tests.support.upstreams import Model

PRICES = {
    "claude-priced": {"input": 1000, "output": 0, "cached": 100, "write": 1250},
    "anthropic/claude-priced": {"input": 1000, "output": 0, "cached": 100, "write": 1250},
    "my-deployment": {"input": 1000, "output": 1000},
    "dated-2026-01-01": {"input": 2000, "output": 2000},
}


@pytest.fixture(scope="module")
def priced(store: Database, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path: Path = tmp_path_factory.mktemp("prices") / "prices.json"
    path.write_text(json.dumps(PRICES))
    with serve(store, model.url, prices=path) as running:
        yield running


def costs(service: Service, path: str, body: dict[str, Any], key: str) -> tuple[dict[str, float] | None, ...]:
    """The money of the session's calls, after one more."""
    answer = httpx.post(f"{service.url}{path}", json=body, headers={"X-Script": key}, timeout=60)
    assert answer.status_code == 200, answer.text
    session = answer.headers["x-tersely-session"]
    calls = httpx.get(f"{service.url}/api/sessions/{session}/calls", timeout=60).json()["items"]
    return tuple(each["money"] for each in sorted(calls, key=lambda each: each["number"]))


def ask_claude(service: Service, key: str, *texts: str) -> tuple[dict[str, float] | None, ...]:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    body = {"model": "claude-priced", "max_tokens": 9, "messages": messages}
    return costs(service, "/v1/messages", body, key)


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"cache_creation_input_tokens": 0}, 600 * 1000),
        ({"cache_creation_input_tokens": 400}, 600 * 1000 + 400 * 1250),
        (
            {"cache_creation_input_tokens": 400, "cache_creation": {"ephemeral_1h_input_tokens": 400}},
            600 * 1000 + 400 * 2000,
        ),
        ({"cache_creation_input_tokens": 0, "cache_read_input_tokens": 300}, 600 * 1000 + 300 * 100),
        ({}, 600 * 1250),
    ],
)
def test_input_costs_the_write_price_where_it_is_written(
    priced: Service, model: Model, key: str, usage: dict[str, Any], cost: float
) -> None:
    """Nothing was shortened: the full history would have cost the same, so that nothing was saved."""
    model.script(
        key, ScriptedReply(message={"content": "hi"}, usage={"input_tokens": 600, "output_tokens": 1, **usage})
    )
    (money,) = ask_claude(priced, key, f"a question {key}")
    assert money is not None
    assert money["sent"] == pytest.approx(cost / 1e6)
    assert money["full"] == pytest.approx(cost / 1e6)


@pytest.mark.parametrize(
    ("details", "cost"),
    [
        ({"cached_tokens": 100, "cache_write_tokens": 400}, 100 * 100 + 400 * 1250 + 500 * 1000),
        ({"cached_tokens": 100, "cache_write_tokens": 0}, 100 * 100 + 900 * 1000),
        ({"cached_tokens": 100}, 100 * 100 + 900 * 1250),
        ({"cached_tokens": 100, "cache_write_tokens": "400"}, 100 * 100 + 900 * 1250),
        ({"cached_tokens": 100, "cache_write_tokens": 2_000_000_000}, 100 * 100 + 900 * (1000 + 4 * 250)),
    ],
)
def test_writes_that_openrouter_reports_cost_the_write_price(
    priced: Service, model: Model, key: str, details: dict[str, Any], cost: float
) -> None:
    usage = {"prompt_tokens": 1_000, "completion_tokens": 1, "total_tokens": 1_001, "prompt_tokens_details": details}
    model.script(key, ScriptedReply(message={"content": "hi"}, usage=usage))
    body = {"model": "anthropic/claude-priced", "messages": [{"role": "user", "content": f"a question {key}"}]}
    (money,) = costs(priced, "/v1/chat/completions", body, key)
    assert money is not None
    assert money["sent"] == pytest.approx(cost / 1e6)


def test_a_history_that_is_not_written_saves_no_writes(priced: Service, model: Model, key: str) -> None:
    """A client that marks nothing for the cache pays no surcharge, whether its history is shortened or not."""
    usage = {"input_tokens": 600, "cache_creation_input_tokens": 0, "output_tokens": 1}
    model.script(key, *(ScriptedReply(message={"content": "hi"}, usage=usage) for _ in range(2)))
    ask_claude(priced, key, f"a question {key} " * 50)
    *_, money = ask_claude(priced, key, f"a question {key} " * 50, "hi", "another question")
    assert money is not None
    assert money["sent"] == pytest.approx(0.6)
    assert money["full"] < 0.6


@pytest.mark.parametrize("requested", ["my-deployment", "some-deployment"])
def test_a_deployment_costs_its_own_price_or_that_of_its_model(
    priced: Service, model: Model, key: str, requested: str
) -> None:
    usage = {"prompt_tokens": 500, "completion_tokens": 500, "total_tokens": 1000}
    whole = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "dated-2026-01-01", "usage": usage,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    }  # fmt: skip
    model.script(key, ScriptedReply(body=json.dumps(whole).encode()))
    body = {"model": requested, "messages": [{"role": "user", "content": f"a question {key}"}]}
    (money,) = costs(priced, "/v1/chat/completions", body, key)
    assert money is not None
    assert money["sent"] == pytest.approx(1.0 if requested == "my-deployment" else 2.0)
