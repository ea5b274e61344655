"""From a request's address to the model host that it is for: each provider's own addresses, under one root.

Three of them have addresses in common, as those of their lists of models: there the caller's headers tell which is
meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_plus

from app.domain.headers import GOOGLE_KEY, Headers
from app.domain.messages import Dialect

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

# What may be a provider's address begins with one of these.
PREFIXES = ("/v1", "/upload/v1", "/download/v1")

_GEMINI = re.compile(r"/v1(?:beta|alpha)/|/(?:upload|download)/v1(?:beta|alpha)?/")
# Sent by Google's clients alone.
_GOOGLE_HEADERS = (GOOGLE_KEY, "x-goog-api-client")
_GEMINI_METHOD = re.compile(r"/v1(?:beta|alpha)?/(?P<model>(?:models|tunedModels)/[^/]+):(?P<method>[A-Za-z]+)")
_GCA_METHOD = re.compile(r"/v1internal:(?P<method>[A-Za-z]+)")
_STREAMS = {"generateContent": False, "streamGenerateContent": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whose request it is. ``path`` follows the upstream's base URL. ``is_call``: a model is to answer, and what is
    said is stored; everything else is passed through. ``model`` and ``streams`` are what the address says of that.

    ``keys`` are the caller's keys that stood in the query, as headers: from there they were taken, because addresses
    are written into logs, and no other host is to see a key of Google's. ``reply_id``: of the reply that is asked for.
    """

    dialect: Dialect
    path: str
    is_call: bool = False
    model: str = ""
    streams: bool = False
    keys: tuple[tuple[str, str], ...] = ()
    reply_id: str = ""

    def with_keys(self, headers: Headers) -> Headers:
        """The caller's headers with the keys from the query among them, where there is none of that name."""
        if not self.keys:
            return headers
        known = {name for name, _ in headers}
        return [*headers, *((name, key) for name, key in self.keys if name not in known)]


def find_target(method: str, path: str, raw: str, headers: Mapping[str, str]) -> Target | None:
    """The target of a request; None for what is no provider's address. ``raw`` is path and query as encoded."""
    raw, keys = _without_keys(raw)
    is_post = method == "POST"
    if path in (CHAT, RESPONSES):
        dialect: Dialect = "openai_chat" if path == CHAT else "openai_responses"
        return Target(dialect=dialect, path=raw.removeprefix("/v1"), is_call=is_post, keys=keys)
    if path.startswith("/v1internal"):
        return _generating("gemini_gca", raw, keys, _GCA_METHOD.fullmatch(path) if is_post else None)
    found = _GEMINI_METHOD.fullmatch(path) if is_post else None
    if found is not None or _GEMINI.match(path):
        return _generating("gemini", raw, keys, found)
    if not path.startswith("/v1/"):
        return None
    if path == MESSAGES or path.startswith(f"{MESSAGES}/") or _is_anthropic(path, headers):
        return Target(dialect="anthropic", path=raw, is_call=is_post and path == MESSAGES, keys=keys)
    if path.startswith(f"{RESPONSES}/"):
        name = path.removeprefix(f"{RESPONSES}/") if method == "GET" else ""
        reply_id = "" if "/" in name else name
        return Target(dialect="openai_responses", path=raw.removeprefix("/v1"), keys=keys, reply_id=reply_id)
    if keys or any(name in headers for name in _GOOGLE_HEADERS):
        return Target(dialect="gemini", path=raw, keys=keys)
    return Target(dialect="openai_chat", path=raw.removeprefix("/v1"), keys=keys)


def _is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request that says nothing by its address is one of Anthropic's: its version goes with all of them."""
    if "anthropic-version" in headers:
        return True
    key = headers.get("x-api-key", "")
    return bool(key) and not key.startswith("tsk_") and (path == "/v1/models" or path.startswith("/v1/models/"))


def _generating(dialect: Dialect, path: str, keys: tuple[tuple[str, str], ...], found: re.Match[str] | None) -> Target:
    streams = _STREAMS.get(found["method"]) if found is not None else None
    if found is None or streams is None:
        return Target(dialect=dialect, path=path, keys=keys)
    model = found.groupdict().get("model", "").removeprefix("models/")
    return Target(dialect=dialect, path=path, is_call=True, model=model, streams=streams, keys=keys)


def _without_keys(raw: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The address without the keys in its query, and these as headers: Tersely's own, and Google's."""
    path, _, query = raw.partition("?")
    if not query:
        return raw, ()
    kept: list[str] = []
    keys: dict[str, str] = {}
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        if unquote_plus(name) != "key":
            kept.append(pair)
        elif key := unquote_plus(value):
            keys["x-tersely-key" if key.startswith("tsk_") else GOOGLE_KEY] = key
    return f"{path}?{'&'.join(kept)}" if kept else path, tuple(keys.items())
