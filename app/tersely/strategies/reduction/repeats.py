"""Send repeated text once: runs of lines in tool results that already stand in the context become references.

A result is looked at once, against what stands before it, so what it looks like never changes while the messages before
it stay: no cached prefix is lost. A new epoch starts with other messages; what has lost its first copy is whole there.
References are lossless: `expand` gives the original from the context alone.

Two kinds of results stay whole although their text stands above. One is text that a reference stood for before: the
model asked for it again, by whatever tool. An epoch carries over what was replaced before it (`Repeats`). The other is
a section of a file of which only parts stand above: an edit must quote it exactly, and would have to join texts from
two messages.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from tersely.domain.history.history import Entry, Repeats
from tersely.domain.messages import Part, ToolCall, ToolResult
from tersely.domain.text.clipping import head
from tersely.domain.tokens import Encode, count_message, estimate_text
from tersely.strategies.pipeline import Draft, Edit, Stage

REASON = "repeated text by reference"
# Lines: the shortest run that is replaced. Characters: shorter results are left alone, and so are runs that save less.
MIN_RUN = 4
MIN_RESULT = 400
MIN_SAVED = 100
# So many occurrences of the same four lines are tried; files of equal lines would have thousands.
MAX_OCCURRENCES = 4
# The characters that a file's result may have besides the one reference that stands for it ("80 more lines").
MAX_REST = 100
# So many replaced runs of four lines are carried over to the next epoch, the newest.
MAX_REPLACED = 2048
# Bytes of a checksum.
_SIZE = 4
NAME_LENGTH = 120
# A call is named by its arguments that are shorter.
LONG_VALUE = 80

BEGIN = "[Repeated text: lines "
# As `cat -n` and agents' read tools number lines.
_NUMBER = re.compile(r" *(0|[1-9][0-9]{0,8})(→|\t)")
_REFERENCE = re.compile(
    r"\[Repeated text: lines (numbered )?(\d+) to (\d+) of (.*?)"
    r"(?:, (unnumbered)|, numbered from \"( *)(\d+)(→|\t)\")?\]"
)
_PATHS = ("file_path", "filePath", "path", "target_file", "notebook_path")

_Run = tuple[str, str, str, str]


class _Number(NamedTuple):
    """The number in front of a line: its value, the characters before the mark, and the mark."""

    value: int
    width: int
    mark: str


@dataclass(frozen=True, slots=True)
class _Lines:
    """A text by lines: as ``written``, and ``bare`` of their numbers; ``numbers`` of the lines that have one.

    ``references`` are the lines that stand for others: no reference points at them.
    """

    written: list[str]
    bare: list[str]
    numbers: dict[int, _Number]
    references: frozenset[int]


class _Match(NamedTuple):
    source: int
    first: int
    length: int
    is_same: bool


class _Folded(NamedTuple):
    """The lines of a result with references, and the runs of four lines that these stand for."""

    lines: list[str]
    references: int
    runs: list[_Run]


def fold_repeats(earlier: Repeats | None, *, encode: Encode) -> Stage:
    """Make a stage that replaces repeated text in tool results. Changed turns are reported as truncated.

    ``earlier``: what earlier epochs decided.
    """

    def stage(draft: Draft) -> Draft:
        folded = fold_entries(draft.entries, earlier, encode=encode)
        turns = {new.turn for old, new in zip(draft.entries, folded, strict=True) if new is not old}
        if not turns:
            return draft
        known = {edit.turn for edit in draft.edits}
        edits = tuple(
            Edit(stage="fold_repeats", turn=turn, kept="truncated", reason=REASON) for turn in sorted(turns - known)
        )
        count = len(draft.kept)
        return replace(draft, kept=folded[:count], tail=folded[count:], edits=(*draft.edits, *edits))

    return stage


def fold_entries(entries: Sequence[Entry], earlier: Repeats | None = None, *, encode: Encode) -> tuple[Entry, ...]:
    """Return ``entries``, in the order of the context, with references for repeated text; O(characters).

    Unchanged entries are the same objects. ``earlier``: what earlier epochs decided. ``encode`` recounts the others.
    """
    return _fold(entries, earlier, encode)[0]


def carry_over(entries: Sequence[Entry], earlier: Repeats | None) -> Repeats:
    """Return what the next epoch must know of the epoch that showed ``entries``, in the order of its context.

    ``earlier``: what that epoch knew of those before it. O(characters).
    """
    return _fold(entries, earlier, estimate_text)[1]


def _fold(entries: Sequence[Entry], earlier: Repeats | None, encode: Encode) -> tuple[tuple[Entry, ...], Repeats]:
    texts = _Texts()
    decided = _Decisions(earlier)
    calls: dict[str, ToolCall] = {}
    shown: list[Entry] = []
    for entry in entries:
        # A result that quotes a reference could not be told from one that has some.
        may_fold = not entry.is_ours and not any(map(_has_reference, entry.message.results))
        decided.start(entry.seq)
        parts: list[Part] = []
        for part in entry.message.parts:
            if isinstance(part, ToolCall):
                calls[part.id] = part
                texts.add_arguments(part)
            elif isinstance(part, ToolResult):
                call = calls.get(part.call_id)
                text = part.text
                if call is not None and may_fold and len(text) >= MIN_RESULT:
                    folded = texts.fold(text)
                    if folded is not None and decided.may_replace(folded, call):
                        text = "\n".join(folded.lines)
                if call is not None:
                    texts.add(text, f"the result of {_name(call)}")
                parts.append(part if text is part.text else replace(part, text=text))
                continue
            parts.append(part)
        is_same = all(new is old for new, old in zip(parts, entry.message.parts, strict=True))
        shown.append(entry if is_same else _folded(entry, tuple(parts), encode))
    return tuple(shown), decided.carry_over()


class _Decisions:
    """Decisions which results become references, in the order of the context. ``earlier``: those of earlier epochs.

    Messages that an earlier epoch showed are decided as then: what was whole because the model had asked again stays
    whole, and all else may be replaced.
    """

    def __init__(self, earlier: Repeats | None) -> None:
        self._earlier = earlier or Repeats()
        self._whole = set(self._earlier.asked_again)
        # Checksums of the replaced runs that were not sent whole since, in order of their replacement.
        self._replaced: dict[int, None] = {}
        self._is_decided = False
        self._has_earlier = False
        self._seq = 0
        self._last = self._earlier.decided_to

    def start(self, seq: int) -> None:
        """Go on with the results of message ``seq``."""
        self._seq = seq
        self._last = max(self._last, seq)
        self._is_decided = seq <= self._earlier.decided_to
        if not self._is_decided:
            self._add_earlier()

    def _add_earlier(self) -> None:
        if not self._has_earlier:
            self._has_earlier = True
            self._replaced = dict.fromkeys(_read_checksums(self._earlier.replaced)) | self._replaced

    def may_replace(self, folded: _Folded, call: ToolCall) -> bool:
        """Return whether ``folded`` may stand for the result of ``call``."""
        runs = [_checksum(run) for run in folded.runs]
        known = [run for run in runs if run in self._replaced]
        is_asked_again = self._seq in self._whole if self._is_decided else 2 * len(known) > len(runs)
        if is_asked_again:
            self._whole.add(self._seq)
            for run in known:
                self._replaced.pop(run, None)
            return False
        if _path_of(call) is not None and not _is_one_reference(folded):
            return False
        self._replaced |= dict.fromkeys(runs)
        return True

    def carry_over(self) -> Repeats:
        """Return the decisions so far."""
        self._add_earlier()
        newest = list(self._replaced)[-MAX_REPLACED:]
        return Repeats(replaced=_write_checksums(newest), asked_again=tuple(sorted(self._whole)), decided_to=self._last)


def _checksum(run: _Run) -> int:
    return crc32("\n".join(run).encode("utf-8", "surrogatepass"))


def _write_checksums(checksums: Sequence[int]) -> bytes:
    # Plans move to other machines in exports, so their byte order is fixed.
    return struct.pack(f"<{len(checksums)}I", *checksums)


def _read_checksums(stored: bytes) -> tuple[int, ...]:
    """Return the checksums in ``stored``. Bytes that are no whole checksum are left out."""
    count = len(stored) // _SIZE
    return struct.unpack_from(f"<{count}I", stored)


def are_checksums(replaced: bytes) -> bool:
    """Return whether ``replaced`` may be that of an epoch: whole checksums, and not too many."""
    return len(replaced) % _SIZE == 0 and len(replaced) <= _SIZE * MAX_REPLACED


def _is_one_reference(folded: _Folded) -> bool:
    rest = sum(len(line) + 1 for line in folded.lines if not _REFERENCE.fullmatch(line))
    return folded.references == 1 and rest <= MAX_REST


def expand(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return ``entries`` with the text that references stand for. The entries alone contain it."""
    texts = _Texts()
    calls: dict[str, ToolCall] = {}
    whole: list[Entry] = []
    for entry in entries:
        parts: list[Part] = []
        for part in entry.message.parts:
            if isinstance(part, ToolCall):
                calls[part.id] = part
                texts.add_arguments(part)
            text = part.text if isinstance(part, ToolResult) else ""
            if isinstance(part, ToolResult) and (call := calls.get(part.call_id)) is not None:
                if entry.is_folded:
                    text = "\n".join(line for each in part.text.split("\n") for line in texts.expand_line(each))
                texts.add(part.text, f"the result of {_name(call)}")
            parts.append(replace(part, text=text) if isinstance(part, ToolResult) else part)
        whole.append(replace(entry, message=replace(entry.message, parts=tuple(parts))))
    return tuple(whole)


