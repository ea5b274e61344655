"""The name of the client program that sends a request, from its headers."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Headers that only one client sends, with its name.
_OWN_HEADERS = (
    ("x-claude-code-session-id", "claude-code"),
    ("x-codex-turn-metadata", "codex"),
    ("x-interaction-type", "copilot-cli"),
)
# How a user agent begins, with the client's name; the first that fits.
_AGENTS = (
    ("claude-cli/", "claude-code"),
    ("codex", "codex"),
    ("geminicli", "gemini-cli"),
    ("qwencode", "qwen-code"),
    ("opencode/", "opencode"),
    ("agents/python", "openai-agents"),
    ("langchain", "langchain"),
    ("pydantic-ai/", "pydantic-ai"),
    ("ai-sdk/", "vercel-ai-sdk"),
    ("ai/", "vercel-ai-sdk"),
    ("asyncopenai/python", "openai-python"),
    ("openai/python", "openai-python"),
    ("openai/js", "openai-js"),
    ("ls/js", "continue-cli"),
    ("asyncanthropic/python", "anthropic-python"),
    ("anthropic/python", "anthropic-python"),
    ("anthropic/js", "anthropic-js"),
    ("google-genai-sdk/", "google-genai"),
)
# What a client's name can be.
CLIENT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
# The first product of any other user agent, without its version.
_PRODUCT = re.compile(rf"({CLIENT_NAME.pattern})(?:/|\Z)")


def client_name(headers: Mapping[str, str]) -> str:
    """Return the client's name in lower case; empty where the headers do not tell. Header names are in lower case."""
    for header, name in _OWN_HEADERS:
        if header in headers:
            return name
    agent = headers.get("user-agent", "").strip().lower()
    for beginning, name in _AGENTS:
        if agent.startswith(beginning):
            return name
    found = _PRODUCT.match(agent.split(" ", 1)[0])
    return found[1] if found else ""
