"""The reference index: the identifiers of cut messages, each with the turn that mentions it.

After a cut, missing names hurt more than missing prose. Candidates are carried over from epoch to epoch, so that
planning reads only newly cut messages. The ranking was measured: names that the model used itself come first, then
frequent and recent ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from tersely.domain.history.history import Entry, Reference
from tersely.domain.history.turns import write_turn_id
from tersely.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult
from tersely.domain.tokens import Encode

MAX_CANDIDATES = 1_500
MIN_LENGTH, MAX_LENGTH = 3, 160
MAX_RUN = 2 * MAX_LENGTH

USED_WEIGHT = 3.0
# A name in a short argument was chosen by the model; in a long argument (a written file) it only occurs.
POINTED_LENGTH = 400
# A path or an address can be opened again; a name in source code can be found by opening its file. Most names
# that replayed agents point at, and that nothing but an index could show, are paths (docs/replay.md).
PLACE_WEIGHT = 6.0
MENTION_WEIGHT, MENTION_CAP = 0.25, 6
RECENCY_WEIGHT = 2.0

# One run of identifier characters, classified once per distinct run. Plain words, most of any text, match outside of
# the group and are skipped. The pattern does not backtrack: a megabyte of dashes is read once.
_RUN = re.compile(r"[A-Z]?[a-z]++[.:?]*+(?![A-Za-z0-9_~@./:#$%+=&?\-])|([A-Za-z0-9_~@./:#$%+=&?\-]{3,})")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_PATH = re.compile(r"(?:~|\.{1,2})?/?[\w.@+~-]+(?:/[\w.@+~-]+)+(?::\d+)*|/[\w.@+~-]{2,}|~/[\w./-]+")
_NAME = re.compile(r"#?\$?\w+(?:[.:@-]\w+)*")
_LINE = re.compile(r":\d+$")
_CAMEL = re.compile(r"[a-z0-9][A-Z]|[A-Z]{2}[a-z]")
_LEADING = "=&?%+:-"
_TRAILING = "~@./:#$%+=&?-"


def extract_identifiers(text: str) -> list[str]:
    """Paths, URLs, ids, dotted and underscored names, codes and long numbers, in order, repeated as mentioned."""
    runs = filter(None, _RUN.findall(text))
    return [name for run in runs if len(run) <= MAX_RUN and (name := _as_identifier(run))]


@lru_cache(maxsize=1 << 14)
def _as_identifier(run: str) -> str:
    """Return the identifier in a run of characters, or "" when it is an ordinary word or number."""
    name = run.rstrip(_TRAILING).lstrip(_LEADING)
    if "=" in name and "://" not in name:
        name = name.rpartition("=")[2]
    if not MIN_LENGTH <= len(name) <= MAX_LENGTH:
        return ""
    if "://" in name:
        return name if _URL.fullmatch(name) else ""
    if "/" in name:
        return name if _PATH.fullmatch(name) and any(map(str.isalpha, name)) else ""
    return name if _NAME.fullmatch(name) and _is_telling(name) else ""


def _is_telling(name: str) -> bool:
    digits = sum(map(str.isdigit, name))
    letters = name.upper() != name.lower()
    if not letters:
        # Plain numbers: an order or a port may matter, a count or a date rarely does.
        return digits >= 4 and (name.isdigit() or name.lstrip("#$").isdigit())
    if digits and len(name) >= 4:
        return True
    if "_" in name.strip("_") or bool(_CAMEL.search(name)):
        return True
    if "." in name:
        return all(len(piece) > 1 for piece in name.split(".")[1:])
    return name.count("-") >= 2 or "@" in name or name[0] in "#$"


def message_text(message: Message) -> tuple[str, str]:
    """Return two texts to search: the model's own call arguments, and everything else in the message."""
    used: list[str] = []
    texts: list[str] = []
    for part in message.parts:
        match part:
            case ToolCall():
                for value in _argument_values(part.arguments):
                    (used if len(value) <= POINTED_LENGTH else texts).append(value)
            case Text(text=text) | ToolResult(text=text):
                texts.append(text)
            case Reasoning() | Media():
                pass
    return "\n".join(used), "\n".join(texts)


def _argument_values(arguments: str) -> list[str]:
    """Return the values in a call's arguments without JSON escapes; malformed JSON unchanged."""
    try:
        pending: list[object] = [json.loads(arguments)]
    except (ValueError, RecursionError):
        return [arguments.replace("\\n", "\n")]
    leaves: list[str] = []
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif value is not None:
            leaves.append(str(value))
    return leaves


