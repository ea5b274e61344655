"""Calls that name their session but cannot be read may be deltas: none goes to the model without its history."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from tests.support.dialect_wires import WIRES
from tests.support.http import Answered, body_of, post
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model

LISTS = {"openai_chat": "messages", "openai_responses": "input", "anthropic": "messages"}
HISTORY, QUESTION = "the history of the session", "the new question"


def with_messages(dialect: str, messages: Any, **more: Any) -> bytes:
    """Write a request with these messages in place of a user's text."""
    body = json.loads(WIRES[dialect].body(QUESTION, **more))
    inner = body["request"] if dialect == "gemini_gca" else body
    inner[LISTS.get(dialect, "contents")] = messages
    return json.dumps(body).encode()


UNREADABLE = [
    *((dialect, messages) for dialect in WIRES for messages in ([], [None], [7])),
    *((dialect, [{"role": "wizard", "content": QUESTION}]) for dialect in LISTS),
    *((dialect, [{"content": QUESTION}]) for dialect in ("openai_chat", "anthropic")),
    *((dialect, [{"role": "wizard", "parts": [{"text": QUESTION}]}]) for dialect in ("gemini", "gemini_gca")),
    *((dialect, [QUESTION]) for dialect in ("gemini", "gemini_gca")),
]


async def begin(service: Service, key: str, dialect: str = "openai_chat") -> None:
    assert (await WIRES[dialect].send(service, HISTORY, X_Tersely_Session=key)).status == 200


async def check_refusal(service: Service, model: Model, key: str, calls: int, answer: Answered) -> str:
    """Check that nothing was sent or stored, and return the message of the error."""
    assert answer.status == 400
    assert model.state.calls == calls
    assert [each.role for each in await messages_by_number(service, key)] == ["user", "assistant"]
    message: str = answer.json["error"]["message"]
    assert "X-Tersely-Session" in message
    return message


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "zstd", "identity, gzip"])
async def test_packed_call_of_a_named_session_is_refused(
    service: Service, model: Model, key: str, dialect: str, encoding: str
) -> None:
    await begin(service, key, dialect)
    calls = model.state.calls
    pack = zlib.compress if encoding == "deflate" else gzip.compress

    answer = await post(
        service,
        pack(WIRES[dialect].body(QUESTION)),
        path=WIRES[dialect].path,
        Content_Encoding=encoding,
        X_Tersely_Session=key,
    )

    assert "Content-Encoding" in await check_refusal(service, model, key, calls, answer)


@pytest.mark.parametrize("encoding", ["identity", "IDENTITY", "", "identity, identity"])
async def test_call_that_is_not_packed_gets_its_history(
    service: Service, model: Model, key: str, encoding: str
) -> None:
    await begin(service, key)

    answer = await post(service, body_of(QUESTION), Content_Encoding=encoding, X_Tersely_Session=key)

    assert (answer.status, answer.session) == (200, key)
    assert HISTORY.encode() in model.last.body
    assert len(await messages_by_number(service, key)) == 4


@pytest.mark.parametrize(("dialect", "messages"), UNREADABLE, ids=json.dumps)
async def test_unreadable_messages_of_a_named_session_are_refused(
    service: Service, model: Model, key: str, dialect: str, messages: list[Any]
) -> None:
    await begin(service, key, dialect)
    calls = model.state.calls

    answer = await post(service, with_messages(dialect, messages), path=WIRES[dialect].path, X_Tersely_Session=key)

    await check_refusal(service, model, key, calls, answer)


async def test_reply_that_comes_later_is_refused_in_a_named_session(service: Service, model: Model, key: str) -> None:
    await begin(service, key, "openai_responses")
    calls = model.state.calls

    answer = await post(
        service, WIRES["openai_responses"].body(QUESTION, background=True), path="/v1/responses", X_Tersely_Session=key
    )

    assert "the reply is fetched later" in await check_refusal(service, model, key, calls, answer)


async def test_error_quotes_little_of_an_unreadable_request(service: Service, model: Model, key: str) -> None:
    await begin(service, key)
    calls = model.state.calls

    answer = await post(service, body_of({"role": "w" * 50_000, "content": QUESTION}), X_Tersely_Session=key)

    assert len(await check_refusal(service, model, key, calls, answer)) < 1_000


@pytest.mark.parametrize("headers", [{}, {"X_Tersely_Bypass": "true"}], ids=["unnamed", "bypass"])
async def test_unread_calls_of_no_session_pass(
    service: Service, model: Model, key: str, headers: dict[str, str]
) -> None:
    named = {"X_Tersely_Session": key} if headers else {}
    calls = model.state.calls

    for body, more in ((body_of(), {}), (gzip.compress(body_of(QUESTION)), {"Content_Encoding": "gzip"})):
        await post(service, body, **headers, **named, **more)

    assert model.state.calls == calls + 2
    assert await messages_by_number(service, key) == []
