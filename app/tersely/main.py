"""The composition root: builds everything from the settings; the only place that reads the clock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.routing import Route

from tersely import __version__
from tersely.api.health import health_router
from tersely.api.host_table import Destination, HostTable, NamedHost
from tersely.api.mcp import McpEndpoint
from tersely.api.proxy import Edge, ProxyRoutes
from tersely.api.rest.guard import Guard
from tersely.api.rest.router import install_rest
from tersely.api.rest.services import Services
from tersely.api.transport.body import BodyBudget
from tersely.api.transport.shutdown import Shutdown
from tersely.console.docs_page import docs_route
from tersely.console.pages import Pages
from tersely.console.router import Console
from tersely.console.views import Sources, Views
from tersely.dialects.account_routes import parse_passthrough
from tersely.dialects.headers import key_header
from tersely.dialects.registry import DIALECTS
from tersely.domain.limits import Limits
from tersely.domain.messages import Dialect as DialectName
from tersely.embedded_postgres import default_data_dir
from tersely.hosts import ROUTE_DIALECTS, embeddings_host, model_hosts, named_hosts, summarizer_host, summary_hosts
from tersely.lifespan import Part, lifespan, migrate_when_there, report_pool, return_freed_memory
from tersely.sandbox.child import Limits as QueryLimits
from tersely.service.common.auth import Auth
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.call_board import CallBoard
from tersely.service.common.console_access import ConsoleAccess, OperatorAccess
from tersely.service.common.metrics import OUTCOMES, IgnoredMetrics, Metrics
from tersely.service.common.operations import Operations
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.retrieval import Retriever
from tersely.service.limits.limiter import Limiter
from tersely.service.limits.tenants import Tenants
from tersely.service.memos.memos import Memos
from tersely.service.money.prices import Prices, read_prices
from tersely.service.money.savings import Savings
from tersely.service.proxy.account_access import AccountAccess
from tersely.service.proxy.chat_commands import ChatCommands
from tersely.service.proxy.exchange_keeping import ExchangeKeeper
from tersely.service.proxy.live_sessions import LiveSessions
from tersely.service.proxy.proxy import Proxy, ProxyConfig, Shared
from tersely.service.replays.replays import Replays
from tersely.service.search.embedder import Embedder
from tersely.service.search.page_builder import PageBuilder
from tersely.service.search.queries import Queries
from tersely.service.search.session_search import Searcher
from tersely.service.search.tenant_search import TenantSearch
from tersely.service.sessions.activity import Activity
from tersely.service.sessions.artifact_removal import ArtifactRemoval
from tersely.service.sessions.artifacts import Artifacts
from tersely.service.sessions.calls import Calls
from tersely.service.sessions.cleanup import Cleanup
from tersely.service.sessions.commands import Commands
from tersely.service.sessions.compactions import Compactions
from tersely.service.sessions.comparisons import Comparisons
from tersely.service.sessions.epochs import EpochKeeper
from tersely.service.sessions.event_stream import EventStream
from tersely.service.sessions.exports import Exports
from tersely.service.sessions.messages import Messages
from tersely.service.sessions.notes import Notes
from tersely.service.sessions.pins import Pins
from tersely.service.sessions.previews import Previews
from tersely.service.sessions.sessions import Sessions
from tersely.service.sessions.stats import StatsReader
from tersely.service.sessions.visibility import Visibility
from tersely.service.summaries.daily_memory import DailyMemory
from tersely.service.summaries.memory_updates import MemoryUpdates
from tersely.service.summaries.models import Host, Models, SummarizerConfig
from tersely.service.summaries.prefetcher import SummaryPrefetcher
from tersely.service.summaries.summarizer import Summarizer
from tersely.service.tools.tools import Tools
from tersely.settings import Settings
from tersely.store.commit.spool import spool_directory
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.telemetry import Telemetry
from tersely.upstream.client import Upstream

MEBIBYTE = 1024 * 1024
# Of the live sessions of a replay.
REPLAY_MEMORY = 64 * MEBIBYTE


def clock() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


def new_id(kind: str = "s") -> str:
    """Return a new id: sortable by time, unguessable. Those of sessions begin with an ``s``."""
    return f"{kind}{int(time.time() * 1000):011x}{secrets.token_hex(8)}"


def build(
    settings: Settings, *, database_url: str, openai_base_url: str | None = None, is_local: bool = False
) -> ProxyRoutes:
    """Return the whole service as one ASGI application.

    ``database_url``: the running database. ``openai_base_url`` replaces the configured upstream. ``is_local``: without
    keys, refuse requests from web pages of other hosts.
    """
    base = _base(settings, database_url, openai_base_url or settings.openai_base_url)
    abilities = _abilities(settings, base)
    configs = configs_of(settings, abilities.tools)
    auth = Auth(
        base.database,
        required=settings.auth == "keys",
        monotonic=time.monotonic,
        clock=clock,
        is_local=is_local,
        origins=settings.allowed_origins,
    )
    limiter = base.limiter
    guard = Guard(
        auth=auth,
        limiter=limiter,
        admin_key=settings.admin_key.get_secret_value() if settings.admin_key else None,
        max_body=settings.max_body,
        body_timeout=settings.body_timeout,
        max_messages=settings.max_messages,
    )
    mcp = McpEndpoint(abilities.tools, guard)
    remembering = MemoryUpdates(base.database, base.summarizer, clock=clock)
    services = _services(settings, base, abilities, configs, remembering)
    telemetry = Telemetry()
    cleanup = Cleanup(base.database, configs, clock=clock, days=settings.cleanup_days, name=new_id())
    shared = _shared(settings, base, abilities, configs, services.commands)
    replays = _replays(settings, shared, services)
    rest = FastAPI(
        title="Tersely",
        docs_url=None,
        redoc_url=None,
        version=__version__,
        # The operation ids of the OpenAPI document are the functions' names.
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan(
            [
                Part(None, telemetry.close),
                *base.parts(),
                Part(limiter.open, limiter.close),
                Part(None, abilities.queries.close),
                Part(mcp.open, mcp.close),
                Part(None, replays.close),
                base.summarizing(),
            ],
            keeping=[
                partial(migrate_when_there, base.database, database_url),
                cleanup.keep_clean,
                limiter.keep_current,
                partial(base.calibrations.keep_shared, base.database, clock),
                partial(report_pool, base.database.sizes, base.metrics),
                remembering.keep_resuming,
            ],
        ),
    )
    shutdown = Shutdown([upstream.interrupt for upstream in base.upstreams()], grace=settings.shutdown_grace)
    health = health_router(
        read_revision=base.database.read_revision,
        pool=base.database.sizes,
        metrics=base.metrics,
        # With keys nobody is let in whose key cannot be looked up.
        serves_without_database=settings.fail_open == "on" and settings.auth == "off",
        is_ending=lambda: shutdown.is_draining,
    )
    rest.include_router(health)
    install_rest(rest, services, guard=guard, metrics=base.metrics)
    rest.router.routes += _console_routes(settings, base, services, auth, replays)
    rest.router.routes.append(mcp.route())
    return ProxyRoutes(
        rest,
        hosts=_host_table(settings, base, shared),
        auth=auth,
        metrics=base.metrics,
        max_body=settings.max_body,
        max_messages=settings.max_messages,
        body_timeout=settings.body_timeout,
        body_budget=_body_budget(settings, base.metrics),
        monotonic=time.perf_counter,
        shutdown=shutdown,
        limiter=limiter,
        edge=Edge(origins=settings.allowed_origins, tracing=telemetry.tracing, board=base.board),
    )


def _body_budget(settings: Settings, metrics: Metrics) -> BodyBudget:
    """Return the memory for request bodies in flight."""
    limit = settings.body_memory * MEBIBYTE
    return BodyBudget(limit, level=metrics.tally.gauge(metrics.body_bytes), return_freed_memory=return_freed_memory)


# The parts that all others use


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """The database, the model hosts, and the objects that exist once in a process."""

    database: Database
    writer: Writer
    exchanges: ExchangeKeeper
    hosts: Mapping[DialectName, Host]
    named_hosts: Mapping[str, Host]
    own_host: Host | None
    summarizer: Summarizer
    embedder: Embedder | None
    searcher: Searcher
    page_builder: PageBuilder
    live: LiveSessions
    metrics: Metrics
    prices: Prices
    calibrations: Calibrations
    limiter: Limiter
    board: CallBoard

    def upstreams(self) -> list[Upstream]:
        """Return the model hosts, each once."""
        hosts = [
            *self.hosts.values(),
            *self.named_hosts.values(),
            *([self.own_host] if self.own_host is not None else []),
        ]
        return list(dict.fromkeys(host.upstream for host in hosts))

    def parts(self) -> list[Part]:
        """Return the parts to open before the first request, in order."""
        return [
            Part(self.database.open, self.database.close),
            *(Part(upstream.open, upstream.close) for upstream in self.upstreams()),
            Part(None, self.writer.close),
            Part(self.exchanges.open, self.exchanges.close),
            *([Part(self.embedder.open, self.embedder.close)] if self.embedder else []),
            Part(self.page_builder.open, self.page_builder.close),
        ]

    def summarizing(self) -> Part:
        """Return the summarizer, opened last: it begins to work at once."""
        return Part(self.summarizer.open, self.summarizer.close)


def _base(settings: Settings, database_url: str, openai_base_url: str) -> _Base:
    database = Database(
        dsn=database_url,
        size=settings.database_pool,
        timeout=settings.database_timeout,
        pooler=settings.database_pooler == "on",
    )
    metrics = Metrics(version=__version__, data_dir=settings.data_dir or default_data_dir())
    hosts = model_hosts(settings, openai_base_url)
    own_host = summarizer_host(settings, openai_base_url)
    config = SummarizerConfig(
        model=settings.summarizer_model,
        timeout=settings.summarizer_timeout,
        output=settings.summarizer_output,
        window=settings.summarizer_window,
        daily_calls=settings.summarizer_daily_calls,
        daily_tokens=settings.summarizer_daily_tokens,
        input_price=settings.summarizer_input_price,
        output_price=settings.summarizer_output_price,
    )
    further = named_hosts(settings)
    models = Models(config, own=own_host, hosts=hosts, named=summary_hosts(settings, further), metrics=metrics)
    embeddings = embeddings_host(settings)
    prices = Prices(read_prices(settings.prices) if settings.prices else None)
    limiter = Limiter(
        database,
        metrics,
        defaults=Limits(**settings.limits.model_dump()),
        clock=clock,
        monotonic=time.monotonic,
        name=new_id(),
    )

    def charge_embeddings(tenant: str, tokens: int) -> None:
        price = prices.of(settings.embeddings_model or "")
        limiter.charge(tenant, tokens, 0.0 if price is None else tokens * price.input)

    embedder = None
    if embeddings:
        embedder = Embedder(database, embeddings, monotonic=time.monotonic, charge=charge_embeddings)
    searcher = Searcher(database, metrics, embedder)
    page_builder = PageBuilder(searcher.build_pages)
    writer = Writer(database, on_full_pages=page_builder.schedule)
    return _Base(
        database=database,
        writer=writer,
        exchanges=ExchangeKeeper(
            database,
            writer,
            metrics,
            directory=spool_directory(settings.data_dir or default_data_dir(), database_url),
            limit=settings.spool_size,
            name=new_id(),
            clock=clock,
        ),
        hosts=hosts,
        named_hosts=further,
        own_host=own_host,
        summarizer=Summarizer(
            database,
            models,
            metrics,
            clock=clock,
            monotonic=time.monotonic,
            name=new_id(),
            charge=limiter.charge,
        ),
        embedder=embedder,
        searcher=searcher,
        page_builder=page_builder,
        live=LiveSessions(settings.live_sessions_budget),
        metrics=metrics,
        prices=prices,
        calibrations=Calibrations(),
        limiter=limiter,
        board=CallBoard(clock=clock),
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
    memories: DailyMemory
    artifacts: Artifacts
    tools: Tools


def _abilities(settings: Settings, base: _Base) -> _Abilities:
    database = base.database
    searcher = base.searcher
    queries = Queries(
        database,
        base.metrics,
        children=settings.query_children,
        limits=QueryLimits(seconds=settings.query_seconds, memory=settings.query_memory),
    )
    notes = Notes(database, clock=clock)
    memos = Memos(database, clock=clock, new_id=partial(new_id, "m"))
    memories = DailyMemory(database)
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


def configs_of(settings: Settings, tools: Tools | None = None) -> ContextConfigs:
    """Strategies and policies as configured; ``tools`` are offered to models."""
    return ContextConfigs(
        offers=None if tools is None else tools.offers,
        offers_always=settings.offered_tools is not None,
        strategy=settings.strategy,
        epoch=settings.epoch,
        references=settings.references,
        instructions=settings.instructions == "on",
        repeats=settings.repeats == "on",
        derive_terse=settings.derive_terse == "on",
        cache_ttl=settings.cache_ttl,
    )


def _services(
    settings: Settings, base: _Base, abilities: _Abilities, configs: ContextConfigs, remembering: MemoryUpdates
) -> Services:
    """Return the use cases behind REST."""
    database = base.database
    sessions = Sessions(database, configs, remembering, clock=clock, new_id=new_id)
    keeper = EpochKeeper(
        database,
        configs,
        base.calibrations,
        abilities.retriever,
        SummaryPrefetcher(base.summarizer),
        base.metrics,
        clock=clock,
    )
    messages = Messages(database, base.writer, configs, advance_epoch=keeper.advance_if_due, clock=clock)
    previews = Previews(database, configs, base.calibrations, abilities.retriever, clock=clock)
    compactions = Compactions(database, configs, base.summarizer, keeper, remembering, clock=clock)
    marks = Pins(database, clock=clock)
    commands = Commands(
        database,
        sessions=sessions,
        previews=previews,
        compactions=compactions,
        notes=abilities.notes,
        pins=marks,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )
    return Services(
        sessions=sessions,
        messages=messages,
        pins=marks,
        visibility=Visibility(database, memory=sessions, clock=clock),
        exports=Exports(database, messages, sessions, clock=clock, new_id=new_id),
        previews=previews,
        searcher=abilities.searcher,
        queries=abilities.queries,
        stats=StatsReader(database, configs, previews, base.summarizer.config, clock=clock),
        event_stream=EventStream(database),
        artifacts=abilities.artifacts,
        artifact_removal=ArtifactRemoval(database, sessions, clock=clock),
        compactions=compactions,
        notes=abilities.notes,
        memos=abilities.memos,
        daily_memory=abilities.memories,
        tools=abilities.tools,
        commands=commands,
        calls=(calls := Calls(database)),
        activity=Activity(database, clock=clock),
        search=TenantSearch(database, abilities.searcher, monotonic=time.monotonic),
        comparisons=Comparisons(database, calls),
        tenants=Tenants(database, base.limiter, clock=clock, new_secret=secrets.token_hex),
        savings=Savings(database, base.prices, clock=clock, summary_price=base.summarizer.config.price_of),
        clock=clock,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )


# The console


def _replays(settings: Settings, shared: Shared, services: Services) -> Replays:
    """Return the player of transcripts: the proxy's own code in front of a simulated host."""

    def open_proxy(dialect: DialectName, upstream: Upstream, times: Callable[[], datetime]) -> Proxy:
        apart = replace(
            shared,
            clock=times,
            metrics=IgnoredMetrics(),
            calibrations=Calibrations(),
            live=LiveSessions(REPLAY_MEMORY),
            chat=None,
        )
        return Proxy(DIALECTS[dialect], upstream, apart, ProxyConfig(is_default=False, fail_open=False))

    return Replays(
        services.sessions,
        open_proxy,
        clock=clock,
        monotonic=time.perf_counter,
        new_id=new_id,
        lifetime=settings.cache_ttl,
    )


