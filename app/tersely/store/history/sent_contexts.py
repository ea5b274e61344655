"""The contexts that were sent to models, as references to stored messages.

A request repeats most of the previous one. So a call stores a description: which stored message each element of the
request's message list is, verbatim or with a patch. An element that no stored message gives (heads, shortened texts, a
client's other spelling of a message) is a literal: a row of ``attributes``, stored once per content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from zlib import crc32

import msgspec

from tersely.store.db.connection import Connection
from tersely.store.history.differences import apply_difference, difference

KIND = "sent"
TOOLS_KIND = "sent_tools"
"""The kind of literals that say which tools were sent. They quote no message."""
BLOCK, GROUP = 16, 8
"""Elements per block, and blocks per group. Full blocks and full groups are literals: as long as a prompt's beginning
stays, calls share them, and a call's own description stays short.
"""
VERSION = 4
"""The version of new descriptions: a patch may apply to the model's view of a message. Since version 3 digests have 8
bytes, runs are of patched messages too, and numbers stand for common names.
"""
EARLIER = frozenset({1, 2})
"""Versions with digests of 12 bytes and with names."""
READABLE = EARLIER | {3, VERSION}
"""The versions that `decode` takes."""
MAX_ELEMENTS = 1_000_000
"""Of a context. A few bytes of an imported description may stand for any number of messages."""
DIGEST_SIZE = 8
EARLIER_DIGEST_SIZE = 12
# Numbers stand for these names: names may be added at the ends alone.
DIALECTS = ("openai_chat", "openai_responses", "anthropic", "gemini", "gemini_gca")
LAYERS = (
    "instructions", "tools", "tail", "injected", "activity_log", "references", "kept", "summary", "files", "memos",
    "note", "state", "scratchpad", "repeats", "tool_summary", "max_steps",
)  # fmt: skip

FULL, SHORTENED, ADDED = 0, 1, 2
"""How an element shows its message: as it is, shortened, or as something that Tersely added."""


class SentMessage(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One element of a request's message list.

    ``seq`` is the stored message (0: none), ``layer`` names what Tersely added. The bytes are those of ``literal``; or
    the stored bytes of ``seq`` with ``middle`` between their first ``prefix`` and their last ``suffix`` bytes
    (``prefix`` -1: the stored bytes alone). ``also``: further stored messages that are part of the element.
    ``is_of_model``: the patch applies to the model's view of the message, not to the client's.
    """

    seq: int
    shows: int = FULL
    literal: bytes = b""
    prefix: int = -1
    suffix: int = 0
    middle: bytes = b""
    layer: str = ""
    also: tuple[int, ...] = ()
    is_of_model: bool = False


class SentContext(msgspec.Struct, frozen=True, array_like=True):
    """The description of one request.

    ``groups`` are literals of the digests of `GROUP` blocks each (16 in earlier versions), ``blocks`` the literals of
    the elements behind them (`BLOCK` each; more in the first version), ``rest`` the last elements, ``instructions`` the
    literal of the instructions that stand outside of the message list. ``rounds`` are the lengths of the message lists
    of the requests before this one, where the reply was made in several rounds. ``checksum`` is that of all elements.
    ``tools``: `SAME_TOOLS`, or the literal of a `SentTools`; empty in descriptions of earlier versions.
    """

    version: int
    dialect: str
    blocks: tuple[bytes, ...]
    rest: bytes
    instructions: bytes
    layers: tuple[tuple[str, int], ...]
    rounds: tuple[int, ...]
    checksum: int
    count: int
    tools: bytes = b""
    groups: tuple[bytes, ...] = ()


SAME_TOOLS = b"="
"""The request had the client's tools, or none, as the client."""


class SentTools(msgspec.Struct, frozen=True, array_like=True):
    """The tools of a request, as a change of the client's: ``middle`` stands between their first ``prefix`` and their
    last ``suffix`` bytes. ``checksum`` is that of the result.
    """

    prefix: int
    suffix: int
    middle: bytes
    checksum: int


class _StoredContext(SentContext, frozen=True, array_like=True):
    """A description with numbers for common names."""

    dialect: str | int  # type: ignore[assignment]
    layers: tuple[tuple[str | int, int], ...]  # type: ignore[assignment]


_DIALECT_NUMBERS = {name: number for number, name in enumerate(DIALECTS)}
_LAYER_NUMBERS = {name: number for number, name in enumerate(LAYERS)}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StoredContext)
_raw_elements = msgspec.msgpack.Decoder(list[msgspec.Raw])
_one = msgspec.msgpack.Decoder(SentMessage)
_run = msgspec.msgpack.Decoder(dict[int, int | list[int | bytes]])
_tools = msgspec.msgpack.Decoder(SentTools)

