"""What a program is made of: how it is installed, set up and run, and what has to be found in Tersely afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Enough words to make a context outgrow a small window after some turns.
FILLER = " ".join(
    f"Remark {number}: the harbour of Cove{number} lies {number * 7} miles off." for number in range(1, 31)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a shell, in which ``$ASK`` is what is asked. ``expects`` is what has to be in its output.

    With ``keys`` it runs on a terminal, and is ended after them: lines that are typed into it, each once it has said
    ``answer`` and then nothing for some seconds.
    """

    command: str
    ask: str = ""
    expects: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    answer: str = "I was sent"
    limit: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program; ``of`` names the one whose installation it shares.

    In ``env`` and ``files`` (paths below its home) ``$URL``, ``$HOME`` and ``$WORK`` are filled in. ``turns`` are those
    of each conversation that Tersely has to know afterwards, ``children`` those of its subagents' conversations;
    ``moved`` says how many messages may be stored twice because the program itself moves them, and ``loose`` why its
    last request need not be what is stored. ``asides`` are statuses other than 200 that are right; ``epochs`` the runs
    that there are: with the default window and with a small one.
    """

    name: str
    of: str = ""
    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    setup: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...]
    turns: tuple[int, ...] = (1,)
    children: tuple[int, ...] = ()
    moved: int = 0
    loose: str = ""
    has_cuts: bool = True
    asides: frozenset[tuple[str, int]] = frozenset()
    epochs: tuple[str, ...] = ("auto", "small")

    @property
    def version(self) -> str:
        """The version of its first package."""
        return (*self.npm, *self.pip)[0].replace("==", "@").rpartition("@")[2]
