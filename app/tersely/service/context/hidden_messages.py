"""Messages of a session that its client does not know: those of the rounds in which Tersely answered tool calls."""

from __future__ import annotations

from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.history.messages import TailRow


def live_hidden(found: SessionMatch) -> list[TailRow]:
    """Hidden messages of the history as the request has it: they go the way of the reply that they came with."""
    if not found.hidden:
        return []
    calls = {row.row.seq: row.row.call for row in found.rows}
    gone = {calls.get(seq) for seq in found.decision.superseded}
    back = {calls.get(seq) for seq in found.decision.restored}
    return [
        row
        for row in found.hidden
        if (row.row.call not in gone if row.row.status == "live" else row.row.call in back)
        and row.row.status in {"live", "superseded"}
    ]


def first_hidden(found: SessionMatch) -> dict[int, int]:
    """Of replies that were said in rounds the first message of theirs: where the client's own history goes on."""
    replies = {row.row.call: row.row for row in found.rows if row.row.role == "assistant"} if found.hidden else {}
    firsts: dict[int, int] = {}
    for row in sorted(live_hidden(found), key=lambda each: each.row.position):
        reply = replies.get(row.row.call)
        if reply is not None and row.row.position < reply.position:
            firsts.setdefault(reply.seq, row.row.seq)
    return firsts
