"""The composition root: builds everything from the settings; the only place that reads the clock."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial

from asyncpg import PostgresError
from fastapi import FastAPI
from pydantic import SecretStr
from sqlalchemy.exc import DBAPIError

from app import __version__
from app.api.health import health_router
from app.api.mcp import McpEndpoint
from app.api.proxy import ProxyRoutes
from app.api.rest.guard import Guard
from app.api.rest.router import Services, install_rest
from app.dialects.registry import DIALECTS
from app.domain.errors import StoreUnavailable
from app.domain.headers import key_header
from app.domain.messages import Dialect as DialectName
from app.service import tokens
from app.service.artifacts import Artifacts
from app.service.auth import Auth
from app.service.calibrations import Calibrations
from app.service.chat_commands import ChatCommands
from app.service.cleanup import Cleanup
from app.service.commands import Commands
from app.service.compactions import Compactions
from app.service.embedder import Embedder
from app.service.epoch_keeping import EpochKeeper
from app.service.exports import Exports
from app.service.following import Followers
from app.service.marks import Marks
from app.service.memory import Memories
from app.service.memos import Memos
from app.service.messages import Messages
from app.service.metrics import Metrics
from app.service.notes import Notes
from app.service.previews import Previews
from app.service.proxy import Proxy, ProxyConfig, Shared
from app.service.queries import Queries
from app.service.recipes import Recipes
from app.service.retrieval import Retriever
from app.service.search import Searcher
from app.service.sessions import Sessions
from app.service.stats import Figures
from app.service.summarizer import Summarizer
from app.service.summary_models import Host, Models, SummarizerConfig
from app.service.tools import Tools
from app.settings import Settings
from app.store.connection import Database
from app.store.migrations import migrate
from app.store.writer import Writer
from app.upstream.client import Timeouts, Upstream
from app.upstream.embeddings import EmbeddingsHost

_log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
REFUSAL_SECONDS = 60.0
REFUSALS = frozenset({"InvalidAuthorizationSpecificationError", "InvalidPasswordError", "InsufficientPrivilegeError"})


def clock() -> datetime:
    """The time."""
    return datetime.now(UTC)


def new_id(kind: str = "s") -> str:
    """A new id: sortable by time, unguessable. Those of sessions begin with an ``s``."""
    return f"{kind}{int(time.time() * 1000):011x}{secrets.token_hex(8)}"


async def _migrate_when_there(database: Database, url: str) -> None:
    """The service starts without its database; when that comes, it may be one that has to be migrated first."""
    told = -REFUSAL_SECONDS
    while True:
        try:
            await database.check_schema()
            return
        except StoreUnavailable:
            pass
        try:
            await migrate(url)
        except (OSError, DBAPIError, PostgresError, TimeoutError) as error:
            cause = getattr(error, "orig", error)
            refused = next((name for name in _names(cause) if name in REFUSALS), None)
            if refused is None:
                _log.info("the database is still away: %s", type(error).__name__)
            elif time.monotonic() - told >= REFUSAL_SECONDS:
                told = time.monotonic()
                _log.warning("the database refuses us (%s): check the authorization in DATABASE_URL", refused)
            await asyncio.sleep(RETRY_SECONDS)


def _names(error: BaseException | None) -> list[str]:
    """The classes of an error, and of what it wraps."""
    names: list[str] = []
    while error is not None:
        names += [kind.__name__ for kind in type(error).__mro__]
        error = error.__cause__
    return names


def _spare_the_collector() -> None:
    """Take what lives as long as the process out of the garbage collector's rounds, and make these rarer.

    Nearly everything that a request makes is freed by reference counts; scanning the rest costs a tenth of the CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _hosts(settings: Settings, openai_base_url: str) -> dict[DialectName, Host]:
    """The model host of each dialect; dialects of one address share its connections."""
    timeouts = Timeouts(
        connect=settings.connect_timeout, first_byte=settings.first_byte_timeout, idle=settings.idle_timeout
    )
    addresses: dict[DialectName, tuple[str, SecretStr | None]] = {
        "openai_chat": (openai_base_url, settings.openai_api_key),
        "openai_responses": (openai_base_url, settings.openai_api_key),
        "anthropic": (settings.anthropic_base_url, settings.anthropic_api_key),
        "gemini": (settings.gemini_base_url, settings.gemini_api_key),
        "gemini_gca": (settings.gemini_gca_base_url, None),
    }
    upstreams = {address: Upstream(address, timeouts) for address, _ in addresses.values()}
    return {
        name: Host(upstream=upstreams[address], dialect=name, api_key=key.get_secret_value() if key else None)
        for name, (address, key) in addresses.items()
    }


