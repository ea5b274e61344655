"""The one error of the embedded Postgres: it could not be started, joined or used, and why."""

from __future__ import annotations


class EmbeddedPostgresError(RuntimeError):
    """The embedded Postgres cannot be had; the text says why and what can be done about it."""
