"""Repair tool calls and results so that a strict provider accepts any history, and prove it.

A provider refuses a request in which a call has no result, a result has no call, a message stands between the two, or a
message is empty. Histories of real clients have all of these. `repair` fixes them and reports what it did.
`prove_pairing` checks the result independently and shares no code with it.

A repaired message is a `Message` with ``raw=b""``, which the dialect writes from its parts. The raw form of a received
message is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec
from msgspec.structs import replace

from tersely.domain.history.context import Repair
from tersely.domain.history.history import Entry
from tersely.domain.messages import Media, Message, Part, Reasoning, Text, ToolCall, ToolResult
from tersely.domain.tokens import (
    CHARS_PER_TOKEN,
    MESSAGE_OVERHEAD,
    count_media,
    count_reasoning,
    estimate,
    estimate_text,
)

NO_RESULT = "[no result was recorded]"
EMPTY_MESSAGE = "[empty message]"


class UnpairedMessages(Exception):
    """A context that was about to leave is not valid: a fault of Tersely, never of the caller."""


# Maps (message index, part index) of a result to the index of the message that contains its call.
Owners = dict[tuple[int, int], int]


class _PairedCalls(msgspec.Struct, frozen=True, kw_only=True):
    owners: Owners
    duplicates: frozenset[tuple[int, int]]


def _match(messages: Sequence[Message]) -> _PairedCalls:
    """Pair each result with the nearest preceding call of its id; the first result wins."""
    latest: dict[str, int] = {}
    answered: set[tuple[int, str]] = set()
    owners: Owners = {}
    duplicates: set[tuple[int, int]] = set()
    for index, message in enumerate(messages):
        for position, part in enumerate(message.parts):
            if isinstance(part, ToolCall):
                latest[part.id] = index
            elif isinstance(part, ToolResult):
                owner = latest.get(part.call_id)
                if owner is None or owner == index:
                    continue
                if (owner, part.call_id) in answered:
                    duplicates.add((index, position))
                else:
                    answered.add((owner, part.call_id))
                    owners[index, position] = owner
    return _PairedCalls(owners=owners, duplicates=frozenset(duplicates))


def safe_cuts(messages: Sequence[Message]) -> tuple[bool, ...]:
    """Return for each index of ``messages`` whether a context may begin there.

    False between a call and its result, and at a message that contains only results.
    """
    spans = [0] * (len(messages) + 1)
    for (index, _), owner in _match(messages).owners.items():
        spans[owner + 1] += 1
        spans[index + 1] -= 1
    safe: list[bool] = []
    crossing = 0
    for index, message in enumerate(messages):
        crossing += spans[index]
        safe.append(crossing == 0 and not _is_only_results(message))
    return tuple(safe)


def repair(entries: Sequence[Entry]) -> tuple[tuple[Entry, ...], tuple[Repair, ...]]:
    """Make ``entries`` valid for a strict provider. A valid sequence is returned unchanged.

    Kinds of `Repair`: ``missing_result`` (a synthetic result was added after the call), ``orphan_result`` (without an
    earlier call: removed), ``duplicate_result`` (not the first: removed), ``moved_result`` (late: moved behind its
    call), ``duplicate_call`` (an id twice in one message: the first stays), ``empty_message`` (an assistant message
    without text or calls: removed), ``empty_content`` (a user message without content: replaced by a note, so that the
    turn stays).

    A result may arrive after a request went out with a synthetic one. It then replaces the synthetic result, which
    changes the prompt's prefix once: correctness is worth more than the cache.
    """
    repairer = _Repairer(entries)
    for index, entry in enumerate(entries):
        repairer.emit(index, entry)
    return tuple(repairer.out), tuple(repairer.repairs)


def prove_pairing(messages: Sequence[Message]) -> None:
    """Check that a strict provider would accept ``messages``. Raises `UnpairedMessages` saying where not.

    The invariant: right after a message with calls come results for exactly these calls, each once, before
    anything else; no other message carries results; call ids are unique within their message; no user or
    assistant message is empty.
    """
    open_ids: set[str] = set()
    for index, message in enumerate(messages):
        calls: list[str] = []
        results: list[str] = []
        has_content = bool(message.injected)
        for part in message.parts:
            if isinstance(part, Text):
                has_content = has_content or not (part.text == "" or part.text.isspace())
            elif isinstance(part, ToolCall):
                calls.append(part.id)
            elif isinstance(part, ToolResult):
                results.append(part.call_id)
            elif isinstance(part, Media):
                has_content = True
        _prove_message(index, message, calls=calls, results=results, has_content=has_content)
        if results or open_ids:
            _prove_results(index, message, results, open_ids)
        open_ids.update(calls)
    if open_ids:
        raise UnpairedMessages(f"{len(open_ids)} calls have no result")


def _prove_message(index: int, message: Message, *, calls: list[str], results: list[str], has_content: bool) -> None:
    if calls and message.role != "assistant":
        raise UnpairedMessages(f"message {index} makes calls as {message.role}")
    if len(calls) > 1 and len(set(calls)) != len(calls):
        raise UnpairedMessages(f"message {index} uses a call id twice")
    if message.role == "tool" and not results:
        raise UnpairedMessages(f"message {index} is a tool message without a result")
    if not (has_content or calls or results or message.is_instruction):
        raise UnpairedMessages(f"message {index} is empty")


def _prove_results(index: int, message: Message, results: list[str], open_ids: set[str]) -> None:
    """Check results against the open calls, and close these calls."""
    if len(set(results)) != len(results) or not open_ids.issuperset(results):
        raise UnpairedMessages(f"message {index} carries a result without an open call")
    open_ids.difference_update(results)
    carries_more = message.role != "tool" and len(results) < len(message.parts)
    if open_ids and (not results or carries_more):
        raise UnpairedMessages(f"message {index} stands between a call and its result")


class _Repairer:
    """The entries that one pass of `repair` has produced so far."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.out: list[Entry] = []
        self.repairs: list[Repair] = []
        self.matching = _match([entry.message for entry in entries])
        self.answers: dict[int, dict[int, list[int]]] = {}  # caller -> holder of results -> indexes of their parts
        for (holder, index), caller in self.matching.owners.items():
            self.answers.setdefault(caller, {}).setdefault(holder, []).append(index)
        self.done: set[int] = set()

    def emit(self, index: int, entry: Entry) -> None:
        """Add what remains of ``entry`` at its own position and, if it makes calls, their results after it."""
        if index in self.done:
            return
        remainder = self._remainder(index, entry)
        if remainder is None:
            return
        self.out.append(remainder)
        if remainder.message.calls:
            self._emit_answers(index, remainder)

    def _remainder(self, index: int, entry: Entry) -> Entry | None:
        message = entry.message
        if message.results:
            self._note_refused_results(index, entry)
            rest = () if message.role == "tool" else _without_results(message)
            if not (_has_content(rest) or message.injected):
                return None
            return self._without_double_calls(_with_parts(entry, rest, is_rest=True))
        if message.role == "tool":
            self._note("orphan_result", "", entry)
            return _with_parts(entry, (), is_rest=True) if message.injected else None
        if message.is_instruction or message.injected or _has_content(message.parts):
            return self._without_double_calls(entry)
        if message.role == "user":
            self._note("empty_content", "", entry)
            return _with_parts(entry, (Text(text=EMPTY_MESSAGE),))
        self._note("empty_message", "", entry)
        return None

    def _note_refused_results(self, index: int, entry: Entry) -> None:
        for position, part in enumerate(entry.message.parts):
            if isinstance(part, ToolResult) and (index, position) not in self.matching.owners:
                kind = "duplicate_result" if (index, position) in self.matching.duplicates else "orphan_result"
                self._note(kind, part.call_id, entry)

    def _without_double_calls(self, entry: Entry) -> Entry:
        seen: set[str] = set()
        parts: list[Part] = []
        for part in entry.message.parts:
            if isinstance(part, ToolCall):
                if part.id in seen:
                    self._note("duplicate_call", part.id, entry)
                    continue
                seen.add(part.id)
            parts.append(part)
        return entry if len(parts) == len(entry.message.parts) else _with_parts(entry, tuple(parts), is_rest=True)

    def _emit_answers(self, caller: int, entry: Entry) -> None:
        """Add the results of one message's calls: real ones, then synthetic ones, then a message that also has text.

        In some dialects a user message carries results *and* text. It ends the group: no result may follow text.
        """
        answered: set[str] = set()
        closing: Entry | None = None
        expected = caller + 1
        for holder, indexes in self.answers.get(caller, {}).items():
            carrier = self.entries[holder]
            parts = tuple(carrier.message.parts[index] for index in indexes)
            answered.update(part.call_id for part in parts if isinstance(part, ToolResult))
            in_place = closing is None and all(self._vanishes(i) for i in range(expected, holder))
            expected = holder + 1
            complete = len(parts) == len(carrier.message.results)
            only_results = carrier.message.role == "tool" or not _without_results(carrier.message)
            if not in_place:
                expected = len(self.entries)  # whatever comes later has been moved as well
                self._note_moved(parts, carrier)
            if complete and only_results:
                self.done.add(holder)
                self.out.append(carrier)
            elif complete and in_place and not carrier.message.calls:
                self.done.add(holder)
                closing = carrier
            else:
                self.out.append(_with_parts(carrier, parts))
        self._emit_missing(entry, answered)
        if closing is not None:
            self.out.append(closing)

    def _emit_missing(self, entry: Entry, answered: set[str]) -> None:
        for call in entry.message.calls:
            if call.id not in answered:
                self._note("missing_result", call.id, entry)
                self.out.append(_missing_result(entry, call.id))

    def _vanishes(self, index: int) -> bool:
        """Record that nothing of the message remains at its own position."""
        message = self.entries[index].message
        if message.injected:
            return False
        if message.results:
            return message.role == "tool" or not _has_content(_without_results(message))
        return message.role == "tool" or (message.role == "assistant" and not _has_content(message.parts))

    def _note_moved(self, parts: tuple[Part, ...], carrier: Entry) -> None:
        for part in parts:
            if isinstance(part, ToolResult):
                self._note("moved_result", part.call_id, carrier)

    def _note(self, kind: str, call_id: str, entry: Entry) -> None:
        self.repairs.append(Repair(kind=kind, call_id=call_id, seq=entry.seq))


