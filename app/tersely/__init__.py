"""Tersely: a context proxy for LLM agents.

docs/architecture.md has the map of the layers, CONTRIBUTING.md a tour of the code in six answers.
"""

__version__ = "0.1.0"
