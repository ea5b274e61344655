"""Messages that the client of a session does not know: those of rounds in which Tersely answered tool calls."""

from __future__ import annotations

from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.history.messages import TailRow


def live_hidden(match: SessionMatch) -> list[TailRow]:
    """Return the hidden messages of the history that the request carries. They share the status of their
    call's reply.
    """
    if not match.hidden:
        return []
    calls = {row.row.seq: row.row.call for row in match.rows}
    gone = {calls.get(seq) for seq in match.decision.superseded}
    back = {calls.get(seq) for seq in match.decision.restored}
    return [
        row
        for row in match.hidden
        if (row.row.call not in gone if row.row.status == "live" else row.row.call in back)
        and row.row.status in {"live", "superseded"}
    ]


def first_hidden(match: SessionMatch) -> dict[int, int]:
    """Map each reply with several rounds to its first hidden message: the place where the client's history
    continues.
    """
    replies = {row.row.call: row.row for row in match.rows if row.row.role == "assistant"} if match.hidden else {}
    firsts: dict[int, int] = {}
    for row in sorted(live_hidden(match), key=lambda each: each.row.position):
        reply = replies.get(row.row.call)
        if reply is not None and row.row.position < reply.position:
            firsts.setdefault(reply.seq, row.row.seq)
    return firsts
