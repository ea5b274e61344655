"""Find the ids of things in a provider's account that a request's body names: replies, items, files, stores,
containers.

A tenant of a shared account must not name what belongs to another tenant. So the whole body is read, including
duplicate members and escaped names. Only values that no provider reads as references are skipped (arguments of the
caller's own tools, schemas, metadata).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountId:
    """An id and the member of the body in which it stands. ``is_cited``: the body repeats a reply that cites it.
    ``is_brought``: the caller gave it to an item of its own, content included.
    """

    id: str
    field: str
    is_cited: bool = False
    is_brought: bool = False


def cited(name: str) -> str:
    """Return the id that represents the citation of a file. The tenant that was shown it may repeat it, and nothing
    more.
    """
    return f"cited {name}"


def brought(name: str) -> str:
    """Return the id that represents an item id of the tenant's own choice. A host may repeat it in a list of the
    tenant's items, which does not make the id the tenant's.
    """
    return f"brought {name}"


class _Members(list[tuple[str, Any]]):
    """An object with all of its members, including duplicates."""

    def get(self, name: str) -> Any:
        """Return the last member of that name."""
        return next((value for key, value in reversed(self) if key == name), None)


class _Member(NamedTuple):
    """One member of an object, ``holder``."""

    name: str
    value: Any
    holder: _Members


_Rule = Callable[[_Member], Iterator[str]]
_Kind = Literal["named", "cited", "brought"]


def find_account_ids(dialect: Dialect, body: bytes) -> list[AccountId]:
    """Find every id of the provider's account in a JSON body, and those that the caller gives to items of its own.

    Raises `InvalidRequest` unless it is a JSON object.
    """
    if not _can_name(dialect, body):
        return []
    try:
        value = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_Members)
        if not isinstance(value, _Members):
            raise InvalidRequest("The request body is not a JSON object.")
        return [
            AccountId(id=name, field=field, is_cited=kind == "cited", is_brought=kind == "brought")
            for field, each in value
            for name, kind in _walk(field, each, value, dialect)
            if name
        ]
    except RecursionError as error:
        raise InvalidRequest("The JSON of the request body is nested too deep.") from error
    except ValueError as error:
        raise InvalidRequest("The request body is not valid JSON in UTF-8.") from error


def _can_name(dialect: Dialect, body: bytes) -> bool:
    """Return whether a member of the body could name an id, in any spelling. This is much faster than parsing it."""
    return (
        _MARKS[dialect].search(body) is not None
        or _ESCAPED_LETTER.search(body) is not None
        or body[:1] != b"{"
        or b"\0" in body  # another encoding
    )


# Every body that names an id contains one of these, unless its letters are escaped.
_ESCAPED_LETTER = re.compile(rb"\\u00[2-7]")
_RESPONSES_MARKS = re.compile(
    rb'"(?:id|previous_response_id|conversation|prompt|file_id|file_ids|vector_store_ids|container|container_id|'
    rb'skill_id|approval_request_id|voice)"'
)
_CHAT_MARKS = re.compile(rb'"(?:file_id|audio|voice)"')
_ANTHROPIC_MARKS = re.compile(rb'"(?:file_id|container|skill_id)"')
_GEMINI_MARKS = re.compile(
    rb'"(?:cachedContent|cached_content|fileUri|file_uri|fileSearchStoreNames|file_search_store_names|source)"'
)
_MARKS: dict[Dialect, re.Pattern[bytes]] = {
    "openai_chat": _CHAT_MARKS,
    "openai_responses": _RESPONSES_MARKS,
    "anthropic": _ANTHROPIC_MARKS,
    "gemini": _GEMINI_MARKS,
    "gemini_gca": _GEMINI_MARKS,
}


def _walk(name: str, value: Any, parent: _Members, dialect: Dialect) -> Iterator[tuple[str, _Kind]]:
    """Yield each id in the member ``name`` of ``parent`` or below it, with the kind of object that it names."""
    rule, opaque = _RULES[dialect], _OPAQUE[dialect]
    is_kept = any(key == "conversation" and each is not None for key, each in parent)
    waiting = [_Member(name, value, parent)]
    while waiting:
        member = waiting.pop()
        key, found, holder = member
        if key in opaque:
            continue
        if dialect == "openai_responses":
            if _cites(key, holder):
                yield from _citations(found)
                continue
            if key == "items" or (key == "input" and is_kept):
                yield from ((each, "named") for item in _listed(found) for each in _own_ids(item))
            elif key == "input":
                own = (item for item in _listed(found) if _is_callers_own(item))
                yield from ((each, "brought") for item in own for each in _own_ids(item))
        yield from ((each, "named") for each in rule(member))
        if isinstance(found, _Members):
            waiting += [_Member(inner, each, found) for inner, each in found]
        elif isinstance(found, list):
            # An element stands for its list; a member that names ids by position (`input`) is read as a whole.
            waiting += [_Member(inner, each, item) for item in _objects(found) for inner, each in item]


def _objects(values: list[Any]) -> Iterator[_Members]:
    for each in values:
        if isinstance(each, _Members):
            yield each
        elif isinstance(each, list):
            yield from _objects(each)


def _listed(value: Any) -> Iterator[_Members]:
    if isinstance(value, list):
        yield from [value] if isinstance(value, _Members) else _objects(value)


def _cites(name: str, holder: _Members) -> bool:
    """Return whether a member holds a citation of an OpenAI reply. No provider opens a cited file."""
    return name == "annotations" or (name == "results" and holder.get("type") == "file_search_call")


def _citations(value: Any) -> Iterator[tuple[str, _Kind]]:
    """Yield the files that a list cites, and the containers that they are in."""
    for note in _listed(value):
        for name, each in note:
            if name in ("file_id", "container_id"):
                yield from ((text, "cited" if name == "file_id" else "named") for text in _texts(each))


# The caller's data, which a provider passes to the model unchanged.
_OPENAI_OPAQUE = frozenset({"metadata", "parameters", "schema", "json_schema", "arguments"})
_GEMINI_OPAQUE = frozenset(
    {
        *("args", "response", "labels", "functionDeclarations", "function_declarations"),
        *("generationConfig", "generation_config"),
    }
)
_OPAQUE: dict[Dialect, frozenset[str]] = {
    "openai_chat": _OPENAI_OPAQUE,
    "openai_responses": _OPENAI_OPAQUE,
    "anthropic": frozenset({"metadata", "input", "input_schema", "schema"}),
    "gemini": _GEMINI_OPAQUE,
    "gemini_gca": _GEMINI_OPAQUE,
}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and not isinstance(value, _Members):
        for each in value:
            yield from _texts(each)


def _own_ids(value: Any) -> Iterator[str]:
    """Yield the members ``id`` of an object."""
    if isinstance(value, _Members):
        for name, each in value:
            if name == "id":
                yield from _texts(each)


_FILES = frozenset({"file_id", "file_ids"})
_RESPONSES_NAMES = _FILES | {
    *("previous_response_id", "vector_store_ids", "container_id", "approval_request_id"),
    *("conversation", "container", "skill_id"),
}
_HOLDERS = frozenset({"conversation", "prompt", "container", "voice"})
_ITEM_LISTS = frozenset({"input", "items"})


def _in_responses(member: _Member) -> Iterator[str]:
    name, value, holder = member
    if name in _RESPONSES_NAMES:
        yield from _texts(value)
    if name in _HOLDERS:
        yield from _own_ids(value)
    elif name in _ITEM_LISTS and isinstance(value, list):
        for item in [value] if isinstance(value, _Members) else _objects(value):
            if not _is_callers_own(item):
                yield from _own_ids(item)
    elif name == "id" and holder.get("type") == "item_reference":
        yield from _texts(value)


def _is_callers_own(item: _Members) -> bool:
    """Return whether the caller wrote the item, content included: then its id, if any, is the caller's own."""
    if item.get("type") in (None, "message") and item.get("content") is not None:
        return item.get("role") in ("user", "system", "developer")
    kind = item.get("type")
    return isinstance(kind, str) and kind.endswith("_output") and item.get("output") is not None


