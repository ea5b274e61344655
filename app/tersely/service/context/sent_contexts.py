"""Describe what a request sends to the model, so that the store can give it back byte for byte.

The description is made from the bytes that go upstream, after everything that may still change them. It runs while the
model works.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from tersely.dialects.openai_responses.content import items_of
from tersely.dialects.wire import raw_json
from tersely.domain.history.context import LayerReport
from tersely.store.commit.records import Attribute, NewReply
from tersely.store.history.patches import Patch, find_patch
from tersely.store.history.sent_contexts import (
    ADDED,
    BLOCK,
    FULL,
    GROUP,
    KIND,
    SAME_TOOLS,
    SHORTENED,
    TOOLS_KIND,
    VERSION,
    SentContext,
    SentMessage,
    checksum,
    digest_of,
    encode,
    pack,
    pack_tools,
)

# Dialect -> members of the request that hold its messages and its instructions.
MEMBERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "openai_chat": ("messages", ()),
    "openai_responses": ("input", ("instructions",)),
    "anthropic": ("messages", ("system",)),
    "gemini": ("contents", ("systemInstruction", "system_instruction")),
    "gemini_gca": ("contents", ("systemInstruction", "system_instruction")),
}
MIN_PATCHED = 64
"""Bytes; a shorter element is a literal rather than a patch."""
MAX_PATCH = 256
"""Bytes; an element that takes a larger patch is a literal: calls repeat their newest patches."""
MAX_KNOWN = 20_000
RECENT_BYTES = 64 * 1024
"""Most bytes of the newest messages of one session that are kept; of larger ones only the digests are."""
_ENTRY_BYTES = 160
"""Bytes of memory of a digest with its key, about."""
INSTRUCTIONS = "instructions"
REPEATS = "repeats"
"""The layer of a message that has references for repeated text."""


class MessageSource(NamedTuple):
    """The source of a message in a request: its bytes before the dialect writes the request, its sequence number (0:
    none), how it shows the message, the layer where Tersely added it, and further messages that are joined with it.
    """

    raw: bytes
    seq: int
    shows: int = FULL
    layer: str = ""
    also: tuple[int, ...] = ()


class KnownSession(msgspec.Struct):
    """The stored content of a session, as this process knows it. ``stored``: sequence number -> digest of the stored
    bytes; ``literals``: digests; ``recent``: the stored bytes of the newest messages; ``views``: the model's views of
    these, where they differ; ``patched``: sequence number and digest of the bytes that were sent -> the patch that
    gives them.
    """

    edits: int
    stored: dict[int, bytes] = msgspec.field(default_factory=dict)
    literals: set[bytes] = msgspec.field(default_factory=set)
    recent: dict[int, bytes] = msgspec.field(default_factory=dict)
    views: dict[int, bytes] = msgspec.field(default_factory=dict)
    patched: dict[tuple[int, bytes], SentMessage] = msgspec.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        texts = sum(map(len, self.recent.values())) + sum(map(len, self.views.values()))
        return _ENTRY_BYTES * (1 + len(self.stored) + len(self.literals) + 3 * len(self.patched)) + texts


class KnownSessions:
    """`KnownSession` of the sessions seen last, within a budget. Forgotten content is stored again without effect."""

    def __init__(self, budget: int) -> None:
        """``budget`` in bytes of memory."""
        self._budget = budget
        self._sessions: OrderedDict[tuple[str, str], tuple[KnownSession, int]] = OrderedDict()
        self._size = 0

    def get(self, tenant: str, session_id: str, edits: int) -> KnownSession:
        """Return what is known; nothing after an edit of the session, which may have deleted literals."""
        known, _ = self._sessions.get((tenant, session_id), (None, 0))
        if known is None or known.edits != edits or len(known.stored) + len(known.literals) > MAX_KNOWN:
            known = KnownSession(edits)
        return known

    def learn(
        self,
        tenant: str,
        session_id: str,
        description: Description,
        replies: Mapping[int, NewReply] = MappingProxyType({}),
        digests: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """Remember what a finished write has stored. ``replies``: by sequence number; ``digests``: of their ``raw``."""
        known = description.known
        known.stored.update(description.digests)
        known.literals.update(literal.digest for literal in description.literals)
        known.patched.update(description.patched)
        known.stored.update(digests)
        recent, views = dict(description.new), {}
        for seq, reply in replies.items():
            recent[seq] = reply.raw
            if reply.model_raw is not None:
                views[seq] = reply.model_raw
        if recent:
            is_small = sum(map(len, recent.values())) + sum(map(len, views.values())) <= RECENT_BYTES
            known.recent, known.views = (recent, views) if is_small else ({}, {})
        self.forget(tenant, session_id)
        size = known.size
        self._sessions[tenant, session_id] = known, size
        self._size += size
        while self._size > self._budget:
            _, (_, size) = self._sessions.popitem(last=False)
            self._size -= size

    def forget(self, tenant: str, session_id: str) -> None:
        """Forget a session whose messages were not stored as was decided."""
        _, size = self._sessions.pop((tenant, session_id), (None, 0))
        self._size -= size


class Elements(msgspec.Struct, frozen=True):
    """The elements of a request, as a later request that only adds elements repeats them: the literals of the full
    groups and blocks, the elements behind these, and the checksum and the count of all of them. ``tools``: see
    `SentContext`.
    """

    groups: tuple[bytes, ...] = ()
    blocks: tuple[bytes, ...] = ()
    rest: tuple[SentMessage, ...] = ()
    checksum: int = 0
    count: int = 0
    tools: bytes = b""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A description, the literals that are to be stored with it, and the request's new messages with their digests."""

    body: bytes
    sent: bytes
    elements: Elements
    literals: tuple[Attribute, ...]
    new: Mapping[int, bytes]
    digests: Mapping[int, bytes]
    patched: Mapping[tuple[int, bytes], SentMessage]
    known: KnownSession