def _folded(entry: Entry, parts: tuple[Part, ...], encode: Encode) -> Entry:
    message = replace(entry.message, parts=parts)
    # One count may be of a vocabulary and the other an estimate; a reference never makes a message longer.
    tokens = min(entry.tokens, count_message(message, encode))
    return replace(entry, message=message, is_shortened=True, is_folded=True, tokens=tokens)


@dataclass(slots=True)
class _Texts:
    """The texts of a context so far, and where four lines first stand together."""

    lines: list[_Lines] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)
    occurrences: dict[_Run, list[tuple[int, int]]] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    numbered: dict[int, dict[int, int]] = field(default_factory=dict)

    def add_arguments(self, call: ToolCall) -> None:
        """Add the texts of several lines among a call's arguments."""
        for key, value in _long_arguments(call):
            self.add(value, f"the argument {key} of {_name(call)}")

    def add(self, text: str, name: str) -> None:
        """Add a text. Where several have one name, later ones are told apart by their number."""
        self.uses[name] = use = self.uses.get(name, 0) + 1
        if text.count("\n") < MIN_RUN - 1:
            return
        name = name if use == 1 else f"{name} (number {use})"
        lines = _read(text)
        source = len(self.lines)
        self.lines.append(lines)
        self.names.append(name)
        self.by_name[name] = source
        for index, key in enumerate(_runs(lines)):
            known = self.occurrences.get(key)
            if known is None:
                self.occurrences[key] = [(source, index)]
            elif len(known) < MAX_OCCURRENCES:
                known.append((source, index))

    def fold(self, text: str) -> _Folded | None:
        """Return ``text`` with references; None where nothing is repeated."""
        if text.count("\n") < MIN_RUN - 1:
            return None
        lines = _read(text)
        keys = list(_runs(lines))
        written = lines.written
        out: list[str] = []
        runs: list[_Run] = []
        index = references = 0
        while index < len(written):
            occurrences = self.occurrences.get(keys[index], ()) if index < len(keys) else ()
            match = self._longest(occurrences, lines, index) if occurrences else None
            if match is None:
                out.append(written[index])
                index += 1
                continue
            reference = self._write(match, lines.numbers.get(index))
            size = sum(map(len, written[index : index + match.length])) + match.length - 1
            if size - len(reference) >= MIN_SAVED:
                out.append(reference)
                references += 1
                runs += keys[index : index + match.length - MIN_RUN + 1]
            else:
                out += written[index : index + match.length]
            index += match.length
        return _Folded(out, references, runs) if references else None

    def expand_line(self, line: str) -> Iterator[str]:
        """Yield the lines that a line of a folded text stands for."""
        found = _REFERENCE.fullmatch(line)
        source = self.by_name.get(found[4]) if found else None
        if found is None or source is None:
            yield line
            return
        first, last = int(found[2]), int(found[3])
        index = self._numbers_of(source)[first] if found[1] else first - 1
        lines = self.lines[source]
        for count in range(last - first + 1):
            if found[7]:
                width = len(found[6]) + len(found[7])
                yield f"{int(found[7]) + count:>{width}}{found[8]}{lines.bare[index + count]}"
            else:
                yield (lines.bare if found[5] else lines.written)[index + count]

    def _longest(self, occurrences: Sequence[tuple[int, int]], lines: _Lines, index: int) -> _Match | None:
        best: _Match | None = None
        for source, first in occurrences:
            for is_same in (True, False):
                count = _count_equal(self.lines[source], first, lines, index, is_same=is_same)
                if count >= MIN_RUN and (best is None or count > best.length):
                    best = _Match(source, first, count, is_same)
        return best

    def _write(self, match: _Match, number: _Number | None) -> str:
        numbering = ""
        if not match.is_same and number is None:
            numbering = ", unnumbered"
        elif not match.is_same and number is not None:
            numbering = f', numbered from "{number.value:>{number.width}}{number.mark}"'
        return f"[Repeated text: lines {self._line_range(match)} of {self.names[match.source]}{numbering}]"

    def _line_range(self, match: _Match) -> str:
        """Name lines by their own numbers where they have some, as a reader would; else by their indexes."""
        numbers = self.lines[match.source].numbers
        run = [numbers.get(index) for index in range(match.first, match.first + match.length)]
        if run[0] is not None and self._numbers_of(match.source)[run[0].value] == match.first:
            start = run[0].value
            if all(number is not None and number.value == start + count for count, number in enumerate(run)):
                return f"numbered {start} to {start + match.length - 1}"
        return f"{match.first + 1} to {match.first + match.length}"

    def _numbers_of(self, source: int) -> dict[int, int]:
        """Map the numbers of a text's lines to the index of the first line with each."""
        if source not in self.numbered:
            first_lines = self.numbered[source] = {}
            for index, number in self.lines[source].numbers.items():
                first_lines.setdefault(number.value, index)
        return self.numbered[source]


