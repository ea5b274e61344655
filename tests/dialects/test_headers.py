"""Headers that pass, and the way of each key."""

from __future__ import annotations

import pytest

from tersely.dialects.headers import (
    CREDENTIALS,
    GOOGLE_KEY,
    Headers,
    downstream_headers,
    is_compressed,
    key_header,
    own_headers,
    upstream_headers,
    without_account_headers,
)
from tersely.domain.messages import Dialect


@pytest.mark.parametrize(
    ("values", "compressed"),
    [
        ((), False),
        (("",), False),
        (("IDENTITY",), False),
        (("identity ,",), False),
        (("gzip",), True),
        (("identity, br",), True),
        (("zstd", "identity"), True),
    ],
)
def test_body_is_compressed_unless_all_its_codings_are_identity(values: tuple[str, ...], compressed: bool) -> None:
    assert is_compressed([("content-type", "gzip"), *(("content-encoding", each) for each in values)]) is compressed


def test_the_callers_key_passes_where_the_operator_has_none() -> None:
    sent = upstream_headers([("authorization", "Bearer sk"), ("x-custom", "1")], key=None, drop=frozenset())

    assert sent == [("authorization", "Bearer sk"), ("x-custom", "1"), ("accept-encoding", "identity")]


@pytest.mark.parametrize("name", sorted(CREDENTIALS))
def test_no_credential_of_the_caller_goes_where_the_operators_key_does(name: str) -> None:
    sent = upstream_headers([(name, "caller")], key=("authorization", "Bearer operator"), drop=frozenset())

    assert ("authorization", "Bearer operator") in sent
    assert "caller" not in dict(sent).values()


@pytest.mark.parametrize(
    "name", ["x-tersely-key", "x-tersely-session", "cookie", "host", "connection", "x-forwarded-for", "content-length"]
)
def test_headers_of_one_connection_and_our_own_stay_here(name: str) -> None:
    assert name not in dict(upstream_headers([(name, "value")], key=None, drop=frozenset()))


def test_a_header_that_carried_a_tersely_key_is_dropped() -> None:
    sent = upstream_headers([("authorization", "Bearer tsk_1_2")], key=None, drop=frozenset({"authorization"}))

    assert "tsk_1_2" not in str(sent)


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("openai_chat", ("authorization", "Bearer k")),
        ("openai_responses", ("authorization", "Bearer k")),
        ("anthropic", ("x-api-key", "k")),
        ("gemini", (GOOGLE_KEY, "k")),
        ("gemini_gca", ("authorization", "Bearer k")),
    ],
)
def test_key_header(dialect: Dialect, expected: tuple[str, str]) -> None:
    assert key_header(dialect, "k") == expected


def test_googles_key_goes_to_google_alone() -> None:
    headers: Headers = [(GOOGLE_KEY, "g"), ("a", "b")]

    assert own_headers("gemini", headers) == headers
    assert own_headers("anthropic", headers) == [("a", "b")]


def test_headers_that_choose_another_account_are_removed() -> None:
    assert without_account_headers(
        [("openai-organization", "org"), ("x-http-method-override", "DELETE"), ("a", "b")]
    ) == [("a", "b")]


def test_hosts_cookies_and_tersely_headers_do_not_reach_the_client() -> None:
    got = downstream_headers(
        [
            ("Set-Cookie", "s"),
            ("X-Tersely-Session", "forged"),
            ("Retry-After", "1"),
            ("Date", "d"),
            ("Access-Control-Allow-Origin", "*"),
            ("Access-Control-Allow-Credentials", "true"),
        ]
    )

    assert got == [("retry-after", "1")]
