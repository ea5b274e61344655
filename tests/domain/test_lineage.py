"""Alignment of an incoming history with a stored one: cases by name, and invariants over generated conversations."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from tersely.domain.history.links import MessageIdentity, StoredLink, as_incoming
from tersely.domain.history.reconciliation import Reconciliation, align, append_messages, reconcile
from tersely.domain.messages import Role


def identity_of(words: str) -> MessageIdentity:
    """``u:hello`` by the user, ``a:`` by the assistant, ``t:`` a tool result, ``s:`` instructions."""
    roles: dict[str, Role] = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    role = roles[words[0]]
    is_link = role != "system"
    return MessageIdentity(
        digest=words.encode(),
        is_link=is_link,
        starts_turn=role == "user",
        role=role,
    )


def history(*words: str) -> list[MessageIdentity]:
    return [identity_of(each) for each in words]


@dataclass
class Stored:
    """A session's rows as the store keeps them."""

    rows: dict[int, StoredLink] = field(default_factory=dict)
    last_seq: int = 0
    turns: int = 0
    calls: int = 0

    @property
    def in_order(self) -> list[StoredLink]:
        return sorted(self.rows.values(), key=lambda row: (row.position, row.seq))

    @property
    def live(self) -> list[str]:
        return [row.digest.decode() for row in self.in_order if row.status == "live"]

    @property
    def live_turns(self) -> list[int]:
        return [row.turn for row in self.in_order if row.status == "live" and row.is_link]

    def decide(self, incoming: Sequence[MessageIdentity]) -> Reconciliation:
        given = (self.in_order, incoming)
        decision = reconcile(*given, last_seq=self.last_seq, turns=self.turns, allow_restore=True)
        # The quick way, where it is open, leads to the same place.
        assert decision == align(*given, last_seq=self.last_seq, turns=self.turns, allow_restore=True)
        return decision

    def ask(self, *words: str, reply: str | None = None) -> Reconciliation:
        """A request with its whole history, and the reply to it."""
        incoming = history(*words)
        decision = self.decide(incoming)
        self.apply(incoming, decision)
        if reply is not None:
            self.reply(decision, reply)
        return decision

    def apply(self, incoming: Sequence[MessageIdentity], decision: Reconciliation) -> None:
        before = 0
        for message, placed in zip(incoming, decision.placed, strict=True):
            follows, before = before, placed.seq if placed.turn > 0 else before
            if placed.is_new:
                assert placed.seq not in self.rows
                self.rows[placed.seq] = StoredLink(
                    seq=placed.seq,
                    position=placed.position,
                    turn=placed.turn,
                    tokens=1,
                    role=message.role,
                    status="live",
                    digest=message.digest,
                    relayed=False,
                    call=0,
                    follows=follows,
                )
        for seq in decision.superseded:
            self.rows[seq] = structs.replace(self.rows[seq], status="superseded")
        for seq in decision.restored:
            self.rows[seq] = structs.replace(self.rows[seq], status="live")
        self.last_seq, self.turns = decision.last_seq, decision.turns
        self.calls += 1

    def reply(self, decision: Reconciliation, words: str) -> None:
        assert decision.answered is not None
        self.last_seq += 1
        self.rows[self.last_seq] = StoredLink(
            seq=self.last_seq,
            position=float(self.last_seq),
            turn=decision.answered.turn,
            tokens=1,
            role="assistant",
            status="live",
            digest=words.encode(),
            relayed=True,
            call=self.calls,
            follows=decision.answered.seq,
        )


def conversation() -> Stored:
    """Two answered turns."""
    stored = Stored()
    stored.ask("s:1", "u:1", reply="a:1")
    stored.ask("s:1", "u:1", "a:1", "u:2", reply="a:2")
    return stored


BEFORE = ("s:1", "u:1", "a:1", "u:2", "a:2")


def test_a_first_request_is_new() -> None:
    decision = Stored().ask("s:1", "u:1")
    assert decision.kind == "new"
    assert [(p.seq, p.turn, p.position, p.is_new) for p in decision.placed] == [(1, 0, 1.0, True), (2, 1, 2.0, True)]


