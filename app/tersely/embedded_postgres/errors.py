"""The error of the embedded Postgres."""

from __future__ import annotations


class EmbeddedPostgresError(RuntimeError):
    """The embedded Postgres could not be started, joined or used. The text contains the cause and advice."""
