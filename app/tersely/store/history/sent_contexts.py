"""The contexts that were sent to models, as references to stored messages.

A request repeats most of the previous one. So a call stores a description: which stored message each element of the
request's message list is, verbatim or with a patch. An element that no stored message gives (heads, shortened texts, a
client's other spelling of a message) is a literal: a row of ``attributes``, stored once per content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from zlib import crc32

import msgspec
from asyncpg import Record
from msgspec import structs

from tersely.store.db.connection import Connection
from tersely.store.db.ranges import END
from tersely.store.history.differences import apply_difference, difference
from tersely.store.history.patches import Patch, is_patch, puts_in

KIND = "sent"
TOOLS_KIND = "sent_tools"
"""The kind of literals that say which tools were sent. They quote no message."""
BLOCK, GROUP = 16, 8
"""Elements per block, and blocks per group. Full blocks and full groups are literals: as long as a prompt's beginning
stays, calls share them, and a call's own description stays short.
"""
VERSION = 5
"""The version of new descriptions: a patch has any number of pieces. Since version 4 it may apply to the model's view
of a message; since version 3 digests have 8 bytes, runs are of patched messages too, and numbers stand for common
names.
"""
EARLIER = frozenset({1, 2})
"""Versions with digests of 12 bytes and with names."""
READABLE = EARLIER | {3, 4, VERSION}
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
    what ``patch`` makes of the stored bytes of ``seq`` (empty: these bytes). ``also``: further stored messages that are
    part of the element. ``is_of_model``: the patch applies to the model's view of the message, not to the client's.
    """

    seq: int
    shows: int = FULL
    literal: bytes = b""
    patch: Patch = ()
    layer: str = ""
    also: tuple[int, ...] = ()
    is_of_model: bool = False


class _EarlierMessage(msgspec.Struct, frozen=True, array_like=True):
    """An element of the versions before 5. Its patch puts ``middle`` between the first ``prefix`` and the last
    ``suffix`` bytes (``prefix`` -1: there is none).
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
_run = msgspec.msgpack.Decoder(dict[int, int | tuple[Patch, bool, list[int]]])
_earlier_one = msgspec.msgpack.Decoder(_EarlierMessage)
_earlier_run = msgspec.msgpack.Decoder(dict[int, int | list[int | bytes]])
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
    """Consecutive stored messages, byte for byte: the first one and how many. Or messages that take the same patch:
    ``counts`` say how many messages follow each of them byte for byte.
    """

    def __init__(self, element: SentMessage) -> None:
        self.start = self.next = element.seq
        self.patch, self.is_of_model = element.patch, element.is_of_model
        self.counts: list[int] = []

    def add(self, element: SentMessage) -> bool:
        """Add the next message; return False if it is no part of the run."""
        if element.seq != self.next:
            return False
        if not element.patch:
            if self.patch:
                self.counts[-1] += 1
        elif (element.patch, element.is_of_model) == (self.patch, self.is_of_model):
            self.counts.append(0)
        else:
            return False
        self.next += 1
        return True

    def packed(self) -> dict[int, object]:
        if not self.patch:
            return {self.start: self.next - self.start}
        return {self.start: (self.patch, self.is_of_model, self.counts)}


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


def unpack(packed: bytes, most: int = MAX_ELEMENTS, *, version: int = VERSION) -> list[SentMessage]:
    """The inverse of `pack`, also of that of an earlier version. Raises `msgspec.DecodeError`, also for runs that are
    longer than ``most``.
    """
    try:
        return _unpack(packed, most, version)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deep") from error


def _unpack(packed: bytes, most: int, version: int) -> list[SentMessage]:
    one, runs = (_one_of, _runs) if version == VERSION else (_one_of_earlier, _runs_of_earlier)
    found: list[SentMessage] = []
    for raw in _raw_elements.decode(packed):
        # A fixed array is an element, a map is a run.
        if b"\x90" <= bytes(raw)[:1] <= b"\x9f":
            found.append(one(raw))
            _check_range(found[-1].seq, 1)
            continue
        for start, patch, is_of_model, counts in runs(raw):
            if min(counts, default=0) < 0:
                raise msgspec.DecodeError("a run has no negative counts")
            length = len(counts) + sum(counts)
            if len(found) + length > most:
                raise msgspec.DecodeError(f"more than {most} elements")
            _check_range(start, length)
            seq = start
            for count in counts:
                found.append(SentMessage(seq, patch=patch, is_of_model=is_of_model))
                found += [SentMessage(each) for each in range(seq + 1, seq + 1 + count)]
                seq += 1 + count
    return found


_Patched = tuple[int, Patch, bool, list[int]]
"""The first message of a run, the patch, whether it applies to the model's view, and the counts (see `_Run`)."""


def _one_of(raw: msgspec.Raw) -> SentMessage:
    element = _one.decode(raw)
    _check(element.patch)
    return element


def _runs(raw: msgspec.Raw) -> Iterator[_Patched]:
    for start, run in _run.decode(raw).items():
        if isinstance(run, int):
            yield start, (), False, [run - 1] if run > 0 else []
        else:
            _check(run[0])
            yield start, *run


def _check_range(start: int, length: int) -> None:
    if not 0 <= start <= END - length:
        raise msgspec.DecodeError("there is no such message")


def _check(patch: Patch) -> None:
    if not is_patch(patch):
        raise msgspec.DecodeError("a patch has bytes and pairs of numbers")


