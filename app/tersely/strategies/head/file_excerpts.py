"""Excerpts of the files that the agent works on: what it may change next, of the messages that a cut takes away.

An agent that is to replace a text has to know it to the letter. Four kinds of text are changed again and again: the
next open items of a plan that is ticked off, the file that is changed most just now, what the last edits put into a
file, and small files and parts of files that were read or written. They stand in the head word for word, with the
edits applied that the cut takes as well.

An epoch carries over more than its head shows (`carry_over`): a text that has no room now may be changed later, and
the head then needs all of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# Tokens: one excerpt may take so many, the open items of all plans so many, the file that is changed most so many.
MAX_EXCERPT = 1_000
MAX_ITEMS = 600
MAX_WORKING_FILE = 3_600
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
        chosen = _choose(known, shown, cut=draft.cut, limit=limit, encode=encode)
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
        if each.path == path and old and old in each.text:
            seqs = tuple(dict.fromkeys((*each.seqs, entry.seq)))
            out.append(structs.replace(each, text=each.text.replace(old, new, 1), seqs=seqs))
        else:
            out.append(each)
    # The place of the last change is known best by the text that was put there.
    return [*out, _excerpt(entry, path, new)] if new.strip() else out


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
        text = excerpt.text if len(excerpt.text) <= MAX_CARRIED_TEXT else open_items(excerpt.text, MAX_CARRIED_TEXT)
        if 0 < len(text) <= left:
            carried[index] = structs.replace(excerpt, text=text)
            left -= len(text)
    return tuple(carried[index] for index in sorted(carried))


def _choose(
    known: Sequence[FileExcerpt], shown: Sequence[str], *, cut: int, limit: int, encode: Encode
) -> tuple[FileExcerpt, ...]:
    """Return what fits: open items, the working file, then the newest excerpts; in the order of ``known``.

    A text that one of the ``shown`` messages has is left out.
    """
    choice = _Choice(shown, limit - encode(prompts.FILES_TITLE) - encode(prompts.FILES_ACK), encode)
    room = MAX_ITEMS
    for index, excerpt in _plans(known):
        room -= choice.take_items(index, excerpt, room)
    for index, excerpt in _working_file(known, cut):
        choice.take(index, excerpt, MAX_WORKING_FILE)
    for index, excerpt in reversed(list(enumerate(known))):
        choice.take(index, excerpt, MAX_EXCERPT)
    return choice.in_order()


def _plans(known: Sequence[FileExcerpt]) -> Iterator[tuple[int, FileExcerpt]]:
    """Yield the texts with open items: of the plan touched last first, its longest text first."""
    plans = [(index, each) for index, each in enumerate(known) if "[ ]" in each.text]
    touched: dict[str, int] = {}
    for _, each in plans:
        touched[each.path] = max(touched.get(each.path, 0), each.seqs[-1])
    yield from sorted(plans, key=lambda pair: (-touched[pair[1].path], pair[1].path, -len(pair[1].text)))


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
    """The excerpts chosen so far. ``room``: the tokens that are left."""

    def __init__(self, shown: Sequence[str], room: int, encode: Encode) -> None:
        self._shown = shown
        self._room = room
        self._encode = encode
        self._chosen: dict[int, FileExcerpt] = {}

    def take(self, index: int, excerpt: FileExcerpt, most: int) -> bool:
        """Take an excerpt of at most ``most`` tokens, unless it has no room or its text is there already. Chosen
        excerpts that it contains make room for it.
        """
        text = excerpt.text
        if index in self._chosen or not text.strip() or len(text) > CHARS_PER_TOKEN * most:
            return False
        if self._is_there(excerpt.path, text):
            return False
        size = self._size(excerpt)
        if size > min(self._room, most):
            return False
        for inner in [number for number, other in self._chosen.items() if _covers(excerpt, other)]:
            self._room += self._size(self._chosen.pop(inner))
        self._chosen[index] = excerpt
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

    def in_order(self) -> tuple[FileExcerpt, ...]:
        """Return the chosen excerpts, the oldest first."""
        return tuple(self._chosen[index] for index in sorted(self._chosen))

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
