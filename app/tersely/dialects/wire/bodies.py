"""A request's body and its messages read into structs, or refused in words that a caller understands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import check_utf8, split_body
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Part, ToolCall

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_MISSING = re.compile(r"missing required field `(\w+)`")


class BodyDecoder(Generic[_Struct]):
    """Reads bodies into ``kind``, a struct that keeps as ``Raw`` what must stay verbatim."""

    def __init__(self, kind: type[_Struct]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, body: bytes) -> _Struct:
        """Raises ``InvalidRequest`` as ``split_body`` does, and for members that are missing or of a wrong type.

        Its ``field`` is the member to blame, where there is one.
        """
        check_utf8(body)
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explain(error) from error
        except (ValueError, RecursionError):
            return self._decode_slowly(body)

    def _decode_slowly(self, body: bytes) -> _Struct:
        """Return the same for what msgspec refuses and the standard library reads: lone surrogates above all."""
        members = split_body(body)
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(self._kind)}
        values = {name: _value(name, members[name], kind) for name, kind in fields.items() if name in members}
        try:
            return msgspec.convert(values, self._kind)
        except msgspec.ValidationError as error:
            raise _explain(error) from error
        except UnicodeEncodeError as error:  # half a character where no text is expected
            raise InvalidRequest("a member is of a wrong type") from error


class MessageDecoder(Generic[_Struct]):
    """Reads messages into ``kind``, a struct without ``Raw`` members."""

    def __init__(self, kind: type[_Struct]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, raw: bytes) -> _Struct:
        """Raises ``InvalidRequest`` for what cannot be understood."""
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"a message that cannot be read: {error}") from error
        except msgspec.DecodeError:
            pass
        except RecursionError as error:
            raise InvalidRequest("a message nested too deep") from error
        try:
            return msgspec.convert(raw_json.load(raw), self._kind)
        except ValueError as error:  # msgspec's errors are ValueErrors too
            raise InvalidRequest(f"a message that cannot be read: {error}") from error


def check_caller(role: str, parts: Iterable[Part]) -> None:
    """Raise ``InvalidRequest`` where tools are called by anybody but the model: no history is made of that."""
    if role != "assistant" and any(isinstance(part, ToolCall) for part in parts):
        raise InvalidRequest(f"a message of the role {role} calls tools", field="role")


def try_decode(decoder: msgspec.json.Decoder[_Struct], raw: bytes) -> _Struct | None:
    """Decode ``raw``; return None if it does not fit the decoder's type."""
    try:
        return decoder.decode(raw)
    except (ValueError, RecursionError):
        return None


def decode_counts(decoder: msgspec.json.Decoder[_Struct], raw: bytes) -> _Struct | None:
    """Decode reported numbers. Values that are no whole numbers are left out; None if ``raw`` is no JSON object."""
    found = try_decode(decoder, raw)
    if found is not None or not raw:
        return found
    try:
        return try_decode(decoder, raw_json.dump(_counts_in(raw_json.load(raw))))
    except ValueError:
        return None


def _counts_in(value: object) -> object:
    """Return a value with the objects and whole numbers in it alone."""
    if isinstance(value, dict):
        return {name: kept for name, each in value.items() if (kept := _counts_in(each)) is not None}
    return value if type(value) is int else None


def verbatim(raw: msgspec.Raw) -> bytes:
    """Return a member's bytes; empty where it is absent or null."""
    value = bytes(raw)
    return b"" if value == b"null" else value


def session_ids(members: Mapping[str, object]) -> dict[str, str]:
    """Return the members of a request by which clients of OpenAI's formats name their own sessions."""
    metadata = members.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    named = {
        "session_id": members.get("session_id") or metadata.get("session_id"),
        "conversation_id": members.get("conversation_id") or metadata.get("conversation_id"),
    }
    return {name: value for name, value in named.items() if isinstance(value, str)}


def _value(name: str, raw: bytes, kind: Any) -> Any:
    if kind is msgspec.Raw:
        return msgspec.Raw(raw)
    if kind != list[msgspec.Raw]:
        return raw_json.load(raw)
    try:
        return [msgspec.Raw(item) for item in raw_json.split_array(raw)]
    except ValueError as error:
        raise InvalidRequest(f"Invalid '{name}': expected `array`.", field=name) from error


def _explain(error: msgspec.ValidationError) -> InvalidRequest:
    """The library says ``Expected `array`, got `str` - at `$.messages` ``: the field is what follows the
    ``$.``.
    """
    detail, _, path = str(error).partition(" - at `$")
    missing = _MISSING.search(detail)
    field = missing[1] if missing else path.rstrip("`").lstrip(".") or None
    where = f"Invalid '{field}'" if field else "Invalid request body"
    return InvalidRequest(f"{where}: {detail[:1].lower() + detail[1:]}.", field=field)