def _console_routes(settings: Settings, base: _Base, services: Services, auth: Auth, replays: Replays) -> list[Route]:
    """The pages of the console, and ``/docs``."""
    pages = Pages(version=__version__)
    access = ConsoleAccess(
        base.database,
        auth,
        required=settings.auth == "keys",
        directory=settings.data_dir or default_data_dir(),
    )
    views = Views(
        pages,
        Sources(
            sessions=services.sessions,
            calls=services.calls,
            comparisons=services.comparisons,
            activity=services.activity,
            board=base.board,
            search=services.search,
            savings=services.savings,
            prices=base.prices,
            previews=services.previews,
            compactions=services.compactions,
            pins=services.pins,
            notes=services.notes,
            memos=services.memos,
            memories=services.daily_memory,
            tenants=services.tenants,
            operations=Operations(
                base.database,
                base.metrics,
                base.board,
                hosts=_addresses(settings),
                summary_queue=lambda: base.summarizer.pending,
                clock=clock,
                monotonic=time.perf_counter,
            ),
            artifacts=services.artifacts,
            artifact_removal=services.artifact_removal,
            replays=replays,
            lifetime=settings.cache_ttl,
            is_guarded=settings.auth == "keys",
        ),
    )
    admin_key = settings.admin_key.get_secret_value() if settings.admin_key else None
    operators = OperatorAccess(admin_key, is_open=settings.auth != "keys")
    console = Console(pages, access, operators, clock=clock)
    return [docs_route(pages), *console.routes(views.views(), views.changes(), views.uploads())]


