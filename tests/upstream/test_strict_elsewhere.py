"""Forms that providers other than OpenAI were seen to take, the strict model takes as well."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tersely.fakellm.scripted import ScriptedModel, ScriptedReply, run_scripted
from tersely.fakellm.strict import anthropic as strict_anthropic
from tersely.fakellm.strict import gemini as strict_gemini
from tersely.fakellm.strict import openai_responses as strict_responses


def _gemini_call(call_id: str) -> dict[str, Any]:
    return {"role": "model", "parts": [{"functionCall": {"id": call_id, "name": "look", "args": {}}}]}


def _gemini_results(*call_ids: str) -> dict[str, Any]:
    results = [{"functionResponse": {"id": each, "name": "look", "response": {"ok": True}}} for each in call_ids]
    return {"role": "user", "parts": results}


ASKED = {"role": "user", "parts": [{"text": "Look twice."}]}


def test_gemini_takes_neighbouring_contents_of_calls_as_one_turn() -> None:
    both = [ASKED, _gemini_call("a"), _gemini_call("b"), _gemini_results("a", "b")]
    assert strict_gemini.check({"contents": both}) is None
    refusal = strict_gemini.check({"contents": [*both[:3], _gemini_results("a")]})
    assert refusal is not None
    assert "number of function response parts" in refusal.message


@pytest.mark.parametrize("kind", ["tool_search_tool_result", "text_editor_code_execution_tool_result"])
def test_anthropic_takes_results_of_its_own_tools(kind: str) -> None:
    reply = {"role": "assistant", "content": [{"type": kind, "tool_use_id": "srvtoolu_1", "content": {}}]}
    messages = [{"role": "user", "content": "Hello."}, reply, {"role": "user", "content": "Go on."}]
    assert strict_anthropic.check({"model": "m", "max_tokens": 5, "messages": messages}) is None


def test_responses_takes_the_output_of_a_call_of_a_remote_server() -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "look", "arguments": "{}", "output": "seen"}
    items = [{"role": "user", "content": "Look."}, call, {"role": "user", "content": "Go on."}]
    assert strict_responses.check({"model": "m", "input": items}) is None
    refusal = strict_responses.check({"model": "m", "input": [*items, {**call, "type": "reasoning"}]})
    assert refusal is not None
    assert refusal.message == "Unknown parameter: 'input[3].output'."


async def test_geminis_signature_on_an_empty_text_is_streamed() -> None:
    last = {"text": "", "thoughtSignature": "c2ln"}
    model = ScriptedModel(script=lambda _: ScriptedReply(message={"parts": [{"text": "Seen."}, last]}))
    async with run_scripted(model=model) as server, aiohttp.ClientSession() as http:
        url = f"{server.root}/v1beta/models/m:streamGenerateContent?alt=sse"
        async with http.post(url, json={"contents": [ASKED]}) as response:
            events = [json.loads(line[6:]) for line in (await response.text()).split("\r\n") if line]
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    assert parts[-1] == last
    assert events[-1]["candidates"][0]["finishReason"] == "STOP"
