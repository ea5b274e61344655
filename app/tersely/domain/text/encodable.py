r"""Texts that UTF-8 can encode. Clients that cut a text leave half a surrogate pair in it: JSON writes it as an escape
(``"\ud800"``), and Python reads it as a character that no UTF-8 has.
"""

from __future__ import annotations

from typing import Any


def encodable(text: str) -> str:
    """Return ``text`` with a question mark for each lone surrogate."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def with_encodable_texts(value: Any) -> Any:
    """Return a value of dicts, lists and scalars, with `encodable` texts and names."""
    match value:
        case str():
            return encodable(value)
        case dict():
            return {with_encodable_texts(name): with_encodable_texts(each) for name, each in value.items()}
        case list() | tuple():
            return [with_encodable_texts(each) for each in value]
        case _:
            return value
