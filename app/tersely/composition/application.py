"""The composition root: builds the whole service from the settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI

from tersely import __version__
from tersely.api.health import Health, health_router
from tersely.api.mcp import McpEndpoint
from tersely.api.proxy import EdgeServices, ProxyRoutes
from tersely.api.rest.guard import Guard
from tersely.api.rest.router import install_rest
from tersely.api.transport.body import BodyBudget
from tersely.api.transport.forwarded import ForwardedScheme
from tersely.api.transport.shutdown import Shutdown
from tersely.composition.clock import clock, new_id
from tersely.composition.console_pages import build_replays, console_routes
from tersely.composition.foundation import Foundation, build_foundation
from tersely.composition.proxies import build_host_table, share
from tersely.composition.use_cases import build_services, build_tool_services, configs_of
from tersely.lifespan import ServicePart, lifespan, migrate_when_there, report_pool, return_freed_memory
from tersely.service.common.auth import Auth
from tersely.service.common.metrics import Metrics
from tersely.service.sessions.cleanup import Cleanup
from tersely.service.summaries.memory_updates import MemoryUpdates
from tersely.settings import Settings
from tersely.store.db.statistics import keep_analysed
from tersely.telemetry import Telemetry

MEBIBYTE = 1024 * 1024


def build(
    settings: Settings, *, database_url: str, openai_base_url: str | None = None, is_local: bool = False
) -> ProxyRoutes:
    """Return the whole service as one ASGI application.

    ``database_url``: the running database. ``openai_base_url`` replaces the configured upstream. ``is_local``: without
    keys, refuse requests from web pages of other hosts.
    """
    base = build_foundation(settings, database_url, openai_base_url or settings.openai_base_url, clock=clock)
    tool_services = build_tool_services(settings, base)
    configs = configs_of(settings, base.prices, tool_services.tools)
    auth = _auth(settings, base, is_local=is_local)
    guard = _guard(settings, base, auth)
    mcp = McpEndpoint(tool_services.tools, guard)
    memory_updates = MemoryUpdates(base.database, base.summarizer, clock=base.clock)
    services = build_services(settings, base, tool_services, configs, memory_updates)
    telemetry = Telemetry()
    shared = share(settings, base, tool_services, configs, services.commands)
    replays = build_replays(settings, shared, services)
    parts = [
        ServicePart(None, telemetry.close),
        *base.parts(),
        ServicePart(base.limiter.open, base.limiter.close),
        ServicePart(None, tool_services.queries.close),
        ServicePart(mcp.open, mcp.close),
        ServicePart(None, replays.close),
        base.summarizing(),
    ]
    cleanup = Cleanup(base.database, configs, clock=base.clock, days=settings.cleanup_days, name=new_id())
    shutdown = Shutdown([upstream.interrupt for upstream in base.upstreams()], grace=settings.shutdown_grace)
    rest = FastAPI(
        title="Tersely",
        docs_url=None,
        redoc_url=None,
        version=__version__,
        # The operation ids of the OpenAPI document are the functions' names.
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan(parts, keeping=_background_work(base, database_url, cleanup, memory_updates)),
    )
    rest.add_middleware(ForwardedScheme)
    rest.include_router(_health(settings, base, shutdown))
    install_rest(rest, services, guard=guard, metrics=base.metrics)
    rest.router.routes += console_routes(settings, base, services, auth, replays)
    rest.router.routes.append(mcp.route())
    return ProxyRoutes(
        rest,
        hosts=build_host_table(settings, base, shared),
        auth=auth,
        metrics=base.metrics,
        max_body=settings.max_body,
        max_messages=settings.max_messages,
        body_timeout=settings.body_timeout,
        body_budget=_body_budget(settings, base.metrics),
        monotonic=time.perf_counter,
        shutdown=shutdown,
        limiter=base.limiter,
        edge=EdgeServices(origins=settings.allowed_origins, tracing=telemetry.tracing, board=base.board),
    )


def _auth(settings: Settings, base: Foundation, *, is_local: bool) -> Auth:
    return Auth(
        base.database,
        required=settings.auth == "keys",
        monotonic=time.monotonic,
        clock=base.clock,
        is_local=is_local,
        origins=settings.allowed_origins,
    )


def _guard(settings: Settings, base: Foundation, auth: Auth) -> Guard:
    return Guard(
        auth=auth,
        limiter=base.limiter,
        admin_key=settings.admin_key.get_secret_value() if settings.admin_key else None,
        max_body=settings.max_body,
        body_timeout=settings.body_timeout,
        max_messages=settings.max_messages,
    )


def _background_work(
    base: Foundation, database_url: str, cleanup: Cleanup, memory_updates: MemoryUpdates
) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """Return what runs for as long as the service does."""
    return [
        partial(migrate_when_there, base.database, database_url),
        partial(keep_analysed, base.database, database_url),
        cleanup.keep_clean,
        base.limiter.keep_current,
        partial(base.calibrations.keep_shared, base.database, base.clock),
        partial(report_pool, base.database.sizes, base.metrics),
        memory_updates.keep_resuming,
    ]


def _health(settings: Settings, base: Foundation, shutdown: Shutdown) -> APIRouter:
    health = Health(
        read_revision=base.database.read_revision,
        pool=base.database.sizes,
        metrics=base.metrics,
        # With keys nobody is let in whose key cannot be looked up.
        serves_without_database=settings.fail_open == "on" and settings.auth == "off",
        is_ending=lambda: shutdown.is_draining,
    )
    return health_router(health)


def _body_budget(settings: Settings, metrics: Metrics) -> BodyBudget:
    """Return the memory for request bodies in flight."""
    limit = settings.body_memory * MEBIBYTE
    return BodyBudget(limit, level=metrics.tally.gauge(metrics.body_bytes), return_freed_memory=return_freed_memory)
