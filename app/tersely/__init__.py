"""Tersely: a context proxy for LLM agents.

docs/architecture.md has the map of the packages, CONTRIBUTING.md a tour of the code.
"""

__version__ = "0.1.0"
