"""The routes of the console: who may look, forms, errors; the views themselves are in `tersely.console.views`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tersely.console.assets import serve_asset
from tersely.console.pages import HEADERS, Pages, link
from tersely.domain.errors import (
    Busy,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    StoreUnavailable,
    TerselyError,
    Unauthorized,
)
from tersely.service.common.console_access import LIFETIME, ConsoleAccess, ConsoleVisitor, OperatorAccess
from tersely.service.common.replay_tenants import replay_tenant

COOKIE = "tersely_console"
OPERATOR_COOKIE = "tersely_operator"
OPERATOR = "/console/operator"
MAX_FORM = 256 * 1024
START = "/console/sessions"
REPLAYS = "/console/replay/"
CSRF_HEADER = "x-console-token"
UPLOAD_SECONDS = 120.0
STATUS: dict[type[TerselyError], int] = {InvalidRequest: 422, Conflict: 409, Forbidden: 403, Busy: 503}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request to a view: the visitor, the form (empty unless something is to be changed), and the time.

    ``permission`` raises once the visitor's key does not hold any more.
    """

    request: Request
    visitor: ConsoleVisitor
    form: dict[str, str]
    now: datetime
    permission: Callable[[], Awaitable[object]]

    @property
    def tenant(self) -> str:
        """The tenant whose sessions are shown: for replays, the tenant of the replays."""
        return replay_tenant(self.visitor.tenant) if self.is_replay else self.visitor.tenant

    @property
    def is_replay(self) -> bool:
        """True for a view of replayed transcripts."""
        return self.request.url.path.startswith(REPLAYS)

    def link(self, path: str, **query: object) -> str:
        """An address of the console; among replays, of the same view there."""
        if not self.is_replay:
            return link(path, **query)
        return link("replay" if path == "sessions" else f"replay/{path}", **query)

    def get(self, name: str) -> str:
        """A parameter of the form or of the address; empty where there is none."""
        value = self.form.get(name) or self.request.query_params.get(name, "")
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()

    def number(self, name: str, default: int | None = None, *, most: int = 2**40) -> int | None:
        """Return a parameter as a whole number from 0 on; ``default`` if it is invalid."""
        text = self.get(name)
        if not (text.isascii() and text.isdecimal() and len(text) < 14):
            return default
        return min(int(text), most)


View = Callable[[PageRequest], Awaitable[Response]]
Upload = Callable[[PageRequest, bytes], Awaitable[Response]]