def _addresses(settings: Settings) -> dict[tuple[str, str], str]:
    """Return the address of each host by its name and dialect, without credentials; default hosts have no name."""

    def bare(address: str) -> str:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"

    return {
        ("", "openai_chat"): bare(settings.openai_base_url),
        ("", "openai_responses"): bare(settings.openai_base_url),
        ("", "anthropic"): bare(settings.anthropic_base_url),
        ("", "gemini"): bare(settings.gemini_base_url),
        ("", "gemini_gca"): bare(settings.gemini_gca_base_url),
        **{
            (name, dialect): bare(given.base_url)
            for name, given in settings.upstreams.items()
            for dialect in ROUTE_DIALECTS[given.dialect]
        },
    }


# The proxies


def _shared(
    settings: Settings, base: _Base, abilities: _Abilities, configs: ContextConfigs, commands: Commands
) -> Shared:
    chat = None
    if settings.chat_commands == "on":
        chat = ChatCommands(
            commands, base.database, base.metrics, clock=clock, monotonic=time.perf_counter, new_id=new_id
        )
    return Shared(
        database=base.database,
        writer=base.writer,
        configs=configs,
        calibrations=base.calibrations,
        metrics=base.metrics,
        summarizer=base.summarizer,
        retriever=abilities.retriever,
        tools=abilities.tools,
        exchanges=base.exchanges,
        live=base.live,
        prices=base.prices,
        clock=clock,
        monotonic=time.perf_counter,
        new_id=new_id,
        chat=chat,
    )


