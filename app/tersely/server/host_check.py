"""Look whether a configured model host is a Tersely service, which may be this one behind another name."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import httpx

from tersely.settings import Settings

_log = logging.getLogger("tersely")

# Seconds after the start at which a host is asked, until it answers: a proxy in front may learn of the service late.
DELAYS = (0.5, 15.0, 60.0)
SECONDS = 5.0
# Tersely alone has it in its answers.
MARK = "x-tersely-request-id"


def check_hosts_in_background(settings: Settings, delays: Sequence[float] = DELAYS) -> None:
    """Start a thread that logs an error for each configured host that is a Tersely service.

    The providers' own addresses are not asked. A host gets ``HEAD /`` without credentials, once for all settings that
    name it.
    """
    defaults = {field.default for name, field in Settings.model_fields.items() if name.endswith("_base_url")}
    hosts: dict[str, list[str]] = {}
    for name, url in settings.base_urls():
        if url not in defaults:
            hosts.setdefault(_root_of(url), []).append(name)
    if hosts:
        threading.Thread(target=_check, args=(hosts, delays), name="host-check", daemon=True).start()


def _root_of(url: str) -> str:
    """Return the address of the service at a base URL: without credentials and version."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.removesuffix('/v1')}/"


def _check(hosts: Mapping[str, Sequence[str]], delays: Sequence[float]) -> None:
    waiting = hosts
    began = time.monotonic()
    with httpx.Client(timeout=SECONDS, trust_env=False) as client:
        for delay in delays:
            time.sleep(max(0.0, began + delay - time.monotonic()))
            waiting = {url: names for url, names in waiting.items() if not _is_answered(client, url, names)}
            if not waiting:
                return


def _is_answered(client: httpx.Client, url: str, names: Sequence[str]) -> bool:
    """Ask a host that these settings name; return whether it, and not a proxy without it, has answered."""
    try:
        answer = client.head(url)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    if MARK in answer.headers:
        _log.error(
            "%s: %s is a Tersely service, not a model host: if it is this one, its calls go round without an end",
            ", ".join(names),
            urlsplit(url).hostname,
        )
        return True
    return answer.status_code < 500
