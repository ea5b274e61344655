"""The description of a program under test: its packages, settings and steps, and the sessions expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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

    ``npm`` and ``pip`` are its packages with the versions that it was tried with, its own package first; ``node`` is
    the release of Node.js that it needs, where the system's own may be too old.

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
    node: str = ""
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
        """The version of its first package that it was tried with."""
        return (*self.npm, *self.pip)[0].replace("==", "@").rpartition("@")[2]

    @property
    def package(self) -> str:
        """The name of its first package."""
        return _without_version((*self.npm, *self.pip)[0])

    def with_newest(self) -> Program:
        """Return the program with its packages in the newest versions."""
        npm = tuple(f"{_without_version(each)}@latest" for each in self.npm)
        return replace(self, npm=npm, pip=tuple(map(_without_version, self.pip)))


def _without_version(package: str) -> str:
    name = package.partition("==")[0]
    scope, at, version = name.rpartition("@")
    return scope if at and scope and version else name
