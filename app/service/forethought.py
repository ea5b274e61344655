"""Asks for summaries ahead of need: after each call, for what the session's next epoch will want."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from app.dialects.dialect import Dialect
from app.service.calls import Call
from app.service.preparing import Prepared
from app.service.summarizer import Summarizer
from app.service.summary_jobs import Job, credentials_of
from app.strategies.foresight import Foreseen, after_cut, foresee
from app.strategies.presets import strategy_name

# A summary that was asked for lately is not asked for again at the next call: whether it is there, the summarizer
# would have to look up each time. Once history was edited, it may be another one.
REMEMBERED = 8_192


class Forethought:
    """Turns what a strategy foresees into jobs of the summarizer; never waits."""

    def __init__(self, summarizer: Summarizer, dialect: Dialect) -> None:
        self._summarizer = summarizer
        self._dialect = dialect
        self._asked: OrderedDict[tuple[str, str, int, Foreseen], None] = OrderedDict()

    def consider(self, call: Call, prepared: Prepared) -> None:
        """Ask for what the call's session will want. The call must be stored."""
        if prepared.built is None:
            return
        strategy, snapshot = prepared.recipe.strategy, prepared.history.snapshot
        if prepared.built.starts_epoch:
            made = prepared.history.material.summaries
            wanted = after_cut(strategy, snapshot, prepared.built.context.epoch, made)
        else:
            wanted = foresee(strategy, snapshot)
        session = prepared.found.session
        for foreseen in self._new(call.tenant, prepared.found.session_id, session.edits if session else 0, wanted):
            self._summarizer.ensure(self._job(call, prepared, foreseen))

    def _new(self, tenant: str, session_id: str, edits: int, wanted: Iterable[Foreseen]) -> list[Foreseen]:
        keys = [(tenant, session_id, edits, foreseen) for foreseen in wanted]
        fresh = [key for key in keys if key not in self._asked]
        for key in keys:
            self._asked[key] = None
            self._asked.move_to_end(key)
        while len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        return [foreseen for *_, foreseen in fresh]

    def _job(self, call: Call, prepared: Prepared, foreseen: Foreseen) -> Job:
        return Job(
            tenant=call.tenant,
            session_id=prepared.found.session_id,
            purpose=foreseen.purpose,
            first_seq=foreseen.first_seq,
            last_seq=foreseen.last_seq,
            strategy=strategy_name(prepared.recipe.strategy),
            dialect=self._dialect.name,
            model=prepared.request.model,
            credentials=credentials_of(call.headers, drop=call.key_headers),
            given=foreseen.given,
        )
