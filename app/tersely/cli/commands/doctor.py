"""``tersely doctor``: check everything that a service needs, and advise how to fix errors."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx

from tersely import __version__
from tersely.composition.foundation import prices_of
from tersely.composition.use_cases import configs_of
from tersely.domain.errors import TerselyError
from tersely.embedded_postgres import default_data_dir
from tersely.server.database import database_of, plainly
from tersely.server.errors import CommandError
from tersely.settings import PREFIX, Settings, load_settings, unknown_settings, unknown_settings_in_files
from tersely.store.db.connection import Database
from tersely.store.db.migrations import current_revision, has_tables, is_newer, is_outdated
from tersely.store.ops import keys

HOST_SECONDS = 5.0
MOST_PROBES = 16
MOST_SKEW = 60.0
# Bytes of free disk: below the first something will fail, below the second soon.
FULL, LEAST_FREE = 64 * 1024**2, 2 * 1024**3
# Ends of base URLs that repeat what clients' paths begin with.
_ENDPOINTS = re.compile(r"/(chat(/completions)?|completions|responses|embeddings|models)$|(?<=/v1)/v1$")
_VERSIONS = {
    "anthropic": re.compile(r"/v1(/messages)?$"),
    "gemini": re.compile(r"/v1(alpha|beta)?(/openai|/models)?$"),
    "azure": re.compile(r"/openai(/v1|/deployments(/[^/]*)?)?$"),
}
PROVIDER_KEYS = ("openai_api_key", "anthropic_api_key", "gemini_api_key")

EMPTY = "empty"
"""The revision of a database without tables."""

CheckStatus = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. ``advice``: how to fix it; empty if there is no error."""

    state: CheckStatus
    subject: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseState:
    """The answers of a database about itself. ``valid_keys`` None: nobody needs a key, or they cannot be read."""

    revision: str | None
    valid_keys: int | None = None


def examine(port: int) -> Iterator[Finding]:
    """Look at one thing after the other. ``port``: where the service is to listen."""
    yield Finding(state="ok", subject="version", text=f"Tersely {__version__}, Python {platform.python_version()}")
    try:
        settings = load_settings()
        configs_of(settings, prices_of(settings))
    except TerselyError as error:
        for line in error.detail.splitlines():
            yield Finding(state="fail", subject="settings", text=line, advice="correct the setting (docs/settings.md)")
        return
    complaints = [*unknown_settings(os.environ), *unknown_settings_in_files()]
    for complaint in complaints:
        yield Finding(state="warn", subject="settings", text=complaint, advice="correct its name or remove it")
    if not complaints:
        yield Finding(state="ok", subject="settings", text="all are known and in range")
    yield _port(port)
    yield _disk(settings.data_dir or default_data_dir())
    yield from _database_and_access(settings)
    yield _provider_keys(settings)
    yield from _hosts(settings)


def _port(port: int) -> Finding:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            pass
        else:
            return Finding(state="ok", subject="port", text=f"{port} is free: `tersely serve` can use it")
    try:
        ready = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=HOST_SECONDS, trust_env=False)
    except httpx.HTTPError:
        ready = None
    if ready is None or "x-tersely-request-id" not in ready.headers:
        text = f"{port} is used by another program"
        return Finding(state="fail", subject="port", text=text, advice="stop it, or `tersely serve --port N`")
    status = ready.json()
    if status == {"status": "ready", "database": "ready"}:
        return Finding(state="ok", subject="port", text=f"Tersely serves on {port} and is ready")
    text = f"Tersely serves on {port}: {', '.join(f'{name} {value}' for name, value in status.items())}"
    return Finding(state="warn", subject="port", text=text, advice="see the line about the database")


def _disk(directory: Path) -> Finding:
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / 1024**3:,.2f} GiB free at {directory}"
    if not existing.is_dir():
        advice = "set TERSELY_DATA_DIR to a directory"
        return Finding(state="fail", subject="disk", text=f"{existing} is not a directory", advice=advice)
    if not os.access(existing, os.W_OK):
        advice = "change its owner, or set TERSELY_DATA_DIR"
        return Finding(state="fail", subject="disk", text=f"{existing} cannot be written to", advice=advice)
    if free < LEAST_FREE:
        state: CheckStatus = "fail" if free < FULL else "warn"
        return Finding(state=state, subject="disk", text=text, advice="make room: the spool and the database need it")
    return Finding(state="ok", subject="disk", text=text)