LITERALS = """
SELECT digest, raw FROM attributes WHERE tenant_id = $1 AND session_id = $2
    AND kind IN ('sent', 'sent_tools') AND digest = ANY($3::bytea[])
"""
FORGET = "DELETE FROM attributes WHERE tenant_id = $1 AND session_id = $2 AND kind = 'sent'"
SENT = """
SELECT number, sent FROM calls
WHERE tenant_id = $1 AND session_id = $2 AND number > $3 AND last_seq >= $4 AND sent IS NOT NULL
ORDER BY number LIMIT $5
"""
SET_SENT = """
UPDATE calls SET sent = u.sent FROM unnest($3::bigint[], $4::bytea[]) AS u (number, sent)
WHERE tenant_id = $1 AND session_id = $2 AND calls.number = u.number
"""
DESCRIPTIONS_AT_ONCE = 500


def digest_of(raw: bytes) -> bytes:
    """The key of a literal."""
    return blake2b(raw, digest_size=DIGEST_SIZE, person=b"sent").digest()


def checksum(raws: Iterable[bytes], value: int = 0) -> int:
    """Return a checksum over all elements and their ends. ``value``: the checksum of the elements before them."""
    for raw in raws:
        value = crc32(b"\n", crc32(raw, value))
    return value


class _Run:
    """Consecutive stored messages, byte for byte: the first one and how many. Or, with ``suffix`` and ``middle``,
    messages that the same bytes are put into: ``numbers`` are the length of each one's beginning, and how many messages
    follow it byte for byte. Where the patch applies to the model's views, ``suffix`` is stored as -1 - ``suffix``.
    """

    def __init__(self, element: SentMessage) -> None:
        self.start = self.next = element.seq
        self.patch = None if element.prefix < 0 else _patch_of(element)
        self.numbers: list[int] = []

    def add(self, element: SentMessage) -> bool:
        """Add the next message; return False if it is no part of the run."""
        if element.seq != self.next:
            return False
        if element.prefix < 0:
            if self.patch is not None:
                self.numbers[-1] += 1
        elif self.patch == _patch_of(element):
            self.numbers += (element.prefix, 0)
        else:
            return False
        self.next += 1
        return True

    def packed(self) -> dict[int, object]:
        if self.patch is None:
            return {self.start: self.next - self.start}
        return {self.start: [*self.patch, *self.numbers]}


def _patch_of(element: SentMessage) -> tuple[bytes, int]:
    """Return what elements of one run have in common: the bytes that are put in, and ``suffix`` as a run stores it."""
    return element.middle, -1 - element.suffix if element.is_of_model else element.suffix


def pack(elements: Sequence[SentMessage]) -> bytes:
    """Elements as bytes. Consecutive stored messages become one entry, also those that take the same patch."""
    found: list[object] = []
    run: _Run | None = None
    for element in elements:
        # A stored message which nothing of Tersely's is part of.
        is_stored = element.seq > 0 and not element.literal and not element.layer and not element.also
        if not is_stored or element.shows != FULL:
            if run is not None:
                found.append(run.packed())
                run = None
            found.append(element)
        elif run is None or not run.add(element):
            if run is not None:
                found.append(run.packed())
            run = _Run(element)
            run.add(element)
    if run is not None:
        found.append(run.packed())
    return _encoder.encode(found)


def unpack(packed: bytes, most: int = MAX_ELEMENTS) -> list[SentMessage]:
    """The inverse of `pack`. Raises `msgspec.DecodeError`, also for runs that are longer than ``most``."""
    found: list[SentMessage] = []
    for raw in _raw_elements.decode(packed):
        # A fixed array is an element, a map is a run.
        if b"\x90" <= bytes(raw)[:1] <= b"\x9f":
            found.append(_one.decode(raw))
            continue
        for start, run in _run.decode(raw).items():
            if len(found) + _length(run) > most:
                raise msgspec.DecodeError(f"more than {most} elements")
            if isinstance(run, int):
                found += [SentMessage(seq) for seq in range(start, start + run)]
            else:
                found += _patched(start, run)
    return found


def _length(run: int | Sequence[int | bytes]) -> int:
    if isinstance(run, int):
        return run
    return sum(1 + max(count, 0) for count in run[3::2] if isinstance(count, int))


def _patched(start: int, run: Sequence[int | bytes]) -> list[SentMessage]:
    match run:
        case [bytes(middle), int(suffix), *numbers] if len(numbers) % 2 == 0:
            pass
        case _:
            raise msgspec.DecodeError("a run of patched messages has bytes, a number, and pairs of numbers")
    is_of_model = suffix < 0
    if is_of_model:
        suffix = -1 - suffix
    found: list[SentMessage] = []
    seq = start
    for prefix, count in zip(numbers[::2], numbers[1::2], strict=True):
        if isinstance(prefix, bytes) or isinstance(count, bytes):
            raise msgspec.DecodeError("a run of patched messages has numbers")
        found.append(SentMessage(seq, prefix=prefix, suffix=suffix, middle=middle, is_of_model=is_of_model))
        found += [SentMessage(each) for each in range(seq + 1, seq + 1 + count)]
        seq += 1 + count
    return found


