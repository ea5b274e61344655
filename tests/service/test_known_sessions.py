"""A process remembers the stored bytes of sessions within a budget."""

from __future__ import annotations

from tersely.service.context.sent_contexts import RECENT_BYTES, KnownSessions, describe
from tests.builders import user


def learn(known: KnownSessions, session: str, text: str, seq: int = 1) -> None:
    message = user(text)
    body = b'{"messages":[' + message.raw + b"]}"
    found = known.get("t", session, 0)
    known.learn("t", session, describe(body, "openai_chat", sources=(), new={seq: message.raw}, known=found))


def test_sessions_beyond_the_budget_are_forgotten_the_oldest_first() -> None:
    known = KnownSessions(budget=64 * 1024)
    for number in range(200):
        learn(known, f"s{number}", "word " * 1_000)

    assert known._size <= 64 * 1024
    assert known.get("t", "s199", 0).stored
    assert not known.get("t", "s0", 0).stored


def test_large_messages_are_remembered_by_their_digests_alone() -> None:
    known = KnownSessions(budget=1 << 20)
    learn(known, "s", "x" * (RECENT_BYTES + 1))
    found = known.get("t", "s", 0)

    assert (found.recent, len(found.stored)) == ({}, 1)
    assert found.size < 1_000


def test_a_session_that_is_forgotten_gives_its_memory_back() -> None:
    known = KnownSessions(budget=1 << 20)
    for _ in range(3):
        learn(known, "s", "hello")
    known.forget("t", "s")
    known.forget("t", "s")

    assert known._size == 0
