"""Over REST: each archived result names a summary that the same context shows, or says what it was."""

from __future__ import annotations

import re

import pytest

from tests.api.conftest import Api


@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic"])
async def test_the_lines_of_thirty_archived_results_lead_somewhere(api: Api, dialect: str) -> None:
    strategy = {"name": "compact", "tool_summary_strategy": "heuristic", "max_tokens": 30_000}
    await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy, "epoch": "every_request"})
    messages: list[dict[str, object]] = [{"role": "user", "content": "Read the thirty files."}]
    for step in range(30):
        output = f"contents of file {step}: " + "lorem ipsum " * 100
        if dialect == "anthropic":
            call = {"type": "tool_use", "id": f"c{step}", "name": "read", "input": {"path": f"{step}.py"}}
            answer = {"type": "tool_result", "tool_use_id": f"c{step}", "content": output}
            messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
        else:
            function = {"name": "read", "arguments": f'{{"path": "{step}.py"}}'}
            call = {"id": f"c{step}", "type": "function", "function": function}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": f"c{step}", "content": output}]
    body = {"dialect": dialect, "messages": messages}
    assert (await api.http.post("/api/sessions/s/messages", json=body)).status_code == 201
    text = (await api.http.post("/api/sessions/s/context", json={"dialect": dialect})).text
    named = re.findall(r"its summary is #(\d+)\.", text)
    listed = re.findall(r"\\n#(\d+): ", text)
    described = re.findall(r"Tool result archived: \d+ characters in 1 line, beginning with 'contents of file", text)
    assert named == listed != []
    assert (len(named) + len(described), len(described) > 0) == (20, True)