def _read(text: str) -> _Lines:
    written = text.split("\n")
    numbers: dict[int, _Number] = {}
    bare = written
    if "\t" in text or "→" in text:
        bare = written.copy()
        for index, line in enumerate(written):
            found = _NUMBER.match(line)
            if found is not None:
                numbers[index] = _Number(int(found[1]), found.end(1), found[2])
                bare[index] = line[found.end() :]
    references: frozenset[int] = frozenset()
    if BEGIN in text:
        references = frozenset(index for index, line in enumerate(written) if _REFERENCE.fullmatch(line))
    return _Lines(written, bare, numbers, references)


def _runs(lines: _Lines) -> Iterator[_Run]:
    """Yield each four lines that follow one another, bare of their numbers."""
    bare = lines.bare
    return zip(bare, bare[1:], bare[2:], bare[3:], strict=False)


def _count_equal(source: _Lines, first: int, lines: _Lines, index: int, *, is_same: bool) -> int:
    """Return how many lines are equal from there on: with their numbers, or with numbers that go on one by one."""
    source_lines, here = (source.written, lines.written) if is_same else (source.bare, lines.bare)
    start = None if is_same else lines.numbers.get(index)
    most = min(len(source_lines) - first, len(here) - index)
    for count in range(most):
        if source_lines[first + count] != here[index + count] or first + count in source.references:
            return count
        if not is_same and not _goes_on(start, lines.numbers.get(index + count), count):
            return count
    return most