class BodyParts(NamedTuple):
    """The elements of a request's message list, its instructions beside the list, and its tools (empty: none)."""

    elements: list[bytes]
    instructions: bytes
    tools: bytes


def body_parts(body: bytes, dialect: str) -> BodyParts:
    """Return the parts of a request. Raises `ValueError` for a body without a message list."""
    members = raw_json.split_object(body)
    if dialect == "gemini_gca":
        members = raw_json.split_object(members.get("request", b"{}"))
    name, others = MEMBERS[dialect]
    instructions = next((members[other] for other in others if other in members), b"")
    given = members.get(name, b"[]").strip()
    elements = raw_json.split_array(given) if given.startswith(b"[") else [given]
    tools = members.get("tools", b"")
    if not tools.startswith(b"["):  # an older form of OpenAI's requests
        tools = members.get("functions", b"")
    return BodyParts(elements, instructions, tools)


def describe(
    body: bytes,
    dialect: str,
    *,
    sources: Sequence[MessageSource],
    new: Mapping[int, bytes],
    known: KnownSession,
    layers: Sequence[LayerReport] = (),
    rounds: Sequence[int] = (),
    volatile: int = 0,
    client_tools: bytes = b"",
) -> Description:
    """Describe the request ``body``. The last ``volatile`` elements are no part of `Description.elements`.

    ``sources`` are its messages in order, as they were before the dialect wrote them into the body. ``new`` are the
    bytes that will be stored of the request's new messages. ``client_tools`` are those of the client's request.
    """
    elements, instructions, tools = body_parts(body, dialect)
    if instructions:
        # What stands beside the list is no element of it.
        sources = [*dropwhile(lambda each: each.layer == INSTRUCTIONS and each.raw not in elements, sources)]
    aligned = _align(elements, sources, dialect)
    packed = b"" if tools == client_tools else pack_tools(client_tools, tools)
    before = Elements(tools=digest_of(packed) if packed else SAME_TOOLS)
    return _describe(body, dialect, before, list(zip(elements, aligned, strict=True)), instructions, new=new,
                     known=known, layers=layers, rounds=rounds, volatile=volatile, packed_tools=packed)  # fmt: skip


