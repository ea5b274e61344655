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
    assert rank_documents(["continue with the next step", "go on"], text) == ()
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
]


def test_memos_that_are_meant_come_and_others_do_not() -> None:
    assert [each.number for each in rank_documents(MEMOS, "Why does the parser lose the trailing comma?")] == [2]
    assert rank_documents(MEMOS, "What is the weather in Lisbon tomorrow?") == ()
    assert rank_documents([], "anything") == ()


def test_at_most_five_memos() -> None:
    assert len(rank_documents([f"parser rule {n}" for n in range(9)], "parser rule")) == 5