def _database_and_access(settings: Settings) -> tuple[Finding, Finding]:
    """Check the database, and whether it has the keys that callers need."""
    kind = "the embedded Postgres" if settings.database_url is None else "DATABASE_URL"
    try:
        with plainly(), database_of(settings) as url:
            state = asyncio.run(_read_database(url, settings))
    except CommandError as error:
        return Finding(state="fail", subject="database", text=str(error), advice=f"check {kind}"), _access(settings)
    except Exception as error:  # noqa: BLE001 whatever it is, it is what is wrong with the database
        text = f"{kind}: {getattr(error, 'detail', None) or type(error).__name__}"
        advice = "start it and check its address; for a new database run `tersely migrate`"
        return Finding(state="fail", subject="database", text=text, advice=advice), _access(settings)
    return _schema(kind, state.revision), _access(settings, state.valid_keys)


async def _read_database(url: str, settings: Settings) -> DatabaseState:
    if not await has_tables(url, HOST_SECONDS):
        return DatabaseState(revision=EMPTY, valid_keys=0)
    database = Database(dsn=url, size=1, timeout=HOST_SECONDS, pooler=settings.database_pooler)
    await database.open()
    try:
        revision = await database.read_revision()
        if settings.auth == "off" or is_outdated(revision):
            return DatabaseState(revision=revision)
        now = datetime.now(UTC)
        valid = [key for key in await keys.of_all_tenants(database) if key.is_valid(now)]
        return DatabaseState(revision=revision, valid_keys=len(valid))
    finally:
        await database.close()


def _schema(kind: str, revision: str | None) -> Finding:
    if revision == EMPTY:
        text = f"{kind} answers and is new: `tersely serve` sets it up"
        return Finding(state="ok", subject="database", text=text)
    if is_outdated(revision):
        text = f"{kind} is at schema {revision or 'unknown'}, this version wants {current_revision()}"
        return Finding(state="warn", subject="database", text=text, advice="run `tersely migrate`")
    newer = f", newer than {current_revision()}" if is_newer(revision) else ""
    return Finding(state="ok", subject="database", text=f"{kind} answers, schema {revision}{newer}")


def _access(settings: Settings, valid_keys: int | None = None) -> Finding:
    """Say who may call. ``valid_keys`` None: the database did not say how many there are."""
    if settings.auth == "off":
        return Finding(state="ok", subject="access", text="no Tersely key is needed (TERSELY_AUTH=off)")
    if valid_keys is None:
        text = "every call needs a Tersely key; the database does not say whether there is one"
        return Finding(state="warn", subject="access", text=text, advice="see the line about the database")
    if valid_keys == 0:
        text = "every call needs a Tersely key, and there is none that is valid"
        return Finding(state="fail", subject="access", text=text, advice="run `tersely keys create --tenant NAME`")
    text = f"every call needs a Tersely key; valid keys: {valid_keys}"
    return Finding(state="ok", subject="access", text=text)


def _provider_keys(settings: Settings) -> Finding:
    own = [name.removesuffix("_api_key") for name in PROVIDER_KEYS if getattr(settings, name) is not None]
    named = [name for name, host in settings.upstreams.items() if host.api_key is not None]
    if own or named:
        return Finding(state="ok", subject="keys", text=f"the service has keys for {', '.join(own + named)}")
    return Finding(state="ok", subject="keys", text="the service has no provider keys: callers send their own")


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostAddress:
    """The base URL of a model host, with the setting that has it. ``dialect``: as in `UpstreamSettings`."""

    name: str
    setting: str
    dialect: str
    url: str


