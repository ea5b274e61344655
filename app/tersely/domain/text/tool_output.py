"""Shorten a tool's output for a model (tiancaiamao/ai, "Tool Output Processing").

The result depends on the text alone, so that prompt prefixes stay stable. The stored output is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from tersely.domain.text.clipping import count_bytes, head, head_bytes

TruncateMode = Literal["head", "head_tail"]

# With fewer lines than this, beginning and end would leave nothing of either.
LEAST_HEAD_TAIL_LINES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutputLimits:
    """``max_bytes`` counts UTF-8; ``max_chars`` and ``large_output_threshold`` count code points ("runes")."""

    max_lines: int = 2_000
    max_bytes: int = 50 * 1024
    max_chars: int = 200 * 1024
    large_output_threshold: int = 200 * 1024
    truncate_mode: TruncateMode = "head_tail"

    @property
    def safe_chars(self) -> int:
        """No text of so many characters is over any limit."""
        return min(self.max_lines, self.max_bytes // 4, self.max_chars, self.large_output_threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizedOutput:
    """An output as the model sees it. ``spilled_sha256`` is set if a notice replaces the output."""

    text: str
    is_truncated: bool = False
    spilled_sha256: str | None = None


DEFAULT_LIMITS = ToolOutputLimits()
# No strategy may spill outputs of fewer characters: those of more are on record, and can be fetched by their digest.
LEAST_SPILLED = 20_000


def normalize(
    text: str, limits: ToolOutputLimits = DEFAULT_LIMITS, *, way: str = "", is_readable: bool = False
) -> NormalizedOutput:
    """Return ``text`` within ``limits``: spilled above the threshold, else truncated by lines, then characters, then
    bytes.

    ``way`` is a sentence that tells this model how to read the whole output. ``is_readable``: the model can read a
    spilled output by its digest, which no other model is shown. The notice replaces a spilled output if the model can
    read it, as in the document; otherwise the truncated output follows the notice, so that it is not lost. An output
    within all limits is returned unchanged, and no output grows.
    """
    if len(text) <= limits.safe_chars:
        return NormalizedOutput(text=text)
    if len(text) > limits.large_output_threshold:
        return _spill(text, limits, way, is_readable=is_readable)
    cut = _truncate(text, limits)
    if cut == text:
        return NormalizedOutput(text=text)
    noted = cut + _statistics(text, cut, way)
    return NormalizedOutput(text=noted, is_truncated=True) if len(noted) < len(text) else NormalizedOutput(text=text)


def output_digest(text: str) -> str:
    """Return the SHA-256 of ``text`` in UTF-8, in hex; lone surrogates as their three bytes."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _spill(text: str, limits: ToolOutputLimits, way: str, *, is_readable: bool) -> NormalizedOutput:
    sha = output_digest(text)
    size = f"{len(text)} characters, {count_bytes(text)} bytes, {count_lines(text)} lines"
    if is_readable:
        size, way = f"{size}; sha256 {sha}", "Use read_artifact with it to see full output"
    notice = f"[Large tool output: {size}.{_spaced(way)}]"
    shown = notice if way else f"{notice}\n{_truncate(text, limits)}"
    if len(shown) >= len(text):
        return NormalizedOutput(text=text)
    return NormalizedOutput(text=shown, is_truncated=True, spilled_sha256=sha)


def _truncate(text: str, limits: ToolOutputLimits) -> str:
    return head_bytes(head(_truncate_lines(text, limits), limits.max_chars), limits.max_bytes)


def _truncate_lines(text: str, limits: ToolOutputLimits) -> str:
    most = limits.max_lines
    if count_lines(text) <= most:
        return text
    lines = text.split("\n")
    if limits.truncate_mode == "head" or most < LEAST_HEAD_TAIL_LINES:
        return "\n".join(lines[:most])
    # The marker is one of the lines.
    last = (most - 1) // 2
    first = most - 1 - last
    marker = f"... [{len(lines) - first - last} lines truncated] ..."
    return "\n".join([*lines[:first], marker, *lines[len(lines) - last :]])


def _statistics(text: str, cut: str, way: str) -> str:
    return (
        f"\n[Output truncated: {count_lines(cut)} of {count_lines(text)} lines, {len(cut)} of {len(text)} characters, "
        f"{count_bytes(cut)} of {count_bytes(text)} bytes shown.{_spaced(way)}]"
    )


def _spaced(way: str) -> str:
    return f" {way}" if way else ""


def count_lines(text: str) -> int:
    """Count the lines of ``text``. The text after the last line end counts as a line, even if it is empty."""
    return text.count("\n") + 1