def _has_content(parts: Iterable[Part]) -> bool:
    """Return whether a provider would find something in these parts: words, calls, results or media."""
    return any(bool(part.text.strip()) if isinstance(part, Text) else not isinstance(part, Reasoning) for part in parts)


def _without_results(message: Message) -> tuple[Part, ...]:
    return tuple(part for part in message.parts if not isinstance(part, ToolResult))


def _is_only_results(message: Message) -> bool:
    if message.role == "tool":
        return True
    # The first part decides nearly always.
    parts = message.parts
    return bool(parts) and type(parts[0]) is ToolResult and not _without_results(message)


def _with_parts(entry: Entry, parts: tuple[Part, ...], *, is_rest: bool = False) -> Entry:
    """Return the entry with other parts, as a synthetic message (``raw`` empty).

    ``is_rest``: the entry without its results. It keeps the injected blocks, in the user's role.
    """
    tokens = min(entry.tokens, _estimate_parts(parts)) if entry.tokens else _estimate_parts(parts)
    message = entry.message
    injected = message.injected if is_rest else ()
    role = "user" if injected and message.role == "tool" else message.role
    return replace(entry, message=Message(role=role, parts=parts, raw=b"", injected=injected), tokens=tokens)


def _missing_result(entry: Entry, call_id: str) -> Entry:
    parts: tuple[Part, ...] = (ToolResult(call_id=call_id, text=NO_RESULT),)
    message = Message(role="tool", parts=parts, raw=b"")
    return replace(entry, message=message, tokens=_estimate_parts(parts), pinned=False)


def _estimate_parts(parts: Iterable[Part]) -> int:
    chars = 0
    for part in parts:
        match part:
            case Text(text=text):
                chars += len(text)
            case Reasoning():
                chars += CHARS_PER_TOKEN * count_reasoning(part, estimate_text)
            case ToolCall():
                chars += len(part.id) + len(part.name) + len(part.arguments)
            case ToolResult():
                chars += len(part.call_id) + len(part.text)
            case Media():
                chars += CHARS_PER_TOKEN * count_media(part)
            case _:
                assert_never(part)
    return estimate(chars) + MESSAGE_OVERHEAD