def _one_of_earlier(raw: msgspec.Raw) -> SentMessage:
    seq, shows, literal, prefix, suffix, middle, layer, also, is_of_model = structs.astuple(_earlier_one.decode(raw))
    patch = _earlier_patch(prefix, suffix, middle) if prefix >= 0 else ()
    return SentMessage(seq, shows, literal, patch, layer, also, is_of_model)


def _runs_of_earlier(raw: msgspec.Raw) -> Iterator[_Patched]:
    """Yield runs of which each had a suffix, -1 - suffix for the model's views, and for each patch its prefix."""
    for start, run in _earlier_run.decode(raw).items():
        match run:
            case int():
                yield start, (), False, [run - 1] if run > 0 else []
                continue
            case [bytes(middle), int(suffix), *numbers] if len(numbers) % 2 == 0:
                pass
            case _:
                raise msgspec.DecodeError("a run of patched messages has bytes, a number, and pairs of numbers")
        is_of_model = suffix < 0
        seq = start
        for prefix, count in zip(numbers[::2], numbers[1::2], strict=True):
            if isinstance(prefix, bytes) or isinstance(count, bytes):
                raise msgspec.DecodeError("a run of patched messages has numbers")
            yield seq, _earlier_patch(prefix, -1 - suffix if is_of_model else suffix, middle), is_of_model, [count]
            seq += 1 + count


def _earlier_patch(prefix: int, suffix: int, middle: bytes) -> Patch:
    """Return the patch that puts ``middle`` between the first ``prefix`` and the last ``suffix`` bytes."""
    return (*((0, prefix) if prefix > 0 else ()), middle, *((-suffix, 0) if suffix > 0 else ()))


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
    except (msgspec.DecodeError, RecursionError):
        return None
    sent = apply_difference(client, tools.prefix, tools.suffix, tools.middle)
    return sent if crc32(sent) == tools.checksum else None


def encode(sent: SentContext) -> bytes:
    """A description as it is stored."""
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
    except (msgspec.DecodeError, IndexError, RecursionError):
        return None


def _name_of(name: str | int, names: Sequence[str]) -> str:
    """Return the name that ``name`` stands for. Raises `IndexError` for a number that stands for none."""
    return names[name] if isinstance(name, int) else name


def renumber(stored: bytes, seqs: Mapping[int, int]) -> bytes:
    """Return the description with other sequence numbers, if the messages were stored elsewhere than first decided.

    Blocks stay unchanged, since new elements are at the end. If that is not so, the checksum shows it.
    """
    sent = decode(stored)
    if sent is None or (sent.version != VERSION and (sent.blocks or sent.groups)):
        return stored  # what an earlier version wrote is read, and not written again
    elements = unpack(sent.rest, version=sent.version)
    return _with_rest(sent, [structs.replace(each, seq=seqs.get(each.seq, each.seq)) for each in elements])


def _with_rest(sent: SentContext, rest: Sequence[SentMessage]) -> bytes:
    """Return the description with other last elements, as one of this version. One of an earlier version must have no
    blocks, or none that are still there.
    """
    return encode(structs.replace(sent, rest=pack(rest), version=VERSION))


async def literals(
    connection: Connection, tenant: str, session_id: str, digests: Iterable[bytes]
) -> dict[bytes, bytes]:
    """Map the digests of stored literals to their content."""
    rows = await connection.fetch(LITERALS, tenant, session_id, list(dict.fromkeys(digests)))
    return {row["digest"]: row["raw"] for row in rows}


async def forget(connection: Connection, tenant: str, session_id: str, seqs: Collection[int]) -> None:
    """Delete what may quote these messages, which are removed for good: the session's literals, the patches that
    descriptions of calls have for the messages, and all patches that put in bytes, since Tersely may have put words of
    the messages beside others.
    """
    await connection.execute(FORGET, tenant, session_id)
    after = 0
    while True:
        records = await connection.fetch(SENT, tenant, session_id, after, min(seqs), DESCRIPTIONS_AT_ONCE)
        changed = await asyncio.to_thread(_changed, records, seqs)
        if changed:
            await connection.execute(SET_SENT, tenant, session_id, list(changed), list(changed.values()))
        if len(records) < DESCRIPTIONS_AT_ONCE:
            return
        after = records[-1]["number"]


def _changed(records: Sequence[Record], seqs: Collection[int]) -> dict[int, bytes | None]:
    """Return the descriptions that quote these messages, without the quotes, by the numbers of their calls."""
    left = [(record["number"], record["sent"], _without_patches(record["sent"], seqs)) for record in records]
    return {number: new for number, old, new in left if new != old}


def _without_patches(stored: bytes, seqs: Collection[int]) -> bytes | None:
    """Return a description without the patches of these messages, and without bytes that patches put in; None if it
    cannot be read.
    """
    sent = decode(stored)
    if sent is None:
        return None
    try:
        rest = unpack(sent.rest, version=sent.version)
    except msgspec.DecodeError:
        return None
    may_quote = [bool(each.patch) and (each.seq in seqs or puts_in(each.patch)) for each in rest]
    if not any(may_quote):
        return stored
    left = [
        structs.replace(each, patch=(), is_of_model=False) if quotes else each
        for each, quotes in zip(rest, may_quote, strict=True)
    ]
    return _with_rest(sent, left)
