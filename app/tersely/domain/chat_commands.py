"""Parse the commands that people type into a chat (std::slop, "Commands Reference"; CowAgent, "Commands").

A command is one line that begins with a known word. Every other text is a message for the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import IMPORTANT, MAX_PRIORITY
from tersely.domain.history.turns import read_turn_id

Verb = Literal[
    "context", "clear", "window", "show", "rebuild", "drop", "undo",
    "list", "show turn", "remove", "pin", "unpin", "important", "scratchpad", "config", "help",
]  # fmt: skip

DEFAULT_LIST = 10
MAX_LIST = 200
MAX_NUMBER = 1_000_000
MAX_SEQ = 999_999_999
HELP = """\
/context                  what the context is made of now
/context clear            start an empty context; history and memory stay
/context window N         turns that a context holds
/context show             the exact context that would be sent
/context rebuild          make the state block anew from the current window
/context drop TURN        hide a turn from every context
/undo                     take the last turn back
/message list [N]         the last N turns, with their tokens
/message show TURN        a turn, whole
/message remove TURN      remove a turn for good
/message pin N            keep message N, numbered as /message show does, in every context
/message unpin N          keep it no longer than others
/message important N [P]  give message N the priority P, 0 to 100; 75 and more is important
/session scratchpad       the scratchpad
/session scratchpad TEXT  add a line to the scratchpad
/config [KEY VALUE]       the session's settings: strategy, epoch, or a parameter of the strategy
/help                     this list"""

_WORDS = frozenset({"/context", "/undo", "/message", "/messages", "/session", "/config"})
# A command counts only if it is alone on its line: some clients and users have their own `/help QUESTION`.
_HELP = "/help"
_TURN_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


_LOOKING = frozenset({"context", "show", "list", "show turn", "help"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A parsed chat command.

    ``number`` is a turn, a message, a count or a size. ``key`` and ``value`` belong to ``config``; ``value`` is also
    the line that ``scratchpad`` adds.
    """

    verb: Verb
    number: int = 0
    priority: int = 0
    key: str = ""
    value: str = ""

    @property
    def is_mutating(self) -> bool:
        """Return whether the command changes the session."""
        if self.verb in {"config", "scratchpad"}:
            return bool(self.value)
        return self.verb not in _LOOKING


def is_command(text: str) -> bool:
    """Return whether ``text`` is a command, valid or not."""
    line = text.strip()
    return line == _HELP or ("\n" not in line and line.split(" ", 1)[0] in _WORDS)


def parse_command(text: str) -> Command:
    """Parse a command. Raises `InvalidRequest` with the command's usage."""
    word, *rest = text.split()
    match word:
        case "/context":
            command = _context(rest)
        case "/message" | "/messages":
            command = _message(rest)
        case _:
            command = _other(word, rest, text)
    if command is None:
        usage = [line for line in HELP.splitlines() if line.startswith(word.removesuffix("s"))]
        raise InvalidRequest("\n".join([f"{text.strip()[:60]!r} is not a valid command. Write:", *usage]))
    return command


def _context(rest: list[str]) -> Command | None:
    match rest:
        case []:
            return Command(verb="context")
        case ["clear" | "show" | "rebuild" as verb]:
            return Command(verb=verb)
        case ["window", size]:
            return Command(verb="window", number=_count(size, 0, MAX_NUMBER))
        case ["drop", turn]:
            return Command(verb="drop", number=_turn(turn))
        case _:
            return None


def _message(rest: list[str]) -> Command | None:
    match rest:
        case [] | ["list"]:
            return Command(verb="list", number=DEFAULT_LIST)
        case ["list", count]:
            return Command(verb="list", number=_count(count, 1, MAX_LIST))
        case ["show", turn]:
            return Command(verb="show turn", number=_turn(turn))
        case ["remove", turn]:
            return Command(verb="remove", number=_turn(turn))
        case ["pin" | "unpin" as verb, seq]:
            return Command(verb=verb, number=_count(seq, 1, MAX_SEQ))
        case ["important", seq]:
            return Command(verb="important", number=_count(seq, 1, MAX_SEQ), priority=IMPORTANT)
        case ["important", seq, priority]:
            return Command(verb="important", number=_count(seq, 1, MAX_SEQ), priority=_count(priority, 0, MAX_PRIORITY))
        case _:
            return None


def _other(word: str, rest: list[str], text: str) -> Command | None:
    match word, rest:
        case "/undo", []:
            return Command(verb="undo")
        case "/help", []:
            return Command(verb="help")
        case "/session", ["scratchpad"]:
            return Command(verb="scratchpad")
        case "/session", ["scratchpad", *_]:
            return Command(verb="scratchpad", value=text.split(maxsplit=2)[2].strip())
        case "/config", []:
            return Command(verb="config")
        case "/config", [key, _, *_]:
            return Command(verb="config", key=key, value=text.split(maxsplit=2)[2].strip())
        case _:
            return None


def _turn(text: str) -> int:
    return int(text) if _TURN_NUMBER.fullmatch(text) else read_turn_id(text, field="turn")


def _count(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise InvalidRequest(f"a number from {low} to {high} is needed, not {text[:40]!r}")
    return int(text)
