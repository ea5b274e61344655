"""Asks for summaries ahead of need: after each call and append, for what the session's next epoch will want."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tersely.domain.history.history import Epoch
from tersely.domain.history.runs import subtract
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Dialect as DialectName
from tersely.service.context.history import History
from tersely.service.summaries.jobs import Job
from tersely.service.summaries.summarizer import Summarizer
from tersely.store.notes.pending_memory import PendingMemory
from tersely.strategies.prefetch import MEMORY_UPDATE, SummaryNeed, after_cut, upcoming_summaries
from tersely.strategies.presets import Strategy, strategy_name

# A summary that was requested lately is not requested again at the next call: the summarizer would have to look it up
# each time. After an edit of the history it may be another one.
REMEMBERED = 8_192


def memory_of_cut(
    strategy: Strategy, history: History, epoch: Epoch, *, dialect: DialectName, model: str, host: str = ""
) -> PendingMemory | None:
    """Return the memory entry to write about the messages that ``epoch`` cut; None if there is none.

    ``dialect``, ``model`` and ``host`` are those of the session's calls. A cleared context goes into the memory under
    every strategy.
    """
    name = strategy_name(strategy)
    if epoch.reason == "clear":
        before = history.snapshot.epoch
        cleared_at = before.cleared_at if before is not None else 1
        runs = (
            subtract([(cleared_at, epoch.cut - 1)], [(seq, seq) for seq in epoch.kept])
            if epoch.cut > cleared_at
            else ()
        )
        if not runs:
            return None
        return PendingMemory(
            first_seq=runs[0][0],
            last_seq=runs[-1][1],
            runs=runs,
            strategy=name,
            dialect=dialect,
            model=model,
            host=host,
        )
    wanted = after_cut(strategy, history.snapshot, epoch, history.epoch_inputs.summaries)
    need = next((need for need in wanted if need.purpose == MEMORY_UPDATE), None)
    if need is None:
        return None
    return PendingMemory(
        first_seq=need.first_seq,
        last_seq=need.last_seq,
        epoch=epoch.number,
        strategy=name,
        dialect=dialect,
        model=model,
        host=host,
    )


class SummaryPrefetcher:
    """Turns what a strategy foresees into jobs of the summarizer; never waits."""

    def __init__(self, summarizer: Summarizer) -> None:
        self._summarizer = summarizer
        self._requested: OrderedDict[tuple[str, str, int, SummaryNeed], None] = OrderedDict()

    def prefetch(
        self,
        tenant: str,
        session_id: str,
        session: Session | None,
        strategy: Strategy,
        history: History,
        epoch: Epoch | None,
        *,
        dialect: DialectName,
        model: str = "",
        host: str = "",
        credentials: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Request the summaries that the session will need. ``epoch`` is the one that was just stored, if any.

        ``model`` is the session's, ``host`` the name of its model host, ``credentials`` the caller's headers for it.
        """
        self._summarizer.caller_keys.remember(tenant, session_id, credentials, host=host, dialect=dialect)
        if epoch is None:
            wanted = upcoming_summaries(strategy, history.snapshot)
        else:
            wanted = after_cut(strategy, history.snapshot, epoch, history.epoch_inputs.summaries)
        for need in self._new(tenant, session_id, session.edits if session else 0, wanted):
            job = Job(
                tenant=tenant,
                session_id=session_id,
                purpose=need.purpose,
                first_seq=need.first_seq,
                last_seq=need.last_seq,
                strategy=strategy_name(strategy),
                dialect=dialect,
                model=model,
                host=host,
                credentials=credentials,
                earlier=need.earlier,
                epoch=need.epoch,
            )
            if not need.is_ahead or self._summarizer.has_model(job):
                self._summarizer.submit(job)

    def _new(self, tenant: str, session_id: str, edits: int, wanted: Iterable[SummaryNeed]) -> list[SummaryNeed]:
        keys = [(tenant, session_id, edits, need) for need in wanted]
        fresh = [key for key in keys if key not in self._requested]
        for key in keys:
            self._requested[key] = None
            self._requested.move_to_end(key)
        while len(self._requested) > REMEMBERED:
            self._requested.popitem(last=False)
        return [need for *_, need in fresh]