def _summarizer_host(settings: Settings, openai_base_url: str) -> Host | None:
    """The summarizer's own model host, or its own key for the sessions' one, if it has either."""
    key = settings.summarizer_api_key
    if settings.summarizer_base_url is None and key is None:
        return None
    # It is spoken to when nobody waits, so it needs no more patience than a whole call gets.
    timeouts = Timeouts(
        connect=settings.connect_timeout, first_byte=settings.summarizer_timeout, idle=settings.summarizer_timeout
    )
    return Host(
        upstream=Upstream(settings.summarizer_base_url or openai_base_url, timeouts),
        api_key=key.get_secret_value() if key else None,
    )


def _embedder(settings: Settings, database: Database) -> Embedder | None:
    """What embeds messages, where a host and a model for that are configured."""
    key = settings.embeddings_api_key
    if settings.embeddings_base_url is None or settings.embeddings_model is None:
        return None
    host = EmbeddingsHost(
        settings.embeddings_base_url,
        model=settings.embeddings_model,
        api_key=key.get_secret_value() if key else None,
        timeout=settings.embeddings_timeout,
    )
    return Embedder(database, host, monotonic=time.monotonic)


def recipes_of(settings: Settings, tools: Tools | None = None) -> Recipes:
    """Strategies and policies as configured; ``tools`` are offered to models."""
    return Recipes(
        offers=None if tools is None else tools.offers,
        strategy=settings.strategy,
        epoch=settings.epoch,
        references=settings.references,
        instructions=settings.instructions == "on",
        derive_terse=settings.derive_terse == "on",
        cache_ttl=settings.cache_ttl,
    )


def _proxies(settings: Settings, hosts: Mapping[DialectName, Host], shared: Shared) -> dict[DialectName, Proxy]:
    """The proxy of each dialect in front of its host."""
    return {
        name: Proxy(
            DIALECTS[name],
            host.upstream,
            shared,
            ProxyConfig(
                key=key_header(name, host.api_key) if host.api_key else None,
                fail_open=settings.fail_open == "on",
                heartbeat=settings.heartbeat,
            ),
        )
        for name, host in hosts.items()
    }


