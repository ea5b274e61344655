"""Terms and the ranking: what meets, what does not, and that stop words bring nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.history import Entry
from app.domain.messages import Message, Text
from app.domain.relevance import Ranked, collect, look, rank_documents, rank_turns, search, tokenize
from app.domain.turns import Turn, group_turns

AT = datetime(2026, 1, 1, tzinfo=UTC)
SMALL_TALK = ("continue", "go on", "next", "Yes, please continue!", "ok thanks", "and now?", "", "   ", "?!")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("palettes", "Palette"),
        ("retrying", "retries"),
        ("Straße", "STRASSE"),
        ("maxRetries", "max_retries"),
        ("parser.js", "the parser"),
        ("src/app/main.py", "main.py is broken"),
        ("HTTPServer", "http server"),
        ("Caroline's", "caroline"),
        ("don’t worry", "worries"),
        ("naïve café", "CAFE\u0301"),
        ("हिन्दी", "हिन्दी भाषा"),
        ("数据库连接", "连接数据库"),
        ("ошибка", "Ошибка"),
        ("v0.6.2", "upgrade to v0.6.2."),
    ],
)
def test_forms_of_one_word_meet(one: str, other: str) -> None:
    assert set(tokenize(one)) & set(tokenize(other))


def test_an_identifier_is_kept_whole_and_in_pieces() -> None:
    assert tokenize("src/userStore.ts") == ["src/userstore.ts", "src", "user", "store", "ts"]
    assert tokenize("order_id=ZX-81.") == ["order_id", "order", "id", "zx-81", "zx", "81"]


@pytest.mark.parametrize("text", SMALL_TALK)
def test_small_talk_is_about_nothing(text: str) -> None:
    assert tokenize(text) == []
    assert ranked([["continue"], ["next"]], text) == []
    assert rank_documents([tokenize("continue with the next step"), tokenize("go on")], tokenize(text)) == ()
    assert rank_turns(turns("please continue", "go on then", "next"), text, budget=1000) == ()


@given(st.text())
def test_any_text_has_terms_of_bounded_length(text: str) -> None:
    assert all(0 < len(term) <= 80 for term in tokenize(text))


def turns(*texts: str, tokens: int = 10) -> tuple[Turn, ...]:
    entries = [
        Entry(
            seq=n,
            turn=n,
            message=Message(role="user", parts=(Text(text=text),), raw=b"{}"),
            tokens=tokens,
            created_at=AT,
        )
        for n, text in enumerate(texts, 1)
    ]
    return group_turns(entries)


def found(texts: list[str], query: str) -> list[int]:
    return [each.number for each in ranked([tokenize(text) for text in texts], query)]


def ranked(documents: list[list[str]], query: str, **options: Any) -> list[Ranked]:
    corpus = collect(documents)
    first = look(query, corpus, **options)
    return search(first, corpus, [documents[each.number] for each in first.best])


def test_rare_words_count_more_than_frequent_ones() -> None:
    texts = ["the build failed", "the build passed", "filler", "the migration", "more filler", "the build again"]
    assert found(texts, "build migration")[0] == 3


def test_a_short_message_comes_before_a_long_one_that_says_the_same() -> None:
    long = "database " + " ".join(f"word{n}" for n in range(900))
    assert found([long, "x", "y", "the database", "z"], "database")[0] == 3


def test_an_answer_is_found_by_its_question() -> None:
    texts = ["alpha", "beta", "Where is the dentist?", "Main Street 5.", "gamma", "delta"]
    assert found(texts, "dentist")[:3] == [2, 3, 1]


def test_what_is_no_part_of_the_collection_is_not_found() -> None:
    assert set(found(["dentist", "", "dentist appointment"], "dentist")) == {0, 2}


def test_hidden_documents_count_for_nothing() -> None:
    texts = ["the dentist", "filler", "dentist dentist", "more", "filler", "the plumber", "x"]
    documents = [tokenize(text) for text in texts]
    hidden = ranked(documents, "dentist plumber", hidden=frozenset({2}))
    gone = ranked([*documents[:2], [], *documents[3:]], "dentist plumber")
    assert hidden == gone
    assert 2 not in {each.number for each in hidden}


def test_whole_turns_within_the_budget_and_none_for_the_sake_of_filling() -> None:
    history = turns("parser bug in parser.js", "holiday plans", "the parser again, parser.js line 45", "weather")
    chosen = rank_turns(history, "fix parser.js", budget=20)
    assert {each.turn.number for each in chosen} == {1, 3}
    assert all(0 < each.relevance <= 1 for each in chosen)
    assert len(rank_turns(history, "fix parser.js", budget=19)) == 1
    assert rank_turns(history, "fix parser.js", budget=9) == ()


def test_a_task_full_of_stop_words_brings_what_its_one_word_is_about() -> None:
    history = turns(*["please continue and go on with the next one"] * 8, "invoice export", "yes, go on")
    chosen = rank_turns(history, "ok, please continue with the next thing: the invoice", budget=1000)
    assert [each.turn.number for each in chosen] == [9]


MEMOS = [
    "deploy: run make deploy, then check the canary",
    "arch-decision: sessions are sharded by tenant",
    "gotcha: the parser drops trailing commas",
    "api-design: errors are problem documents",
    "the Stripe webhook signature needs the raw body [billing, gotcha]",
    "the platypus service listens on 9911, its 2 replicas on 9912",
    "run the tests with make test-all; the fix of issue 2 is in src/app.py",
    "hello is the name of the greeting template",
]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        # What is meant comes, whatever else the message says that no memo knows.
        ("Why does the parser lose the trailing comma?", [2]),
        ("tell me about Stripe", [4]),
        ("tell me of the platypus", [5]),
        ("Stripe webhook fails", [4]),
        ("Yesterday the Stripe integration of our Portuguese customer broke again, can you look into it?", [4]),
        ("How do I deploy?", [0]),
        ("where do replicas of the platypus listen, and how are sessions sharded?", [5, 1]),
        ("run the tests", [6]),
        ("greeting", [7]),
        # Small talk, everyday words and numbers are about nothing.
        ("hello", []),
        ("hello 0", []),
        ("go on", []),
        ("ok, continue with the next one please", []),
        ("2", []),
        ("fix 2", []),
        ("2 + 2?", []),
        ("what is 9911", []),
        ("try again and check that everything works", []),
        ("fix it in lib/other.py", []),
        ("the name of the file?", []),
        ("What is the weather in Lisbon tomorrow?", []),
        ("", []),
    ],
)
def test_a_message_brings_the_memos_that_it_is_about(message: str, expected: list[int]) -> None:
    found = rank_documents([sorted(set(tokenize(memo))) for memo in MEMOS], tokenize(message))
    assert [each.number for each in found] == expected


def test_where_there_are_no_memos_none_come() -> None:
    assert rank_documents([], ["anything"]) == ()


def test_who_asks_for_memos_gets_all_that_share_a_word() -> None:
    found = rank_documents(
        [sorted(set(tokenize(memo))) for memo in MEMOS], tokenize("2 tests of Lisbon"), is_asked=True
    )
    assert {each.number for each in found} == {5, 6}


def test_at_most_five_memos() -> None:
    assert len(rank_documents([["parser", "rule", str(n)] for n in range(9)], ["parser", "rule"])) == 5