def test_new_messages_are_appended() -> None:
    stored = conversation()
    decision = stored.ask(*BEFORE, "u:3")
    assert decision.kind == "continue"
    assert [p.is_new for p in decision.placed] == [False] * 5 + [True]
    assert (decision.placed[-1].seq, decision.placed[-1].turn) == (6, 3)
    assert not decision.superseded
    assert decision.answered == decision.placed[-1]


def test_tool_results_stay_in_the_turn_of_their_call() -> None:
    stored = conversation()
    stored.ask(*BEFORE, "u:3", reply="a:call")
    decision = stored.ask(*BEFORE, "u:3", "a:call", "t:1", "t:2", reply="a:3")
    assert decision.kind == "continue"
    assert [p.turn for p in decision.placed[-2:]] == [3, 3]
    assert stored.live_turns == [1, 1, 2, 2, 3, 3, 3, 3, 3]


def test_the_same_request_again_is_a_retry_that_replaces_its_reply() -> None:
    stored = conversation()
    decision = stored.ask("s:1", "u:1", "a:1", "u:2", reply="a:other")
    assert decision.kind == "retry"
    assert [stored.rows[seq].digest for seq in decision.superseded] == [b"a:2"]
    assert not any(p.is_new for p in decision.placed)
    assert stored.live == ["s:1", "u:1", "a:1", "u:2", "a:other"]
    assert stored.turns == 2


def test_an_unanswered_request_again_is_a_retry() -> None:
    stored = Stored()
    stored.ask("u:1")
    decision = stored.ask("u:1")
    assert (decision.kind, decision.superseded) == ("retry", ())
    assert stored.last_seq == 1


def test_edited_question_supersedes_the_messages_after_it() -> None:
    stored = conversation()
    decision = stored.ask("s:1", "u:other", reply="a:other")
    assert decision.kind == "edited"
    assert [stored.rows[seq].digest for seq in decision.superseded] == [b"u:1", b"a:1", b"u:2", b"a:2"]
    assert stored.live == ["s:1", "u:other", "a:other"]


def test_a_history_cut_in_its_middle_keeps_the_rest() -> None:
    stored = conversation()
    decision = stored.ask("s:1", "u:2", "a:2", "u:3")
    assert decision.kind == "edited"
    assert [stored.rows[seq].digest for seq in decision.superseded] == [b"u:1", b"a:1"]
    assert [p.turn for p in decision.placed] == [0, 2, 2, 3]
    assert sum(p.is_new for p in decision.placed) == 1


def test_an_edit_in_the_middle_goes_between_its_neighbours() -> None:
    stored = conversation()
    decision = stored.ask("s:1", "u:1", "a:mine", "u:2", "a:2", "u:3")
    assert decision.kind == "edited"
    assert stored.live == ["s:1", "u:1", "a:mine", "u:2", "a:2", "u:3"]
    assert stored.live_turns == [1, 1, 2, 2, 3]
    assert decision.placed[2].position == pytest.approx(3.0)


def test_returning_to_an_earlier_branch_revives_it() -> None:
    stored = conversation()
    stored.ask("s:1", "u:1", "a:1", "u:other", reply="a:other")
    decision = stored.ask(*BEFORE, "u:3")
    assert decision.kind == "edited"
    assert [stored.rows[seq].digest for seq in decision.restored] == [b"u:2", b"a:2"]
    assert [stored.rows[seq].digest for seq in decision.superseded] == [b"u:other", b"a:other"]
    assert stored.live == [*BEFORE, "u:3"]
    assert sum(p.is_new for p in decision.placed) == 1


def test_a_live_message_is_preferred_to_its_superseded_twin() -> None:
    stored = Stored()
    stored.ask("u:1", reply="a:Ok.")
    stored.ask("u:1", reply="a:Ok.")
    decision = stored.ask("u:1", "a:Ok.", "u:2")
    assert (decision.kind, decision.restored, decision.superseded) == ("continue", (), ())


