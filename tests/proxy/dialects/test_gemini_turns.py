"""Gemini refuses a call directly behind another content of the model: requests without a message between are joined."""

from __future__ import annotations

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.injected_clients import InjectingClient, first_request
from tests.support.services import Service
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
