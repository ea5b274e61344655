"""Gemini refuses a call directly behind another content of the model: requests without a message between are joined."""

from __future__ import annotations

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.injected_clients import InjectingClient, first_request
from tests.support.services import FROM_THE_START, Service
from tests.support.upstreams import Model

CALL = {"functionCall": {"id": "c1", "name": "read", "args": {}}}
RESULT = {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "read", "response": {"output": "ok"}}}]}


@pytest.mark.parametrize("strategy", ["full", "slim", "window", "trim", "compact", "tiered"])
@pytest.mark.parametrize("dialect", ["gemini", "gemini_gca"])
def test_a_call_whose_question_is_hidden_joins_the_reply_before_it(
    service: Service, model: Model, key: str, dialect: str, strategy: str
) -> None:
    with httpx.Client(timeout=60) as http:
        headers = {"x_tersely_session": key, "x_tersely_strategy": strategy}
        client = InjectingClient(service, model, key, dialect, first_request(dialect), headers=headers, http=http)
        client.say("What is there?")
        model.script(key, ScriptedReply(message={"parts": [CALL]}))
        client.ask(client.wire.user("Read the quokka."))
        client.ask(RESULT)
        changed = http.patch(f"{service.url}/api/sessions/{key}/messages/3", json={"model_visible": False})
        assert changed.status_code == 200, changed.text
        client.say("And now?")
    sent = model.last.request
    assert sent is not None
    contents = (sent["request"] if dialect == "gemini_gca" else sent)["contents"]
    assert "quokka" not in str(contents)
    calling = next(each for each in contents if any("functionCall" in part for part in each["parts"]))
    assert [list(part) for part in calling["parts"]] == [["text"], ["functionCall"]]


@pytest.mark.parametrize("dialect", ["gemini", "gemini_gca"])
def test_contents_that_a_client_sends_apart_stay_apart(service: Service, model: Model, key: str, dialect: str) -> None:
    """Chats of google-genai send each piece of a streamed reply back as a content of its own."""
    roles = ("user", "model", "model", "user", "model", "user")
    contents = [{"role": role, "parts": [{"text": f"{key} {number}"}]} for number, role in enumerate(roles)]
    url = (
        f"{service.url}/v1beta/models/gpt-4o-mini:generateContent"
        if dialect == "gemini"
        else (f"{service.url}/v1internal:generateContent")
    )
    headers = {"x-tersely-strategy": "slim", "x-tersely-epoch": FROM_THE_START}
    for count in (4, 6):
        sent = {"contents": contents[:count]}
        body = sent if dialect == "gemini" else {"model": "gpt-4o-mini", "request": sent}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        got = model.last.request
        assert got is not None
        assert (got["request"] if dialect == "gemini_gca" else got)["contents"] == sent["contents"]