def test_instructions_that_change_are_no_edit() -> None:
    stored = conversation()
    decision = stored.ask("s:2", *BEFORE[1:], "u:3", reply="a:3")
    assert decision.kind == "continue"
    assert [stored.rows[seq].digest for seq in decision.superseded] == [b"s:1"]
    assert stored.live[0] == "s:2"
    back = stored.ask("s:1", *BEFORE[1:], "u:3", "a:3", "u:4")
    assert back.kind == "continue"
    assert [stored.rows[seq].digest for seq in back.restored] == [b"s:1"]


def test_context_injected_in_the_middle_has_no_turn() -> None:
    stored = conversation()
    decision = stored.ask(*BEFORE, "s:reminder", "u:3", reply="a:3")
    assert decision.kind == "continue"
    assert [p.turn for p in decision.placed[-2:]] == [0, 3]
    again = stored.ask(*BEFORE, "u:3", "a:3", "s:reminder", "u:4")
    assert again.kind == "continue"
    assert again.placed[-2].is_new, "it stands elsewhere now"
    assert stored.live == [*BEFORE, "u:3", "a:3", "s:reminder", "u:4"]


def test_an_opening_assistant_message_belongs_to_the_first_users_turn() -> None:
    stored = Stored()
    decision = stored.ask("a:hello", "u:1", reply="a:1")
    assert [p.turn for p in decision.placed] == [1, 1]
    rewritten = stored.ask("a:hi", "u:1", "a:1", "u:2")
    assert [p.turn for p in rewritten.placed] == [1, 1, 1, 2]


def test_a_client_that_rebuilds_its_history_stays_in_one_session_of_sane_turns() -> None:
    """Files in front, the newest question with a suffix that it loses later: aider."""
    stored = Stored()
    known: list[str] = []
    for number in range(1, 30):
        front = ["s:1", "u:example", "a:example", f"u:files as of {number // 3}", "a:seen"]
        decision = stored.ask(*front, *known, f"u:{number} with a reminder", reply=f"a:{number}")
        new = sum(p.is_new for p in decision.placed)
        assert new <= (6 if number == 1 else 3), "the question again without its suffix, the new one, the files"
        assert stored.live == [*front, *known, f"u:{number} with a reminder", f"a:{number}"]
        assert stored.live_turns == sorted(stored.live_turns)
        known += [f"u:{number}", f"a:{number}"]


def test_a_summary_in_front_of_a_kept_tail_opens_its_turn() -> None:
    stored = conversation()
    stored.ask(*BEFORE, "u:3", reply="a:call")
    stored.ask(*BEFORE, "u:3", "a:call", "t:1", reply="a:3")
    decision = stored.ask("s:1", "u:summary", "a:call", "t:1", "a:3", "u:4")
    assert decision.kind == "edited"
    assert [p.turn for p in decision.placed] == [0, 3, 3, 3, 3, 4]
    assert [p.is_new for p in decision.placed] == [False, True, False, False, False, True]


def test_alignment_prefers_replies_to_their_neighbours() -> None:
    """A reminder at the end of every request must not cost the reply its identity."""
    stored = Stored()
    stored.ask("u:1", "u:remember", "u:rules", reply="a:1")
    decision = stored.ask("u:1", "a:1", "u:2", "u:remember", "u:rules")
    assert not decision.placed[1].is_new


def test_repeated_insertions_at_one_place_never_run_out_of_room() -> None:
    stored = Stored()
    middle: list[str] = []
    stored.ask("u:first", "u:last", reply="a:end")
    for number in range(300):
        middle.append(f"u:{number}")
        stored.ask("u:first", *middle, "u:last", "a:end")
        places = [row.position for row in stored.in_order if row.status == "live"]
        assert places == sorted(set(places))
    assert stored.live == ["u:first", *middle, "u:last", "a:end"]
    assert stored.last_seq < 1_000


def test_hundreds_of_messages_fit_between_two_others() -> None:
    stored = Stored()
    stored.ask("u:first", "u:last", reply="a:end")
    middle = [f"u:{number}" for number in range(500)]
    stored.ask("u:first", *middle, "u:last", "a:end")
    assert stored.live == ["u:first", *middle, "u:last", "a:end"]
    assert stored.last_seq == 3 + 500