def _addresses(settings: Settings) -> list[_HostAddress]:
    defaults = [
        _HostAddress(name=name, setting=f"{PREFIX}{name.upper()}_BASE_URL", dialect=name, url=url)
        for name, url in (
            ("openai", settings.openai_base_url),
            ("anthropic", settings.anthropic_base_url),
            ("gemini", settings.gemini_base_url),
        )
    ]
    own = [
        _HostAddress(name=name, setting=f"{PREFIX}{name.upper()}_BASE_URL", dialect="openai", url=url)
        for name, url in (("summarizer", settings.summarizer_base_url), ("embeddings", settings.embeddings_base_url))
        if url is not None
    ]
    named = [
        _HostAddress(name=name, setting=f"base_url of upstreams.{name}", dialect=host.dialect, url=host.base_url)
        for name, host in settings.upstreams.items()
    ]
    return defaults + own + named


def _hosts(settings: Settings) -> Iterator[Finding]:
    addresses = _addresses(settings)
    skews: list[float] = []
    with httpx.Client(timeout=HOST_SECONDS, trust_env=False) as client, ThreadPoolExecutor(MOST_PROBES) as pool:
        answers = list(pool.map(partial(_probe, client), [each.url for each in addresses]))
        doubts = list(pool.map(partial(_doubt_path, client), addresses, answers))
    for address, answer, doubt in zip(addresses, answers, doubts, strict=True):
        host = urlsplit(address.url).hostname
        if isinstance(answer, httpx.HTTPError):
            text = f"{address.name}: {host} cannot be reached ({type(answer).__name__})"
            advice = "check network, DNS and the base URL; unused hosts do not matter"
            yield Finding(state="warn", subject="host", text=text, advice=advice)
        elif "x-tersely-request-id" in answer.headers:
            text = f"{address.name}: {host} is a Tersely service, not a model host"
            advice = f"set {address.setting} to the model host: a service that is its own host calls itself endlessly"
            yield Finding(state="warn", subject="host", text=text, advice=advice)
        else:
            yield Finding(state="ok", subject="host", text=f"{address.name}: {host} answers")
            skews += _skew(answer)
        if doubt is not None:
            yield doubt
    yield _clock(skews)


def _doubt_path(
    client: httpx.Client, address: _HostAddress, answer: httpx.Response | httpx.HTTPError
) -> Finding | None:
    """Return a doubt where the path of a base URL lacks the version that clients' paths lack, or repeats it."""
    path = urlsplit(address.url).path
    if address.dialect == "openai":
        end = _ENDPOINTS.search(path)
        right = (path[: end.start()] if end else path) or "/v1"
        if right == "/v1" and path != "/v1" and not end and not isinstance(answer, httpx.HTTPError):
            models = _probe(client, f"{address.url}/models")
            if not isinstance(models, httpx.HTTPError) and models.status_code != httpx.codes.NOT_FOUND:
                return None
    else:
        end = _VERSIONS[address.dialect].search(path)
        right = path[: end.start()] if end else path
    if right == path:
        return None
    error = f"ends with {path[len(right) :]}, which Tersely adds itself" if end else "has no version such as /v1"
    parts = urlsplit(address.url)
    # Without the name and password that may stand before the host.
    origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return Finding(
        state="warn",
        subject="host",
        text=f"{address.name}: {origin}{path} {error}",
        advice=f"set {address.setting} to {origin}{right}, unless the host's documentation says otherwise",
    )


def _skew(answer: httpx.Response) -> list[float]:
    """Return how many seconds this machine's clock is ahead of a host's, if the host tells a time."""
    try:
        return [time.time() - parsedate_to_datetime(answer.headers["date"]).timestamp()]
    except (KeyError, ValueError):
        return []


def _clock(skews: list[float]) -> Finding:
    if not skews:
        return Finding(state="warn", subject="clock", text="not checked: no model host answers", advice="see the hosts")
    skew = sorted(skews)[len(skews) // 2]
    if abs(skew) > MOST_SKEW:
        text = f"this machine's clock is {skew:+.0f} s off"
        advice = "synchronise it (NTP): epochs and leases depend on it"
        return Finding(state="warn", subject="clock", text=text, advice=advice)
    return Finding(state="ok", subject="clock", text=f"within {max(1, abs(round(skew)))} s of the hosts'")


def _probe(client: httpx.Client, address: str) -> httpx.Response | httpx.HTTPError:
    try:
        return client.get(address)
    except httpx.HTTPError as error:
        return error
