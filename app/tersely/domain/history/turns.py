"""Group a sequence of messages into turns and steps.

A **turn** is a user message and everything up to the next user message. A message that carries only tool results never
starts one, whatever its role on the wire. A **step** is one assistant message with the results of its calls. This
module only groups; it decides nothing about what is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import Entry
from tersely.domain.messages import Message

INSTRUCTION_TURN = 0
_TURN_ID = re.compile(r"t([1-9][0-9]{0,17})")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One model call inside a turn: the assistant message and the results of its calls, in order.

    Entries before a turn's first assistant message belong to no step.
    """

    entries: tuple[Entry, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the assistant message and its results."""
        return sum(entry.tokens for entry in self.entries)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of one turn, in order; never empty."""

    number: int
    entries: tuple[Entry, ...]

    @property
    def opening(self) -> tuple[Entry, ...]:
        """The entries that start the turn: its user message. Empty if it was cut."""
        return tuple(entry for entry in self.entries if entry.message.starts_turn)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the turn's steps, in order."""
        return group_steps(self.entries)

    @property
    def tokens(self) -> int:
        """Tokens of all the turn's entries."""
        return sum(entry.tokens for entry in self.entries)


def write_turn_id(turn: int) -> str:
    """Format a turn id: 7 becomes ``t7``, as in activity logs and excerpts."""
    return f"t{turn}"


def read_turn_id(text: str, *, field: str = "turnId") -> int:
    """Parse a turn id: ``t7`` becomes 7. Raises `InvalidRequest` naming ``field`` for anything else."""
    match = _TURN_ID.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{field} must be a turn id such as 't5', not {text[:40]!r}", field=field)
    return int(match.group(1))


def number_turns(messages: Iterable[Message], *, turn: int = 0, opened: bool = False) -> tuple[int, ...]:
    """Return the turn of each message that is appended to a session.

    ``turn`` is the session's last turn so far (0: none yet); ``opened``: a message of the session has started a turn.
    Messages before the first user message (a greeting by the assistant, an imported part of a history) belong to turn
    1, and so does that first user message. Instructions belong to turn 0.
    """
    numbers: list[int] = []
    for message in messages:
        if message.is_instruction:
            numbers.append(INSTRUCTION_TURN)
            continue
        if message.starts_turn:
            turn = turn + 1 if opened else max(turn, 1)
            opened = True
        turn = max(turn, 1)
        numbers.append(turn)
    return tuple(numbers)


def group_turns(entries: Iterable[Entry]) -> tuple[Turn, ...]:
    """Group entries into turns, in order. Instructions (turn 0) are left out."""
    return tuple(
        Turn(number=number, entries=tuple(group))
        for number, group in groupby(entries, key=lambda entry: entry.turn)
        if number != INSTRUCTION_TURN
    )


def group_steps(entries: Sequence[Entry]) -> tuple[Step, ...]:
    """Group entries into steps: each assistant message opens one; results and other messages join it."""
    steps: list[list[Entry]] = []
    for entry in entries:
        if entry.message.role == "assistant":
            steps.append([entry])
        elif steps and not entry.message.starts_turn:
            steps[-1].append(entry)
    return tuple(Step(entries=tuple(step)) for step in steps)
