"""The use cases: what agents, users and operators can do."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from functools import partial

from tersely.api.rest.services import Services
from tersely.composition.clock import new_id
from tersely.composition.foundation import Foundation
from tersely.domain.errors import InvalidRequest
from tersely.sandbox.child import QueryLimits
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.retrieval import Retriever
from tersely.service.limits.tenants import Tenants
from tersely.service.memos.memos import Memos
from tersely.service.money.model_watermarks import policy_for_model
from tersely.service.money.prices import Prices
from tersely.service.money.savings import Savings
from tersely.service.search.queries import Queries
from tersely.service.search.session_search import Searcher
from tersely.service.search.tenant_search import TenantSearch
from tersely.service.sessions.activity import Activity
from tersely.service.sessions.artifact_removal import ArtifactRemoval
from tersely.service.sessions.artifacts import Artifacts
from tersely.service.sessions.calls import Calls
from tersely.service.sessions.commands import Commands
from tersely.service.sessions.compactions import Compactions
from tersely.service.sessions.comparisons import Comparisons
from tersely.service.sessions.epochs import EpochStarter
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
from tersely.service.summaries.prefetcher import SummaryPrefetcher
from tersely.service.tools.tools import Tools
from tersely.settings import PREFIX, InvalidSettings, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServices:
    """The tools, and the use cases that they share with REST."""

    searcher: Searcher
    retriever: Retriever
    queries: Queries
    notes: Notes
    memos: Memos
    daily_memory: DailyMemory
    artifacts: Artifacts
    tools: Tools


def build_tool_services(settings: Settings, base: Foundation) -> ToolServices:
    database = base.database
    searcher = base.searcher
    queries = Queries(
        database,
        base.metrics,
        children=settings.query_children,
        limits=QueryLimits(seconds=settings.query_seconds, memory=settings.query_memory),
    )
    notes = Notes(database, clock=base.clock)
    memos = Memos(database, clock=base.clock, new_id=partial(new_id, "m"))
    daily_memory = DailyMemory(database)
    artifacts = Artifacts(database)
    tools = Tools(
        database,
        searcher=searcher,
        queries=queries,
        notes=notes,
        memos=memos,
        daily_memory=daily_memory,
        artifacts=artifacts,
        offered=settings.offered_tools,
    )
    return ToolServices(
        searcher=searcher,
        retriever=Retriever(database, searcher),
        queries=queries,
        notes=notes,
        memos=memos,
        daily_memory=daily_memory,
        artifacts=artifacts,
        tools=tools,
    )


def configs_of(settings: Settings, prices: Prices, tools: Tools | None = None) -> ContextConfigs:
    """Strategies and policies as configured; ``tools`` are offered to models, ``prices`` choose watermarks by model.

    Raises `InvalidSettings`.
    """
    try:
        return ContextConfigs(
            offers=None if tools is None else tools.offers,
            offers_always=settings.offered_tools is not None,
            strategy=settings.strategy,
            epoch=settings.epoch,
            references=settings.references,
            instructions=settings.instructions == "on",
            repeats=settings.repeats == "on",
            shadow=settings.shadow,
            derive_terse=settings.derive_terse == "on",
            cache_ttl=settings.cache_ttl,
            policy_for_model=policy_for_model(prices),
        )
    except InvalidRequest as error:
        name = PREFIX + (error.field or "").upper()
        raise InvalidSettings(f"{name}: {error.detail}", field=name) from error


def build_services(
    settings: Settings,
    base: Foundation,
    tool_services: ToolServices,
    configs: ContextConfigs,
    memory_updates: MemoryUpdates,
) -> Services:
    """Return the use cases behind REST."""
    database = base.database
    sessions = Sessions(database, configs, memory_updates, clock=base.clock, new_id=new_id)
    epoch_starter = EpochStarter(
        database,
        configs,
        base.calibrations,
        tool_services.retriever,
        SummaryPrefetcher(base.summarizer),
        base.metrics,
        clock=base.clock,
    )
    messages = Messages(database, base.writer, configs, advance_epoch=epoch_starter.advance_if_due, clock=base.clock)
    previews = Previews(database, configs, base.calibrations, tool_services.retriever, clock=base.clock)
    compactions = Compactions(database, configs, base.summarizer, epoch_starter, memory_updates, clock=base.clock)
    pins = Pins(database, clock=base.clock)
    commands = Commands(
        database,
        sessions=sessions,
        previews=previews,
        compactions=compactions,
        notes=tool_services.notes,
        pins=pins,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )
    return Services(
        sessions=sessions,
        messages=messages,
        pins=pins,
        visibility=Visibility(database, memory=sessions, clock=base.clock),
        exports=Exports(database, messages, sessions, clock=base.clock, new_id=new_id),
        previews=previews,
        searcher=tool_services.searcher,
        queries=tool_services.queries,
        stats=StatsReader(database, configs, previews, base.summarizer.config, clock=base.clock),
        event_stream=EventStream(database),
        artifacts=tool_services.artifacts,
        artifact_removal=ArtifactRemoval(database, sessions, clock=base.clock),
        compactions=compactions,
        notes=tool_services.notes,
        memos=tool_services.memos,
        daily_memory=tool_services.daily_memory,
        tools=tool_services.tools,
        commands=commands,
        calls=(calls := Calls(database)),
        activity=Activity(database, clock=base.clock),
        search=TenantSearch(database, tool_services.searcher, monotonic=time.monotonic),
        comparisons=Comparisons(database, calls),
        tenants=Tenants(database, base.limiter, clock=base.clock, new_secret=secrets.token_hex),
        savings=Savings(database, base.prices, clock=base.clock, summary_price=base.summarizer.config.price_of),
        clock=base.clock,
        strategy=settings.strategy,
        epoch=settings.epoch,
    )
