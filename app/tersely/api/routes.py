"""Find the provider and the upstream path of a request from its address. All providers share one root URL.

Some addresses belong to three providers (lists of models). There the caller's headers decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_plus

from tersely.dialects.headers import GOOGLE_KEY, Headers
from tersely.domain.messages import Dialect

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

# Beginnings of provider addresses.
PREFIXES = ("/v1", "/upload/v1", "/download/v1", "/u/", "/openai/")

_GEMINI = re.compile(r"/v1(?:beta|alpha)/|/(?:upload|download)/v1(?:beta|alpha)?/")
# Sent by Google's clients alone.
_GOOGLE_HEADERS = (GOOGLE_KEY, "x-goog-api-client")
_GEMINI_METHOD = re.compile(r"/v1(?:beta|alpha)?/(?P<model>(?:models|tunedModels)/[^/]+):(?P<method>[A-Za-z]+)")
# Azure OpenAI: the calls of a deployment, and OpenAI's own paths behind a prefix.
_AZURE_DEPLOYMENT = re.compile(r"/openai/deployments/(?P<model>[^/]+)/.*")
_AZURE_PREFIX = re.compile(r"\A/openai/(?:deployments/[^/]+/|v1/)?")
_AZURE_CALLS = frozenset({"/openai/v1/chat/completions", "/openai/v1/responses", "/openai/responses"})
_GCA_METHOD = re.compile(r"/v1internal:(?P<method>[A-Za-z]+)")
_STREAMS = {"generateContent": False, "streamGenerateContent": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The provider and the upstream path of a request.

    ``path`` follows the upstream's base URL. ``is_call``: a model answers and the call is stored; other requests are
    forwarded. ``model`` and ``streams`` come from the address. ``keys``: the caller's keys from the query, as headers;
    they are moved there because addresses are logged and no other host may see a key of Google's. ``reply_id``: the id
    of a requested stored reply. ``is_azure``: the path is one of Azure OpenAI's.
    """

    dialect: Dialect
    path: str
    is_call: bool = False
    model: str = ""
    streams: bool = False
    keys: tuple[tuple[str, str], ...] = ()
    reply_id: str = ""
    is_azure: bool = False

    def account_path(self, raw: str) -> str:
        """The path by OpenAI's own names, which the rules of shared accounts use."""
        return _AZURE_PREFIX.sub("/v1/", raw) if self.is_azure else raw

    def with_keys(self, headers: Headers) -> Headers:
        """Return the caller's headers, with the query's keys added under names that the headers lack."""
        if not self.keys:
            return headers
        known = {name for name, _ in headers}
        return [*headers, *((name, key) for name, key in self.keys if name not in known)]


def find_target(method: str, path: str, raw: str, headers: Mapping[str, str]) -> Target | None:
    """Return the target of a request; None for a path of no provider. ``raw`` is path and query, encoded."""
    raw, keys = _without_keys(raw)
    is_post = method == "POST"
    if path in (CHAT, RESPONSES):
        dialect: Dialect = "openai_chat" if path == CHAT else "openai_responses"
        return Target(dialect=dialect, path=raw.removeprefix("/v1"), is_call=is_post, keys=keys)
    if path.startswith("/openai/"):
        return _azure(method, path, raw, keys)
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
        reply_id = _reply_id(method, path)
        return Target(dialect="openai_responses", path=raw.removeprefix("/v1"), keys=keys, reply_id=reply_id)
    if keys or any(name in headers for name in _GOOGLE_HEADERS):
        return Target(dialect="gemini", path=raw, keys=keys)
    return Target(dialect="openai_chat", path=raw.removeprefix("/v1"), keys=keys)


def _azure(method: str, path: str, raw: str, keys: tuple[tuple[str, str], ...]) -> Target:
    """Return the target of an Azure OpenAI path, which follows the resource's own address unchanged."""
    deployment = _AZURE_DEPLOYMENT.fullmatch(path)
    plain = _AZURE_PREFIX.sub("/v1/", path)
    is_call = path in _AZURE_CALLS or (deployment is not None and path.endswith(("/chat/completions", "/responses")))
    is_of_responses = path.endswith("/responses") if is_call else plain.startswith(f"{RESPONSES}/")
    return Target(
        dialect="openai_responses" if is_of_responses else "openai_chat",
        path=raw,
        is_call=is_call and method == "POST",
        model=deployment["model"] if deployment is not None else "",
        keys=keys,
        reply_id=_reply_id(method, plain),
        is_azure=True,
    )


def _reply_id(method: str, path: str) -> str:
    """Return the id of the stored reply that a request asks for; empty if it asks for something else."""
    name = path.removeprefix(f"{RESPONSES}/") if method == "GET" and path.startswith(f"{RESPONSES}/") else ""
    return "" if "/" in name else name


def _is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request with a shared address is for Anthropic: all of its clients send a version header."""
    if "anthropic-version" in headers:
        return True
    key = headers.get("x-api-key", "")
    return bool(key) and not key.startswith("tsk_") and (path == "/v1/models" or path.startswith("/v1/models/"))


def _generating(dialect: Dialect, path: str, keys: tuple[tuple[str, str], ...], found: re.Match[str] | None) -> Target:
    if found is None:
        return Target(dialect=dialect, path=path, keys=keys)
    streams = _STREAMS.get(found["method"])
    model = found.groupdict().get("model", "").removeprefix("models/")
    return Target(
        dialect=dialect, path=path, is_call=streams is not None, model=model, streams=bool(streams), keys=keys
    )


def _without_keys(raw: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the address without the keys in its query, and these as headers: Tersely's own, and Google's."""
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
