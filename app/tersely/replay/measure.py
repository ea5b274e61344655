"""Measure the cost of a replay: tokens, prefixes and prices, as values that add up.

A request is priced by a perfect prefix cache: the leading messages that equal those of the conversation's previous
request, byte for byte, cost the read price; the rest costs the write price. The client's request is priced in the same
way. Tool definitions stand before the first message, as in providers' caches. Tersely's own instructions and tools are
part of the sent tokens, but their price is counted separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.context_use import Edits, Losses
from tersely.domain.messages import INSTRUCTION_ROLES
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.tokens import estimate
from tersely.service.common import tokens

PRICES: tuple[tuple[float, float], ...] = ((1.25, 0.1), (1.0, 0.5))
"""(write, read) relative to plain input."""
CACHE_MARK = "cache_control"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParts:
    """The parts of a request: tool definitions as JSON (empty: none), and messages in wire form."""

    tools: bytes
    messages: tuple[bytes, ...]
    dialect: DialectName = "openai_chat"

    @property
    def blocks(self) -> tuple[bytes, ...]:
        """Return the parts that a cache keys on, in order."""
        return (self.tools, *self.messages) if self.tools else self.messages


def take_apart(body: bytes, dialect: DialectName) -> RequestParts:
    """Split a request's body into its parts.

    An unreadable body is one block. Cache marks are removed.
    """
    try:
        request = DIALECTS[dialect].read_request(body)
    except InvalidRequest:
        return RequestParts(tools=b"", messages=(body,), dialect=dialect)
    if request.unreadable is not None:
        return RequestParts(tools=request.tools, messages=(body,), dialect=dialect)
    messages = tuple([_without_marks(message.raw) for message in request.messages])
    return RequestParts(tools=_without_marks(request.tools), messages=messages, dialect=dialect)


def _without_marks(raw: bytes) -> bytes:
    return raw_json.dump(_unmarked(raw_json.load(raw))) if CACHE_MARK.encode() in raw else raw


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unmarked(each) for key, each in value.items() if key != CACHE_MARK}
    return [_unmarked(each) for each in value] if isinstance(value, list) else value


class Counter:
    """Tokens of messages in wire form, counted once each by the vocabulary of the model that is asked for."""

    def __init__(self, model: str) -> None:
        """``model`` decides about the vocabulary."""
        self._model = model
        self._known: dict[tuple[DialectName, bytes], tuple[int, bool]] = {}
        self._tools: dict[bytes, int] = {b"": 0}

    def count(self, raw: bytes, dialect: DialectName = "openai_chat") -> int:
        """Tokens of a message."""
        return self._look(raw, dialect)[0]

    def is_instruction(self, raw: bytes, dialect: DialectName = "openai_chat") -> bool:
        """Return whether a message is system or developer text."""
        return self._look(raw, dialect)[1]

    def count_tools(self, raw: bytes) -> int:
        """Tokens of definitions of tools."""
        known = self._tools.get(raw)
        if known is None:
            known = self._tools[raw] = tokens.count_tools_of(raw, tokens.encoding_for(self._model))
        return known

    def sizes(self, shown: RequestParts) -> list[int]:
        """Tokens of each block."""
        tools = [self.count_tools(shown.tools)] if shown.tools else []
        return [*tools, *(self.count(raw, shown.dialect) for raw in shown.messages)]

    def instructions(self, shown: RequestParts) -> int:
        """Tokens of all instructions."""
        return sum(self.count(raw, shown.dialect) for raw in shown.messages if self.is_instruction(raw, shown.dialect))

    def _look(self, raw: bytes, dialect: DialectName) -> tuple[int, bool]:
        known = self._known.get((dialect, raw))
        if known is None:
            try:
                message = DIALECTS[dialect].read_message(raw)
                known = tokens.count_message(message, self._model), message.role in INSTRUCTION_ROLES
            except InvalidRequest:
                known = estimate(len(raw)), False
            self._known[dialect, raw] = known
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class SideTotals:
    """The requests of one side (what the client sent, or what the model was sent), added up.

    ``repeated`` are the tokens that were a prefix of the request before, ``later`` all tokens of the requests that
    had one before them. ``own`` is the price of Tersely's instructions, which ``price`` includes.
    """

    tokens: int = 0
    repeated: int = 0
    later: int = 0
    price: tuple[float, ...] = (0.0,) * len(PRICES)
    own: tuple[float, ...] = (0.0,) * len(PRICES)

    def __add__(self, other: SideTotals) -> SideTotals:
        return SideTotals(
            tokens=self.tokens + other.tokens,
            repeated=self.repeated + other.repeated,
            later=self.later + other.later,
            price=_sum(self.price, other.price),
            own=_sum(self.own, other.own),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTotals:
    """The sums of one or more conversations under one strategy.

    ``beside`` counts calls outside of any session; they are passed on, and part of no other number. ``overflows``
    counts requests that were refused as too long and then shortened. ``overhead_ms`` has the time that each call spent
    in Tersely before it went upstream.
    """

    conversations: int = 0
    calls: int = 0
    beside: int = 0
    client: SideTotals = field(default_factory=SideTotals)
    model: SideTotals = field(default_factory=SideTotals)
    losses: Losses = field(default_factory=Losses)
    edits: Edits = field(default_factory=Edits)
    epochs: int = 0
    overflows: int = 0
    overhead_ms: tuple[float, ...] = ()

    def __add__(self, other: ReplayTotals) -> ReplayTotals:
        return ReplayTotals(
            conversations=self.conversations + other.conversations,
            calls=self.calls + other.calls,
            beside=self.beside + other.beside,
            client=self.client + other.client,
            model=self.model + other.model,
            losses=self.losses + other.losses,
            edits=self.edits + other.edits,
            epochs=self.epochs + other.epochs,
            overflows=self.overflows + other.overflows,
            overhead_ms=self.overhead_ms + other.overhead_ms,
        )

    def price(self, index: int) -> float:
        """Return the price by ``PRICES[index]`` relative to sending everything; without what is Tersely's own."""
        everything = self.client.price[index]
        return (self.model.price[index] - self.model.own[index]) / everything if everything else 1.0

    def own_price(self, index: int) -> float:
        """Return the price of Tersely's own instructions and tools, relative to sending everything."""
        everything = self.client.price[index]
        return self.model.own[index] / everything if everything else 0.0

    @property
    def sent_share(self) -> float:
        """Tokens sent, relative to what the client sent."""
        return self.model.tokens / self.client.tokens if self.client.tokens else 1.0