def build(
    settings: Settings, *, database_url: str, openai_base_url: str | None = None, is_local: bool = False
) -> ProxyRoutes:
    """The whole service as one ASGI application.

    ``database_url`` is that of the running database, whoever runs it; ``openai_base_url`` replaces the configured
    upstream; ``is_local``: without keys, refuse what comes from web pages of other hosts.
    """
    database = Database(
        dsn=database_url,
        size=settings.database_pool,
        timeout=settings.database_timeout,
        pooler=settings.database_pooler == "on",
    )
    writer = Writer(database)
    hosts = _hosts(settings, openai_base_url or settings.openai_base_url)
    metrics = Metrics()
    calibrations = Calibrations()
    own_host = _summarizer_host(settings, openai_base_url or settings.openai_base_url)
    summarizer = Summarizer(
        database,
        Models(
            SummarizerConfig(
                model=settings.summarizer_model,
                timeout=settings.summarizer_timeout,
                output=settings.summarizer_output,
                window=settings.summarizer_window,
            ),
            own=own_host,
            hosts=hosts,
            metrics=metrics,
        ),
        metrics,
        clock=clock,
        monotonic=time.monotonic,
        name=new_id(),
    )
    embedder = _embedder(settings, database)
    searcher = Searcher(database, metrics, embedder)
    retriever = Retriever(database, searcher)
    queries = Queries(database)
    notes = Notes(database, clock=clock)
    memos = Memos(database, clock=clock, new_id=partial(new_id, "m"))
    memories = Memories(database)
    artifacts = Artifacts(database)
    tools = Tools(
        database,
        searcher=searcher,
        queries=queries,
        notes=notes,
        memos=memos,
        memories=memories,
        artifacts=artifacts,
        offered=settings.offered_tools,
    )
    recipes = recipes_of(settings, tools)
    cleanup = Cleanup(database, recipes, clock=clock, days=settings.cleanup_days)
    auth = Auth(database, required=settings.auth == "keys", monotonic=time.monotonic, is_local=is_local)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await database.open()
            stack.push_async_callback(database.close)
            for upstream in {host.upstream for host in hosts.values()}:
                await upstream.open()
                stack.push_async_callback(upstream.close)
            if own_host is not None:
                await own_host.upstream.open()
                stack.push_async_callback(own_host.upstream.close)
            stack.push_async_callback(writer.close)
            if embedder is not None:
                await embedder.open()
                stack.push_async_callback(embedder.close)
            stack.push_async_callback(queries.close)
            await mcp.open()
            stack.push_async_callback(mcp.close)
            await summarizer.open()
            stack.push_async_callback(summarizer.close)
            # Reading a vocabulary takes some tenths of a second, which no request should wait for.
            await asyncio.to_thread(tokens.count_text, "warm", "o200k_base")
            migrating = asyncio.get_running_loop().create_task(_migrate_when_there(database, database_url))
            stack.callback(migrating.cancel)
            cleaning = asyncio.get_running_loop().create_task(cleanup.keep_clean())
            stack.callback(cleaning.cancel)
            _spare_the_collector()
            yield

    rest = FastAPI(title="Tersely", version=__version__, lifespan=lifespan)
    rest.include_router(health_router(ping=database.ping, pool=database.sizes, metrics=metrics))
    sessions = Sessions(database, recipes, clock=clock, new_id=new_id)
    keeper = EpochKeeper(database, recipes, clock=clock)
    messages = Messages(database, writer, recipes, keep_up=keeper.keep_up, clock=clock)
    previews = Previews(database, recipes, calibrations, retriever, clock=clock)
    compactions = Compactions(database, recipes, summarizer, keeper, clock=clock)
    commands = Commands(
        database,
        sessions=sessions,
        previews=previews,
        compactions=compactions,
        notes=notes,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )
    chat = ChatCommands(commands, database, metrics, clock=clock, monotonic=time.perf_counter, new_id=new_id)
    services = Services(
        sessions=sessions,
        messages=messages,
        marks=Marks(database, clock=clock),
        exports=Exports(database, messages, sessions, clock=clock, new_id=new_id),
        previews=previews,
        searcher=searcher,
        queries=queries,
        figures=Figures(database, recipes, previews),
        followers=Followers(database),
        artifacts=artifacts,
        compactions=compactions,
        notes=notes,
        memos=memos,
        memories=memories,
        tools=tools,
        commands=commands,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )
    guard = Guard(auth=auth, max_body=settings.max_body, body_timeout=settings.body_timeout)
    install_rest(rest, services, guard=guard, metrics=metrics)
    mcp = McpEndpoint(tools, guard)
    rest.router.routes.append(mcp.route())
    shared = Shared(
        database=database,
        writer=writer,
        recipes=recipes,
        calibrations=calibrations,
        metrics=metrics,
        summarizer=summarizer,
        retriever=retriever,
        tools=tools,
        clock=clock,
        monotonic=time.perf_counter,
        new_id=new_id,
        chat=chat if settings.chat_commands == "on" else None,
    )
    return ProxyRoutes(
        rest,
        proxies=_proxies(settings, hosts, shared),
        auth=auth,
        metrics=metrics,
        max_body=settings.max_body,
        body_timeout=settings.body_timeout,
        monotonic=time.perf_counter,
    )
