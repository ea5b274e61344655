"""Terms and the ranking: what meets, what does not, and that stop words bring nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.history import Entry
from tersely.domain.history.turns import Turn, group_turns
from tersely.domain.messages import Message, Text
from tersely.domain.search.cues import is_mark
from tersely.domain.search.relevance import (
    PHRASED,
    Ranked,
    build_corpus,
    build_query,
    document_terms,
    find_relevant,
    fuse,
    prefer_phrases,
    rank_documents,
    rank_turns,
    search_corpus,
    tokenize,
)
from tests.builders import assistant, user

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
    corpus = build_corpus(documents)
    first = build_query(query, corpus, **options)
    return search_corpus(first, corpus, [documents[each.number] for each in first.best])


def test_words_stand_side_by_side_as_in_the_question() -> None:
    documents = [tokenize(text) for text in (
        "the summer camp of the scouts began", "filler one", "filler two", "filler three",
        "a camp; nobody likes it in summer heat", "filler four", "filler five",
    )]  # fmt: skip
    corpus = build_corpus(documents)

    assert [each.number for each in find_relevant("When is the summer camp?", documents, corpus)][:2] == [0, 4]
    assert [each.number for each in find_relevant("Which camp, summer or winter?", documents, corpus)][:2] == [4, 0]


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=8), max_size=40), st.lists(st.sampled_from("abcde")))
def test_phrases_move_the_first_documents_alone(documents: list[list[str]], words: list[str]) -> None:
    corpus = build_corpus(documents)
    first = build_query(" ".join(words), corpus)
    found = search_corpus(first, corpus)

    moved = prefer_phrases(first, found, [documents[each.number] for each in found], corpus)

    assert sorted(each.number for each in moved) == sorted(each.number for each in found)
    assert moved[PHRASED:] == found[PHRASED:]
    scores = [each.score for each in moved]
    assert scores == sorted(scores, reverse=True)


def test_rare_words_count_more_than_frequent_ones() -> None:
    texts = ["the build failed", "the build passed", "filler", "the migration", "more filler", "the build again"]
    assert found(texts, "build migration")[0] == 3


def test_a_short_message_comes_before_a_long_one_that_says_the_same() -> None:
    long = "database " + " ".join(f"word{n}" for n in range(900))
    assert found([long, "x", "y", "the database", "z"], "database")[0] == 3


def test_an_answer_is_found_by_its_question() -> None:
    texts = ["alpha", "beta", "Where is the dentist?", "Main Street 5.", "gamma", "delta"]
    assert found(texts, "dentist")[:3] == [2, 3, 1]


def test_documents_outside_the_collection_are_not_found() -> None:
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


def test_query_of_stop_words_finds_memos_by_its_content_word() -> None:
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


def test_selection_without_memos_is_empty() -> None:
    assert rank_documents([], ["anything"]) == ()


def test_who_asks_for_memos_gets_all_that_share_a_word() -> None:
    found = rank_documents(
        [sorted(set(tokenize(memo))) for memo in MEMOS], tokenize("2 tests of Lisbon"), is_asked=True
    )
    assert {each.number for each in found} == {5, 6}


def test_at_most_five_memos() -> None:
    assert len(rank_documents([["parser", "rule", str(n)] for n in range(9)], ["parser", "rule"])) == 5


def test_a_turn_is_as_relevant_as_the_share_of_the_question_that_it_covers() -> None:
    texts = ["deploy the payments service", "the migration failed " + "with many words beside it " * 60]
    texts += ["weather?", "rain in Kiel"]
    messages = [
        Message(role="assistant" if number % 2 else "user", parts=(Text(text=text),), raw=b"x")
        for number, text in enumerate(texts)
    ]
    turns = group_turns(
        Entry(seq=seq, turn=1 + (seq > 2), message=message, tokens=1, created_at=AT)
        for seq, message in enumerate(messages, start=1)
    )
    question = "back to the payments service deploy: which migration was it, and what about zebras?"
    relevance = {ranked.turn.number: ranked.relevance for ranked in rank_turns(turns, question)}
    assert relevance == {1: 1.0}  # what no turn speaks of does not count against it
    half = {ranked.turn.number: ranked.relevance for ranked in rank_turns(turns, "payments in Kiel")}
    assert all(0.5 <= share < 0.6 for share in (half[1], half[2]))  # a short message may be a little closer still


def marked(*messages: Message) -> list[list[str]]:
    return [document_terms(message) for message in messages]


def test_a_standing_instruction_counts_more_unless_the_question_looks_back() -> None:
    messages = marked(
        *(
            user(text)
            for text in ("the reports, all of them", "filler", "more", "Always a table when I ask for reports.")
        )
    )

    scores = {each.number: each.score for each in ranked(messages, "How should I write the reports?")}
    recalled = {each.number: each.score for each in ranked(messages, "How were the reports written?")}
    assert scores[3] / scores[0] > 2 * recalled[3] / recalled[0]


def test_a_standing_instruction_holds_for_requests_that_share_no_word_with_it() -> None:
    texts = (
        "The festival in Kiel is on May 3.",
        "filler",
        "more",
        "other",
        "Always name the day when I ask for dates.",
    )
    messages = marked(*(user(text) for text in texts))

    def found(question: str) -> list[int]:
        return [each.number for each in ranked(messages, question)][:2]

    assert found("When is the festival in Kiel?") == [0, 4]
    assert 4 not in found("What did I say about the festival in Kiel?")
    assert 4 not in found("Summarize how we planned the festival in Kiel.")
    assert found("the") == found("a motorway") == []
    assert [each.turn.number for each in rank_turns(turns(*texts), "When is the festival in Kiel?")] == [1]


def test_a_short_question_passes_a_share_of_its_score_to_its_answer() -> None:
    questions = ranked(
        marked(user("x"), user("Where is the dentist?"), assistant("Main Street 5."), user("z")), "dentist"
    )
    statements = ranked(
        marked(user("x"), user("There is the dentist."), assistant("Main Street 5."), user("z")), "dentist"
    )

    assert {each.number: each.score for each in questions}[2] > {each.number: each.score for each in statements}[2]


def test_a_speaker_whom_the_question_names_counts_more() -> None:
    def by(name: str, text: str) -> Message:
        raw = json.dumps({"role": "user", "name": name, "content": text}).encode()
        return Message(role="user", parts=(Text(text=text),), raw=raw)

    documents = marked(by("Ann", "Bob swims in lakes"), by("x", "y"), by("z", "y"), by("Bob", "Ann swims in lakes"))

    assert ranked(documents, "Where does Bob swim?")[0].number == 3
    assert ranked(documents, "Where does Ann swim?")[0].number == 0


def test_the_users_own_words_count_more_for_a_question_in_the_first_person() -> None:
    documents = marked(assistant("the garden plan"), user("x"), user("the garden plan"), assistant("y"), user("z"))

    def scores(question: str) -> dict[int, float]:
        return {each.number: each.score for each in ranked(documents, question)}

    plain, own = scores("Which garden?"), scores("Which garden is mine?")
    assert own[2] / own[0] > 1.2 * plain[2] / plain[0]
    assert scores("Did you say which garden is mine?")[2] == pytest.approx(plain[2])


@pytest.mark.parametrize(
    "question",
    ["What did you recommend against snails?", "Your advice against snails?", "Snails: what have you suggested?"],
)
def test_a_question_about_a_reply_finds_it_behind_the_message_that_it_answers(question: str) -> None:
    messages = [user("x"), user("Snails eat my plants!"), assistant("Lay out copper."), *map(user, "abc")]
    messages += [user("Snails and slugs"), user("Snails again")]
    documents = marked(*messages)

    order = [each.number for each in ranked(documents, question)]
    assert order[order.index(1) + 1] == 2
    # A message that the user wrote is no reply.
    assert 7 in order
    assert len(order) == len(set(order))
    corpus = build_corpus(documents)
    first = build_query(question, corpus, hidden=frozenset({2}))
    assert 2 not in [each.number for each in search_corpus(first, corpus, [documents[n.number] for n in first.best])]


def test_words_about_the_conversation_count_less() -> None:
    texts = ["a summary of the list in order", "the garden plan", "x", "y"]

    assert found(texts, "summary of the garden")[0] == 1


@pytest.mark.parametrize("text", ["\x01standing", "a \x01question b", "\x01by ann", "\x01user"])
def test_no_text_has_a_mark_as_a_term(text: str) -> None:
    assert not any(is_mark(term) for term in tokenize(text))


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 9)), max_size=8, unique_by=lambda pair: pair[0]),
    st.lists(st.tuples(st.integers(1, 20), st.floats(-1, 1)), max_size=8, unique_by=lambda pair: pair[0]),
)
def test_fuse_ranks_every_document_of_both_once(words: list[tuple[int, float]], near: list[tuple[int, float]]) -> None:
    by_words = [Ranked(number=number, score=score) for number, score in sorted(words, key=lambda pair: -pair[1])]
    by_meaning = [Ranked(number=number, score=score) for number, score in near]
    order = fuse(by_words, by_meaning)

    assert sorted(order) == sorted({each.number for each in (*by_words, *by_meaning)})
    if by_words and not by_meaning:
        best = max(score for _, score in words)
        assert dict(words)[order[0]] == best


def test_fuse_ranks_equal_word_scores_by_embedding() -> None:
    words = [Ranked(number=1, score=2.0), Ranked(number=2, score=1.95)]

    assert fuse(words, [Ranked(number=2, score=0.9), Ranked(number=3, score=0.1)]) == [2, 1, 3]
    assert fuse(words, []) == [1, 2]


def test_fuse_keeps_the_best_by_words_in_front() -> None:
    words = [Ranked(number=number, score=9 - number / 10) for number in range(1, 40)]
    near = [Ranked(number=number, score=number / 100) for number in range(99, 4, -1)]

    order = fuse(words, near)
    assert set(order[:10]) == set(range(1, 11))
    # Where words find few, the nearest follow at once.
    assert fuse(words[:1], near)[:3] == [1, 99, 98]
