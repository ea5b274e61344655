"""Read files of conversations. The form of a file is recognised by its lines:

- one conversation on each line, in the wire form of a dialect (`forms`);
- a client's requests, one on each line (`recordings`);
- an agent's own session file, one conversation (`agent_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tersely.dialects.wire import raw_json
from tersely.domain.messages import Dialect as DialectName
from tersely.transcripts.agent_files import read_agent_file
from tersely.transcripts.conversations import BadTranscript, Conversation, Transcript
from tersely.transcripts.recordings import is_call, is_resent, read_recording, with_files
from tersely.transcripts.wire_forms import recognise, steps_of

MAX_LINE = 64 * 1024 * 1024
REQUESTS, RESPONSES, INDEX = "requests", "responses", "index"

Line = tuple[int, Mapping[str, Any]]
OnBadLine = Callable[[str], None]


def load_transcript(
    path: Path,
    *,
    limit: int | None = None,
    dialect: DialectName | None = None,
    on_bad_line: OnBadLine | None = None,
    max_line: int = MAX_LINE,
) -> Transcript:
    """Read a file, or its first ``limit`` conversations; ``dialect`` is that of lines that name none and look like
    none.

    Raises `BadTranscript` with the first line (at most ``max_line`` bytes) that is no conversation; with
    ``on_bad_line``, that function gets the problem instead, and the line is skipped.
    """

    def bad(number: int, why: str) -> None:
        problem = f"{path}, line {number}: {why}"
        if on_bad_line is None:
            raise BadTranscript(problem)
        on_bad_line(problem)

    lines = list(_read_lines(path, bad, max_line))
    name = path.parent.resolve().name if path.stem in {REQUESTS, INDEX} else path.stem
    if (found := read_agent_file([line for _, line in lines])) is not None:
        agent_dialect, conversation = found
        lines = [(1, {"id": path.stem, **conversation, "dialect": agent_dialect})]
    elif _is_recording(lines):
        replies = _replies(path, max_line)
        beside = partial(_read_beside, path.parent, max_line)
        try:
            whole = [(number, _with_files(number, line, beside)) for number, line in lines]
            recording = read_recording(name, whole, replies, dialect)
        except BadTranscript as error:
            raise BadTranscript(f"{path}: {error}") from error
        return Transcript(name=name, conversations=[recording])
    return Transcript(name=name, conversations=list(_conversations(lines, limit, dialect, bad)))


def _conversations(
    lines: Sequence[Line], limit: int | None, dialect: DialectName | None, bad: Callable[[int, str], None]
) -> Iterator[Conversation]:
    for number, line in lines[:limit]:
        try:
            steps = steps_of(line, recognise(line, dialect))
        except (BadTranscript, ValueError, TypeError, AttributeError) as error:
            why = str(error) if isinstance(error, BadTranscript) else type(error).__name__
            bad(number, f"not a conversation: {why}")
            continue
        yield Conversation(id=str(line.get("id", number)), number=number, steps=steps, model=_model_of(line))


def _model_of(line: Mapping[str, Any]) -> str:
    model = line.get("model", "")
    return model if isinstance(model, str) else ""


def _is_recording(lines: Sequence[Line]) -> bool:
    if lines and all(is_call(line) for _, line in lines):
        return True
    return any(is_resent(line, later) for (_, line), (_, later) in pairwise(lines))


def _with_files(number: int, line: Mapping[str, Any], read: Callable[[str], bytes]) -> Mapping[str, Any]:
    try:
        return with_files(line, read)
    except (OSError, ValueError) as error:
        raise BadTranscript(f"line {number}: {line['request_file']} cannot be read ({error})") from error


def _read_beside(directory: Path, max_line: int, name: str) -> bytes:
    """Return a file that a line names. Raises OSError, or ValueError for a file outside the directory."""
    path = (directory / name).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise ValueError("outside of the transcript's directory")
    if path.stat().st_size > max_line:
        raise ValueError(f"longer than {max_line:,} bytes")
    return path.read_bytes()


def _replies(path: Path, max_line: int) -> dict[object, Any]:
    """Return the replies beside a recording, by request number; empty without such a file."""
    beside = path.with_name(path.name.replace(REQUESTS, RESPONSES))
    if beside == path or not beside.exists():
        return {}

    def bad(number: int, why: str) -> None:
        raise BadTranscript(f"{beside}, line {number}: {why}")

    lines = _read_lines(beside, bad, max_line)
    return {line.get("n", number): line.get("reply", line.get("response")) for number, line in lines}


def _read_lines(path: Path, bad: Callable[[int, str], None], max_line: int) -> Iterator[Line]:
    """Yield the JSON objects of a file with their line numbers.

    A file that is one object over many lines is one line.
    """
    try:
        if path.suffix == ".json":
            yield 1, _whole(path, bad, max_line)
            return
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(max_line + 1):
                number += 1
                if len(raw) > max_line:
                    _skip_rest(file.readline, raw, max_line)
                    bad(number, f"longer than {max_line:,} bytes")
                elif raw.strip():
                    line = _parse(raw)
                    if isinstance(line, Mapping):
                        yield number, line
                    else:
                        bad(number, "not a conversation: no JSON object")
    except OSError as error:
        raise BadTranscript(f"{path}: {error.strerror}") from error


def _skip_rest(readline: Callable[[int], bytes], raw: bytes, max_line: int) -> None:
    while raw and not raw.endswith(b"\n"):
        raw = readline(max_line)


def _whole(path: Path, bad: Callable[[int, str], None], max_line: int) -> Mapping[str, Any]:
    with path.open("rb") as file:
        raw = file.read(max_line + 1)
    if len(raw) > max_line:
        bad(1, f"longer than {max_line:,} bytes")
        return {}
    value = _parse(raw)
    # A checkpoint of Gemini CLI may be the bare list of contents.
    return value if isinstance(value, Mapping) else {"contents": value}


def _parse(raw: bytes) -> Any:
    try:
        return raw_json.load(raw)
    except ValueError:
        return None
