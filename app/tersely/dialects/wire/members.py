"""Split a request body into its members, or raise an error that a caller understands."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest


def split_body(body: bytes) -> dict[str, bytes]:
    """Return the members of a body, values verbatim. Raises `InvalidRequest` unless it is a JSON object in UTF-8."""
    check_utf8(body)
    try:
        return raw_json.split_object(body)
    except raw_json.TooDeep as error:
        raise InvalidRequest("The JSON of the request body is nested too deep.") from error
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from error


class _Model(msgspec.Struct):
    model: str = ""


def model_in(body: bytes, *, must_be_json: bool) -> str:
    """Return the model that a body names; empty if it names none.

    Raises `InvalidRequest` if a body that ``must_be_json`` cannot be read.
    """
    try:
        return msgspec.json.decode(body, type=_Model).model
    except (ValueError, RecursionError):
        pass
    try:
        return raw_json.string(split_body(body).get("model")) if body else ""
    except InvalidRequest:
        if must_be_json:
            raise
        return ""


def append_items(array: bytes | None, items: Sequence[object]) -> bytes:
    """Return the JSON array with ``items`` at its end; its own members keep their bytes. None counts as an empty array.

    Raises ``InvalidRequest`` for a value that is no array.
    """
    try:
        own = [] if array in (None, b"null") else raw_json.split_array(array or b"[]")
    except ValueError as error:
        raise InvalidRequest("The request's tools are not a list.") from error
    return raw_json.join_array([*own, *map(raw_json.dump, items)])


def append_tools(body: bytes, definitions: Sequence[object]) -> bytes:
    """Return the request with ``definitions`` after the client's own tools. All other members keep their bytes."""
    members = split_body(body)
    members["tools"] = append_items(members.get("tools"), definitions)
    return raw_json.join_object(members)


def check_utf8(body: bytes) -> None:
    """Raises ``InvalidRequest`` naming the first bad byte."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request body is not valid UTF-8 (byte {error.start}).") from error
