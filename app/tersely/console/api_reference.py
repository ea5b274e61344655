"""The API's reference, made of its OpenAPI document: operations with their parameters, bodies and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

METHODS = ("get", "post", "put", "patch", "delete", "head")
DEPTH = 4
"""Levels of members that a table shows."""
BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "minLength": "characters, at least",
    "maxLength": "characters, at most",
    "minItems": "items, at least",
    "maxItems": "items, at most",
}

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReference:
    """A parameter, or a member of a body: its path of names, what it may be, and its description. ``place``: path,
    query or header; empty in bodies.
    """

    name: str
    kind: str
    text: str
    is_required: bool
    place: str = ""
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReference:
    """A body of a request or an answer: its media type, description, members, and an example."""

    media_type: str
    kind: str
    text: str
    members: tuple[ParameterReference, ...]
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer with a status. ``others``: further media types, with how to ask for them."""

    status: str
    text: str
    body: BodyReference | None
    headers: tuple[ParameterReference, ...]
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of the API."""

    name: str
    method: str
    path: str
    tag: str
    summary: str
    text: str
    parameters: tuple[ParameterReference, ...]
    body: BodyReference | None
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Operations with one tag."""

    name: str
    text: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiReference:
    """The whole reference. ``operations``: by their names."""

    text: str
    groups: tuple[Group, ...]
    operations: Mapping[str, Operation]


def read_reference(document: Schema) -> ApiReference:
    """Return the reference of an OpenAPI document."""
    schemas = document.get("components", {}).get("schemas", {})
    operations = [
        _operation(schemas, path, method, each)
        for path, methods in document["paths"].items()
        for method, each in methods.items()
        if method in METHODS
    ]
    texts = {tag["name"]: tag.get("description", "") for tag in document.get("tags", ())}
    tags = dict.fromkeys([*texts, *(operation.tag for operation in operations)])
    groups = [
        Group(name=tag, text=texts.get(tag, ""), operations=tuple(each for each in operations if each.tag == tag))
        for tag in tags
    ]
    return ApiReference(
        text=document["info"].get("description", ""),
        groups=tuple(group for group in groups if group.operations),
        operations={operation.name: operation for operation in operations},
    )


def prose(text: str) -> Markup:
    """Return Markdown of descriptions as HTML: paragraphs, lists, and code between backticks."""
    found: list[Markup] = []
    for block in _blocks(text):
        text = "\n".join(block)
        if text.startswith("- "):
            found.append(_list(text.removeprefix("- ").split("\n- ")))
        else:
            found.append(Markup("<p>{}</p>").format(_code(text)))
    return Markup("\n").join(found)


def _blocks(text: str) -> list[list[str]]:
    """Return the lines of each paragraph and of each list."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        starts_list = line.startswith("- ") and not "".join(found[-1][:1]).startswith("- ")
        if found[-1] and (starts_list or not line.strip()):
            found.append([])
        if line.strip():
            found[-1].append(line)
    return [block for block in found if block]


def _list(items: list[str]) -> Markup:
    written = Markup("").join(Markup("<li>{}</li>").format(_code(item)) for item in items)
    return Markup("<ul>{}</ul>").format(written)


def _code(text: str) -> Markup:
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if at % 2 else escape(piece) for at, piece in enumerate(pieces)
    )


def _operation(schemas: Schema, path: str, method: str, given: Schema) -> Operation:
    return Operation(
        name=given["operationId"],
        method=method.upper(),
        path=path,
        tag=next(iter(given.get("tags", ())), "other"),
        summary=given.get("summary", ""),
        text=given.get("description", ""),
        parameters=tuple(_parameter(schemas, each) for each in given.get("parameters", ())),
        body=_body(schemas, given["requestBody"]) if "requestBody" in given else None,
        answers=tuple(_answer(schemas, status, each) for status, each in sorted(given["responses"].items())),
    )


def _parameter(schemas: Schema, given: Schema) -> ParameterReference:
    schema = given.get("schema", {})
    return ParameterReference(
        name=given["name"],
        kind=_kind(schemas, schema),
        text=given.get("description") or schema.get("description", ""),
        is_required=given.get("required", False),
        place=given["in"],
        example=next((_write(each) for each in schema.get("examples", ())), ""),
    )


def _answer(schemas: Schema, status: str, given: Schema) -> Answer:
    headers = tuple(
        ParameterReference(
            name=name,
            kind=_kind(schemas, each.get("schema", {})),
            text=each.get("description", ""),
            is_required=False,
        )
        for name, each in given.get("headers", {}).items()
    )
    return Answer(
        status=status,
        text=given.get("description", ""),
        body=_body(schemas, given) if given.get("content") else None,
        headers=headers,
        others=tuple(given.get("x-alternative-content", {}).items()),
    )


def _body(schemas: Schema, given: Schema) -> BodyReference:
    media_type, content = next(iter(given["content"].items()))
    schema = _resolve(schemas, content.get("schema", {}))
    examples = [
        *([content["example"]] if "example" in content else []),
        *(each.get("value") for each in content.get("examples", {}).values()),
        *schema.get("examples", ()),
    ]
    return BodyReference(
        media_type=media_type,
        kind=_kind(schemas, content.get("schema", {})),
        text=schema.get("description", ""),
        members=tuple(_members(schemas, schema, "", DEPTH)),
        example=_write(examples[0], indent=2) if examples else "",
    )


def _members(schemas: Schema, schema: Schema, prefix: str, depth: int) -> Iterator[ParameterReference]:
    """Yield the members of an object, or of the items of a list, each before its own."""
    if not depth:
        return
    for variant in _variants(schemas, schema):
        if "items" in variant:
            yield from _members(schemas, _resolve(schemas, variant["items"]), f"{prefix}[]", depth)
        required = variant.get("required", ())
        for name, each in variant.get("properties", {}).items():
            path = f"{prefix}.{name}" if prefix else name
            found = _resolve(schemas, each)
            yield ParameterReference(
                name=path,
                kind=_kind(schemas, each),
                text=each.get("description") or found.get("description", ""),
                is_required=name in required,
            )
            yield from _members(schemas, found, path, depth - 1)


def _variants(schemas: Schema, schema: Schema) -> list[Schema]:
    """Return the schema, or those that it may be one of, without null."""
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    found = [_resolve(schemas, each) for each in options]
    return [each for each in found if each.get("type") != "null"] if found else [schema]


def _kind(schemas: Schema, schema: Schema) -> str:
    """Say what a value may be."""
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    if options:
        return " or ".join(dict.fromkeys(_kind(schemas, each) for each in options))
    found = _resolve(schemas, schema)
    if found is not schema and ("anyOf" in found or "oneOf" in found):
        return _kind(schemas, found)
    if "enum" in found:
        return ", ".join(_write(each) for each in found["enum"])
    if "const" in found:
        return _write(found["const"])
    kind = found.get("type", "any value")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        kind = f"list of {_kind(schemas, found['items'])}" if found.get("items") else "list"
    notes = [found["format"]] if "format" in found else []
    notes += [f"{words} {found[name]:,.10g}" for name, words in BOUNDS.items() if name in found]
    if schema.get("default") is not None:
        notes.append(f"default {_write(schema['default'])}")
    return f"{kind} ({', '.join(notes)})" if notes else str(kind)


def _resolve(schemas: Schema, schema: Schema) -> Schema:
    name = schema.get("$ref", "").rpartition("/")[2]
    return schemas.get(name, {}) if name else schema


def _write(value: object, indent: int | None = None) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=indent)
