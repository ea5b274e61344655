"""The composition root: builds everything from the settings; the only place that reads the clock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from fastapi import FastAPI

from app import __version__
from app.api.health import health_router
from app.api.mcp import McpEndpoint
from app.api.proxy import ProxyRoutes
from app.api.rest.guard import Guard
from app.api.rest.router import Services, install_rest
from app.dialects.registry import DIALECTS
from app.domain.headers import key_header
from app.domain.messages import Dialect as DialectName
from app.hosts import embeddings_host, model_hosts, summarizer_host
from app.lifetime import Part, lifespan, migrate_when_there
from app.sandbox.child import Limits
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
from app.service.remembering import Remembering
from app.service.retrieval import Retriever
from app.service.search import Searcher
from app.service.sessions import Sessions
from app.service.stats import Figures
from app.service.summarizer import Summarizer
from app.service.summary_models import Host, Models, SummarizerConfig
from app.service.tools import Tools
from app.settings import Settings
from app.store.connection import Database
from app.store.writer import Writer


def clock() -> datetime:
    """The time."""
    return datetime.now(UTC)


def new_id(kind: str = "s") -> str:
    """A new id: sortable by time, unguessable. Those of sessions begin with an ``s``."""
    return f"{kind}{int(time.time() * 1000):011x}{secrets.token_hex(8)}"


def build(
    settings: Settings, *, database_url: str, openai_base_url: str | None = None, is_local: bool = False
) -> ProxyRoutes:
    """The whole service as one ASGI application.

    ``database_url`` is that of the running database, whoever runs it; ``openai_base_url`` replaces the configured
    upstream; ``is_local``: without keys, refuse what comes from web pages of other hosts.
    """
    base = _base(settings, database_url, openai_base_url or settings.openai_base_url)
    abilities = _abilities(settings, base)
    recipes = recipes_of(settings, abilities.tools)
    auth = Auth(base.database, required=settings.auth == "keys", monotonic=time.monotonic, is_local=is_local)
    guard = Guard(auth=auth, max_body=settings.max_body, body_timeout=settings.body_timeout)
    mcp = McpEndpoint(abilities.tools, guard)
    services = _services(settings, base, abilities, recipes)
    cleanup = Cleanup(base.database, recipes, clock=clock, days=settings.cleanup_days)
    rest = FastAPI(
        title="Tersely",
        version=__version__,
        lifespan=lifespan(
            [*base.parts(), Part(None, abilities.queries.close), Part(mcp.open, mcp.close), base.summarizing()],
            keeping=[partial(migrate_when_there, base.database, database_url), cleanup.keep_clean],
        ),
    )
    rest.include_router(health_router(ping=base.database.ping, pool=base.database.sizes, metrics=base.metrics))
    install_rest(rest, services, guard=guard, metrics=base.metrics)
    rest.router.routes.append(mcp.route())
    return ProxyRoutes(
        rest,
        proxies=_proxies(settings, base.hosts, _shared(settings, base, abilities, recipes, services.commands)),
        auth=auth,
        metrics=base.metrics,
        max_body=settings.max_body,
        body_timeout=settings.body_timeout,
        monotonic=time.perf_counter,
    )


# What everything stands on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """The database and the model hosts, and what is one in a process."""

    database: Database
    writer: Writer
    hosts: Mapping[DialectName, Host]
    own_host: Host | None
    summarizer: Summarizer
    embedder: Embedder | None
    metrics: Metrics
    calibrations: Calibrations

    def parts(self) -> list[Part]:
        """What has to be opened before the first request, in this order."""
        upstreams = {host.upstream: None for host in self.hosts.values()}
        if self.own_host is not None:
            upstreams[self.own_host.upstream] = None
        return [
            Part(self.database.open, self.database.close),
            *(Part(upstream.open, upstream.close) for upstream in upstreams),
            Part(None, self.writer.close),
            *([Part(self.embedder.open, self.embedder.close)] if self.embedder else []),
        ]

    def summarizing(self) -> Part:
        """The summarizer, opened last: it begins to work at once."""
        return Part(self.summarizer.open, self.summarizer.close)


def _base(settings: Settings, database_url: str, openai_base_url: str) -> _Base:
    database = Database(
        dsn=database_url,
        size=settings.database_pool,
        timeout=settings.database_timeout,
        pooler=settings.database_pooler == "on",
    )
    metrics = Metrics()
    hosts = model_hosts(settings, openai_base_url)
    own_host = summarizer_host(settings, openai_base_url)
    config = SummarizerConfig(
        model=settings.summarizer_model,
        timeout=settings.summarizer_timeout,
        output=settings.summarizer_output,
        window=settings.summarizer_window,
    )
    models = Models(config, own=own_host, hosts=hosts, metrics=metrics)
    embeddings = embeddings_host(settings)
    return _Base(
        database=database,
        writer=Writer(database),
        hosts=hosts,
        own_host=own_host,
        summarizer=Summarizer(database, models, metrics, clock=clock, monotonic=time.monotonic, name=new_id()),
        embedder=Embedder(database, embeddings, monotonic=time.monotonic) if embeddings else None,
        metrics=metrics,
        calibrations=Calibrations(),
    )


# What agents and their users can do


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abilities:
    """The tools, and the use cases that they share with REST."""

    searcher: Searcher
    retriever: Retriever
    queries: Queries
    notes: Notes
    memos: Memos
    memories: Memories
    artifacts: Artifacts
    tools: Tools


def _abilities(settings: Settings, base: _Base) -> _Abilities:
    database = base.database
    searcher = Searcher(database, base.metrics, base.embedder)
    queries = Queries(
        database,
        base.metrics,
        children=settings.query_children,
        limits=Limits(seconds=settings.query_seconds, memory=settings.query_memory),
    )
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
    return _Abilities(
        searcher=searcher,
        retriever=Retriever(database, searcher),
        queries=queries,
        notes=notes,
        memos=memos,
        memories=memories,
        artifacts=artifacts,
        tools=tools,
    )


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


def _services(settings: Settings, base: _Base, abilities: _Abilities, recipes: Recipes) -> Services:
    """The use cases behind REST."""
    database = base.database
    remembering = Remembering(database, base.summarizer)
    sessions = Sessions(database, recipes, remembering, clock=clock, new_id=new_id)
    keeper = EpochKeeper(database, recipes, clock=clock)
    messages = Messages(database, base.writer, recipes, keep_up=keeper.keep_up, clock=clock)
    previews = Previews(database, recipes, base.calibrations, abilities.retriever, clock=clock)
    compactions = Compactions(database, recipes, base.summarizer, keeper, remembering, clock=clock)
    marks = Marks(database, clock=clock)
    commands = Commands(
        database,
        sessions=sessions,
        previews=previews,
        compactions=compactions,
        notes=abilities.notes,
        marks=marks,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )
    return Services(
        sessions=sessions,
        messages=messages,
        marks=marks,
        exports=Exports(database, messages, sessions, clock=clock, new_id=new_id),
        previews=previews,
        searcher=abilities.searcher,
        queries=abilities.queries,
        figures=Figures(database, recipes, previews),
        followers=Followers(database),
        artifacts=abilities.artifacts,
        compactions=compactions,
        notes=abilities.notes,
        memos=abilities.memos,
        memories=abilities.memories,
        tools=abilities.tools,
        commands=commands,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )


# The proxies


def _shared(settings: Settings, base: _Base, abilities: _Abilities, recipes: Recipes, commands: Commands) -> Shared:
    chat = None
    if settings.chat_commands == "on":
        chat = ChatCommands(
            commands, base.database, base.metrics, clock=clock, monotonic=time.perf_counter, new_id=new_id
        )
    return Shared(
        database=base.database,
        writer=base.writer,
        recipes=recipes,
        calibrations=base.calibrations,
        metrics=base.metrics,
        summarizer=base.summarizer,
        retriever=abilities.retriever,
        tools=abilities.tools,
        clock=clock,
        monotonic=time.perf_counter,
        new_id=new_id,
        chat=chat,
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
