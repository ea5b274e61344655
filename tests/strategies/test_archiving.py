"""tiancaiamao/ai, "Tool Result Summarization During Loops" and "Rebuild context"."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.domain.history.history import Entry, Summary
from tersely.domain.history.pairing import prove_pairing, repair
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate_text
from tersely.strategies.pipeline import Draft
from tersely.strategies.reduction.archiving import (
    archive_results,
    archive_tiers,
    archived_summaries,
    fit_digest,
    results_to_archive,
    tool_digest_message,
)
from tersely.strategies.reduction.shortening import apply_tiers
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, conversations, place, work

LONG = "a long result " * 20


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
    assert archived_summaries(made, tiers, candidates={3, 5}) == tuple(made)


def test_nothing_is_archived_that_has_no_summary_yet() -> None:
    assert archive_tiers(work(4), [summary(5)], cutoff=1) == ()
    (tier,) = archive_tiers(work(4), [summary(3), summary(7)], cutoff=1)
    assert tier.until == 3
    assert archived_summaries([summary(3), summary(7)], (tier,), candidates={3, 5, 7}) == (summary(3),)


def test_a_way_to_the_whole_result_is_named_where_the_model_has_one() -> None:
    history = work(2)
    tiers = archive_tiers(history, [summary(3)], cutoff=1, read_back="query_db")
    assert results(apply_tiers(history, tiers, encode=estimate_text))[0] == (
        "[Tool result archived; its summary is #3. "
        'Use query_db(sql="SELECT content FROM messages WHERE id=3") to see full output]'
    )


def test_the_digest_has_its_prefix_and_stays_within_its_limit() -> None:
    made = [summary(seq, "w" * 80) for seq in (3, 5, 7)]
    assert fit_digest(made, limit=1_000, encode=estimate_text) == tuple(made)
    digest = tool_digest_message(made, encode=estimate_text)
    assert digest is not None
    assert (digest.role, digest.layer) == ("user", "tool_summary")
    assert digest.text.split("\n") == ["[Compaction tool digest]", *[f"#{s.first_seq}: {s.text}" for s in made]]
    assert fit_digest(made, limit=55, encode=estimate_text) == tuple(made[1:])
    tight = tool_digest_message(made[1:], left_out=1, encode=estimate_text)
    assert tight is not None
    assert tight.text.split("\n")[1] == "(1 older results are described in their places.)"
    assert fit_digest(made, limit=5, encode=estimate_text) == ()
    assert tool_digest_message((), encode=estimate_text) is None


def archive(history: tuple[Entry, ...], made: list[Summary], *, limit: int = 1_000, cutoff: int = 0) -> Draft:
    stage = archive_results(
        made, cutoff=cutoff, heuristic=False, limit=limit, read_back="", encode=estimate_text, originals={}, now=START
    )
    return stage(Draft(tail=history))


def test_archived_result_without_room_for_a_summary_names_its_call() -> None:
    history = work(4)
    draft = archive(history, [summary(seq, "w" * 80) for seq in (3, 5, 7, 9)], limit=55)
    shown = results(draft.tail)
    assert shown[:2] == [
        f"[Tool result archived: 410 characters in 1 line, beginning with 'content_{step} {'y' * 50}'.]"
        for step in (1, 2)
    ]
    assert shown[2:] == [f"[Tool result archived; its summary is #{seq}.]" for seq in (7, 9)]
    assert [line[:3] for line in draft.head[0].text.split("\n")] == ["[Co", "(2 ", "#7:", "#9:"]


def test_digest_omits_results_that_were_cut_or_stay() -> None:
    history = place(
        user("go"), assistant(None, call("c1")), result("c1", "short"), assistant(None, call("c2")), result("c2", LONG)
    )
    draft = archive(history, [summary(seq) for seq in (1, 3, 5)])
    assert results(draft.tail) == ["short", "[Tool result archived; its summary is #5.]"]
    assert draft.head[0].text == "[Compaction tool digest]\n#5: found it"


@settings(max_examples=60, deadline=None)
@given(conversations, st.integers(0, 6))
def test_archiving_keeps_any_history_valid(batches: list[list[Message]], cutoff: int) -> None:
    history, _ = repair(place(*[message for batch in batches for message in batch]))
    archived = results_to_archive(history, cutoff=cutoff)
    assert len(results(history)) - len(results(archived)) <= cutoff
    tiers = archive_tiers(history, [summary(entry.seq) for entry in archived], cutoff=cutoff)
    prove_pairing([entry.message for entry in apply_tiers(history, tiers, encode=estimate_text)])
