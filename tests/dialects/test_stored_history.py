"""The errors of providers that do not have the history that a request names."""

from __future__ import annotations

import json

import pytest

from tersely.dialects.openai_responses.read import read_request
from tersely.dialects.openai_responses.stored_history import lacks_history
from tersely.dialects.openai_responses.write import as_input
from tests.dialects.recordings import SHARED


def error(message: str, **more: object) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", **more}}).encode()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, error("Previous response with id 'resp_1' not found.", code="previous_response_not_found")),
        (404, error("Response with id 'resp_1' not found.")),
        (400, error("Previous response cannot be used for this organization due to Zero Data Retention.")),
        (400, error("llama.cpp does not support 'previous_response_id'.")),
        (400, error("Unknown parameter: 'previous_response_id'.", param="previous_response_id")),
        (422, b'{"detail":[{"loc":["body","conversation"],"msg":"Extra inputs are not permitted"}]}'),
        (404, error("Conversation with id 'conv_1' not found.")),
        (400, error("Unsupported parameter: 'conversation' is not supported by this model.")),
        (404, b'{"error":{"type":"not_found_error","message":"Not found"}}'),
        (501, error("`previous_response_id` is not implemented")),
        (200, b'event: error\ndata: {"type":"error","error":{"code":"previous_response_not_found","message":"x"}}\n\n'),
    ],
)
def test_a_missing_history_is_recognised(status: int, body: bytes) -> None:
    assert lacks_history(status, body)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, error("Another process is currently operating on this conversation. Please retry in a few seconds.")),
        (400, error("No tool output found for function call call_1.", param="input")),
        (404, error("The model `gpt-x` does not exist or you do not have access to it.", code="model_not_found")),
        (400, error("Invalid value: 'x'.", param="input[0].role")),
        (429, error("Previous response not found")),
        (500, error("Conversation not found")),
        (200, b'data: {"type":"response.created","response":{"error":null,"previous_response_id":null}}\n\n'),
    ],
)
def test_other_refusals_are_not_missing_history(status: int, body: bytes) -> None:
    assert not lacks_history(status, body)


def test_no_other_error_that_was_seen_is_taken_for_it() -> None:
    path = SHARED / "overflow_errors_dev.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    cases = json.loads(path.read_text())
    wrong = []
    for case in cases if isinstance(cases, list) else cases["cases"]:
        body = case["body"] if isinstance(case["body"], str) else json.dumps(case["body"])
        if lacks_history(case["status"], body.encode()):
            wrong.append(case["id"])
    assert not wrong


def test_a_reply_that_is_fetched_later_is_only_passed_on() -> None:
    request = read_request(b'{"model":"m","input":"x","background":true,"previous_response_id":"resp_1"}')
    assert request.unreadable
    assert not request.messages
    assert (request.reply_id, request.references_history, request.is_stored) == ("resp_1", True, True)
    assert not read_request(b'{"model":"m","input":"x","store":false}').is_stored


def test_omitted_thought_removes_items_that_depend_on_it() -> None:
    def reply(*items: object) -> bytes:
        return json.dumps({"output": items}).encode()

    looked_up = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
    bare, whole = (
        {"type": "reasoning", "id": "rs_1", "summary": [], **more} for more in ({}, {"encrypted_content": "g"})
    )
    assert json.loads(as_input(reply(bare, looked_up, call))) == {key: call[key] for key in call if key != "id"}
    assert json.loads(as_input(reply(whole, looked_up, call)))["output"] == [whole, looked_up, call]
    assert json.loads(as_input(reply(call, whole))) == call
