"""Requests of several clients on one session, in any order of arrival, storing and answering: a state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from tersely.domain.history.links import MessageIdentity, StoredLink
from tersely.domain.history.reconciliation import Reconciliation, append_messages
from tersely.domain.history.repetition import (
    CUT_OFF_WITHIN,
    RETRY_WITHIN,
    EarlierQuestion,
    find_earlier_question,
    is_repetition,
    reconcile_repetition,
)
from tersely.domain.history.reply_placement import ReplyNeighbours, ReplyPlacement, place_reply

NOW = timedelta()


def question(name: str) -> MessageIdentity:
    return MessageIdentity(digest=name.encode(), is_link=True, starts_turn=True, role="user")


@dataclass
class Session:
    """A session's rows and counters; ``broke_off`` holds the numbers of replies that are not whole."""

    rows: dict[int, StoredLink] = field(default_factory=dict)
    turns: int = 0
    calls: int = 0
    broke_off: set[int] = field(default_factory=set)

    @property
    def last_seq(self) -> int:
        return len(self.rows)

    @property
    def in_order(self) -> list[StoredLink]:
        return sorted(self.rows.values(), key=lambda row: (row.position, row.seq))

    @property
    def live(self) -> list[StoredLink]:
        return [row for row in self.in_order if row.status == "live"]

    def add(self, row: StoredLink) -> None:
        assert row.seq == self.last_seq + 1, "sequence numbers have no gaps"
        self.rows[row.seq] = row

    def around(self, seq: int) -> ReplyNeighbours:
        question = self.rows[seq]
        behind = [row for row in self.in_order if row.position > question.position]
        current_call = None
        for row in behind:
            if row.status == "live" and row.role != "assistant":
                break
            if row.status == "live" and row.turn == question.turn:
                current_call = row
        return ReplyNeighbours(
            status=question.status,
            next_position=behind[0].position if behind else None,
            current_call=current_call.call if current_call else None,
            current_broke_off=current_call.seq in self.broke_off if current_call else None,
        )


@dataclass(eq=False)
class Request:
    """A delta under way: decided on the session as it was at ``last_seq``, then stored, then answered."""

    name: str
    decision: Reconciliation
    last_seq: int
    call: int = 0
    answered: int = 0