def _in_chat(member: _Member) -> Iterator[str]:
    if member.name in _FILES:
        yield from _texts(member.value)
    elif member.name in ("audio", "voice"):
        yield from _own_ids(member.value)


def _in_anthropic(member: _Member) -> Iterator[str]:
    name, value, holder = member
    if name in _FILES or name == "container" or (name == "skill_id" and holder.get("type") != "anthropic"):
        yield from _texts(value)
    if name == "container":
        yield from _own_ids(value)


_GEMINI_NAMES = frozenset(
    {"cachedContent", "cached_content", "fileSearchStoreNames", "file_search_store_names", "source"}
)
_GEMINI_FILE = re.compile(r"(?:^|/)(files/[^/?#:]+)")


def _in_gemini(member: _Member) -> Iterator[str]:
    if member.name in _GEMINI_NAMES:
        yield from _texts(member.value)
    elif member.name in ("fileUri", "file_uri"):
        for uri in _texts(member.value):
            yield from _file_of(uri)


def _file_of(uri: str) -> Iterator[str]:
    """Yield the file of the account that a URI names; nothing for an address elsewhere."""
    plain = unquote(unquote(uri))
    try:
        parts = urlsplit(plain)
        host = parts.hostname or ""
    except ValueError:
        yield uri
        return
    if found := _GEMINI_FILE.search(parts.path):
        yield found[1]
    elif parts.scheme not in ("http", "https") or not host or host.endswith("googleapis.com"):
        yield uri


