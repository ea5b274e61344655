"""The routes of a provider that tenants may use with the operator's key.

One key opens a whole account: its files, its administration, and the data of every other tenant. So a list names the
permitted routes, and every other route is refused. The list knows routes, not hosts: `Rule` matches a method and a
decoded path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Dialect

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
ROOTS = ("/v1", "/upload/v1", "/download/v1")

# Percent-encoding is removed once. The rest must be plain: a host that decodes twice or knows other separators would
# see another path.
_SEGMENT = re.compile(r"[A-Za-z0-9._:@+=~-]+")
_PATTERN = re.compile(r"(?:/(?:[A-Za-z0-9._:@+=~*-]|\{[a-z_]+\})+)+")
_WILDCARD = re.compile(r"\*\*|\*|\{[a-z_]+\}")
_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/@+=~*-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A permitted route. ``ids``: how many segments of the path are ids that must belong to the tenant.

    ``takes_forms``: the body may be a form, which names nothing of the account. ``creates``: the reply names what the
    call created, which then belongs to the tenant. ``lists``: the reply may be a list, all of which belongs to the
    tenant, but for items whose ids the tenant chose itself.
    """

    methods: frozenset[str]
    path: re.Pattern[str]
    ids: int = 0
    takes_forms: bool = False
    creates: bool = False
    lists: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedRoute:
    """A request's route, with the ids in its path."""

    ids: tuple[str, ...]
    takes_forms: bool
    creates: bool
    lists: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Passthrough:
    """The operator's additions: routes, and patterns of ids that all tenants share."""

    rules: tuple[Rule, ...] = ()
    shared_ids: tuple[re.Pattern[str], ...] = ()

    def is_shared(self, name: str) -> bool:
        """Return whether every tenant may name this id."""
        return any(pattern.fullmatch(name) for pattern in self.shared_ids)


def allow(methods: str, path: str, *, takes_forms: bool = False, creates: bool = False, lists: bool = False) -> Rule:
    """Make a rule from methods (``GET|DELETE``) and a path pattern.

    In a pattern ``{name}`` is an id that must be the tenant's own, ``*`` is anything within a segment, and ``**`` at
    the end is any number of segments. Raises `InvalidRequest`.
    """
    named = frozenset(methods.split("|"))
    if not named <= METHODS:
        raise InvalidRequest(f"{methods!r} is not one of {', '.join(sorted(METHODS))}, or several with | between them")
    if not path.startswith(ROOTS) or not _PATTERN.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise InvalidRequest(f"{path!r} is not a path under {', '.join(ROOTS)}")
    if "**" in path.removesuffix("/**"):
        raise InvalidRequest(f"{path!r}: ** stands at the end alone")
    return Rule(
        methods=named,
        path=re.compile(_expression(path)),
        ids=path.count("{"),
        takes_forms=takes_forms,
        creates=creates,
        lists=lists,
    )


def _expression(path: str) -> str:
    wildcards = {"**": ".+", "*": "[^/]*"}
    pieces = []
    end = 0
    for found in _WILDCARD.finditer(path):
        pieces += [re.escape(path[end : found.start()]), wildcards.get(found[0], "([^/:]+)")]
        end = found.end()
    return "".join([*pieces, re.escape(path[end:])])


