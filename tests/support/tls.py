"""One TLS context for the HTTP clients of a test process.

Each client reads the certificates of all authorities, which takes 30 ms of CPU, and tests make thousands of clients for
hosts without TLS.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Any

import httpx._transports.default
import httpx2._transports.default

_MakeContext = Callable[..., ssl.SSLContext]


def share_contexts() -> None:
    """Have clients of httpx and httpx2 that verify as they do by default share a context."""
    modules: tuple[Any, ...] = (httpx._transports.default, httpx2._transports.default)
    for transports in modules:
        transports.create_ssl_context = _sharing(transports.create_ssl_context)


def _sharing(make: _MakeContext) -> _MakeContext:
    contexts: dict[tuple[object, ...], ssl.SSLContext] = {}

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return make(verify=verify, cert=cert, trust_env=trust_env)
        key = (trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        if key not in contexts:
            contexts[key] = make(trust_env=trust_env)
        return contexts[key]

    return create