def test_the_later_part_of_a_history_suffices() -> None:
    stored = conversation()
    tail = [row for row in stored.in_order if row.seq >= 4 or not row.is_link]
    decision = reconcile(
        tail, history(*BEFORE, "u:3"), last_seq=stored.last_seq, turns=stored.turns, first_link=2, allow_restore=True
    )
    assert decision.kind == "continue"
    assert [(p.seq, p.is_new) for p in decision.placed] == [
        (1, False),
        (0, False),
        (0, False),
        (4, False),
        (5, False),
        (6, True),
    ]
    assert decision.placed[-1].turn == 3


def test_hidden_messages_stay_hidden_when_the_client_resends_them() -> None:
    stored = conversation()
    for seq in (4, 5):
        stored.rows[seq] = structs.replace(stored.rows[seq], status="undone")
    decision = stored.ask(*BEFORE, "u:3")
    assert decision.kind == "continue"
    assert [p.status for p in decision.placed] == ["live", "live", "live", "undone", "undone", "live"]


def test_append_gives_each_message_the_next_number_and_turn() -> None:
    decision = append_messages(history("t:1", "u:3", "u:4"), last_seq=5, turns=2, turn=2, superseded=[1])
    assert [(p.seq, p.turn) for p in decision.placed] == [(6, 2), (7, 3), (8, 4)]
    assert (decision.kind, decision.last_seq, decision.turns, decision.superseded) == ("delta", 8, 4, (1,))


def test_append_to_an_empty_session_starts_at_one() -> None:
    decision = append_messages(history("s:1", "a:hello", "u:1"), last_seq=0, turns=0, turn=0)
    assert [(p.seq, p.turn) for p in decision.placed] == [(1, 0), (2, 1), (3, 1)]


WORDS = st.sampled_from(["u:1", "u:2", "u:3", "u:Ok.", "a:1", "a:Ok.", "a:2", "t:1", "t:2", "s:1", "s:2"])
HISTORIES = st.lists(st.tuples(st.lists(WORDS, min_size=1, max_size=12), st.sampled_from(["a:Ok.", "a:1", "a:new"])))


@st.composite
def edits(draw: st.DrawFn) -> list[list[str]]:
    """Requests of a client that resends what it has, edited here and there."""
    known: list[str] = []
    requests: list[list[str]] = []
    for number in range(draw(st.integers(1, 8))):
        match draw(st.sampled_from(["go on", "go on", "cut", "insert", "replace", "front", "again"])):
            case "cut":
                start = draw(st.integers(0, len(known)))
                known = known[:start] + known[draw(st.integers(start, len(known))) :]
            case "insert":
                at = draw(st.integers(0, len(known)))
                known = [*known[:at], f"u:inserted {number}", *known[at:]]
            case "replace" if known:
                known[draw(st.integers(0, len(known) - 1))] = f"a:replaced {number}"
            case "front":
                known = [f"s:{number}", *known]
            case "again" if requests:
                known = list(draw(st.sampled_from(requests)))
            case _:
                pass
        request = [*known, draw(st.sampled_from([f"u:{number}", "u:Ok.", "t:1"]))]
        requests.append(request)
        known = [*request, draw(st.sampled_from([f"a:{number}", "a:Ok."]))]
    return requests


def check(before: Stored, incoming: Sequence[MessageIdentity], decision: Reconciliation, after: Stored) -> None:
    placed = decision.placed
    assert len(placed) == len(incoming), "every message has its place"
    new = [p for p in placed if p.is_new]
    assert [p.seq for p in new] == [*range(before.last_seq + 1, before.last_seq + 1 + len(new))]
    assert decision.last_seq == before.last_seq + len(new)
    places = [p.position for p in placed]
    assert all(one < other for one, other in itertools.pairwise(places)), "strictly increasing"
    assert len({p.seq for p in placed}) == len(placed), "no row stands for two messages"
    for message, p in zip(incoming, placed, strict=True):
        assert (p.turn > 0) == message.is_link
        assert p.turn <= decision.turns
        if not p.is_new:
            assert before.rows[p.seq].turn == p.turn, "matched rows keep their turn"
            assert before.rows[p.seq].digest == message.digest
    assert decision.turns >= before.turns
    assert after.live == [message.digest.decode() for message in incoming], "the client's view is what it sent"
    again = after.decide(incoming)
    assert (again.kind, again.superseded, again.restored) == ("retry", (), ())
    assert not any(p.is_new for p in again.placed)