def split_group(group: bytes, version: int = VERSION) -> list[bytes]:
    """Return the digests of the blocks of a group, which is these digests in a row. ``version`` is that of its
    description.
    """
    size = EARLIER_DIGEST_SIZE if version in EARLIER else DIGEST_SIZE
    return [group[at : at + size] for at in range(0, len(group), size)]


def pack_tools(client: bytes, sent: bytes) -> bytes:
    """Return how the tools of a request are made of the client's."""
    return _encoder.encode(SentTools(*difference(client, sent), crc32(sent)))


def unpack_tools(packed: bytes, client: bytes) -> bytes | None:
    """Return the tools that were sent; None if the client's are not the ones that they were made of."""
    try:
        tools = _tools.decode(packed)
    except msgspec.DecodeError:
        return None
    sent = apply_difference(client, tools.prefix, tools.suffix, tools.middle)
    return sent if crc32(sent) == tools.checksum else None


def encode(sent: SentContext) -> bytes:
    """A description as it is stored."""
    if sent.version in EARLIER:
        return _encoder.encode(sent)
    dialect = _DIALECT_NUMBERS.get(sent.dialect, sent.dialect)
    layers = [(_LAYER_NUMBERS.get(name, name), tokens) for name, tokens in sent.layers]
    return _encoder.encode(
        (
            sent.version, dialect, sent.blocks, sent.rest, sent.instructions, layers, sent.rounds, sent.checksum,
            sent.count, sent.tools, sent.groups,
        )
    )  # fmt: skip


def decode(stored: bytes) -> SentContext | None:
    """The inverse of `encode`; None for a description of another version."""
    try:
        sent = _decoder.decode(stored)
        if sent.version not in READABLE:
            return None
        values = {name: getattr(sent, name) for name in SentContext.__struct_fields__}
        dialect, layers = sent.dialect, [(_name_of(name, LAYERS), tokens) for name, tokens in sent.layers]
        return SentContext(**values | {"dialect": _name_of(dialect, DIALECTS), "layers": tuple(layers)})
    except (msgspec.DecodeError, IndexError):
        return None


def _name_of(name: str | int, names: Sequence[str]) -> str:
    """Return the name that ``name`` stands for. Raises `IndexError` for a number that stands for none."""
    return names[name] if isinstance(name, int) else name


def renumber(stored: bytes, seqs: Mapping[int, int]) -> bytes:
    """Return the description with other sequence numbers, if the messages were stored elsewhere than first decided.

    Blocks stay unchanged, since new elements are at the end. If that is not so, the checksum shows it.
    """
    sent = decode(stored)
    if sent is None:
        return stored
    rest = [msgspec.structs.replace(each, seq=seqs.get(each.seq, each.seq)) for each in unpack(sent.rest)]
    return encode(msgspec.structs.replace(sent, rest=pack(rest)))


async def literals(
    connection: Connection, tenant: str, session_id: str, digests: Iterable[bytes]
) -> dict[bytes, bytes]:
    """Map the digests of stored literals to their content."""
    rows = await connection.fetch(LITERALS, tenant, session_id, list(dict.fromkeys(digests)))
    return {row["digest"]: row["raw"] for row in rows}


async def forget(connection: Connection, tenant: str, session_id: str, seqs: Collection[int]) -> None:
    """Delete what may quote these messages, which are removed for good: the session's literals, and the patches that
    descriptions of calls have for the messages.
    """
    await connection.execute(FORGET, tenant, session_id)
    after = 0
    while True:
        records = await connection.fetch(SENT, tenant, session_id, after, min(seqs), DESCRIPTIONS_AT_ONCE)
        left = [(record["number"], record["sent"], _without_patches(record["sent"], seqs)) for record in records]
        changed = {number: new for number, old, new in left if new != old}
        if changed:
            await connection.execute(SET_SENT, tenant, session_id, list(changed), list(changed.values()))
        if len(records) < DESCRIPTIONS_AT_ONCE:
            return
        after = records[-1]["number"]


def _without_patches(stored: bytes, seqs: Collection[int]) -> bytes | None:
    """Return a description without the patches of these messages; None if it cannot be read."""
    sent = decode(stored)
    if sent is None:
        return None
    try:
        rest = unpack(sent.rest)
    except msgspec.DecodeError:
        return None
    if not any(each.seq in seqs and each.prefix >= 0 for each in rest):
        return stored
    left = [
        msgspec.structs.replace(each, prefix=-1, suffix=0, middle=b"", is_of_model=False) if each.seq in seqs else each
        for each in rest
    ]
    return encode(msgspec.structs.replace(sent, rest=pack(left)))
