"""The position and status of a reply, whatever was stored while the model wrote it."""

from __future__ import annotations

import msgspec

from tersely.domain.history.history import Status


class ReplyNeighbours(msgspec.Struct, frozen=True, kw_only=True):
    """The state around a stored question when a reply to it arrives.

    ``status`` is the question's (None: its row is gone), ``next_position`` the position of the next message (None:
    there is none). ``current_call`` is the number of the call that gave the current reply (0: the client's own message,
    None: there is no reply). ``current_broke_off``: that reply is incomplete.
    """

    status: Status | None
    next_position: float | None = None
    current_call: int | None = None
    current_broke_off: bool | None = None


class ReplyPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """The position and status of a reply.

    ``before_position``: the position of the message that follows (None: the end of the session). ``replaces``: the
    number of the call whose reply is superseded (0: none).
    """

    status: Status = "live"
    before_position: float | None = None
    replaces: int = 0


def place_reply(neighbours: ReplyNeighbours, *, call: int, broke_off: bool) -> ReplyPlacement:
    """Place the reply of ``call`` after its question, whatever was stored in the meantime.

    A reply shares the status of its question (superseded, dropped, undone, removed). Of two replies to one question a
    complete one wins over an incomplete one; otherwise the later call wins.
    """
    if neighbours.status != "live":
        return ReplyPlacement(status=neighbours.status or "superseded", before_position=neighbours.next_position)
    if not neighbours.current_call:
        return ReplyPlacement(before_position=neighbours.next_position)
    if broke_off != bool(neighbours.current_broke_off):
        stays = bool(neighbours.current_broke_off)
    else:
        stays = call > neighbours.current_call
    if not stays:
        return ReplyPlacement(status="superseded", before_position=neighbours.next_position)
    return ReplyPlacement(before_position=neighbours.next_position, replaces=neighbours.current_call)
