"""Counting tokens: the rules, with the encoder as an argument, and the calibration against what providers report.

Sources of the rules: OpenAI's cookbook ("How to count tokens with tiktoken": messages and tool definitions) and
OpenAI's vision guide (image tiles). What a provider does not document is estimated on the high side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

import msgspec
from msgspec.structs import replace

from tersely.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult

Encode = Callable[[str], int]
"""Text -> number of tokens."""

MESSAGE_OVERHEAD = 3
# Each role is one word of both vocabularies.
ROLE_TOKENS = 1
NAME_OVERHEAD = 1
REPLY_PRIMING = 3
# A call is framed like a message of its own; measured against reported usage, the cookbook is silent.
CALL_OVERHEAD = 4

CHARS_PER_TOKEN = 4

IMAGE_BASE = 85
IMAGE_TILE = 170
IMAGE_TILE_SIDE = 512
IMAGE_LONG_SIDE = 2048
IMAGE_SHORT_SIDE = 768
# tiancaiamao/ai, "Token Estimation".
IMAGE_UNKNOWN = 1_200
AUDIO_TOKENS = 1_000
FILE_TOKENS = 2_000
VIDEO_TOKENS = 5_000


def estimate(n_chars: int) -> int:
    """Tokens of a text of ``n_chars`` characters when no encoder is at hand: a quarter, rounded up."""
    return -(-n_chars // CHARS_PER_TOKEN)


def estimate_text(text: str) -> int:
    """Return an `Encode` that needs no vocabulary."""
    return estimate(len(text))


def count_message(message: Message, encode: Encode, *, name: str = "") -> int:
    """Count the tokens of one message in a chat request, including its framing, without the reply's priming."""
    total = MESSAGE_OVERHEAD + ROLE_TOKENS
    if name:
        total += NAME_OVERHEAD + encode(name)
    for block in message.injected:
        total += encode(block.text)
    for part in message.parts:
        match part:
            case Text(text=text) | ToolResult(text=text):
                total += encode(text)
            case Reasoning():
                total += count_reasoning(part, encode)
            case ToolCall():
                total += CALL_OVERHEAD + encode(part.name) + encode(part.arguments)
            case Media():
                total += count_media(part)
            case _:
                assert_never(part)
    return total


def count_text_message(text: str, encode: Encode) -> int:
    """Tokens of a plain text message: what a message of a head costs."""
    return MESSAGE_OVERHEAD + ROLE_TOKENS + encode(text)


def count_reasoning(thought: Reasoning, encode: Encode) -> int:
    """Count the tokens of a thought. Its text may be a summary of the encrypted part and is not counted twice."""
    return max(encode(thought.text), estimate(thought.hidden))


def count_media(media: Media) -> int:
    """Tokens of an image, sound or file; fixed estimates where the size is unknown."""
    match media.kind:
        case "image":
            return count_image(media.width, media.height, detail=media.detail)
        case "audio":
            return AUDIO_TOKENS
        case "video":
            return VIDEO_TOKENS
        case "file" | "other":
            return estimate(media.size) if media.size else FILE_TOKENS
        case _:
            assert_never(media.kind)


def count_image(width: int, height: int, *, detail: str = "") -> int:
    """Tokens of an image of ``width`` x ``height`` pixels (0: unknown).

    Low detail costs the base alone. Otherwise the image is fitted into 2048 x 2048, then its short side is
    brought down to 768, and each tile of 512 x 512 costs 170 on top of the base of 85.
    """
    if detail == "low":
        return IMAGE_BASE
    if width <= 0 or height <= 0:
        return IMAGE_UNKNOWN
    fit = min(1.0, IMAGE_LONG_SIDE / max(width, height))
    shrink = min(1.0, IMAGE_SHORT_SIDE / (min(width, height) * fit))
    across = math.ceil(round(width * fit * shrink, 6) / IMAGE_TILE_SIDE)
    down = math.ceil(round(height * fit * shrink, 6) / IMAGE_TILE_SIDE)
    return IMAGE_BASE + IMAGE_TILE * max(1, across) * max(1, down)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Tokens of a model family for the framing of tool definitions (the cookbook's constants)."""

    function: int
    properties: int = 3
    property_key: int = 3
    enum: int = -3
    enum_item: int = 3
    closing: int = 12


GPT_4O_TOOLS = ToolFormat(function=7)
GPT_4_TOOLS = ToolFormat(function=10)


def count_tools(tools: Iterable[object], encode: Encode, *, layout: ToolFormat = GPT_4O_TOOLS) -> int:
    """Tokens of a request's ``tools``, given as parsed JSON. 0 without tools.

    A definition that is not shaped like a function (a provider's own tool, a nested schema) is counted by
    its JSON text.
    """
    counts = [_count_tool(tool, encode, layout) for tool in tools]
    return sum(counts) + layout.closing if counts else 0


def _count_tool(tool: object, encode: Encode, layout: ToolFormat) -> int:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return layout.function + encode(_as_json(tool))
    described = f"{function.get('name', '')}:{_sentence(function.get('description'))}"
    total = layout.function + encode(described)
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return total + (encode(_as_json(parameters)) if parameters else 0)
    if properties:
        total += layout.properties
    return total + sum(_count_property(str(key), value, encode, layout) for key, value in properties.items())


def _count_property(key: str, schema: object, encode: Encode, layout: ToolFormat) -> int:
    if not isinstance(schema, Mapping):
        return layout.property_key + encode(f"{key}:{_as_json(schema)}")
    total = layout.property_key
    choices = schema.get("enum")
    if isinstance(choices, list):
        total += layout.enum + sum(layout.enum_item + encode(str(choice)) for choice in choices)
    total += encode(f"{key}:{schema.get('type', '')}:{_sentence(schema.get('description'))}")
    nested = {name: schema[name] for name in ("items", "properties", "anyOf", "oneOf", "allOf") if schema.get(name)}
    return total + (encode(_as_json(nested)) if nested else 0)


def _sentence(value: object) -> str:
    return str(value or "").removesuffix(".")


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


CALIBRATION_WEIGHT = 0.2
CALIBRATION_LOW = 0.5
CALIBRATION_HIGH = 3.0
CALIBRATION_MINIMUM = 50


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The ratio of a model's reported input tokens to Tersely's estimates: a bounded, exponentially weighted mean.

    One outlier (a provider that counts a cached or an audio part separately) changes it by a fifth at most, and it
    stays between 0.5 and 3. ``samples`` is the number of reports.
    """

    ratio: float = 1.0
    samples: int = 0

    def observe(self, *, estimated: int, reported: int) -> Calibration:
        """Return the calibration after one more report. Requests that are too small are ignored."""
        if estimated < CALIBRATION_MINIMUM or reported <= 0:
            return self
        seen = _bounded(reported / estimated)
        # The first reports count as a plain mean, so that the start value does not linger.
        weight = max(CALIBRATION_WEIGHT, 1 / (self.samples + 1))
        return replace(self, ratio=_bounded(self.ratio + weight * (seen - self.ratio)), samples=self.samples + 1)

    def apply(self, tokens: int) -> int:
        """Return an estimate in the provider's own measure, rounded up."""
        return math.ceil(tokens * self.ratio)


def _bounded(ratio: float) -> float:
    return min(CALIBRATION_HIGH, max(CALIBRATION_LOW, ratio))
