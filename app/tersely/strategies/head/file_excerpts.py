"""Excerpts of the files that the agent works on: what it may change next, of the messages that a cut takes away.

An agent that is to replace a text has to know it to the letter. Four kinds of text are changed again and again: the
next open items of a plan that is ticked off, the file that is changed most just now, what the last edits put into a
file, and small files and parts of files that were read or written. They stand in the head word for word, with the
edits applied that the cut takes as well. Where much room is left, a long text that was just written stands there by its
beginning.

An epoch carries over more than its head shows (`carry_over`): a text that has no room now may be changed later, and
the head then needs all of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import structs

from tersely.domain.history.context_use import readable_text
from tersely.domain.history.history import Entry, FileExcerpt
from tersely.domain.messages import ToolCall
from tersely.domain.tokens import Encode
from tersely.strategies import prompts
from tersely.strategies.head.layers import exchange
from tersely.strategies.pipeline import Draft, Stage

LAYER = "files"
# Tokens: one excerpt may take so many, the open items of all plans so many, the file that is changed most so many. The
# beginning of a longer text takes so many where they are left.
MAX_EXCERPT = 1_000
MAX_ITEMS = 600
MAX_WORKING_FILE = 3_600
MAX_BEGINNING = 2_000
# A working file has so many texts that were read, written or changed in so many messages before the cut.
LEAST_TEXTS = 3
WORKING_SPAN = 60
# So many runs of items of one text are looked at.
MAX_RUNS = 500
# An edit that ticks items off often names the next heading: it is looked for in so many lines after the items.
LINES_TO_HEADING = 5
# Characters that an epoch carries over in all, and of one text. Of a longer text only the open items are carried over.
MAX_CARRIED = 60_000
MAX_CARRIED_TEXT = 14_000
# So many characters make a token, at least: what is longer need not be counted.
CHARS_PER_TOKEN = 6

_PATHS = ("file_path", "filePath", "path", "target_file", "notebook_path")
_CONTENTS = ("content", "contents", "file_text", "text")
# Members of arguments that hold a text to be replaced, and the one that holds what replaces it.
_EDITS = {
    "old_string": "new_string",
    "oldString": "newString",
    "oldText": "newText",
    "old_text": "new_text",
    "old_str": "new_str",
}
_NUMBER = re.compile(r"^ *\d+(?:→|\t)", re.MULTILINE)
_OPEN_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+\[ \]\s")
# Between two runs of items of one text.
_GAP = "\n...\n"


def insert_file_excerpts(*, limit: int, encode: Encode) -> Stage:
    """Make a stage that writes excerpts of files into the head, in at most ``limit`` tokens. Those of earlier cuts are
    carried over.
    """

    def stage(draft: Draft) -> Draft:
        if limit <= 0 or draft.cut == 1:
            return draft
        known = follow(draft.excerpts, draft.gone)
        shown = [readable_text(entry.message) for entry in draft.entries]
        choice = _Choice(shown, limit - encode(prompts.FILES_TITLE) - encode(prompts.FILES_ACK), encode)
        calls = frozenset(entry.seq for entry in draft.gone if entry.message.calls)
        chosen = _choose(known, choice, cut=draft.cut, calls=calls)
        messages = exchange(LAYER, _render(chosen), prompts.FILES_ACK, encode)
        return structs.replace(draft, excerpts=carry_over(known)).with_head(*messages)

    return stage


def follow(known: Sequence[FileExcerpt], entries: Iterable[Entry]) -> tuple[FileExcerpt, ...]:
    """Return the excerpts after what ``entries`` read, wrote and changed, the newest last."""
    excerpts = list(known)
    paths: dict[str, str] = {}
    for entry in entries:
        for call in entry.message.calls:
            arguments = _decode(call)
            path = next((arguments[name] for name in _PATHS if isinstance(arguments.get(name), str)), "")
            if not path:
                continue
            edits = list(_edits_of(arguments))
            content = next((arguments[name] for name in _CONTENTS if isinstance(arguments.get(name), str)), None)
            if edits:
                for old, new in edits:
                    excerpts = _apply(excerpts, entry, path, old, new)
            elif content is not None:
                excerpts = [each for each in excerpts if each.path != path]
                excerpts.append(_excerpt(entry, path, content))
            else:
                paths[call.id] = path
        for result in entry.message.results:
            path = paths.pop(result.call_id, "")
            text = _NUMBER.sub("", result.text).strip("\n")
            if path and text:
                excerpts = [each for each in excerpts if each.path != path or each.text not in text]
                excerpts.append(_excerpt(entry, path, text))
    return tuple(excerpts)


def _apply(excerpts: Sequence[FileExcerpt], entry: Entry, path: str, old: str, new: str) -> list[FileExcerpt]:
    out: list[FileExcerpt] = []
    for each in excerpts:
        text = _edited(each, old, new) if each.path == path and old else each.text
        if text == each.text:
            out.append(each)
        else:
            out.append(structs.replace(each, text=text, seqs=tuple(dict.fromkeys((*each.seqs, entry.seq)))))
    # The place of the last change is known best by the text that was put there.
    return [*out, _excerpt(entry, path, new)] if new.strip() else out


def _edited(excerpt: FileExcerpt, old: str, new: str) -> str:
    """Return the text of ``excerpt`` with ``old`` replaced by ``new``."""
    text = excerpt.text.replace(old, new, 1)
    if not excerpt.only_items:
        return text
    return open_items(text) if text != excerpt.text else _edited_items(text, old, new)


def _edited_items(text: str, old: str, new: str) -> str:
    """Return the open items of a longer text after an edit that reaches beyond them: the items of ``new`` take the
    place of those in ``old``. Nothing changes where that place is not clear.
    """
    runs = [run.split("\n") for run in text.split(_GAP)]
    left = [_lines_left(run, old) for run in runs]
    touched = [number for number, (before, after) in enumerate(left) if len(before) + len(after) < len(runs[number])]
    if not touched or touched[-1] - touched[0] >= len(touched):
        return text
    first, last = touched[0], touched[-1]
    items = open_items("\n".join([*left[first][0], new, *left[last][1]]))
    runs[first : last + 1] = [[items]] if items else []
    return _GAP.join("\n".join(run) for run in runs)


def _lines_left(run: list[str], old: str) -> tuple[list[str], list[str]]:
    """Return the lines of ``run`` before and behind those that it has in common with ``old``, which contains it, begins
    in it or ends in it. Where they have none in common, all lines are before.
    """
    if "\n".join(["", *run, ""]) in f"\n{old}\n":
        return [], []
    begins, ends = old.split("\n", len(run))[: len(run)], old.rsplit("\n", len(run))[-len(run) :]
    for common in range(len(run) - 1, 0, -1):
        if run[-common:] == begins[:common]:
            return run[:-common], []
        if run[:common] == ends[-common:]:
            return [], run[common:]
    return run, []


def _excerpt(entry: Entry, path: str, text: str) -> FileExcerpt:
    return FileExcerpt(path=path, turn=entry.turn, seqs=(entry.seq,), text=text)


def carry_over(known: Sequence[FileExcerpt]) -> tuple[FileExcerpt, ...]:
    """Return what the next epoch may choose from, in the order of ``known`` and in at most `MAX_CARRIED` characters.

    Texts of files that were changed come first, then those that were touched last.
    """
    changed = {each.path for each in known if len(each.seqs) > 1}
    ranked = sorted(enumerate(known), key=lambda pair: (pair[1].path not in changed, -pair[1].seqs[-1], -pair[0]))
    carried: dict[int, FileExcerpt] = {}
    left = MAX_CARRIED
    for index, excerpt in ranked:
        short = _shorten(excerpt)
        if 0 < len(short.text) <= left:
            carried[index] = short
            left -= len(short.text)
    return tuple(carried[index] for index in sorted(carried))


def _shorten(excerpt: FileExcerpt) -> FileExcerpt:
    if len(excerpt.text) <= MAX_CARRIED_TEXT:
        return excerpt
    return structs.replace(excerpt, text=open_items(excerpt.text, MAX_CARRIED_TEXT), only_items=True)


def _choose(
    known: Sequence[FileExcerpt], choice: _Choice, *, cut: int, calls: Collection[int]
) -> tuple[FileExcerpt, ...]:
    """Return what fits: open items, the working file, the newest excerpts, and the beginning of the newest text that is
    too long, of those that the agent wrote or changed in ``calls`` (sequence numbers); in the order of ``known``.
    """
    newest = [*enumerate(known)][::-1]
    room = MAX_ITEMS
    for index, excerpt in _plans(known):
        room -= choice.take_items(index, excerpt, room)
    for index, excerpt in _working_file(known, cut):
        choice.take(index, excerpt, MAX_WORKING_FILE)
    for index, excerpt in newest:
        choice.take(index, excerpt, MAX_EXCERPT)
    for index, excerpt in newest:
        if excerpt.seqs[-1] in calls and choice.take_beginning(index, excerpt):
            break
    return choice.in_order()


def _plans(known: Sequence[FileExcerpt]) -> Iterator[tuple[int, FileExcerpt]]:
    """Yield the texts with open items: of the plan touched last first, its text with most items first."""
    plans = [(index, each, each.text.count("[ ]")) for index, each in enumerate(known) if "[ ]" in each.text]
    touched: dict[str, int] = {}
    for _, each, _ in plans:
        touched[each.path] = max(touched.get(each.path, 0), each.seqs[-1])
    plans.sort(key=lambda plan: (-touched[plan[1].path], plan[1].path, -plan[2]))
    yield from ((index, each) for index, each, _ in plans)


def _working_file(known: Sequence[FileExcerpt], cut: int) -> Iterator[tuple[int, FileExcerpt]]:
    """Yield the longest text of the file that most texts before the cut belong to; nothing where no file has enough.
    A plan is no such file: of it the open items are shown.
    """
    plans = {each.path for each in known if any(_runs_of_items(each.text))}
    texts = Counter(each.path for each in known if each.seqs[-1] >= cut - WORKING_SPAN and each.path not in plans)
    if not texts:
        return
    path, count = min(texts.items(), key=lambda item: (-item[1], item[0]))
    if count >= LEAST_TEXTS:
        yield max(
            ((index, each) for index, each in enumerate(known) if each.path == path),
            key=lambda pair: (len(pair[1].text), pair[0]),
        )


class _Choice:
    """The excerpts chosen so far. ``room``: the tokens that are left. What the ``shown`` messages have is left out."""

    def __init__(self, shown: Sequence[str], room: int, encode: Encode) -> None:
        self._shown = shown
        self._room = room
        self._encode = encode
        # By the place of the text and of its part: a text may be there by its items and by its beginning.
        self._chosen: dict[tuple[int, int], FileExcerpt] = {}

    def take(self, index: int, excerpt: FileExcerpt, most: int) -> bool:
        """Take an excerpt of at most ``most`` tokens, unless it has no room or its text is there already. Chosen
        excerpts that it contains make room for it.
        """
        return (index, 0) not in self._chosen and self._take((index, 0), excerpt, most)

    def _take(self, place: tuple[int, int], excerpt: FileExcerpt, most: int) -> bool:
        text = excerpt.text
        if not text.strip() or len(text) > CHARS_PER_TOKEN * most:
            return False
        if self._is_there(excerpt.path, text):
            return False
        size = self._size(excerpt)
        if size > min(self._room, most):
            return False
        for inner in [number for number, other in self._chosen.items() if _covers(excerpt, other)]:
            self._room += self._size(self._chosen.pop(inner))
        self._chosen[place] = excerpt
        self._room -= size
        return True

    def take_items(self, index: int, excerpt: FileExcerpt, most: int) -> int:
        """Take the first open items that fit into ``most`` tokens; return how many tokens they have."""
        runs: list[str] = []
        size = self._encode(_title(excerpt))
        for run in islice(_runs_of_items(excerpt.text), MAX_RUNS):
            if run in runs or self._is_there(excerpt.path, run):
                continue
            if len(run) > CHARS_PER_TOKEN * most:
                break
            size += self._encode(_GAP) + self._encode(run)
            if size > min(self._room, most):
                break
            runs.append(run)
        items = structs.replace(excerpt, text=_GAP.join(runs))
        return self._size(items) if runs and self.take(index, items, most) else 0

    def take_beginning(self, index: int, excerpt: FileExcerpt) -> bool:
        """Take the first lines of a text that is too long to be taken whole, if there is room for `MAX_BEGINNING`."""
        start = excerpt.text[: CHARS_PER_TOKEN * MAX_BEGINNING]
        if excerpt.only_items or self._room < MAX_BEGINNING or self._encode(start) <= MAX_EXCERPT:
            return False
        size = self._encode(_title(excerpt))
        lines: list[str] = []
        for line in start.split("\n"):
            size += self._encode(f"{line}\n")
            if size > MAX_BEGINNING:
                break
            lines.append(line)
        return self._take((index, 1), structs.replace(excerpt, text="\n".join(lines)), MAX_BEGINNING)

    def in_order(self) -> tuple[FileExcerpt, ...]:
        """Return the chosen excerpts, the oldest first."""
        return tuple(self._chosen[place] for place in sorted(self._chosen))

    def _is_there(self, path: str, text: str) -> bool:
        is_chosen = any(other.path == path and text in other.text for other in self._chosen.values())
        return is_chosen or any(text in message for message in self._shown)

    def _size(self, excerpt: FileExcerpt) -> int:
        return self._encode(excerpt.text) + self._encode(_title(excerpt))


def _covers(one: FileExcerpt, other: FileExcerpt) -> bool:
    return one.path == other.path and other.text in one.text


def open_items(text: str, most: int | None = None) -> str:
    """Return the items of a list that are not ticked off (``- [ ] ...``), as they stand in ``text``: the first ones, in
    at most ``most`` characters (None: all).
    """
    runs: list[str] = []
    length = -len(_GAP)
    for run in _runs_of_items(text):
        length += len(_GAP) + len(run)
        if most is not None and length > most:
            break
        runs.append(run)
    return _GAP.join(runs)


def _runs_of_items(text: str) -> Iterator[str]:
    """Yield each run of open items, with the lines to the next heading if that is near."""
    if "[ ]" not in text:
        return
    lines = text.split("\n")
    end = 0
    for start, line in enumerate(lines):
        if start < end or _OPEN_ITEM.match(line) is None:
            continue
        end = start + 1
        while end < len(lines) and _OPEN_ITEM.match(lines[end]):
            end += 1
        yield "\n".join(lines[start : end + _lines_to_heading(lines[end : end + LINES_TO_HEADING])])


def _lines_to_heading(lines: Sequence[str]) -> int:
    """Return how many lines lead up to the first heading, it included; 0 if other items or a gap come first."""
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            return number
        if _OPEN_ITEM.match(line) or line == _GAP.strip():
            return 0
    return 0


def _render(excerpts: Sequence[FileExcerpt]) -> str:
    if not excerpts:
        return ""
    return "\n".join([prompts.FILES_TITLE, *(f"{_title(each)}\n{each.text}" for each in excerpts)])


def _title(excerpt: FileExcerpt) -> str:
    return f"--- {excerpt.path} (t{excerpt.turn})"


def _edits_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what an edit replaces, and by what; also of tools that make several edits in one call."""
    nested = (each for value in arguments.values() if isinstance(value, list) for each in value)
    for group in (arguments, *(each for each in nested if isinstance(each, dict))):
        for old, new in _EDITS.items():
            if isinstance(group.get(old), str) and isinstance(group.get(new), str):
                yield group[old], group[new]


def _decode(call: ToolCall) -> dict[str, Any]:
    try:
        values = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