def replay(requests: Sequence[tuple[Sequence[str], str]]) -> Stored:
    stored = Stored()
    for words, reply in requests:
        incoming = history(*words)
        before = replace(stored, rows=dict(stored.rows))
        decision = stored.ask(*words)
        check(before, incoming, decision, stored)
        if decision.answered is not None:
            stored.reply(decision, reply)
    return stored


def client_views(requests: Sequence[tuple[Sequence[str], str]]) -> list[list[str]]:
    """Return what the client may hold after the last request: its own history, alone or with the reply."""
    words, reply = requests[-1] if requests else ((), "")
    return [list(words), [*words, reply]]


@given(HISTORIES)
def test_invariants_over_histories_that_have_little_in_common(requests: list[tuple[list[str], str]]) -> None:
    assert replay(requests).live in client_views(requests)


@given(edits())
def test_invariants_over_a_client_that_edits(requests: list[list[str]]) -> None:
    answered = [(words, f"a:{number}") for number, words in enumerate(requests)]
    assert replay(answered).live in client_views(answered)


@given(st.lists(st.sampled_from(["u:1", "u:Ok.", "t:1"]), min_size=1, max_size=10), st.data())
def test_appended_messages_are_never_an_edit(questions: list[str], data: st.DataObject) -> None:
    stored = Stored()
    known: list[str] = []
    for number, question in enumerate(questions):
        reply = data.draw(st.sampled_from(["a:Ok.", f"a:{number}"]))
        decision = stored.ask(*known, question, reply=reply)
        assert decision.kind == ("continue" if number else "new")
        assert not decision.superseded
        assert sum(p.is_new for p in decision.placed) == 1
        assert decision.answered is not None
        known += [question, reply]
    assert stored.live_turns == sorted(stored.live_turns)


@given(st.lists(st.sampled_from(["ask", "ask", "tool", "again", "compact"]), min_size=1, max_size=14), st.data())
def test_questions_sent_without_their_replies_behind_a_summary_are_stored_once(
    kinds: list[str], data: st.DataObject
) -> None:
    """Codex sends all earlier questions behind its own compaction, and none of their replies."""
    stored, sent, questions = Stored(), ["u:0"], ["u:0"]
    stored.ask(*sent, reply="a:0")
    known = [*sent, "a:0"]
    for number, kind in enumerate(kinds, start=1):
        if kind == "again":
            decision = stored.ask(*sent, reply=f"a:{number}")
            assert not any(p.is_new for p in decision.placed)
            known = [*sent, f"a:{number}"]
            continue
        if kind == "tool":
            sent = [*known, f"t:{number}"]
        else:
            question = data.draw(st.sampled_from(["u:Ok.", f"u:{number}"]))
            sent = [*questions, f"u:summary {number}", question] if kind == "compact" else [*known, question]
            questions = [*questions, question]
        before = {row.seq: row.turn for row in stored.in_order if row.digest.decode() in questions}
        decision = stored.ask(*sent, reply=f"a:{number}")
        new = [p for p in decision.placed if p.is_new]
        assert len(new) == (2 if kind == "compact" else 1), "the summary and the question, or what was said"
        assert {seq: stored.rows[seq].turn for seq in before} == before
        known = [*sent, f"a:{number}"]
        assert stored.live == known
    assert [row.digest.decode() for row in stored.in_order if row.digest.decode() in questions] == questions