def repeated_share(side: SideTotals) -> float | None:
    """Return the share of requests, but a conversation's first, that begin with the whole request before."""
    return side.repeated / side.later if side.later else None


def measure(
    counter: Counter, shown: RequestParts, before: RequestParts | None, *, given: RequestParts | None = None
) -> SideTotals:
    """Measure one request, after the request ``before`` (None: the conversation's first).

    ``given``: the client's own request. Instructions and tools beyond it are Tersely's. They stand in the last of the
    leading instructions, and in the list of tools.
    """
    blocks, sizes = shown.blocks, counter.sizes(shown)
    same = common(blocks, before.blocks if before else ())
    total, repeated = sum(sizes), sum(sizes[:same])
    instructions, tools = own_tokens(counter, shown, given) if given else (0, 0)
    instructions_at = _last_leading(counter, shown)
    return SideTotals(
        tokens=total,
        repeated=repeated,
        later=0 if before is None else total,
        price=tuple(write * (total - repeated) + read * repeated for write, read in PRICES),
        own=tuple(
            instructions * (read if instructions_at < same else write) + tools * (read if same > 0 else write)
            for write, read in PRICES
        ),
    )


def own_tokens(counter: Counter, sent: RequestParts, given: RequestParts) -> tuple[int, int]:
    """Count the tokens that ``sent`` has beyond the client's request: in instructions, and in tool definitions."""
    instructions = counter.instructions(sent) - counter.instructions(given)
    tools = counter.count_tools(sent.tools) - counter.count_tools(given.tools)
    return max(0, instructions), max(0, tools)


def common(messages: Sequence[bytes], before: Sequence[bytes]) -> int:
    """Return how many leading messages are byte for byte the same."""
    same = 0
    for now, then in zip(messages, before, strict=False):
        if now != then:
            break
        same += 1
    return same


def _last_leading(counter: Counter, shown: RequestParts) -> int:
    """Return the block with the last of the leading instructions."""
    index = len(shown.blocks) - len(shown.messages) - 1
    for raw in shown.messages:
        if not counter.is_instruction(raw, shown.dialect):
            break
        index += 1
    return index


def _sum(these: tuple[float, ...], those: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(these, those, strict=True))