class Racing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.session = Session()
        self.arrived: list[Request] = []
        self.stored: list[Request] = []
        self.cut_off: set[str] = set()
        self.whole: set[str] = set()
        self.count = 0

    def decide(self, name: str, before: EarlierQuestion | None) -> Reconciliation:
        last_seq, turns = self.session.last_seq, self.session.turns
        if before is not None:
            return reconcile_repetition(before.rows, (), [question(name)], last_seq=last_seq, turns=turns)
        turn = self.session.live[-1].turn if self.session.live else 0
        return append_messages([question(name)], last_seq=last_seq, turns=turns, turn=turn)

    @rule()
    def ask(self) -> None:
        self.count += 1
        self.arrive(f"q{self.count}", is_retry=False)

    @precondition(lambda self: self.arrived or self.stored)
    @rule(data=st.data(), is_retry=st.booleans())
    def ask_at_the_same_time(self, data: st.DataObject, is_retry: bool) -> None:
        self.arrive(data.draw(st.sampled_from([each.name for each in self.arrived + self.stored])), is_retry=is_retry)

    @precondition(lambda self: self.cut_off)
    @rule(data=st.data())
    def ask_again_after_a_cut(self, data: st.DataObject) -> None:
        self.arrive(data.draw(st.sampled_from(sorted(self.cut_off))), is_retry=False)

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def retry_what_was_answered(self, data: st.DataObject) -> None:
        self.arrive(data.draw(st.sampled_from(sorted(self.whole))), is_retry=True)

    def arrive(self, name: str, *, is_retry: bool) -> None:
        before = find_earlier_question(self.session.in_order, [question(name)])
        if before is not None:
            is_under_way = any(each.name == name for each in self.stored)
            reply = before.replies[-1].seq if before.replies else 0
            assert is_repetition(
                before,
                # Behind a whole answer only a client that says so tries again.
                is_retry=is_retry or name in self.whole,
                age=NOW,
                client_left=reply in self.session.broke_off,
                ended=None if is_under_way and not reply else NOW,
            )
        self.arrived.append(Request(name, self.decide(name, before), self.session.last_seq))

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.arrived))
        self.arrived.remove(request)
        if request.last_seq != self.session.last_seq:
            before = find_earlier_question(self.session.in_order, [question(request.name)])
            request.decision = self.decide(request.name, before)
        for placed in request.decision.placed:
            if placed.is_new:
                self.session.add(
                    StoredLink(
                        seq=placed.seq,
                        position=placed.position,
                        turn=placed.turn,
                        tokens=1,
                        role="user",
                        status="live",
                        digest=request.name.encode(),
                        relayed=False,
                        call=0,
                    )
                )
        self.session.turns = request.decision.turns
        self.session.calls += 1
        request.call = self.session.calls
        assert request.decision.answered is not None
        request.answered = request.decision.answered.seq
        request.last_seq = self.session.last_seq
        self.stored.append(request)

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), breaks_off=st.booleans())
    def answer(self, data: st.DataObject, breaks_off: bool) -> None:
        request = data.draw(st.sampled_from(self.stored))
        self.stored.remove(request)
        session, question = self.session, self.session.rows[request.answered]
        placement = ReplyPlacement()
        if session.last_seq != request.last_seq or not request.decision.replies_at_end:
            placement = place_reply(session.around(question.seq), call=request.call, broke_off=breaks_off)
        for row in session.live:
            if placement.replaces and row.call == placement.replaces:
                session.rows[row.seq] = structs.replace(row, status="superseded")
        seq = session.last_seq + 1
        place = float(seq) if placement.before_position is None else (question.position + placement.before_position) / 2
        assert question.position < place
        if breaks_off:
            session.broke_off.add(seq)
            self.cut_off.add(request.name)
        else:
            self.whole.add(request.name)
        self.cut_off -= self.whole
        session.add(
            StoredLink(
                seq=seq,
                position=place,
                turn=question.turn,
                tokens=1,
                role="assistant",
                status=placement.status,
                digest=b"answer " + question.digest,
                relayed=True,
                call=request.call,
            )
        )

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.stored))
        self.stored.remove(request)
        if request.name not in self.whole:
            self.cut_off.add(request.name)

    @invariant()
    def each_question_is_one_turn(self) -> None:
        questions = [row for row in self.session.live if row.role == "user"]
        assert len({row.digest for row in questions}) == len(questions)
        assert len({row.turn for row in questions}) == len(questions)
        assert all(row.status == "live" for row in self.session.rows.values() if row.role == "user")

    @invariant()
    def each_reply_stands_behind_its_question(self) -> None:
        live = self.session.live
        for index, row in enumerate(live):
            if row.role == "assistant":
                assert row.digest == b"answer " + live[index - 1].digest
                assert row.turn == live[index - 1].turn
        assert len({row.position for row in self.session.rows.values()}) == len(self.session.rows)

    @invariant()
    def what_was_answered_whole_stays_so(self) -> None:
        answered = {row.digest: row.seq for row in self.session.live if row.role == "assistant"}
        for name in self.whole:
            assert answered[f"answer {name}".encode()] not in self.session.broke_off


TestRacing = Racing.TestCase
TestRacing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def before(*, replies: int = 0, is_last: bool = True) -> EarlierQuestion:
    row = StoredLink(
        seq=1, position=1.0, turn=1, tokens=1, role="user", status="live", digest=b"q", relayed=False, call=0
    )
    return EarlierQuestion(rows=(row,), replies=(row,) * replies, is_last=is_last)


def test_equal_text_after_a_whole_reply_is_a_new_question() -> None:
    assert not is_repetition(before(replies=1), is_retry=False, age=NOW, ended=NOW)
    assert is_repetition(before(replies=1), is_retry=True, age=NOW, ended=NOW)


def test_a_cut_is_forgotten_after_a_while() -> None:
    late = CUT_OFF_WITHIN + timedelta(seconds=1)
    for is_last in (True, False):
        cut = before(replies=1, is_last=is_last)
        assert is_repetition(cut, is_retry=False, age=NOW, client_left=True, ended=CUT_OFF_WITHIN)
        assert not is_repetition(cut, is_retry=False, age=NOW, client_left=True, ended=late)
    failed = before(is_last=False)
    assert is_repetition(failed, is_retry=False, age=NOW, ended=CUT_OFF_WITHIN)
    assert not is_repetition(failed, is_retry=False, age=NOW, ended=late)


def test_the_last_question_without_an_answer_is_repeated_at_any_time() -> None:
    assert is_repetition(before(), is_retry=False, age=timedelta(days=9), ended=timedelta(days=9))


def test_a_call_is_under_way_for_so_long_at_most() -> None:
    waiting = before(is_last=False)
    assert is_repetition(waiting, is_retry=False, age=RETRY_WITHIN)
    assert not is_repetition(waiting, is_retry=False, age=RETRY_WITHIN + timedelta(seconds=1))
    assert not is_repetition(waiting, is_retry=True, age=RETRY_WITHIN + timedelta(seconds=1), ended=RETRY_WITHIN)
