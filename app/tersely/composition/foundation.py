"""Build the parts that all others use: the database, the model hosts, the metrics, the summarizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from tersely import __version__
from tersely.composition.clock import new_id
from tersely.domain.limits import Limits
from tersely.domain.messages import Dialect as DialectName
from tersely.embedded_postgres import default_data_dir
from tersely.hosts import embeddings_host, model_hosts, named_hosts, summarizer_host, summary_hosts
from tersely.lifespan import ServicePart
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.call_board import CallBoard
from tersely.service.common.metrics import Metrics
from tersely.service.limits.limiter import Limiter
from tersely.service.money.prices import Prices, read_prices
from tersely.service.proxy.durability.durable_writer import DurableWriter
from tersely.service.proxy.live_sessions.live_session import LiveSessions
from tersely.service.search.embedder import Embedder
from tersely.service.search.page_builder import PageBuilder
from tersely.service.search.session_search import Searcher
from tersely.service.shadows.shadows import Shadows
from tersely.service.summaries.models import Host, Models, SummarizerConfig
from tersely.service.summaries.summarizer import Summarizer
from tersely.settings import Settings
from tersely.store.commit.spool import spool_directory
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.store.history.tail_cache import TailCache
from tersely.upstream.client import Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """The database, the model hosts, and the objects that exist once in a process."""

    clock: Callable[[], datetime]
    database: Database
    writer: Writer
    exchanges: DurableWriter
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
    shadows: Shadows

    def upstreams(self) -> list[Upstream]:
        """Return the model hosts, each once."""
        hosts = [
            *self.hosts.values(),
            *self.named_hosts.values(),
            *([self.own_host] if self.own_host is not None else []),
        ]
        return list(dict.fromkeys(host.upstream for host in hosts))

    def parts(self) -> list[ServicePart]:
        """Return the parts to open before the first request, in order."""
        return [
            ServicePart(self.database.open, self.database.close),
            *(ServicePart(upstream.open, upstream.close) for upstream in self.upstreams()),
            ServicePart(None, self.shadows.close),
            ServicePart(None, self.writer.close),
            ServicePart(self.exchanges.open, self.exchanges.close),
            *([ServicePart(self.embedder.open, self.embedder.close)] if self.embedder else []),
            ServicePart(self.page_builder.open, self.page_builder.close),
        ]

    def summarizing(self) -> ServicePart:
        """Return the summarizer, opened last: it begins to work at once."""
        return ServicePart(self.summarizer.open, self.summarizer.close)


def prices_of(settings: Settings) -> Prices:
    """Return the prices of models: the table's, and before it those of the operator's file."""
    return Prices(read_prices(settings.prices) if settings.prices else None)


def build_foundation(
    settings: Settings, database_url: str, openai_base_url: str, *, clock: Callable[[], datetime]
) -> Foundation:
    """Return the parts, not yet opened. ``openai_base_url`` is the address of the default OpenAI host."""
    database = Database(
        dsn=database_url,
        size=settings.database_pool,
        timeout=settings.database_timeout,
        pooler=settings.database_pooler,
    )
    metrics = Metrics(version=__version__, data_dir=data_dir_of(settings))
    hosts, further_hosts = model_hosts(settings, openai_base_url), named_hosts(settings)
    own_host = summarizer_host(settings, openai_base_url)
    models = Models(
        _summarizer_config(settings),
        own=own_host,
        hosts=hosts,
        named=summary_hosts(settings, further_hosts),
        metrics=metrics,
    )
    prices = prices_of(settings)
    limiter = Limiter(
        database,
        metrics,
        defaults=Limits(**settings.limits.model_dump()),
        clock=clock,
        monotonic=time.monotonic,
        name=new_id(),
    )
    embedder = _build_embedder(settings, database, prices, limiter)
    searcher = Searcher(database, metrics, embedder)
    page_builder = PageBuilder(searcher.build_pages)
    tail_cache = TailCache(settings.session_cache_budget)
    writer = Writer(database, tail_cache=tail_cache, on_full_pages=page_builder.schedule)
    database.flush_with(writer.flush)
    return Foundation(
        clock=clock,
        database=database,
        writer=writer,
        exchanges=_build_durable_writer(settings, database, writer, metrics, clock, database_url=database_url),
        hosts=hosts,
        named_hosts=further_hosts,
        own_host=own_host,
        summarizer=Summarizer(
            database,
            models,
            metrics,
            clock=clock,
            monotonic=time.monotonic,
            name=new_id(),
            charge=partial(_charge_summary, limiter, prices),
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
        shadows=Shadows(database, prices, metrics, monotonic=time.monotonic, clock=clock),
    )


def data_dir_of(settings: Settings) -> Path:
    """Return the directory of the service's own files."""
    return settings.data_dir or default_data_dir()


def _build_durable_writer(
    settings: Settings,
    database: Database,
    writer: Writer,
    metrics: Metrics,
    clock: Callable[[], datetime],
    *,
    database_url: str,
) -> DurableWriter:
    return DurableWriter(
        database,
        writer,
        metrics,
        directory=spool_directory(data_dir_of(settings), database_url),
        limit=settings.spool_size,
        name=new_id(),
        clock=clock,
    )


def _summarizer_config(settings: Settings) -> SummarizerConfig:
    return SummarizerConfig(
        model=settings.summarizer_model,
        timeout=settings.summarizer_timeout,
        output=settings.summarizer_output,
        window=settings.summarizer_window,
        daily_calls=settings.summarizer_daily_calls,
        daily_tokens=settings.summarizer_daily_tokens,
        input_price=settings.summarizer_input_price,
        output_price=settings.summarizer_output_price,
    )


def _charge_summary(
    limiter: Limiter,
    prices: Prices,
    tenant: str,
    model: str,
    input_tokens: int,
    output_tokens: int,
    money: float | None,
) -> None:
    """Count a summary for its tenant. Its model costs the configured price (``money``), else that of the table."""
    if money is None and (price := prices.of(model)) is not None:
        money = price.input * input_tokens + price.output * output_tokens
    limiter.charge(tenant, input_tokens + output_tokens, money or 0.0)


def _build_embedder(settings: Settings, database: Database, prices: Prices, limiter: Limiter) -> Embedder | None:
    """Return the embedder, which charges tenants for what it embeds; None without an embedding model."""
    host = embeddings_host(settings)
    if host is None:
        return None

    def charge(tenant: str, tokens: int) -> None:
        price = prices.of(settings.embeddings_model or "")
        limiter.charge(tenant, tokens, 0.0 if price is None else tokens * price.input)

    return Embedder(database, host, monotonic=time.monotonic, charge=charge)
