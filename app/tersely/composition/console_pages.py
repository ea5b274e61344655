"""The console with its pages, and the player of its replays."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from urllib.parse import urlsplit

from msgspec.structs import replace
from starlette.routing import Route

from tersely import __version__
from tersely.api.rest.services import Services
from tersely.composition.clock import new_id
from tersely.composition.foundation import Foundation, data_dir_of
from tersely.console.docs_page import DocsPages
from tersely.console.pages import Pages
from tersely.console.router import Console
from tersely.console.views.base import ViewServices
from tersely.console.views.table import Views
from tersely.dialects.registry import DIALECTS
from tersely.domain.messages import Dialect as DialectName
from tersely.hosts import ROUTE_DIALECTS
from tersely.service.common.auth import Auth
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.console_access import ConsoleAccess, OperatorAccess
from tersely.service.common.metrics import IgnoredMetrics
from tersely.service.common.operations import Operations
from tersely.service.proxy.live_sessions.live_session import LiveSessions
from tersely.service.proxy.proxy import Proxy, ProxyConfig, SharedServices
from tersely.service.replays.replays import Replays
from tersely.settings import Settings
from tersely.upstream.client import Upstream

# Of the live sessions of a replay.
REPLAY_MEMORY = 64 * 1024 * 1024


def build_replays(settings: Settings, shared: SharedServices, services: Services) -> Replays:
    """Return the player of transcripts: the proxy's own code in front of a simulated host."""

    def open_proxy(dialect: DialectName, upstream: Upstream, times: Callable[[], datetime]) -> Proxy:
        apart = replace(
            shared,
            clock=times,
            metrics=IgnoredMetrics(),
            calibrations=Calibrations(),
            live=LiveSessions(REPLAY_MEMORY),
            chat=None,
            shadows=None,
        )
        return Proxy(DIALECTS[dialect], upstream, apart, ProxyConfig(is_default=False, fail_open=False))

    return Replays(
        services.sessions,
        open_proxy,
        clock=shared.clock,
        monotonic=time.perf_counter,
        new_id=new_id,
        lifetime=settings.cache_ttl,
    )


def console_routes(
    settings: Settings, base: Foundation, services: Services, auth: Auth, replays: Replays
) -> list[Route]:
    """The pages of the console, and ``/docs``."""
    pages = Pages(version=__version__)
    access = ConsoleAccess(
        base.database,
        auth,
        required=settings.auth == "keys",
        directory=data_dir_of(settings),
    )
    views = Views(
        pages,
        ViewServices(
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
            daily_memory=services.daily_memory,
            tenants=services.tenants,
            operations=Operations(
                base.database,
                base.metrics,
                base.board,
                hosts=_addresses(settings),
                summary_queue=lambda: base.summarizer.pending,
                clock=base.clock,
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
    console = Console(pages, access, operators, clock=base.clock)
    return [*DocsPages(pages).routes(), *console.routes(views.views(), views.changes(), views.uploads())]


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