_RULES: dict[Dialect, _Rule] = {
    "openai_chat": _in_chat,
    "openai_responses": _in_responses,
    "anthropic": _in_anthropic,
    "gemini": _in_gemini,
    "gemini_gca": _in_gemini,
}


def find_named_ids(dialect: Dialect, message: bytes) -> list[str]:
    """Find the ids that a reply, or a message of it, gives to other things than itself and its items.

    These are spoken replies in OpenAI's chat format, containers with their files, and cited files (as `cited`). Later
    requests may name them, or repeat items that do.
    """
    if dialect == "openai_chat":
        return _spoken_ids(message)
    if dialect == "anthropic":
        return _anthropic_ids(message)
    return _container_ids(message) if dialect == "openai_responses" else []


def _spoken_ids(message: bytes) -> list[str]:
    if b'"audio"' not in message:
        return []
    reply = _load(message)
    audio = reply.get("audio") if isinstance(reply, dict) else None
    return _strings(audio.get("id")) if isinstance(audio, dict) else []


def _container_ids(message: bytes) -> list[str]:
    """Return the containers of a reply or a list of items, as its code interpreter and its citations name them, and the
    files that are cited.
    """
    if b'"container_id"' not in message and b'"file_id"' not in message:
        return []
    reply = _load(message)
    items = reply.get("output", [reply]) if isinstance(reply, dict) else reply
    found: list[str] = []
    for item in _dicts(items):
        match item.get("type"):
            case "code_interpreter_call":
                found += _strings(item.get("container_id"))
            case "file_search_call":
                found += [cited(name) for each in _dicts(item.get("results")) for name in _strings(each.get("file_id"))]
            case "message" if item.get("role") == "assistant":
                for part in _dicts(item.get("content")):
                    for note in _dicts(part.get("annotations")):
                        found += _noted_ids(note)
    return found


def _noted_ids(note: dict[str, Any]) -> list[str]:
    files = _strings(note.get("file_id"))
    if note.get("type") == "container_file_citation":
        return [*_strings(note.get("container_id")), *files]
    return [cited(name) for name in files]


_CODE_RESULT = "code_execution_tool_result"


def _anthropic_ids(message: bytes) -> list[str]:
    """Return the container of a reply, and the files that code created in it."""
    if b'"container"' not in message and b'"file_id"' not in message:
        return []
    reply = _load(message)
    if not isinstance(reply, dict):
        return []
    container = reply.get("container")
    found = _strings(container.get("id")) if isinstance(container, dict) else []
    for block in _dicts(reply.get("content")):
        result = block.get("content") if str(block.get("type")).endswith(_CODE_RESULT) else None
        outputs = _dicts(result.get("content")) if isinstance(result, dict) else ()
        found += [name for output in outputs for name in _strings(output.get("file_id"))]
    return found


def _load(message: bytes) -> Any:
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        return None


def _dicts(values: Any) -> Iterator[dict[str, Any]]:
    return (each for each in values if isinstance(each, dict)) if isinstance(values, list) else iter(())


def _strings(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else []