def describe_added(
    dialect: str,
    before: Elements,
    added: Sequence[tuple[bytes, MessageSource]],
    *,
    new: Mapping[int, bytes],
    known: KnownSession,
    layers: Sequence[LayerReport] = (),
    instructions: bytes = b"",
    volatile: int = 0,
) -> Description:
    """Describe a request that adds elements to those of an earlier request and changes nothing else. ``added`` are
    these elements with their sources, of which the last ``volatile`` are no part of `Description.elements`.
    ``instructions``: those beside the list.

    The result equals that of `describe`, but that `Description.body` is empty. The work depends on the size of
    ``added``, not on that of the whole request.
    """
    return _describe(b"", dialect, before, added, instructions, new=new, known=known,
                     layers=layers, rounds=(), volatile=volatile)  # fmt: skip


def _describe(
    body: bytes,
    dialect: str,
    before: Elements,
    added: Sequence[tuple[bytes, MessageSource | None]],
    instructions: bytes,
    *,
    new: Mapping[int, bytes],
    known: KnownSession,
    layers: Sequence[LayerReport],
    rounds: Sequence[int],
    volatile: int,
    packed_tools: bytes = b"",
) -> Description:
    literals: dict[bytes, bytes] = {}

    def literal(raw: bytes) -> bytes:
        digest = digest_of(raw)
        if digest not in known.literals:
            literals[digest] = raw
        return digest

    patched: dict[tuple[int, bytes], SentMessage] = {}
    described = [*before.rest, *[_element(raw, source, new, known, literal, patched) for raw, source in added]]
    full = len(described) - len(described) % BLOCK
    stays, stay_added = max(0, len(described) - volatile), max(0, len(added) - volatile)
    staying = stays - stays % BLOCK
    raws = [raw for raw, _ in added]
    groups, blocks = before.groups, before.blocks
    if staying:
        groups, blocks = _with_blocks(groups, blocks, described[:staying], literal)
    elements = Elements(
        groups=groups,
        blocks=blocks,
        rest=tuple(described[staying:stays]),
        checksum=checksum(raws[:stay_added], before.checksum),
        count=before.count + stay_added,
        tools=before.tools,
    )
    if full > staying:
        groups, blocks = _with_blocks(groups, blocks, described[staying:full], literal)
    sent = SentContext(
        version=VERSION,
        dialect=dialect,
        blocks=blocks,
        rest=pack(described[full:]),
        instructions=literal(instructions) if instructions else b"",
        layers=tuple([(layer.name, layer.tokens) for layer in layers]),
        rounds=tuple(rounds),
        checksum=checksum(raws[stay_added:], elements.checksum),
        count=before.count + len(added),
        tools=before.tools,
        groups=groups,
    )
    attributes = [Attribute(digest=digest, kind=KIND, raw=raw) for digest, raw in literals.items()]
    if packed_tools and before.tools not in known.literals:
        attributes.append(Attribute(digest=before.tools, kind=TOOLS_KIND, raw=packed_tools))
    return Description(
        body=body,
        sent=encode(sent),
        elements=elements,
        literals=tuple(attributes),
        new=new,
        digests={seq: digest_of(raw) for seq, raw in new.items()},
        patched=patched,
        known=known,
    )


