"""The model hosts from the settings, and the clients that call them with an operator's key."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import SecretStr

from tersely.domain.messages import Dialect as DialectName
from tersely.service.summaries.models import Host, NamedHost
from tersely.settings import Settings
from tersely.upstream.client import Timeouts, Upstream
from tersely.upstream.embeddings import EmbeddingsHost


def model_hosts(settings: Settings, openai_base_url: str) -> dict[DialectName, Host]:
    """Return the model host of each dialect; dialects of one address share its connections."""
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
        name: Host(upstream=upstreams[address], dialect=name, api_key=_secret_value(key))
        for name, (address, key) in addresses.items()
    }


# What the host of each setting speaks.
ROUTE_DIALECTS: Mapping[str, tuple[DialectName, ...]] = {
    "openai": ("openai_chat", "openai_responses"),
    "azure": ("openai_chat", "openai_responses"),
    "anthropic": ("anthropic",),
    "gemini": ("gemini",),
}


def named_hosts(settings: Settings) -> dict[str, Host]:
    """The further hosts of the settings, by their names, in their order."""
    timeouts = Timeouts(
        connect=settings.connect_timeout, first_byte=settings.first_byte_timeout, idle=settings.idle_timeout
    )
    return {
        name: Host(
            upstream=Upstream(given.base_url, timeouts),
            dialect=ROUTE_DIALECTS[given.dialect][0],
            api_key=_secret_value(given.api_key),
        )
        for name, given in settings.upstreams.items()
    }


def summary_hosts(settings: Settings, hosts: Mapping[str, Host]) -> dict[str, NamedHost]:
    """Return which of the further hosts write the summaries of their sessions; Azure's paths name deployments."""
    return {
        name: NamedHost(
            host=None if given.dialect == "azure" else hosts[name],
            dialects=ROUTE_DIALECTS[given.dialect],
            models=given.models,
        )
        for name, given in settings.upstreams.items()
    }


def summarizer_host(settings: Settings, openai_base_url: str) -> Host | None:
    """Return the summarizer's own model host, or the sessions' host with its own key; None if neither is set."""
    key = settings.summarizer_api_key
    if settings.summarizer_base_url is None and key is None:
        return None
    # Nobody waits for the summarizer, so it has no more patience than a whole call.
    timeouts = Timeouts(
        connect=settings.connect_timeout, first_byte=settings.summarizer_timeout, idle=settings.summarizer_timeout
    )
    return Host(
        upstream=Upstream(settings.summarizer_base_url or openai_base_url, timeouts), api_key=_secret_value(key)
    )


def embeddings_host(settings: Settings) -> EmbeddingsHost | None:
    """Return the embedding host, where a host and a model are configured."""
    if settings.embeddings_base_url is None or settings.embeddings_model is None:
        return None
    return EmbeddingsHost(
        settings.embeddings_base_url,
        model=settings.embeddings_model,
        api_key=_secret_value(settings.embeddings_api_key),
        timeout=settings.embeddings_timeout,
    )


def _secret_value(key: SecretStr | None) -> str | None:
    return key.get_secret_value() if key else None