class Console:
    """Serves views to visitors with access, and pages with instructions to everybody else."""

    def __init__(
        self, pages: Pages, access: ConsoleAccess, operators: OperatorAccess, *, clock: Callable[[], datetime]
    ) -> None:
        self._pages = pages
        self._operators = operators
        self._access = access
        self._clock = clock

    def routes(
        self, views: dict[str, View], changes: dict[str, View], uploads: dict[str, tuple[Upload, int]]
    ) -> list[Route]:
        """Routes under ``/console``.

        ``views`` are looked at (GET), ``changes`` change something (POST of a form), ``uploads`` take a body of at most
        so many bytes (POST by a script, with the token in a header).
        """
        found = [
            Route("/console", _redirect(START), methods=["GET"]),
            Route("/console/login", self._login() if self._access.required else _redirect(START), methods=["GET"]),
            Route("/console/login", self._log_in, methods=["POST"]),
            Route(
                "/console/logout", self._guarded(lambda _: _log_out(), changes=True, any_scope=True), methods=["POST"]
            ),
            Route(f"{OPERATOR}/login", self._log_in_operator, methods=["POST"]),
            Route("/console/static/{name:path}", serve_asset, methods=["GET"]),
        ]
        found += [Route(f"/console/{path}", self._guarded(view), methods=["GET"]) for path, view in views.items()]
        found += [
            Route(f"/console/{path}", self._guarded(view, changes=True), methods=["POST"])
            for path, view in changes.items()
        ]
        found += [
            Route(f"/console/{path}", self._taking(upload, limit), methods=["POST"])
            for path, (upload, limit) in uploads.items()
        ]
        missing = self._error(404, "There is no such page", "Check the address, or start from the list of sessions.")
        return [*found, Route("/console/{rest:path}", missing, methods=["GET"])]

    def _login(self, trouble: str = "", following: str = "", status: int = 200) -> Response:
        return self._pages.render("login.html", status=status, trouble=trouble, following=following)

    async def _log_in(self, request: Request) -> Response:
        form = await _form(request)
        if form is None or not _is_own(request):
            return self._error(403, "The form was not sent from the console", "Open the log-in page and try again.")
        following = form.get("following", "")
        if not following.startswith("/console/") or "\\" in following:
            following = START
        try:
            visitor = await self._access.log_in(form.get("key", ""), now=self._clock(), nonce=secrets.token_hex(8))
        except Unauthorized as error:
            return self._login(error.detail, following, 401)
        except TerselyError as error:
            return self._failed(error)
        return _with_cookie(_redirect(following), visitor, request)

    def _guarded(
        self, view: View, *, changes: bool = False, any_scope: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """``changes``: the view needs a form with its token. ``any_scope``: keys that may only read may use it."""

        async def serve(request: Request) -> Response:
            try:
                self._access.check_address(request.headers.items())
                visitor, is_new = await self._visit(request)
                visitor.check_scope(changes=changes and not any_scope)
                form: dict[str, str] = {}
                if changes:
                    given = await _form(request)
                    if given is None or not _is_own(request):
                        return self._error(
                            403, "The form was not sent from the console", "Reload the page and try again."
                        )
                    self._access.check_token(visitor, given.get("token", ""))
                    form = given
                response = await view(self._page(request, visitor, form))
            except Unauthorized as error:
                if request.url.path.startswith(OPERATOR):
                    trouble = "" if OPERATOR_COOKIE not in request.cookies else error.detail
                    return self._operator_login(trouble, 401)
                following = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return self._login(error.detail, "" if changes else following, 401)
            except TerselyError as error:
                return self._failed(error)
            return _with_cookie(response, visitor, request) if is_new else response

        return serve

    def _taking(self, upload: Upload, limit: int) -> Callable[[Request], Awaitable[Response]]:
        """Serve uploads. Errors are JSON, for the script that sends the file."""

        async def serve(request: Request) -> Response:
            try:
                self._access.check_address(request.headers.items())
                visitor, _ = await self._visit(request)
                visitor.check_scope(changes=True)
                if not _is_own(request):
                    raise Forbidden("the form was not sent from the console")
                self._access.check_token(visitor, request.headers.get(CSRF_HEADER, ""))
                body = await _read_upload(request, limit)
                return await upload(self._page(request, visitor, {}), body)
            except TerselyError as error:
                status = 401 if isinstance(error, Unauthorized) else _status(error)
                headers = {**HEADERS, "cache-control": "no-store"}
                return JSONResponse({"trouble": error.detail}, status_code=status, headers=headers)

        return serve

    def _page(self, request: Request, visitor: ConsoleVisitor, form: dict[str, str]) -> PageRequest:
        return PageRequest(
            request=request, visitor=visitor, form=form, now=self._clock(), permission=partial(self._visit, request)
        )

    async def _log_in_operator(self, request: Request) -> Response:
        form = await _form(request)
        if form is None or not _is_own(request):
            return self._error(403, "The form was not sent from the console", "Open the page again.")
        try:
            self._access.check_address(request.headers.items())
            visitor = self._operators.log_in(form.get("key", ""), now=self._clock(), nonce=secrets.token_hex(8))
        except Unauthorized as error:
            return self._operator_login(error.detail, 401)
        except TerselyError as error:
            return self._failed(error)
        return _with_cookie(_redirect(OPERATOR), visitor, request, OPERATOR_COOKIE, OPERATOR)

    def _operator_login(self, trouble: str = "", status: int = 200) -> Response:
        return self._pages.render("operator_login.html", status=status, trouble=trouble)

    async def _visit(self, request: Request) -> tuple[ConsoleVisitor, bool]:
        now = self._clock()
        if request.url.path.startswith(OPERATOR):
            if self._operators.is_shut:
                raise NotFound("the operator's view is off: set TERSELY_ADMIN_KEY")
            if self._operators.needs_key:
                return self._operators.visit(request.cookies.get(OPERATOR_COOKIE, ""), now=now), False
        cookie = request.cookies.get(COOKIE, "")
        try:
            return await self._access.visit(cookie, now=now), False
        except Unauthorized:
            if self._access.required:
                raise
            return await self._access.log_in("", now=now, nonce=secrets.token_hex(8)), True

    def _failed(self, error: TerselyError) -> Response:
        if isinstance(error, StoreUnavailable):
            return self._error(503, "The database is unavailable", "Nothing is lost. Try again in a few seconds.")
        if isinstance(error, NotFound):
            return self._error(404, "Not found", f"{error.detail[:1].upper()}{error.detail[1:]}, or it is not yours.")
        return self._error(_status(error), "That did not work", f"{error.detail[:1].upper()}{error.detail[1:]}.")

    def _error(self, status: int, title: str, text: str) -> Response:
        return self._pages.render("error.html", status=status, title=title, text=text, code=status)


def _status(error: TerselyError) -> int:
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)


async def _read_upload(request: Request, limit: int) -> bytes:
    """Return a body. Raises `InvalidRequest` if it is too large or too slow."""
    too_large = InvalidRequest(f"the file has more than {limit // 2**20} MiB", field="file")
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    pieces, size = [], 0
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        raise InvalidRequest(f"the upload took longer than {UPLOAD_SECONDS:.0f} s", field="file") from None
    return b"".join(pieces)


async def _log_out() -> Response:
    response = _redirect("/console/login")
    response.delete_cookie(COOKIE, path="/console")
    return response


def _redirect(path: str) -> RedirectResponse:
    return RedirectResponse(path, status_code=303, headers={**HEADERS, "cache-control": "no-store"})


def _with_cookie(
    response: Response, visitor: ConsoleVisitor, request: Request, name: str = COOKIE, path: str = "/console"
) -> Response:
    response.set_cookie(
        name,
        visitor.cookie,
        max_age=int(LIFETIME.total_seconds()),
        path=path,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response


def _is_own(request: Request) -> bool:
    """Return whether a form was sent by a page of this host, as far as the browser says."""
    origin = request.headers.get("origin")
    fetched = request.headers.get("sec-fetch-site", "same-origin")
    host = request.headers.get("host", "")
    return fetched in {"same-origin", "none"} and (origin is None or origin.partition("://")[2] == host)


async def _form(request: Request) -> dict[str, str] | None:
    """Return the fields of a form; None if it is invalid or too large."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return None
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM:
            return None
    try:
        given = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=50)
    except ValueError:
        return None
    return {name: values[-1] for name, values in given.items()}
