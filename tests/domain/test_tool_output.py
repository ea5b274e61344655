"""tiancaiamao/ai, "Tool Output Processing": each step of the processing order, and what holds for all outputs."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.domain.text.clipping import count_bytes
from tersely.domain.text.tool_output import NormalizedOutput, ToolOutputLimits, count_lines, normalize, output_digest

WAY = "Use query_db(...) to see full output"


def numbered(lines: int) -> str:
    return "\n".join(f"line {number}" for number in range(1, lines + 1))


def test_defaults_are_those_of_the_document() -> None:
    assert ToolOutputLimits() == ToolOutputLimits(
        max_lines=2000,
        max_bytes=50 * 1024,
        max_chars=200 * 1024,
        large_output_threshold=200 * 1024,
        truncate_mode="head_tail",
    )


def test_order_1_over_the_threshold_in_runes_a_notice_with_the_checksum_replaces_the_output() -> None:
    text = "é" * (200 * 1024 + 1)
    sha = sha256(text.encode()).hexdigest()
    size = "204801 characters, 409602 bytes, 1 lines"
    readable = f"[Large tool output: {size}; sha256 {sha}. Use read_artifact with it to see full output]"
    for way in ("", WAY):
        done = normalize(text, way=way, is_readable=True)
        assert done == NormalizedOutput(text=readable, is_truncated=True, spilled_sha256=sha)
    done = normalize(text, way=WAY)
    assert done == NormalizedOutput(text=f"[Large tool output: {size}. {WAY}]", is_truncated=True, spilled_sha256=sha)
    assert normalize("é" * (200 * 1024)).spilled_sha256 is None


def test_notice_without_retrieval_hint_is_followed_by_the_fitting_text() -> None:
    done = normalize("x" * 300_000)
    notice, _, rest = done.text.partition("\n")
    assert notice.startswith("[Large tool output: 300000 characters")
    assert "Use" not in notice
    assert rest == "x" * 50 * 1024


def test_order_2_lines_first_with_the_head_tail_marker() -> None:
    lines = normalize(numbered(2_500)).text.split("\n")
    assert lines[999:1002] == ["line 1000", "... [501 lines truncated] ...", "line 1502"]
    assert (lines[0], lines[1999]) == ("line 1", "line 2500")
    assert lines[2000].startswith("[Output truncated: 2000 of 2500 lines, ")


@pytest.mark.parametrize("limits", [
    ToolOutputLimits(max_lines=3),
    ToolOutputLimits(max_lines=3, truncate_mode="head"),
])  # fmt: skip
def test_order_2_no_marker_below_a_limit_of_4_or_in_head_mode(limits: ToolOutputLimits) -> None:
    assert normalize(numbered(100), limits).text.split("\n")[:3] == ["line 1", "line 2", "line 3"]


def test_order_2_a_limit_of_4_has_a_marker() -> None:
    lines = normalize(numbered(100), ToolOutputLimits(max_lines=4)).text.split("\n")
    assert lines[:4] == ["line 1", "line 2", "... [97 lines truncated] ...", "line 100"]


def test_order_2_then_runes() -> None:
    cut = normalize("é" * 1_000, ToolOutputLimits(max_chars=300)).text
    assert cut.startswith("é" * 300 + "\n[Output truncated: 1 of 1 lines, 300 of 1000 characters, 600 of 2000 bytes")


def test_order_2_then_bytes_never_inside_a_character() -> None:
    cut = normalize("é" * 1_000, ToolOutputLimits(max_bytes=301)).text
    assert cut.partition("\n")[0] == "é" * 150


def test_order_3_statistics_are_appended_to_a_cut_result() -> None:
    assert normalize("x" * 60_000, way=WAY).text.endswith(
        f"\n[Output truncated: 1 of 1 lines, 51200 of 60000 characters, 51200 of 60000 bytes shown. {WAY}]"
    )
    assert normalize("x" * 51_200) == NormalizedOutput(text="x" * 51_200)


limits = st.builds(
    ToolOutputLimits,
    max_lines=st.integers(1, 20),
    max_bytes=st.integers(0, 400),
    max_chars=st.integers(0, 400),
    large_output_threshold=st.integers(0, 600),
    truncate_mode=st.sampled_from(["head", "head_tail"]),
)
outputs = st.lists(st.text(st.sampled_from("ab é\n\ud800\U0001f600"), max_size=60), max_size=20).map("\n".join)


@settings(deadline=None)
@given(outputs, limits, st.sampled_from(["", WAY]), st.booleans())
def test_tool_output_is_bounded(text: str, bounds: ToolOutputLimits, way: str, is_readable: bool) -> None:
    done = normalize(text, bounds, way=way, is_readable=is_readable)
    assert normalize(text, bounds, way=way, is_readable=is_readable) == done
    assert len(done.text) <= len(text)
    assert done.is_truncated == (done.text != text)
    if done.spilled_sha256:
        assert done.spilled_sha256 == output_digest(text)
        assert (done.spilled_sha256 in done.text) is is_readable
    elif done.is_truncated:
        body = done.text[: done.text.rindex("\n[Output truncated")]
        assert count_lines(body) <= bounds.max_lines
        assert len(body) <= bounds.max_chars
        assert count_bytes(body) <= bounds.max_bytes


@settings(deadline=None)
@given(outputs)
def test_output_within_the_limits_is_unchanged(text: str) -> None:
    assert normalize(text).text is text
