"""``/mcp``: Tersely's tools for clients of the Model Context Protocol, over stateless streamable HTTP.

Who calls, from where, and how much at once is checked as under ``/api``; a caller sees what its tenant owns.
"""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tersely import __version__
from tersely.api.rest.guard import Guard
from tersely.api.transport.body import Disconnected
from tersely.domain.errors import TerselyError
from tersely.domain.tools.catalog import TOOLS, WRITING_TOOLS, Tool
from tersely.service.tools.tools import ToolOutcome, Tools

PATH = "/mcp"
SESSION_HEADER = b"x-tersely-session"
INSTRUCTIONS = (
    "Tools over conversations that Tersely stores. They work on the session named by the header X-Tersely-Session or, "
    "without it, by the parameter `session`."
)
SESSION_NEEDED = "session: give the session's id, here or in the header X-Tersely-Session, and only one"
SESSION = {"type": "string", "description": "The session's id."}


class McpEndpoint:
    """An ASGI application. It serves between `open` and `close`."""

    def __init__(self, tools: Tools, guard: Guard) -> None:
        self._tools = tools
        self._guard = guard
        self._server = Server(
            "tersely",
            version=__version__,
            instructions=INSTRUCTIONS,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        self._manager = self._new_manager()
        self._closing = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to serve."""
        self._manager = self._new_manager()
        self._closing = asyncio.Event()
        started = asyncio.Event()
        self._running = asyncio.get_running_loop().create_task(self._run(started))
        await started.wait()

    async def close(self) -> None:
        """Give up what is under way."""
        self._closing.set()
        if self._running is not None:
            await self._running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises `TerselyError` and `UnsupportedMedia` for what is not let in."""
        try:
            request = await self._guard.admit(Request(scope, receive), has_body=True)
        except Disconnected:
            await Response(status_code=499)(scope, receive, send)
            return
        body: Message = {"type": "http.request", "body": request.state.body, "more_body": False}
        unread = [body]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._manager.handle_request(scope, replay, send)

    def route(self) -> Route:
        """Return the path. Nothing is served for GET, since the server offers no stream of its own."""
        return Route(PATH, endpoint=self, methods=["POST"])

    def _new_manager(self) -> StreamableHTTPSessionManager:
        # Every answer is complete at once, so it needs no event stream.
        return StreamableHTTPSessionManager(
            app=self._server, json_response=True, stateless=True, max_request_body_size=self._guard.max_body
        )

    async def _run(self, started: asyncio.Event) -> None:
        # Use a task: the transport must be closed by the task that opened it.
        async with self._manager.run():
            started.set()
            await self._closing.wait()

    async def _list(
        self, context: ServerRequestContext[Any], _: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        is_fixed = _fixed_session(context) is not None
        return types.ListToolsResult(tools=[_describe(tool, is_fixed=is_fixed) for tool in self._tools.catalog])

    async def _call(
        self, context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        if params.name not in TOOLS:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:40]!r}")
        arguments = dict(params.arguments or {})
        session, fixed = arguments.pop("session", None), _fixed_session(context)
        session_id = session if fixed is None else fixed
        if not isinstance(session_id, str) or session not in (None, session_id):
            return _result(ToolOutcome(text=SESSION_NEEDED, is_error=True))
        tenant: str = _request(context).state.tenant
        try:
            answer = await self._tools.call(tenant, session_id, params.name, arguments)
        except TerselyError as error:
            return _result(ToolOutcome(text=error.detail, is_error=True))
        return _result(answer)


def _result(answer: ToolOutcome) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=answer.text)], is_error=answer.is_error)


def _request(context: ServerRequestContext[Any]) -> Request:
    request = context.request
    assert isinstance(request, Request)  # every message comes over HTTP
    return request


def _fixed_session(context: ServerRequestContext[Any]) -> str | None:
    """Return the session that the caller's configuration names: then the model has no choice."""
    found = dict(_request(context).scope["headers"]).get(SESSION_HEADER)
    return None if found is None else str(found, "utf-8", "replace")


def _describe(tool: Tool, *, is_fixed: bool) -> types.Tool:
    schema = dict(tool.parameters)
    if not is_fixed:
        schema["properties"] = {"session": SESSION, **schema["properties"]}
        schema["required"] = ["session", *schema["required"]]
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=schema,
        annotations=types.ToolAnnotations(read_only_hint=tool.name not in WRITING_TOOLS, open_world_hint=False),
    )
