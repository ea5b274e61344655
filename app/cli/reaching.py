"""Where the commands do their work: a running service, or the same application in this process on the database.

There is one implementation, the REST API; what differs is only the way to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import httpx
import typer

from app.cli.serving import Refused, database_of, log_as_json
from app.main import build
from app.settings import Settings
from app.store.migrations import migrate

DEFAULT_URL = "http://127.0.0.1:8484"
# Seconds: whether somebody is there, and what a compaction may take.
KNOCK, PATIENCE = 2.0, 600.0

T = TypeVar("T")

Url = Annotated[str | None, typer.Option(envvar="TERSELY_URL", help="A running service.", show_default=DEFAULT_URL)]
Key = Annotated[str | None, typer.Option(envvar="TERSELY_KEY", help="A Tersely key.")]
Local = Annotated[bool, typer.Option("--local", help="Straight on the database, without a service.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
SessionId = Annotated[str, typer.Option("--session", "-s", envvar="TERSELY_SESSION", help="The session.")]


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

    async def call(self, method: str, path: str, **how: Any) -> httpx.Response:
        """The answer; ``how`` as `httpx` has it."""
        response = await self.http.request(method, path, **how)
        check(response)
        return response

    async def ask(self, method: str, path: str, **how: Any) -> Any:
        """What the answer says."""
        return (await self.call(method, path, **how)).json()

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
    raise Refused(str(detail))


def session_path(session_id: str, *steps: str) -> str:
    """``/api/sessions/{id}/...``."""
    return "/".join(["/api/sessions", quote(session_id, safe=""), *steps])


def work(place: Place, task: Callable[[Service], Awaitable[T]]) -> T:
    """The result of ``task`` where ``place`` says. Raises `Refused`."""

    async def run(http: httpx.AsyncClient) -> T:
        try:
            return await task(Service(http))
        except httpx.HTTPError as error:
            raise Refused(f"the service does not answer: {type(error).__name__}") from error

    async def there(url: str) -> T:
        headers = {"x-tersely-key": place.key} if place.key else {}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE) as http:
            return await run(http)

    url = _service_at(place)
    if url is not None:
        return asyncio.run(there(url))
    return _work_here(place, run)


def _service_at(place: Place) -> str | None:
    """The address of a service, if one is to be used."""
    if place.is_local or place.upstream is not None:
        return None
    url = (place.url or DEFAULT_URL).rstrip("/")
    if place.url is None:
        try:
            httpx.get(f"{url}/healthz", timeout=KNOCK)
        except httpx.HTTPError:
            return None
    return url


def _work_here(place: Place, run: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    settings = Settings()
    # With a key it is its tenant's data; without, that of the one tenant there is without keys.
    settings = settings.model_copy(update={"auth": "keys" if place.key else "off"})
    log_as_json("error")
    with database_of(settings) as database_url:

        async def here() -> T:
            await migrate(database_url)
            async with _application(settings, database_url, place) as http:
                return await run(http)

        return asyncio.run(here())


@asynccontextmanager
async def _application(settings: Settings, database_url: str, place: Place) -> AsyncIterator[httpx.AsyncClient]:
    application = build(settings, database_url=database_url, openai_base_url=place.upstream)
    headers = {"x-tersely-key": place.key} if place.key else {}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(application.rest.router.lifespan_context(application.rest))
        transport = httpx.ASGITransport(app=application, raise_app_exceptions=False)
        yield await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url=DEFAULT_URL, headers=headers, timeout=PATIENCE)
        )
