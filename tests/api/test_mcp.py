"""The tools over MCP: a client of the official package against the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

from tersely.domain.tools.catalog import TOOLS
from tests.api.conftest import Api, NewKey, serve
from tests.conftest import Database

USER = {"role": "user", "content": "Can you make a colour palette?"}
HEADERS = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


@asynccontextmanager
async def client_of(api: Api, mode: str = "auto", **headers: str) -> AsyncIterator[Client]:
    transport = httpx2.ASGITransport(app=api.app)
    async with (
        httpx2.AsyncClient(transport=transport, headers=headers) as http,
        Client(streamable_http_client("http://test/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


async def call_tool_text(client: Client, name: str, **arguments: object) -> str:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    return text_of(result)


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_listed_and_called(api: Api, mode: str) -> None:
    await api.append("s", USER)
    async with client_of(api, mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(listed) == list(TOOLS)
        schema = listed["context_search"].input_schema
        assert schema["required"] == ["session", "mode"]
        looking = {name for name, tool in listed.items() if tool.annotations and tool.annotations.read_only_hint}
        assert set(TOOLS) - looking == {"manage_scratchpad", "save_memo"}
        assert await call_tool_text(client, "context_search", session="s", mode="tail") == (
            "--- messages 1-1 of 1 ---\n[user t1] Can you make a colour palette?"
        )
        wrong = await client.call_tool("context_search", {"session": "s", "mode": "find"})
        assert wrong.is_error
        assert "one of 'search'" in text_of(wrong)
        with pytest.raises(MCPError, match="no tool"):
            await client.call_tool("rm", {"session": "s"})


async def test_the_session_by_header(api: Api) -> None:
    await api.append("sp%C3%A4%C5%A5%2F1", USER)
    await api.append("other", {"role": "user", "content": "elsewhere"})
    async with client_of(api, **{"x-tersely-session": "späť/1".encode()}) as client:  # type: ignore[arg-type]
        schema = (await client.list_tools()).tools[0].input_schema
        assert "session" not in schema["properties"]
        assert "palette" in await call_tool_text(client, "context_search", mode="tail")
        assert "palette" in await call_tool_text(client, "context_search", mode="tail", session="späť/1")
        # Who configured the client said which session it is; the model cannot ask for another.
        answer = await client.call_tool("context_search", {"mode": "tail", "session": "other"})
        assert answer.is_error
        assert "elsewhere" not in text_of(answer)
    async with client_of(api) as client:
        for session in ({}, {"session": 7}, {"session": "none"}, {"session": "a\x00"}):
            answer = await client.call_tool("context_search", {"mode": "tail", **session})
            assert answer.is_error
            assert "session" in text_of(answer)


async def test_another_tenants_session_is_not_found_over_mcp(guarded: Api, new_tenant: NewKey) -> None:
    north, south = await new_tenant("north"), await new_tenant("south")
    await guarded.append("s", USER, **north)
    await guarded.append("own", USER, **south)
    async with client_of(guarded, authorization=f"Bearer {north['x-tersely-key']}") as client:
        await call_tool_text(client, "save_memo", session="s", content="the secret port", tags=["net"])
        assert "secret" in await call_tool_text(client, "retrieve_memos", session="s", tags=["net"])
    async with client_of(guarded, **south) as client:
        for name in TOOLS:
            answer = await client.call_tool(name, {"session": "s"})
            assert answer.is_error
            assert text_of(answer) == "there is no such session"
        assert await call_tool_text(client, "retrieve_memos", session="own", tags=["net"]) == "No memos found."
    for headers in ({}, {"x-tersely-key": "tsk_aaaaaaaa_" + "b" * 40}):
        refused = await guarded.http.post("/mcp", json=CALL, headers={**HEADERS, **headers})
        assert refused.status_code == 401


async def test_limits_and_origins(database: Database) -> None:
    async with serve(database.dsn, is_local=True, max_body=2_000) as api:
        local = {**HEADERS, "host": "127.0.0.1:8484"}
        assert (await api.http.post("/mcp", json=CALL, headers=local)).status_code == 200
        elsewhere = {**local, "origin": "https://evil.example"}
        assert (await api.http.post("/mcp", json=CALL, headers=elsewhere)).status_code == 403
        assert (await api.http.post("/mcp", json=CALL, headers={**HEADERS, "host": "evil.example"})).status_code == 403
        large = {**CALL, "params": {"x": "x" * 3_000}}
        assert (await api.http.post("/mcp", json=large, headers=local)).status_code == 413
        assert (await api.http.get("/mcp", headers=local)).status_code == 405
        assert (await api.http.post("/mcp", content=b"{", headers=local)).status_code == 422
        assert (await api.http.post("/mcp", content=b"{}", headers={"host": "127.0.0.1"})).status_code == 415
        without_body = await api.http.post("/mcp", headers={"host": "127.0.0.1"})
        assert without_body.status_code == 400, without_body.text
        metrics = (await api.http.get("/metrics")).text
        assert 'tersely_requests_total{dialect="",route="mcp",status="200",strategy=""} 1.0' in metrics