def _host_table(settings: Settings, base: _Base, shared: Shared) -> HostTable:
    """Build the proxies of the default and the named hosts, each with the guard of the operator's account there."""
    access = _account_access(settings, base, base.hosts)
    proxies = _proxies(settings, base.hosts, shared, access, ProxyConfig())
    named = []
    for name, host in base.named_hosts.items():
        given = settings.upstreams[name]
        hosts = dict.fromkeys(ROUTE_DIALECTS[given.dialect], host)
        guard = _account_access(settings, base, hosts) if host.api_key else None
        config = ProxyConfig(is_default=False, host=name)
        for dialect, outcome in product(hosts, OUTCOMES):
            base.metrics.host_calls.labels(name, dialect, outcome)
        named.append(
            NamedHost(
                name=name,
                proxies=_proxies(settings, hosts, shared, guard, config, is_azure=given.dialect == "azure"),
                models=given.models,
                access=guard,
                is_azure=given.dialect == "azure",
            )
        )
    defaults = {name: Destination(proxy=proxy, access=access) for name, proxy in proxies.items()}
    return HostTable(defaults=defaults, named=named)


def _account_access(settings: Settings, base: _Base, hosts: Mapping[DialectName, Host]) -> AccountAccess | None:
    """Return the rules by which tenants share the operator's accounts, for dialects with an operator's key."""
    if settings.auth != "keys":
        return None
    shared = {name: DIALECTS[name] for name, host in hosts.items() if host.api_key}
    return AccountAccess(base.database, shared, parse_passthrough(settings.passthrough or ""), clock=clock)


def _proxies(
    settings: Settings,
    hosts: Mapping[DialectName, Host],
    shared: Shared,
    access: AccountAccess | None,
    config: ProxyConfig,
    *,
    is_azure: bool = False,
) -> dict[DialectName, Proxy]:
    """Return the proxy of each dialect in front of its host."""

    def key_of(name: DialectName, key: str | None) -> tuple[str, str] | None:
        if not key:
            return None
        return ("api-key", key) if is_azure else key_header(name, key)

    return {
        name: Proxy(
            DIALECTS[name],
            host.upstream,
            shared,
            replace(
                config,
                key=key_of(name, host.api_key),
                on_ids=access.trust if access is not None and host.api_key else None,
                fail_open=settings.fail_open == "on",
                heartbeat=settings.heartbeat,
                max_reply=settings.max_reply,
            ),
        )
        for name, host in hosts.items()
    }
