"""The headers that pass between client and upstream, and Tersely's own."""

from __future__ import annotations

from collections.abc import Iterable

from tersely.domain.messages import Dialect

Headers = list[tuple[str, str]]

PREFIX = "x-tersely-"

# Headers of one connection, or that each sender writes itself (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
    }
)
# What the client's network put there, and cookies, which are nobody's business here. The upstream is asked for an
# unencoded body, because replies are read on their way.
NOT_UPSTREAM = HOP_BY_HOP | {
    "accept-encoding",
    "cookie",
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-forwarded-prefix",
    "x-forwarded-server",
    "x-forwarded-ssl",
    "x-original-forwarded-for",
    "x-real-ip",
    # Addresses of clients, as networks of content delivery name them.
    "cf-connecting-ip",
    "cf-connecting-ipv6",
    "fly-client-ip",
    "true-client-ip",
    "x-client-ip",
    "x-cluster-client-ip",
}
# Only Google's clients send this key, and no other host may see it.
GOOGLE_KEY = "x-goog-api-key"
_GOOGLES = frozenset({"gemini", "gemini_gca"})
# The provider decides which of these counts, so all of the caller's are removed where the operator's key is used.
CREDENTIALS = frozenset({"authorization", "x-api-key", "api-key", GOOGLE_KEY})
# Headers that choose another project, organisation or method than the operator's key and the route.
ACCOUNT_HEADERS = frozenset(
    {
        "openai-organization",
        "openai-project",
        "x-goog-user-project",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-original-url",
        "x-rewrite-url",
    }
)
# Which web pages may read an answer is Tersely's own setting.
_NOT_DOWNSTREAM_PREFIXES = (PREFIX, "access-control-")
NOT_DOWNSTREAM = HOP_BY_HOP | {"set-cookie", "alt-svc", "strict-transport-security", "server", "date"}


def is_compressed(headers: Iterable[tuple[str, str]]) -> bool:
    """Return whether headers say that the body is compressed (RFC 9110, section 8.4), so that it cannot be read. Names
    in lower case.
    """
    codings = [each for name, value in headers if name == "content-encoding" for each in value.split(",")]
    return any(each.strip().lower() not in ("", "identity") for each in codings)


def key_header(dialect: Dialect, key: str) -> tuple[str, str]:
    """Return the header by which a provider is given a key."""
    match dialect:
        case "anthropic":
            return "x-api-key", key
        case "gemini":
            return GOOGLE_KEY, key
        case _:
            return "authorization", f"Bearer {key}"


def own_headers(dialect: Dialect, headers: Headers) -> Headers:
    """Return the client's headers without a key that is another provider's."""
    if dialect in _GOOGLES:
        return headers
    return [(name, value) for name, value in headers if name != GOOGLE_KEY]


def without_account_headers(headers: Headers) -> Headers:
    """Return the client's headers without those that choose a part of a shared account."""
    return [(name, value) for name, value in headers if name not in ACCOUNT_HEADERS]


def upstream_headers(
    headers: Iterable[tuple[str, str]], *, key: tuple[str, str] | None, drop: frozenset[str]
) -> Headers:
    """Return the client's headers as the upstream gets them; names in lower case.

    ``key`` is the operator's, as a header, sent in place of the caller's. ``drop`` names headers that carried a Tersely
    key.
    """
    passed = [
        (name, value)
        for name, value in headers
        if name not in NOT_UPSTREAM and not name.startswith(PREFIX) and name not in drop
    ]
    if key is not None:
        passed = [(name, value) for name, value in passed if name not in CREDENTIALS]
        passed.append(key)
    passed.append(("accept-encoding", "identity"))
    return passed


def downstream_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return the upstream's headers as the client gets them."""
    return [
        (lower, value)
        for name, value in headers
        if (lower := name.lower()) not in NOT_DOWNSTREAM and not lower.startswith(_NOT_DOWNSTREAM_PREFIXES)
    ]
