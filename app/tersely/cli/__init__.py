"""The command line."""

from tersely.cli.program import main

__all__ = ["main"]
