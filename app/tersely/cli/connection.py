"""Connect the commands to a running service, or to the same application in this process.

Both use the one implementation, the REST API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import typer

from tersely.server.errors import CommandError

DEFAULT_URL = "http://127.0.0.1:8484"
# Time limits in seconds: to find out whether a service answers, to connect, for a request, and for a request that may
# wait for a model or moves a whole session.
PROBE_TIMEOUT, CONNECT_TIMEOUT, REQUEST_TIMEOUT, LONG_TIMEOUT = 2.0, 10.0, 60.0, 600.0
LIMITS = httpx.Timeout(REQUEST_TIMEOUT, connect=CONNECT_TIMEOUT)
LONG_LIMITS = httpx.Timeout(LONG_TIMEOUT, connect=CONNECT_TIMEOUT)

T = TypeVar("T")

Url = Annotated[
    str | None, typer.Option(envvar="TERSELY_URL", help="The address of a running service.", show_default=DEFAULT_URL)
]
Key = Annotated[str | None, typer.Option(envvar="TERSELY_KEY", help="A Tersely key.")]
Local = Annotated[bool, typer.Option("--local", help="Work directly on the database, without a service.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SessionId = Annotated[str, typer.Option("--session", "-s", envvar="TERSELY_SESSION", help="The session.")]
MAIN = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTarget:
    """The target of a command. ``url`` None: the default address if a service answers there, else this process.
    ``upstream`` applies to this process only.
    """

    url: str | None = None
    key: str | None = None
    is_local: bool = False
    upstream: str | None = None


class Service:
    """The REST API for the commands. Error responses are raised as `CommandError` with their text."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise `CommandError` if the service is unreachable, the connection breaks, or text cannot be encoded."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise CommandError(
                f"the service at {self.http.base_url} has not answered in time ({type(error).__name__}): "
                "look at its log, or run `tersely doctor`"
            ) from error
        except httpx.HTTPError as error:
            raise CommandError(
                f"the service at {self.http.base_url} does not answer: {type(error).__name__}"
            ) from error
        except UnicodeEncodeError as error:
            raise CommandError("the arguments are not UTF-8 text") from error

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the answer; ``options`` as `httpx` has it."""
        response = await self.http.request(method, path, **options)
        check(response)
        return response

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """Return the response's JSON; None without a body."""
        response = await self.call(method, path, **options)
        if response.status_code == 204:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise CommandError(f"the server at {self.http.base_url} is not a Tersely service") from error

    async def page_through(self, path: str, params: Mapping[str, Any], limit: int) -> list[Any]:
        """Return the first ``limit`` items of a list."""
        found: list[Any] = []
        after: Any = None
        while len(found) < limit:
            query = {**params, "limit": min(limit - len(found), 1_000), **({} if after is None else {"after": after})}
            page = await self.request("GET", path, params=query)
            found += page["items"]
            after = page["next"]
            if after is None:
                break
        return found


def check(response: httpx.Response) -> None:
    """Raise `CommandError` unless the answer is a success. Its body must have been read."""
    if response.status_code < 400:
        return
    try:
        body = response.json()
        detail = body.get("detail") or body["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = f"status {response.status_code}"
    raise CommandError(str(detail), status=response.status_code)


def path_of(*steps: str) -> str:
    """Return ``/api/...`` with quoted steps. Raises `CommandError` for a step that would change the path."""
    for step in steps:
        if step in ("", ".", "..") or not step.isprintable():
            raise CommandError(f"{step!r} is not a valid name")
    return "/api/" + "/".join(quote(step, safe="") for step in steps)


def session_path(session_id: str, *steps: str) -> str:
    """``/api/sessions/{id}/...``, as `path_of`."""
    return path_of("sessions", session_id, *steps)


def target_of(url: str | None, key: str | None, local: bool) -> ServiceTarget:
    """Return the target that the commands' options name."""
    return ServiceTarget(url=url, key=key, is_local=local)


def request(target: ServiceTarget, method: str, path: str, **options: Any) -> Any:
    """Return the response's JSON to one request. Raises `CommandError`."""

    async def task(service: Service) -> Any:
        return await service.request(method, path, **options)

    return with_service(target, task)


def run_command(target: ServiceTarget, session_id: str, *words: str) -> str:
    """Return the text answer of a chat command.

    Raises `CommandError`, also if the text would be parsed as another command.
    """
    if any(len(word.split()) != 1 for word in words[:-1]) or not words[-1].strip() or "\n" in words[-1]:
        raise CommandError(f"{' '.join(words)!r} is not a valid command")
    answer = request(
        target, "POST", session_path(session_id, "commands"), json={"text": " ".join(words)}, timeout=LONG_LIMITS
    )
    return str(answer["text"])


def with_service(target: ServiceTarget, task: Callable[[Service], Awaitable[T]]) -> T:
    """Return the result of ``task`` where ``target`` says. Raises `CommandError`."""

    async def run(http: httpx.AsyncClient) -> T:
        service = Service(http)
        with service.refusing():
            return await task(service)

    async def against_server(url: str) -> T:
        # Without TLS there is nothing to verify, and the certificates of the world need not be loaded.
        is_safe = url.startswith("https:")
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=LIMITS, verify=is_safe) as http:
            return await run(http)

    headers = _key_header(target.key)
    upstream = None if target.upstream is None else _address(target.upstream, "--upstream")
    url = _service_at(target)
    if url is not None:
        return asyncio.run(against_server(url))
    # This import loads the whole service. Commands against a running service do not need it.
    from tersely.cli.in_process import run_in_process

    return run_in_process(run, headers=headers, url=DEFAULT_URL, limits=LIMITS, upstream=upstream)


def _key_header(key: str | None) -> dict[bytes, bytes]:
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise CommandError("--key: not a Tersely key")
    return {b"x-tersely-key": key.encode()}


def _service_at(target: ServiceTarget) -> str | None:
    """Return the address of a service, if one is to be used."""
    if target.is_local or target.upstream is not None:
        return None
    if target.url:
        return _address(target.url, "--url")
    try:
        found = httpx.get(f"{DEFAULT_URL}/healthz", timeout=PROBE_TIMEOUT, verify=False)  # noqa: S501 not TLS
    except httpx.HTTPError:
        return None
    return DEFAULT_URL if found.status_code == 200 else None


def _address(text: str, option: str) -> str:
    """Return an address without a slash at its end. Raises `CommandError` for an invalid one."""
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_one = is_one and text.isprintable() and not (parts.query or parts.fragment)
    except ValueError:
        is_one = False
    if not is_one:
        raise CommandError(f"{option}: {text!r} is not an http(s) address")
    return text.rstrip("/")