@given(edits(), st.data())
def test_reconciling_the_tail_equals_reconciling_the_whole_history(
    requests: list[list[str]], data: st.DataObject
) -> None:
    """Rows before a cut need not be read if they are known to match."""
    stored = replay([(words, f"a:{number}") for number, words in enumerate(requests)])
    known = [word for word in stored.live if not word.startswith("s:")]
    cut = data.draw(st.integers(0, len(known) - 1))
    assume(cut == 0 or any(word.startswith("u:") for word in known[:cut]))
    changed = (
        data.draw(st.sampled_from([known, [*known[: cut + 1], "u:edited"], known[:-1]]))
        if len(known) > cut + 1
        else known
    )
    incoming = history(*changed, "u:next")
    live = [row for row in stored.in_order if row.status == "live" and row.is_link]
    whole = reconcile(live, incoming, last_seq=stored.last_seq, turns=stored.turns)
    tail = reconcile(live[cut:], incoming, last_seq=stored.last_seq, turns=stored.turns, first_link=cut)
    assert (tail.kind, tail.superseded, tail.last_seq, tail.turns) == (
        whole.kind,
        whole.superseded,
        whole.last_seq,
        whole.turns,
    )
    assert tail.placed[cut:] == whole.placed[cut:]
    assert all(p.seq == 0 and not p.is_new for p in tail.placed[:cut])


def elapsed(rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity]) -> float:
    """Seconds of this thread, the best of three: the garbage collector may run in one of them."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        reconcile(rows, incoming, last_seq=len(rows), turns=len(rows), allow_restore=True)
        times.append(time.thread_time() - started)
    return min(times)


def long_session(words: Sequence[str]) -> Stored:
    stored = Stored()
    incoming = history(*words)
    stored.apply(incoming, stored.decide(incoming))
    return stored


@pytest.mark.parametrize("case", ["go on", "cut in front", "edit in the middle", "all the same", "shuffled", "system"])
def test_long_and_hostile_histories_are_placed_quickly(case: str) -> None:
    words = [f"{'ua'[number % 2]}:{number}" for number in range(5_000)]
    after = [*words, "u:next"]
    match case:
        case "cut in front":
            after = ["u:summary", *words[1_001:], "u:next"]
        case "edit in the middle":
            after = [*words[:2_000], "u:edited", *words[2_001:], "u:next"]
        case "all the same":
            words = ["u:Ok."] * 5_000
            after = ["a:else", *words, "a:else"]
        case "shuffled":
            after = random.Random(1).sample(words, len(words))
        case "system":
            words = ["s:same", "u:same"] * 2_500
            after = ["a:else", *words]
        case _:
            pass
    # Half a second is ten times what it takes; a quadratic algorithm takes minutes.
    assert elapsed(long_session(words).in_order, history(*after)) < 0.5


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["u:more", "u:same", "u:else"])), min_size=1, max_size=12
    ),
)
def test_live_messages_follow_their_predecessors_on_every_branch(steps: list[tuple[int, str]]) -> None:
    stored = Stored()
    histories: list[tuple[str, ...]] = [()]
    for number, (at, question) in enumerate(steps):
        request = (*histories[at % len(histories)], question)
        stored.ask(*request, reply=f"a:{number}")
        histories.append((*request, f"a:{number}"))
        assert stored.live == list(histories[-1])
        live = [row for row in stored.in_order if row.status == "live"]
        assert [row.follows for row in live] == [0, *(row.seq for row in live[:-1])]


def test_question_behind_another_reply_is_a_message_of_its_own() -> None:
    stored = Stored()
    stored.ask("u:1", reply="a:1")
    stored.ask("u:1", "a:1", "u:2", reply="a:2")
    stored.ask("u:1", "a:1", "u:2", "a:2", "u:same", reply="a:3")
    decision = stored.ask("u:1", "a:1", "u:same", reply="a:4")
    assert decision.placed[-1].is_new
    again = stored.ask("u:1", "a:1", "u:2", "a:2", "u:same", "a:3", "u:4")
    assert [placed.seq for placed in again.placed if not placed.is_new] == [1, 2, 3, 4, 5, 6]


def test_named_messages_are_the_ones_with_their_numbers() -> None:
    stored = Stored()
    stored.ask("u:1", reply="a:1")
    stored.ask("u:1", "a:1", "u:2", reply="a:same")
    stored.ask("u:1", "a:1", "u:2", reply="a:same")
    for number in (4, 5):
        named = [as_incoming(stored.rows[seq]) for seq in (1, 2, 3, number)]
        decision = stored.decide([*named, identity_of("u:3")])
        assert [placed.seq for placed in decision.placed[:-1]] == [1, 2, 3, number]