def _with_blocks(
    groups: tuple[bytes, ...],
    blocks: tuple[bytes, ...],
    added: Sequence[SentMessage],
    literal: Callable[[bytes], bytes],
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return groups and blocks with those of the elements ``added``, which fill their blocks."""
    blocks += tuple([literal(pack(added[at : at + BLOCK])) for at in range(0, len(added), BLOCK)])
    while len(blocks) >= GROUP:
        groups, blocks = (*groups, literal(b"".join(blocks[:GROUP]))), blocks[GROUP:]
    return groups, blocks


def _element(
    raw: bytes,
    source: MessageSource | None,
    new: Mapping[int, bytes],
    known: KnownSession,
    literal: Callable[[bytes], bytes],
    patched: dict[tuple[int, bytes], SentMessage],
) -> SentMessage:
    if source is None:
        return SentMessage(0, ADDED, literal(raw))
    seq, shows, layer = source.seq, source.shows, source.layer
    if source.also:
        return SentMessage(seq, shows, literal(raw), layer=layer, also=source.also)
    if seq:
        stored = new.get(seq)
        if stored is None:
            stored = known.recent.get(seq)
        if stored == raw:
            return SentMessage(seq, shows)
        digest = digest_of(raw)
        if stored is None and known.stored.get(seq) == digest:
            return SentMessage(seq, shows)
        element = known.patched.get((seq, digest))
        if element is not None and element.shows == shows:
            return element
        # The model's view has the tags of a reply already: a patch of this view need not repeat them.
        patch = _patch(known.views.get(seq), raw)
        is_of_model = patch is not None
        if patch is None:
            patch = _patch(stored if stored is not None else _same_as_stored(source, known), raw)
        if patch is not None:
            layer = layer if layer == REPEATS else ""
            element = SentMessage(seq, shows, patch=patch, layer=layer, is_of_model=is_of_model)
            patched[seq, digest] = element
            return element
    return SentMessage(seq, shows, literal(raw), layer=layer)


def _same_as_stored(source: MessageSource, known: KnownSession) -> bytes | None:
    """The bytes that the client sent, where they are the stored ones."""
    return source.raw if known.stored.get(source.seq) == digest_of(source.raw) else None


def _patch(stored: bytes | None, raw: bytes) -> Patch | None:
    """Return what turns ``stored`` into ``raw``; None where a patch saves too little."""
    if stored is None or len(raw) < MIN_PATCHED:
        return None
    return find_patch(stored, raw, MAX_PATCH)


def _align(elements: Sequence[bytes], sources: Sequence[MessageSource], dialect: str) -> list[MessageSource | None]:
    """The source of each element. Equal bytes are anchors; between two of them, both go in order."""
    given = [part for source in sources for part in _parts(source, dialect)]
    # Nearly always the body has the sources as they are, one after the other.
    at = next((at for at, (raw, source) in enumerate(zip(elements, given, strict=False)) if raw != source.raw), None)
    if at is None:
        at = min(len(elements), len(given))
    found: list[MessageSource | None] = [*given[:at]]
    if at == len(elements):
        return found
    indexes: dict[bytes, list[int]] = {}
    for index, source in enumerate(given[at:], at):
        indexes.setdefault(source.raw, []).append(index)
    for raw in elements[at:]:
        anchors = [each for each in indexes.get(raw, ()) if each >= at][:1]
        found += [given[each] for each in anchors] or [None]
        at = anchors[0] + 1 if anchors else at
    _fill_gaps(found, given)
    return found


def _fill_gaps(found: list[MessageSource | None], given: Sequence[MessageSource]) -> None:
    """Give the elements between two anchors the sources between them, in order.

    Where more elements than sources stand there, the first ones were added; where fewer, the last one is all the rest.
    """
    position = {id(source): index for index, source in enumerate(given)}
    start = 0
    index = 0
    while index < len(found):
        if found[index] is not None:
            start = position[id(found[index])] + 1
            index += 1
            continue
        end = index
        while end < len(found) and found[end] is None:
            end += 1
        stop = position[id(found[end])] if end < len(found) else len(given)
        between = [source for source in given[start:stop] if source.layer != INSTRUCTIONS or source.seq]
        gap = end - index
        if len(between) > gap:
            also = tuple(source.seq for source in between[gap:] if source.seq)
            between = [*between[: gap - 1], between[gap - 1]._replace(also=also)]
        first = end - len(between)
        found[first:end] = between
        index = end


def _parts(source: MessageSource, dialect: str) -> list[MessageSource]:
    """A source as the elements that it becomes: one message of the responses format is a run of items."""
    if dialect != "openai_responses" or source.layer == INSTRUCTIONS:
        return [source]
    return [source._replace(raw=item) for item in items_of(source.raw)]


__all__ = [
    "ADDED",
    "FULL",
    "SHORTENED",
    "Description",
    "Elements",
    "KnownSessions",
    "MessageSource",
    "body_parts",
    "describe",
    "describe_added",
]
