"""tiancaiamao/ai, "Tool Result Summarization During Loops" and "Rebuild context"."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.history import Entry, Summary
from app.domain.messages import Message
from app.domain.pairing import prove_pairing, repair
from app.domain.tokens import estimate_text
from app.strategies.archiving import (
    archive_tiers,
    archived_summaries,
    results_to_archive,
    tool_digest_message,
)
from app.strategies.shortening import apply_tiers
from tests.strategies.histories import START, conversations, place, work


def summary(seq: int, text: str = "found it") -> Summary:
    return Summary(
        first_seq=seq, last_seq=seq, purpose="tool_result", text=text, tokens=2, source="model", created_at=START
    )


def results(entries: tuple[Entry, ...]) -> list[str]:
    return [r.text for entry in entries for r in entry.message.results]


def test_trigger_more_visible_results_than_the_cutoff() -> None:
    assert results_to_archive(work(10)) == ()
    assert [entry.seq for entry in results_to_archive(work(11))] == [3]


def test_the_oldest_visible_result_goes_first_until_at_or_below_the_cutoff() -> None:
    assert [entry.seq for entry in results_to_archive(work(5), cutoff=2)] == [3, 5, 7]
    assert len(results_to_archive(work(5), cutoff=0)) == 5


def test_an_archived_result_names_its_summary_and_stays_paired() -> None:
    history = work(4)
    made = [summary(3), summary(5)]
    tiers = archive_tiers(history, made, cutoff=2)
    short = apply_tiers(history, tiers, encode=estimate_text)
    assert results(short)[:2] == [
        "[Tool result archived; its summary is #3.]",
        "[Tool result archived; its summary is #5.]",
    ]
    assert results(short)[2:] == results(history)[2:]
    prove_pairing([entry.message for entry in short])
    assert archived_summaries(made, tiers) == tuple(made)


def test_nothing_is_archived_that_has_no_summary_yet() -> None:
    assert archive_tiers(work(4), [summary(5)], cutoff=1) == ()
    (tier,) = archive_tiers(work(4), [summary(3), summary(7)], cutoff=1)
    assert tier.until == 3
    assert archived_summaries([summary(3), summary(7)], (tier,)) == (summary(3),)


def test_a_way_to_the_whole_result_is_named_where_the_model_has_one() -> None:
    history = work(2)
    tiers = archive_tiers(history, [summary(3)], cutoff=1, way="query_db")
    assert results(apply_tiers(history, tiers, encode=estimate_text))[0] == (
        "[Tool result archived; its summary is #3. "
        'Use query_db(sql="SELECT content FROM messages WHERE id=3") to see full output]'
    )


def test_the_digest_has_its_prefix_and_stays_within_its_limit() -> None:
    made = [summary(seq, "w" * 80) for seq in (3, 5, 7)]
    digest = tool_digest_message(made, limit=1_000, encode=estimate_text)
    assert digest is not None
    assert (digest.role, digest.layer) == ("user", "tool_summary")
    assert digest.text.split("\n") == ["[Compaction tool digest]", *[f"#{s.first_seq}: {s.text}" for s in made]]
    tight = tool_digest_message(made, limit=55, encode=estimate_text)
    assert tight is not None
    assert tight.text.split("\n")[1:2] == ["(1 older results are not shown here.)"]
    assert tool_digest_message(made, limit=5, encode=estimate_text) is None
    assert tool_digest_message((), limit=1_000, encode=estimate_text) is None


@settings(max_examples=60, deadline=None)
@given(conversations, st.integers(0, 6))
def test_archiving_keeps_any_history_valid(batches: list[list[Message]], cutoff: int) -> None:
    history, _ = repair(place(*[message for batch in batches for message in batch]))
    archived = results_to_archive(history, cutoff=cutoff)
    assert len(results(history)) - len(results(archived)) <= cutoff
    tiers = archive_tiers(history, [summary(entry.seq) for entry in archived], cutoff=cutoff)
    prove_pairing([entry.message for entry in apply_tiers(history, tiers, encode=estimate_text)])
