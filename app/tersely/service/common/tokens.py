"""Counting tokens: exact for OpenAI's models, calibrated for the others from what their hosts report."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

from tiktoken import Encoding

from tersely.dialects.wire import raw_json
from tersely.domain import tokens
from tersely.domain.messages import Message
from tersely.service.common.ascii_counts import ascii_counter
from tersely.service.common.size_bounded_cache import SizeBoundedCache
from tersely.service.common.vocabulary import load_encoding

EncodingName = Literal["o200k_base", "cl100k_base"]

# Models of the older vocabulary. All others are counted with the newer one, which is close for most hosts.
_CL100K = re.compile(r"(?:^|/)(?:gpt-4(?!o|\.1|\.5)|gpt-3\.5|gpt-35|text-embedding)")

# The encoder's time grows faster than the length of a run without a break. A text with a run of two pieces is counted
# in pieces of so many characters, which is off by at most a token a piece.
_PIECE = 1000
# Longer texts are counted in slices of this number of characters that end between words: the encoder lists all tokens
# at once, which takes many times the memory of the text. The error is at most one token a slice.
_SLICE = 200_000
# Longer texts, and more messages, are counted in a thread: the encoder releases the interpreter lock.
INLINE_CHARS = 16_000
INLINE_MESSAGES = 200
# Texts of contexts whose counts are remembered.
RECOUNTED = 8_192
# Number of injected blocks whose counts are cached, and their characters in total.
INJECTED_BLOCKS = 4_096
INJECTED_CHARS = 16 * 1024 * 1024
_recounted: dict[tuple[EncodingName, bytes], int] = {}


@lru_cache(maxsize=256)
def encoding_for(model: str) -> EncodingName:
    """Return the vocabulary that counts for ``model``."""
    return "cl100k_base" if _CL100K.search(model) else "o200k_base"


def count_text(text: str, name: EncodingName) -> int:
    """Count the tokens of ``text``, in time linear in its length. Lone surrogates count as one character."""
    if len(text) <= _PIECE and text.isascii():
        return ascii_counter(name).count(text)
    encoding = load_encoding(name)
    if len(text) <= _PIECE:
        return len(encoding.encode_ordinary(text))
    return sum(_count_slice(encoding, text[start:end]) for start, end in _slices(text))


def _slices(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    while len(text) - start > _SLICE:
        end = text.rfind(" ", start + _SLICE // 2, start + _SLICE)
        end = end if end > 0 else start + _SLICE
        yield start, end
        start = end
    yield start, len(text)


def _count_slice(encoding: Encoding, text: str) -> int:
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    if any(_is_run(piece) for piece in pieces if len(piece) == _PIECE):
        return sum(len(encoding.encode_ordinary(piece)) for piece in pieces)
    return len(encoding.encode_ordinary(text))


def _is_run(piece: str) -> bool:
    """Return whether a piece is one word or blank. A run of two pieces always covers one of the pieces."""
    return len(piece.split(None, 1)) < 2


def recount(text: str, name: EncodingName) -> int:
    """As `count_text`, for a text that is shown again: one that an epoch shortens, or a part of a head, which is likely
    to be a part of the next one too.
    """
    digest = content_digest(text.encode("utf-8", "surrogatepass"))
    known = _recounted.get((name, digest))
    if known is None:
        if len(_recounted) >= RECOUNTED:
            _recounted.clear()
        known = _recounted[name, digest] = count_text(text, name)
    return known


class _BlockCounts:
    """Token counts by the text of a block. Requests repeat their blocks word for word."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._chars = 0

    def count(self, text: str) -> int:
        known = self._counts.get(text)
        if known is None:
            known = count_text(text, "o200k_base")
            if len(self._counts) >= INJECTED_BLOCKS or self._chars + len(text) > INJECTED_CHARS:
                self._counts, self._chars = {}, 0
            self._counts[text] = known
            self._chars += len(text)
        return known


count_block: Callable[[str], int] = _BlockCounts().count
"""Tokens of an injected block, counted once and remembered."""


def count_message(message: Message, model: str) -> int:
    """Tokens of one message, its overhead included."""
    name = encoding_for(model)
    return tokens.count_message(message, lambda text: count_text(text, name))


async def count_messages(messages: Sequence[Message], model: str) -> list[int]:
    """Count the tokens of each message; long or many ones in a thread, so that other requests continue."""
    if len(messages) <= INLINE_MESSAGES and sum([len(message.raw) for message in messages]) <= INLINE_CHARS:
        return [count_message(message, model) for message in messages]
    return await asyncio.to_thread(lambda: [count_message(message, model) for message in messages])


def estimate_message(message: Message) -> int:
    """Return a quick guess for decisions that cannot wait for the count."""
    return tokens.count_message(message, tokens.estimate_text)


def count_short(text: str) -> int:
    """Tokens of a text of Tersely's own; memorised by the encoder's caller where it matters."""
    return tokens.estimate(len(text))


def content_digest(raw: bytes) -> bytes:
    """By what an attribute of a request is known: 16 bytes."""
    return blake2b(raw, digest_size=16).digest()


def count_text_of(raw: bytes, name: EncodingName) -> int:
    """Tokens of an instruction message, by its wire form."""
    return count_text(raw.decode("utf-8", "replace"), name)


def count_tools_of(raw: bytes, name: EncodingName) -> int:
    """Tokens of tool definitions in wire form: by the rule for OpenAI's functions, others by their JSON text."""
    try:
        tools = raw_json.load(raw)
    except ValueError:
        return count_text_of(raw, name)
    if not isinstance(tools, list):
        return count_text_of(raw, name)
    layout = tokens.GPT_4O_TOOLS if name == "o200k_base" else tokens.GPT_4_TOOLS
    return tokens.count_tools(tools, lambda text: count_text(text, name), layout=layout)


class FixedTokens:
    """Counts the tokens of instructions and tools, which rarely change between calls: once per content.

    A text that is seen for the first time is counted exactly if it is short; a long one is counted in slices, since the
    result is cached.
    """

    def __init__(self, budget: int = 8 * 1024 * 1024, seen: int = 4096) -> None:
        """``budget``: bytes of the contents whose counts are remembered; ``seen``: attributes known to be stored."""
        self._counts: SizeBoundedCache[int] = SizeBoundedCache(budget)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._most_seen = seen

    def count_instructions(self, model: str, raws: Sequence[bytes]) -> int:
        """Tokens of instruction messages in wire form."""
        name = encoding_for(model)
        return sum([self._count(name, raw, count_text_of) for raw in raws if raw])

    def count_tools(self, model: str, tools: bytes) -> int:
        """Tokens of tool definitions in wire form; empty: none."""
        return self._count(encoding_for(model), tools, count_tools_of) if tools else 0

    def is_new(self, tenant: str, session_id: str, raw: bytes) -> bool:
        """Return whether a session's attribute may not be stored yet. It returns True again for forgotten ones."""
        key = content_digest(b"\0".join((tenant.encode(), session_id.encode("utf-8", "replace"), raw)))
        if key in self._seen:
            self._seen.move_to_end(key)
            return False
        self._seen[key] = None
        if len(self._seen) > self._most_seen:
            self._seen.popitem(last=False)
        return True

    def _count(self, name: EncodingName, raw: bytes, work: Callable[[bytes, EncodingName], int]) -> int:
        count = self._counts.get((name, raw), len(raw))
        if count is None:
            count = work(raw, name)
            self._counts.put((name, raw), count, len(raw))
        return count
