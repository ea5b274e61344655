"""Excerpts of the files that the agent works on: what it may change next, of the messages that a cut takes away.

An agent that is to replace a text has to know it to the letter. Three kinds of text are changed again and again: what
the last edits put into a file, small files and parts of files that were read or written, and the open items of a
plan that is ticked off. They stand in the head word for word, with the edits applied that the cut takes as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
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
# Tokens: one excerpt may take so many, the open items of one file so many.
MAX_EXCERPT = 1_000
MAX_ITEMS = 2_600
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


def insert_file_excerpts(*, limit: int, encode: Encode) -> Stage:
    """Make a stage that writes excerpts of files into the head, in at most ``limit`` tokens. Those of earlier cuts are
    carried over.
    """

    def stage(draft: Draft) -> Draft:
        if limit <= 0 or draft.cut == 1:
            return draft
        known = follow(draft.excerpts, draft.gone)
        shown = [readable_text(entry.message) for entry in draft.entries]
        chosen = _choose(known, shown, limit=limit, encode=encode)
        text = _render(chosen)
        return structs.replace(draft, excerpts=chosen).with_head(*exchange(LAYER, text, prompts.FILES_ACK, encode))

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


def _choose(
    known: Sequence[FileExcerpt], shown: Sequence[str], *, limit: int, encode: Encode
) -> tuple[FileExcerpt, ...]:
    """Return what fits: open items of the files touched last, then the newest excerpts; in the order of ``known``.

    A text that one of the ``shown`` messages has is left out.
    """
    left = limit - encode(prompts.FILES_TITLE) - encode(prompts.FILES_ACK)
    chosen: dict[int, FileExcerpt] = {}

    def take(index: int, excerpt: FileExcerpt, most: int) -> bool:
        nonlocal left
        if len(excerpt.text) > CHARS_PER_TOKEN * most:
            return False
        size = encode(excerpt.text) + encode(_title(excerpt))
        if size > min(left, most) or any(_covers(other, excerpt) for other in chosen.values()):
            return False
        if any(excerpt.text in text for text in shown):
            return False
        chosen[index] = excerpt
        left -= size
        return True

    for index, excerpt in reversed(list(enumerate(known))):
        items = open_items(excerpt.text)
        if items:
            while items and len(items) > CHARS_PER_TOKEN * MAX_ITEMS:
                items = items[: len(items) // 2]
            take(index, structs.replace(excerpt, text=items), MAX_ITEMS)
    for index, excerpt in reversed(list(enumerate(known))):
        if index not in chosen and excerpt.text.strip():
            take(index, excerpt, MAX_EXCERPT)
    return tuple(chosen[index] for index in sorted(chosen))


def _covers(one: FileExcerpt, other: FileExcerpt) -> bool:
    return one.path == other.path and other.text in one.text


def open_items(text: str) -> str:
    """Return the items of a list that are not ticked off (``- [ ] ...``), as they stand in ``text``."""
    if "[ ]" not in text:
        return ""
    runs = groupby(text.split("\n"), key=lambda line: _OPEN_ITEM.match(line) is not None)
    return "\n...\n".join("\n".join(lines) for is_open, lines in runs if is_open)


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
