"""Where the commands do their work: a running service, or the same application in this process on the database.

There is one implementation, the REST API; what differs is only the way to it.
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

from app.cli.refusals import Refused

DEFAULT_URL = "http://127.0.0.1:8484"
# Seconds: whether somebody is there, and what a compaction may take.
KNOCK, PATIENCE = 2.0, 600.0

T = TypeVar("T")

Url = Annotated[str | None, typer.Option(envvar="TERSELY_URL", help="A running service.", show_default=DEFAULT_URL)]
Key = Annotated[str | None, typer.Option(envvar="TERSELY_KEY", help="A Tersely key.")]
Local = Annotated[bool, typer.Option("--local", help="Straight on the database, without a service.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
SessionId = Annotated[str, typer.Option("--session", "-s", envvar="TERSELY_SESSION", help="The session.")]
MAIN = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to work. ``url`` None: the usual one if somebody answers there, else here. ``upstream``: only here."""

    url: str | None = None
    key: str | None = None
    is_local: bool = False
    upstream: str | None = None


class Service:
    """The REST API as the commands use it. What it refuses is raised as `Refused`, in its own words."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A service that is not there, or breaks off, is `Refused` too, and so is text that cannot be sent."""
        try:
            yield
        except httpx.HTTPError as error:
            raise Refused(f"the service at {self.http.base_url} does not answer: {type(error).__name__}") from error
        except UnicodeEncodeError as error:
            raise Refused("what was given is not UTF-8 text") from error

    async def call(self, method: str, path: str, **how: Any) -> httpx.Response:
        """The answer; ``how`` as `httpx` has it."""
        response = await self.http.request(method, path, **how)
        check(response)
        return response

    async def ask(self, method: str, path: str, **how: Any) -> Any:
        """What the answer says; None where it has no body."""
        response = await self.call(method, path, **how)
        if response.status_code == 204:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise Refused(f"what answers at {self.http.base_url} is no Tersely") from error

    async def page_through(self, path: str, params: Mapping[str, Any], most: int) -> list[Any]:
        """The first ``most`` items of a list."""
        found: list[Any] = []
        after: Any = None
        while len(found) < most:
            query = {**params, "limit": min(most - len(found), 1_000), **({} if after is None else {"after": after})}
            page = await self.ask("GET", path, params=query)
            found += page["items"]
            after = page["next"]
            if after is None:
                break
        return found


def check(response: httpx.Response) -> None:
    """Raise `Refused` for what is not a success; its body must have been read."""
    if response.status_code < 400:
        return
    try:
        said = response.json()
        detail = said.get("detail") or said["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = f"status {response.status_code}"
    raise Refused(str(detail), status=response.status_code)


def path_of(*steps: str) -> str:
    """``/api/...``, whatever the steps are made of. Raises `Refused` for one that would lead elsewhere."""
    for step in steps:
        if step in ("", ".", "..") or not step.isprintable():
            raise Refused(f"there is nothing that is named {step!r}")
    return "/api/" + "/".join(quote(step, safe="") for step in steps)


def session_path(session_id: str, *steps: str) -> str:
    """``/api/sessions/{id}/...``, as `path_of`."""
    return path_of("sessions", session_id, *steps)


def place_of(url: str | None, key: str | None, local: bool) -> Place:
    """What the options of the commands say."""
    return Place(url=url, key=key, is_local=local)


def ask(place: Place, method: str, path: str, **how: Any) -> Any:
    """What the answer to one request says. Raises `Refused`."""

    async def task(service: Service) -> Any:
        return await service.ask(method, path, **how)

    return work(place, task)


def run_command(place: Place, session_id: str, *words: str) -> str:
    """What a chat command is answered. Raises `Refused`, also for words that would be read as other ones."""
    if any(len(word.split()) != 1 for word in words[:-1]) or not words[-1].strip() or "\n" in words[-1]:
        raise Refused(f"{' '.join(words)!r} is not how a command is written")
    answer = ask(place, "POST", session_path(session_id, "commands"), json={"text": " ".join(words)})
    return str(answer["text"])


def work(place: Place, task: Callable[[Service], Awaitable[T]]) -> T:
    """The result of ``task`` where ``place`` says. Raises `Refused`."""

    async def run(http: httpx.AsyncClient) -> T:
        service = Service(http)
        with service.refusing():
            return await task(service)

    async def there(url: str) -> T:
        # Without TLS there is nothing to verify, and the certificates of the world need not be loaded.
        is_safe = url.startswith("https:")
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE, verify=is_safe) as http:
            return await run(http)

    headers = _key_header(place.key)
    upstream = None if place.upstream is None else _address(place.upstream, "--upstream")
    url = _service_at(place)
    if url is not None:
        return asyncio.run(there(url))
    # All of the service is behind this import; who talks to a running one need not wait for it.
    from app.cli.here import work_here

    return work_here(run, headers=headers, url=DEFAULT_URL, patience=PATIENCE, upstream=upstream)


def _key_header(key: str | None) -> dict[bytes, bytes]:
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise Refused("--key: that is no Tersely key")
    return {b"x-tersely-key": key.encode()}


def _service_at(place: Place) -> str | None:
    """The address of a service, if one is to be used."""
    if place.is_local or place.upstream is not None:
        return None
    if place.url:
        return _address(place.url, "--url")
    try:
        found = httpx.get(f"{DEFAULT_URL}/healthz", timeout=KNOCK, verify=False)  # noqa: S501 not TLS
    except httpx.HTTPError:
        return None
    return DEFAULT_URL if found.status_code == 200 else None


def _address(text: str, option: str) -> str:
    """An address without a slash at its end. Raises `Refused` for what is none."""
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_one = is_one and text.isprintable() and not (parts.query or parts.fragment)
    except ValueError:
        is_one = False
    if not is_one:
        raise Refused(f"{option}: {text!r} is not an http(s) address")
    return text.rstrip("/")
