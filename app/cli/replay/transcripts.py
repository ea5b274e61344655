"""Transcripts: one conversation per line, ``{"id", "messages": [OpenAI chat messages]}``.

Members that begin with ``x_`` are annotations of whoever recorded them; no client would send them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.dialects import raw_json
from app.domain.errors import TerselyError

ANNOTATION = "x_"


class BadTranscript(TerselyError):
    """A file that is no transcript."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message of a recording: as values, and as the bytes that a client sends."""

    message: Mapping[str, Any]
    raw: bytes

    @property
    def role(self) -> str:
        """The message's role."""
        return str(self.message.get("role"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One recording; ``number`` is its line in the file, from 1."""

    id: str
    number: int
    said: tuple[Said, ...]

    @property
    def calls(self) -> tuple[int, ...]:
        """Where the model spoke: the indexes of assistant messages that answer something."""
        return tuple(index for index, said in enumerate(self.said) if index > 0 and said.role == "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The conversations of one file."""

    name: str
    conversations: tuple[Conversation, ...]


def load_transcript(path: Path, *, limit: int | None = None) -> Transcript:
    """Read a file, or its first ``limit`` conversations. Raises `BadTranscript` with the line that is wrong."""
    return Transcript(name=path.stem, conversations=tuple(_read(path, limit)))


def _read(path: Path, limit: int | None) -> Iterator[Conversation]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadTranscript(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines[:limit], start=1):
        if not line.strip():
            continue
        try:
            record = raw_json.load(line)
            said = tuple(_bare(message) for message in record["messages"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadTranscript(f"{path}, line {number}: not a conversation ({type(error).__name__})") from error
        yield Conversation(id=str(record.get("id", number)), number=number, said=said)


def _bare(message: Mapping[str, Any]) -> Said:
    bare = {key: value for key, value in message.items() if not key.startswith(ANNOTATION)}
    return Said(message=bare, raw=raw_json.dump(bare))