Identifier = tuple[list[str], list[str]]


class IdentifierCache:
    """Caches the identifiers of messages: those in the model's own calls, and all others.

    Each message is read once, however many rounds of a plan need it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Message, Identifier]] = {}

    def identifiers_in(self, message: Message) -> Identifier:
        """Identifiers in order, repeated as mentioned."""
        # Keep the message with its names, so that its identity is not reused for another one.
        known = self._known.get(id(message))
        if known is None:
            used, texts = message_text(message)
            known = (message, (extract_identifiers(used), extract_identifiers(texts)))
            self._known[id(message)] = known
        return known[1]


def gather(
    known: Iterable[Reference], entries: Iterable[Entry], names: IdentifierCache | None = None
) -> tuple[Reference, ...]:
    """Return the candidates after ``entries`` were cut as well: merged, ranked best first, bounded.

    ``known`` are the candidates of the epoch before. The cost depends on ``entries`` and on the bound only.
    """
    names = names or IdentifierCache()
    found = {reference.text: reference for reference in known}
    last = max((reference.last_seq for reference in found.values()), default=1)
    for entry in entries:
        if entry.is_ours:
            continue
        used, texts = names.identifiers_in(entry.message)
        _mention(found, used, entry, used=True)
        _mention(found, texts, entry, used=False)
        last = max(last, entry.seq)
    return tuple(sorted(found.values(), key=ranking(last))[:MAX_CANDIDATES])


def _mention(found: dict[str, Reference], names: Iterable[str], entry: Entry, *, used: bool) -> None:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    for name, count in counts.items():
        before = found.get(name)
        fresh = before is None or before.last_seq <= entry.seq
        found[name] = Reference(
            text=name,
            turn=entry.turn if before is None or fresh else before.turn,
            last_seq=entry.seq if before is None or fresh else before.last_seq,
            mentions=count + (before.mentions if before else 0),
            used_by_model=used or (before is not None and before.used_by_model),
        )


def ranking(last: int) -> Callable[[Reference], tuple[float, int, str]]:
    """Return a sort key, best first, for candidates up to sequence number ``last``."""

    def key(reference: Reference) -> tuple[float, int, str]:
        score = (
            USED_WEIGHT * reference.used_by_model
            + MENTION_WEIGHT * min(reference.mentions, MENTION_CAP)
            + RECENCY_WEIGHT * reference.last_seq / last
            + PLACE_WEIGHT * _is_place(reference.text)
        )
        return (-score, -reference.last_seq, reference.text)

    return key


def _is_place(name: str) -> bool:
    """Return whether ``name`` can be opened. A line of a file (``src/app.py:42``, as compilers write) is gone when the
    file changes; the file itself is a name of its own.
    """
    return "/" in name and _LINE.search(name) is None


def visible_names(entries: Iterable[Entry], names: IdentifierCache | None = None) -> frozenset[str]:
    """Return the identifiers that ``entries`` show, which an index need not repeat."""
    names = names or IdentifierCache()
    return frozenset(name for entry in entries for found in names.identifiers_in(entry.message) for name in found)


def render_references(
    references: Sequence[Reference],
    *,
    title: str,
    limit: int,
    encode: Encode,
    shown: frozenset[str] = frozenset(),
    head: str = "",
) -> str:
    """Return ``title`` and one line ``t14: name other_name`` for each turn, in at most ``limit`` tokens.

    The best candidates are listed. Names in ``shown`` are passed over, and names that stand in ``head`` or in a longer
    name of the index. Empty when not one name fits.
    """
    turns: dict[int, list[str]] = {}
    # No name has a blank in it, so each word is searched once. The index is apart, since each name makes it anew.
    words, index = "\n".join(dict.fromkeys(head.split())), ""
    spent = encode(title)
    for reference in references:
        if reference.text in shown or reference.text in words or reference.text in index:
            continue
        cost = encode(f" {reference.text}")
        if reference.turn not in turns:
            cost += encode(f"\n{write_turn_id(reference.turn)}:")
        if spent + cost > limit:
            break
        spent += cost
        turns.setdefault(reference.turn, []).append(reference.text)
        index = f"{index}\n{reference.text}"
    lines = [f"{write_turn_id(turn)}: {' '.join(names)}" for turn, names in sorted(turns.items())]
    return "\n".join([title, *lines]) if lines else ""
