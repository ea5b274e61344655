"""A stored call with what its description says: the layers of its context, and the tools that it sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tersely.dialects.tool_rounds import tool_names
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.common.tokens import FixedTokens
from tersely.store.db.connection import Connection
from tersely.store.history import attributes, sent_contexts
from tersely.store.history.sent_contexts import SAME_TOOLS, decode, unpack_tools
from tersely.store.ops.calls import CallRow

TOOLS_NOT_KEPT = (
    "which tools this call sent was not recorded: it was made by an earlier version, or failed before it left"
)
DELETED = "some messages that this call sent have been deleted since"
ALTERED = "what is stored now does not give what this call sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of a context and its tokens, by our own counts."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """A call, with the layers of its context (empty where they are not known), the digest of its instructions, and
    `SentContext.tools`.
    """

    row: CallRow
    layers: tuple[Layer, ...]
    instructions: bytes = b""
    tools: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTools:
    """The tools of a request. ``raw`` is the list that went upstream (empty: none; None: it cannot be rebuilt, and
    ``reason`` says why). ``own`` are the names of Tersely's tools in it.
    """

    raw: bytes | None
    own: tuple[str, ...] = ()
    reason: str | None = None


def info(row: CallRow) -> CallInfo:
    """A call with the layers of its context."""
    sent = decode(row.sent) if row.sent is not None else None
    layers = sent.layers if sent is not None else ()
    return CallInfo(
        row=row,
        layers=tuple(Layer(name=name, tokens=count) for name, count in layers),
        instructions=sent.instructions if sent is not None else b"",
        tools=sent.tools if sent is not None else b"",
    )


async def divided_infos(
    connection: Connection, tenant: str, rows: Sequence[CallRow], counter: FixedTokens
) -> list[CallInfo]:
    """Return calls of one session with a layer of tools.

    Descriptions of earlier versions count tools among the instructions. Their share is counted here, from the tools
    that are stored. Where these are not stored, the call has no layer of tools.
    """
    counts: dict[tuple[str, bytes | None, bytes], int | None] = {}
    found = []
    for call in map(info, rows):
        names = {layer.name for layer in call.layers}
        if "instructions" not in names or "tools" in names:
            found.append(call)
            continue
        key = call.row.model, call.row.tools, call.tools
        if key not in counts:
            raw = (await tools_of(connection, tenant, call)).raw
            counts[key] = (
                None
                if raw is None
                else await run_in_thread_if_large(len(raw), counter.count_tools, call.row.model, raw)
            )
        tokens = counts[key]
        found.append(call if tokens is None else _divide(call, tokens))
    return found


def _divide(call: CallInfo, tool_tokens: int) -> CallInfo:
    layers: list[Layer] = []
    for layer in call.layers:
        if layer.name == "instructions":
            tools = min(tool_tokens, layer.tokens)
            layers += [replace(layer, tokens=layer.tokens - tools), Layer(name="tools", tokens=tools)]
        else:
            layers.append(layer)
    return replace(call, layers=tuple(layers))


async def tools_of(connection: Connection, tenant: str, call: CallInfo) -> CallTools:
    """Rebuild the tools that a call sent, from the client's and the difference that is stored."""
    row = call.row
    if not call.tools:
        return CallTools(raw=None, reason=TOOLS_NOT_KEPT)
    client: bytes | None = b""
    if row.tools is not None:
        client = await attributes.tools(connection, tenant, row.session_id, row.tools)
    if client is None:
        return CallTools(raw=None, reason=DELETED)
    if call.tools == SAME_TOOLS:
        return CallTools(raw=client)
    found = await sent_contexts.literals(connection, tenant, row.session_id, [call.tools])
    if call.tools not in found:
        return CallTools(raw=None, reason=DELETED)
    raw = unpack_tools(found[call.tools], client)
    if raw is None:
        return CallTools(raw=None, reason=ALTERED)
    return CallTools(raw=raw, own=tuple(sorted(tool_names(raw) - tool_names(client))))
