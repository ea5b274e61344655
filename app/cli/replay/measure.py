"""What a replay cost: tokens, prefixes, prices; as values that add up.

A request is priced by a perfect prefix cache: the leading messages that are, byte for byte, those of the conversation's
request before cost the read price, all the rest the write price. What the client sent is priced in the same way.
Tersely's own instructions are part of the tokens sent, but their price is kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.cli.replay.references import Losses
from app.dialects.openai_chat.read import read_message
from app.domain.errors import InvalidRequest
from app.domain.messages import INSTRUCTION_ROLES
from app.domain.tokens import estimate
from app.service import tokens

PRICES: tuple[tuple[float, float], ...] = ((1.25, 0.1), (1.0, 0.5))
"""(write, read) relative to plain input."""


class Counter:
    """Tokens of messages in wire form, counted once each by the vocabulary of the model that is asked for."""

    def __init__(self, model: str) -> None:
        """``model`` decides about the vocabulary."""
        self._model = model
        self._known: dict[bytes, tuple[int, bool]] = {}

    def count(self, raw: bytes) -> int:
        """Tokens of a message."""
        return self._look(raw)[0]

    def is_instruction(self, raw: bytes) -> bool:
        """Whether a message is system or developer text."""
        return self._look(raw)[1]

    def _look(self, raw: bytes) -> tuple[int, bool]:
        known = self._known.get(raw)
        if known is None:
            try:
                message = read_message(raw)
                known = tokens.count_message(message, self._model), message.role in INSTRUCTION_ROLES
            except InvalidRequest:
                known = estimate(len(raw)), False
            self._known[raw] = known
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The requests of one side (what the client sent, or what the model was sent), added up.

    ``repeated`` are the tokens that were a prefix of the request before, ``later`` all tokens of the requests that
    had one before them. ``own`` is the price of Tersely's instructions, which ``price`` includes.
    """

    tokens: int = 0
    repeated: int = 0
    later: int = 0
    price: tuple[float, ...] = (0.0,) * len(PRICES)
    own: tuple[float, ...] = (0.0,) * len(PRICES)

    def __add__(self, other: Side) -> Side:
        return Side(
            tokens=self.tokens + other.tokens,
            repeated=self.repeated + other.repeated,
            later=self.later + other.later,
            price=_sum(self.price, other.price),
            own=_sum(self.own, other.own),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The sums of one or more conversations under one strategy.

    ``overflows`` are requests that were refused as too long and then mended. ``overhead_ms`` has the time that each
    call spent in Tersely before it went upstream.
    """

    conversations: int = 0
    calls: int = 0
    client: Side = field(default_factory=Side)
    model: Side = field(default_factory=Side)
    losses: Losses = field(default_factory=Losses)
    epochs: int = 0
    overflows: int = 0
    overhead_ms: tuple[float, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            conversations=self.conversations + other.conversations,
            calls=self.calls + other.calls,
            client=self.client + other.client,
            model=self.model + other.model,
            losses=self.losses + other.losses,
            epochs=self.epochs + other.epochs,
            overflows=self.overflows + other.overflows,
            overhead_ms=self.overhead_ms + other.overhead_ms,
        )

    def price(self, index: int) -> float:
        """The price by ``PRICES[index]`` relative to sending everything; Tersely's own instructions left out."""
        everything = self.client.price[index]
        return (self.model.price[index] - self.model.own[index]) / everything if everything else 1.0

    def own_price(self, index: int) -> float:
        """The price of Tersely's own instructions, relative to sending everything."""
        everything = self.client.price[index]
        return self.model.own[index] / everything if everything else 0.0

    @property
    def sent_share(self) -> float:
        """Tokens sent, relative to what the client sent."""
        return self.model.tokens / self.client.tokens if self.client.tokens else 1.0


def repeated_share(side: Side) -> float | None:
    """Of all requests but a conversation's first, the share that was a prefix of the request before."""
    return side.repeated / side.later if side.later else None


def measure(counter: Counter, messages: Sequence[bytes], before: Sequence[bytes] | None, *, own: int = 0) -> Side:
    """One request, after the request ``before`` (None: the conversation's first).

    ``own`` tokens of it are Tersely's instructions, which stand in the last of the leading instructions.
    """
    same = common(messages, before or ())
    total = sum(map(counter.count, messages))
    repeated = sum(map(counter.count, messages[:same]))
    place = sum(1 for _ in _leading(counter, messages)) - 1
    return Side(
        tokens=total,
        repeated=repeated,
        later=0 if before is None else total,
        price=tuple(write * (total - repeated) + read * repeated for write, read in PRICES),
        own=tuple(own * (read if place < same else write) for write, read in PRICES),
    )


def own_tokens(counter: Counter, sent: Sequence[bytes], given: Sequence[bytes]) -> int:
    """Tokens that ``sent`` carries in instructions beyond those which the client gave."""
    ours = sum(counter.count(raw) for raw in sent if counter.is_instruction(raw))
    theirs = sum(counter.count(raw) for raw in given if counter.is_instruction(raw))
    return max(0, ours - theirs)


def common(messages: Sequence[bytes], before: Sequence[bytes]) -> int:
    """How many leading messages are byte for byte the same."""
    same = 0
    for now, then in zip(messages, before, strict=False):
        if now != then:
            break
        same += 1
    return same


def _leading(counter: Counter, messages: Sequence[bytes]) -> list[bytes]:
    leading: list[bytes] = []
    for raw in messages:
        if not counter.is_instruction(raw):
            break
        leading.append(raw)
    return leading


def _sum(these: tuple[float, ...], those: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(these, those, strict=True))