def _goes_on(start: _Number | None, here: _Number | None, count: int) -> bool:
    """Return whether a line is numbered as the one ``count`` lines before it says, or both have no number."""
    if start is None or here is None:
        return start is here
    value = start.value + count
    return here == _Number(value, max(start.width, len(str(value))), start.mark)


def _has_reference(result: ToolResult) -> bool:
    return BEGIN in result.text


def _long_arguments(call: ToolCall) -> Iterable[tuple[str, str]]:
    values = _decode(call)
    return (
        (key, value) for key, value in values.items() if isinstance(value, str) and value.count("\n") >= MIN_RUN - 1
    )


def _name(call: ToolCall) -> str:
    """Name a call by tool and short arguments: ``read(path=src/app.py, offset=20)``."""
    values = _decode(call)
    short = {
        key: value for key, value in values.items() if isinstance(value, str | int) and len(str(value)) < LONG_VALUE
    }
    if not any(isinstance(value, str) for value in short.values()):
        # A long path or command says what the call is: a path by its end, all else by its beginning.
        clipped: dict[str, str | int] = {
            key: f"...{value[-LONG_VALUE:]}" if key in _PATHS else f"{value[:LONG_VALUE]}..."
            for key, value in values.items()
            if isinstance(value, str)
        }
        short = clipped | short
    given = ", ".join(f"{key}={value}" for key, value in short.items()) if values else call.arguments
    text = " ".join(f"{call.name}({given})".split())
    return head(text, NAME_LENGTH).replace("]", ")")


def _path_of(call: ToolCall) -> str | None:
    """Return the file that a call reads or changes; None for other calls."""
    values = _decode(call)
    return next((path for key in _PATHS if isinstance(path := values.get(key), str)), None)


def _decode(call: ToolCall) -> dict[str, object]:
    try:
        values = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
