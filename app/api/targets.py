"""From a request's address to the model host that it is for: each provider's own addresses, under one root.

Two of them use the same address for their lists of models: there the caller's headers tell which is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_plus

from app.domain.headers import Headers
from app.domain.messages import Dialect

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

_GEMINI = re.compile(r"/v1(?:beta|alpha)/")
_GEMINI_METHOD = re.compile(r"/v1(?:beta|alpha)?/(?P<model>(?:models|tunedModels)/[^/]+):(?P<method>[A-Za-z]+)")
_GCA_METHOD = re.compile(r"/v1internal:(?P<method>[A-Za-z]+)")
_STREAMS = {"generateContent": False, "streamGenerateContent": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whose request it is. ``path`` follows the upstream's base URL. ``is_call``: a model is to answer, and what is
    said is stored; everything else is passed through. ``model`` and ``streams`` are what the address says of that.

    ``key`` is a caller's key that stood in the query, from which it was taken: addresses are written into logs.
    """

    dialect: Dialect
    path: str
    is_call: bool = False
    model: str = ""
    streams: bool = False
    key: str = ""

    def with_key(self, headers: Headers) -> Headers:
        """The caller's headers with the key from the query among them: Tersely's own, or the provider's."""
        if not self.key:
            return headers
        name = "x-tersely-key" if self.key.startswith("tsk_") else "x-goog-api-key"
        return headers if any(name == known for known, _ in headers) else [*headers, (name, self.key)]


def find_target(method: str, path: str, raw: str, headers: Mapping[str, str]) -> Target | None:
    """The target of a request; None for what is no provider's address. ``raw`` is path and query as encoded."""
    is_post = method == "POST"
    if path in (CHAT, RESPONSES):
        dialect: Dialect = "openai_chat" if path == CHAT else "openai_responses"
        return Target(dialect=dialect, path=raw.removeprefix("/v1"), is_call=is_post)
    if path.startswith("/v1internal"):
        return _generating("gemini_gca", raw, _GCA_METHOD.fullmatch(path) if is_post else None)
    found = _GEMINI_METHOD.fullmatch(path) if is_post else None
    if found is not None or _GEMINI.match(path):
        return _generating("gemini", raw, found)
    if not path.startswith("/v1/"):
        return None
    if path == MESSAGES or path.startswith(f"{MESSAGES}/") or _is_anthropic(path, headers):
        return Target(dialect="anthropic", path=raw, is_call=is_post and path == MESSAGES)
    dialect = "openai_responses" if path.startswith(f"{RESPONSES}/") else "openai_chat"
    return Target(dialect=dialect, path=raw.removeprefix("/v1"))


def _is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request that says nothing by its address is one of Anthropic's: its version goes with all of them."""
    if "anthropic-version" in headers:
        return True
    key = headers.get("x-api-key", "")
    return bool(key) and not key.startswith("tsk_") and (path == "/v1/models" or path.startswith("/v1/models/"))


def _generating(dialect: Dialect, raw: str, found: re.Match[str] | None) -> Target:
    path, key = _without_key(raw)
    streams = _STREAMS.get(found["method"]) if found is not None else None
    if found is None or streams is None:
        return Target(dialect=dialect, path=path, key=key)
    model = found.groupdict().get("model", "").removeprefix("models/")
    return Target(dialect=dialect, path=path, is_call=True, model=model, streams=streams, key=key)


def _without_key(raw: str) -> tuple[str, str]:
    path, _, query = raw.partition("?")
    kept: list[str] = []
    key = ""
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name == "key":
            key = unquote_plus(value)
        else:
            kept.append(pair)
    return f"{path}?{'&'.join(kept)}" if kept else path, key
