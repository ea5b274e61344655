"""The proxies: one for each dialect and host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import product

from msgspec.structs import replace

from tersely.api.host_table import Destination, HostEntry, HostTable
from tersely.composition.clock import new_id
from tersely.composition.foundation import Foundation
from tersely.composition.use_cases import ToolServices
from tersely.dialects.account_routes import parse_passthrough
from tersely.dialects.headers import key_header
from tersely.dialects.registry import DIALECTS
from tersely.domain.messages import Dialect as DialectName
from tersely.hosts import ROUTE_DIALECTS
from tersely.service.common.outcomes import OUTCOMES
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.proxy.chat_commands import ChatCommands
from tersely.service.proxy.proxy import Proxy, ProxyConfig, SharedServices
from tersely.service.proxy.sending.account_access import AccountAccess
from tersely.service.sessions.commands import Commands
from tersely.service.summaries.models import Host
from tersely.settings import Settings


def share(
    settings: Settings, base: Foundation, tool_services: ToolServices, configs: ContextConfigs, commands: Commands
) -> SharedServices:
    chat = None
    if settings.chat_commands == "on":
        chat = ChatCommands(
            commands, base.database, base.metrics, clock=base.clock, monotonic=time.perf_counter, new_id=new_id
        )
    return SharedServices(
        database=base.database,
        writer=base.writer,
        configs=configs,
        calibrations=base.calibrations,
        metrics=base.metrics,
        summarizer=base.summarizer,
        retriever=tool_services.retriever,
        tools=tool_services.tools,
        exchanges=base.exchanges,
        live=base.live,
        prices=base.prices,
        clock=base.clock,
        monotonic=time.perf_counter,
        new_id=new_id,
        chat=chat,
        shadows=base.shadows,
    )


def build_host_table(settings: Settings, base: Foundation, shared: SharedServices) -> HostTable:
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
            HostEntry(
                name=name,
                proxies=_proxies(settings, hosts, shared, guard, config, is_azure=given.dialect == "azure"),
                models=given.models,
                access=guard,
                is_azure=given.dialect == "azure",
            )
        )
    defaults = {name: Destination(proxy=proxy, access=access) for name, proxy in proxies.items()}
    return HostTable(defaults=defaults, named=named)


def _account_access(settings: Settings, base: Foundation, hosts: Mapping[DialectName, Host]) -> AccountAccess | None:
    """Return the rules by which tenants share the operator's accounts, for dialects with an operator's key."""
    if settings.auth != "keys":
        return None
    shared = {name: DIALECTS[name] for name, host in hosts.items() if host.api_key}
    return AccountAccess(base.database, shared, parse_passthrough(settings.passthrough or ""), clock=base.clock)


def _proxies(
    settings: Settings,
    hosts: Mapping[DialectName, Host],
    shared: SharedServices,
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
                known_contexts=settings.session_cache_budget,
            ),
        )
        for name, host in hosts.items()
    }
