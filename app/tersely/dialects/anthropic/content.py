"""The blocks of a message's content, each kept as the bytes it came in."""

from __future__ import annotations

from typing import NamedTuple

from tersely.dialects.wire import raw_json

THINKING = frozenset({"thinking", "redacted_thinking"})
"""Signed by the provider: sent back to the bit, or left out."""


class Block(NamedTuple):
    """A block of content: its bytes, its members, and its type (empty: none)."""

    raw: bytes
    members: dict[str, bytes]
    type: str


def read_block(raw: bytes) -> Block:
    """Return a block with its members."""
    members = raw_json.split_object(raw)
    return Block(raw, members, string_member(members, "type"))


def split_content(content: bytes) -> list[bytes]:
    """Return the blocks of a ``content`` or ``system`` member. A string is one block of text; an empty one is none."""
    if content.startswith(b"["):
        return raw_json.split_array(content)
    text = raw_json.load(content)
    return [text_block(text)] if isinstance(text, str) and text else []


def content_of(raw: bytes) -> list[bytes]:
    """Return the blocks of a message."""
    return split_content(raw_json.split_object(raw).get("content", b"null"))


def text_block(text: str) -> bytes:
    """Return a block of text."""
    return raw_json.dump({"type": "text", "text": text})


def block_type(block: bytes) -> str:
    """Return the type of a block, or nothing."""
    return string_member(raw_json.split_object(block), "type")


def string_member(members: dict[str, bytes], name: str) -> str:
    """Return a string member; an empty string for anything else."""
    return raw_json.string(members.get(name))


def is_blank(block: bytes) -> bool:
    """Return whether a block is blank text, which the provider refuses."""
    members = raw_json.split_object(block)
    return string_member(members, "type") == "text" and not string_member(members, "text").strip()


def with_block_text(block: bytes, text: str) -> bytes:
    """Return a text block with another text."""
    return with_text_member(raw_json.split_object(block), text)


def with_text_member(members: dict[str, bytes], text: str) -> bytes:
    """Return the text block that has ``members`` with another text."""
    return raw_json.join_object({**members, "text": raw_json.dump(text)})


def replace_text(blocks: list[bytes], text: str) -> list[bytes]:
    """Return the blocks with ``text`` in the first text block and without the other text blocks.

    Without a text block, the text goes behind tool results and in front of calls, where the provider expects it.
    """
    types = [block_type(block) for block in blocks]
    texts = [index for index, kind in enumerate(types) if kind == "text"]
    words = [] if not text.strip() else [with_block_text(blocks[texts[0]], text) if texts else text_block(text)]
    index = texts[0] if texts else _index_of_text(types)
    before = [block for block, kind in zip(blocks[:index], types[:index], strict=True) if kind != "text"]
    after = [block for block, kind in zip(blocks[index:], types[index:], strict=True) if kind != "text"]
    return [*before, *words, *after]


def insert_text(blocks: list[bytes], text: str) -> list[bytes]:
    """Return ``text`` in front of the words of a user's message, behind the results of tools."""
    index = after_results(blocks)
    return [*blocks[:index], text_block(text), *blocks[index:]]


def after_results(blocks: list[bytes]) -> int:
    """Return the index behind the last result of a tool."""
    return max((index + 1 for index, block in enumerate(blocks) if block_type(block) == "tool_result"), default=0)


def _index_of_text(types: list[str]) -> int:
    if "tool_use" in types:
        return types.index("tool_use")
    return len(types)
