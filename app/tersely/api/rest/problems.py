"""Render every error of the REST application as a problem document (RFC 9457)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from tersely.api.errors import PROBLEM, extra_headers, problem
from tersely.domain.errors import InvalidRequest, TerselyError

_log = logging.getLogger(__name__)

TITLES = {
    404: "Not found",
    405: "Method not allowed",
    415: "Unsupported media type",
    422: "Invalid request",
    500: "Internal error",
}
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
# How much of a text an answer repeats.
MAX_ECHO = 300


class UnsupportedMedia(Exception):
    """The body is not announced as JSON."""


def install_problems(app: FastAPI) -> None:
    """Answer every error of ``app`` with a problem document."""
    app.add_exception_handler(TerselyError, _tersely)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(UnsupportedMedia, _media)
    app.add_exception_handler(Exception, _unexpected)


def plain_problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """Return a problem document without a field."""
    title = TITLES.get(status, "Error")
    document = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    added = {**dict(extra_headers(status)), **(headers or {})}
    return Response(json.dumps(document), status_code=status, media_type=PROBLEM, headers=added)


async def _tersely(_: Request, error: Exception) -> Response:
    assert isinstance(error, TerselyError)
    status, headers, body = problem(error)
    if status >= 500:
        _log.warning("%s: %s", type(error).__name__, error.detail)
    return Response(body, status_code=status, headers=dict(headers))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = _field(first["loc"])
    detail = f"{field}: {_explain(first)}" if field else _explain(first)
    return await _tersely(_, InvalidRequest(detail[:MAX_ECHO], field=field[:MAX_ECHO] or None))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = {
        404: f"there is nothing at {request.url.path[:MAX_ECHO]}",
        405: f"{request.method} is not possible here",
    }.get(error.status_code, str(error.detail))
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 405:
        headers["allow"] = ", ".join(sorted(_allowed(request)))
    return plain_problem(error.status_code, detail, headers)


def _allowed(request: Request) -> set[str]:
    """Return the methods of all routes of this path; Starlette only names those of the first route."""
    scopes = [{**request.scope, "method": method} for method in METHODS]
    return {
        scope["method"] for scope in scopes for route in request.app.routes if route.matches(scope)[0] is Match.FULL
    }


async def _media(_: Request, __: Exception) -> Response:
    return plain_problem(415, "the body must be JSON, announced with Content-Type: application/json")


async def _unexpected(_: Request, error: Exception) -> Response:
    _log.error("unexpected: %s", type(error).__name__, exc_info=error)
    return plain_problem(500, "something went wrong inside Tersely; its log says what")


def _field(where: Sequence[Any]) -> str:
    """``("body", "messages", 0, "role")`` -> ``messages[0].role``; the branches of a union are no steps."""
    text = ""
    for step in where[1:]:
        if step == "str" or str(step).startswith("dict["):
            continue
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _explain(error: dict[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown field"
    message = str(error["msg"])
    return message[:1].lower() + message[1:]