_JSON = ("/v1/completions", "/v1/responses/input_tokens", "/v1/embeddings")
_FORMS = (
    *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
    *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
)
_OPENAI = (
    *(allow("POST", path) for path in _JSON),
    *(allow("POST", path, takes_forms=True) for path in _FORMS),
    allow("POST", "/v1/chat/completions", creates=True),
    allow("GET", "/v1/models"),
    allow("GET", "/v1/models/**"),
    allow("POST", "/v1/responses", creates=True),
    allow("POST", "/v1/responses/compact", creates=True),
    allow("GET", "/v1/responses/{id}", creates=True),  # of one in the background, its items are first seen here
    allow("DELETE", "/v1/responses/{id}"),
    allow("GET", "/v1/responses/{id}/input_items", creates=True, lists=True),
    allow("POST", "/v1/responses/{id}/cancel"),
    allow("POST", "/v1/conversations", creates=True),
    allow("GET|POST|DELETE", "/v1/conversations/{id}"),
    allow("GET|POST", "/v1/conversations/{id}/items", creates=True, lists=True),
    allow("GET", "/v1/conversations/{id}/items/*", creates=True),
    allow("DELETE", "/v1/conversations/{id}/items/*"),
)
_ANTHROPIC = (
    allow("POST", "/v1/messages", creates=True),
    *(allow("POST", path) for path in ("/v1/messages/count_tokens", "/v1/complete")),
    allow("GET", "/v1/models"),
    allow("GET", "/v1/models/*"),
)
_GEMINI_CALLS = (
    *("generateContent", "streamGenerateContent", "countTokens", "embedContent", "batchEmbedContents", "predict"),
)
_GEMINI = tuple(
    rule
    for version in ("v1", "v1beta", "v1alpha")
    for rule in (
        *(allow("POST", f"/{version}/models/*:{method}") for method in _GEMINI_CALLS),
        *(allow("POST", f"/{version}/tunedModels/*:{method}") for method in _GEMINI_CALLS[:2]),
        allow("GET", f"/{version}/models"),
        allow("GET", f"/{version}/models/*"),
    )
)
ALLOWED: dict[Dialect, tuple[Rule, ...]] = {
    "openai_chat": _OPENAI,
    "openai_responses": _OPENAI,
    "anthropic": _ANTHROPIC,
    "gemini": _GEMINI,
    "gemini_gca": (),
}


def find_route(rules: Iterable[Rule], dialect: Dialect, method: str, raw_path: str) -> AllowedRoute | None:
    """Find the rule for a request; None: it is not permitted. ``raw_path``: path and query as the client
    encoded them.
    """
    raw, _, query = raw_path.partition("?")
    path = _decode(raw)
    if path is None or not _is_plain(query):
        return None
    for rule in rules:
        found = rule.path.fullmatch(path) if method in rule.methods else None
        if found is not None:
            return AllowedRoute(
                ids=tuple(_name(path, found, number, dialect) for number in range(1, rule.ids + 1)),
                takes_forms=rule.takes_forms,
                creates=rule.creates,
                lists=rule.lists,
            )
    return None


def _decode(raw: str) -> str | None:
    """Return the path without percent-encoding; None if its meaning is ambiguous."""
    if not raw.startswith("/"):
        return None
    segments = [unquote(segment, errors="replace") for segment in raw[1:].split("/")]
    if all(_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in segments):
        return "/" + "/".join(segments)
    return None


def _is_plain(query: str) -> bool:
    """Return whether no parameter changes method or headers of the request, as those of Google's frontend do."""
    names = [name for name, _ in parse_qsl(query, keep_blank_values=True)]
    return all(not name.startswith("$") or name == "$alt" for name in names)


def _name(path: str, found: re.Match[str], number: int, dialect: Dialect) -> str:
    """Return an id as the provider's bodies write it: Google's carry the name of their collection."""
    if dialect not in ("gemini", "gemini_gca"):
        return found[number]
    return f"{path[: found.start(number)].rstrip('/').rpartition('/')[2]}/{found[number]}"


def parse_passthrough(text: str) -> Passthrough:
    """Read the operator's additions: entries with commas or line ends between them, each ``METHODS PATH`` or ``ID
    PATTERN``. Raises `InvalidRequest` that names the entry.
    """
    rules: list[Rule] = []
    shared: list[re.Pattern[str]] = []
    for entry in filter(None, (each.strip() for each in re.split(r"[,\n]", text))):
        kind, *rest = entry.split()
        if len(rest) != 1:
            raise InvalidRequest(f"{entry!r} is neither METHOD PATH nor ID PATTERN")
        if kind == "ID":
            if not _ID_PATTERN.fullmatch(rest[0]):
                raise InvalidRequest(f"{entry!r} is not a pattern of ids")
            shared.append(re.compile(re.escape(rest[0]).replace(r"\*", ".*")))
        else:
            creates = "POST" in kind.split("|")
            rules.append(allow(kind, rest[0], takes_forms=True, creates=creates))
    return Passthrough(rules=tuple(rules), shared_ids=tuple(shared))


def rules_for(dialect: Dialect, passthrough: Passthrough) -> Sequence[Rule]:
    """Return all rules of a dialect; the operator's come first."""
    return (*passthrough.rules, *ALLOWED[dialect])
