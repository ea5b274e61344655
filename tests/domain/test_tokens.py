"""The counting rules, with a word counter for an encoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.messages import Media, Text
from tersely.domain.tokens import (
    FILE_TOKENS,
    GPT_4_TOOLS,
    GPT_4O_TOOLS,
    REPLY_PRIMING,
    Calibration,
    ToolFormat,
    count_image,
    count_media,
    count_message,
    count_tools,
    estimate,
)
from tersely.service.common.tokens import count_text, encoding_for
from tests.builders import assistant, call, message, system, user


def words(text: str) -> int:
    return len(text.split())


def test_a_message_costs_its_words_its_role_and_three() -> None:
    assert count_message(user("one two three"), words) == 3 + 1 + 3
    assert count_message(user("one"), words, name="al") == 3 + 1 + 1 + 1 + 1


def test_a_call_costs_name_and_arguments_and_its_frame() -> None:
    assert count_message(assistant(None, call("c1", "dom", '{"a": 1}')), words) == 3 + 1 + 4 + 1 + 2


def test_media_count_by_kind() -> None:
    picture = Media(kind="image", digest="d", detail="low")
    assert count_message(message("user", Text(text="look"), picture), words) == 3 + 1 + 1 + 85
    assert count_media(Media(kind="image", digest="d")) == 1_200  # tiancaiamao/ai: an image of unknown size
    assert count_media(Media(kind="file", digest="d")) == FILE_TOKENS


# The examples of OpenAI's vision guide.
@pytest.mark.parametrize(
    ("width", "height", "detail", "tokens"),
    [
        (1024, 1024, "high", 765),
        (2048, 4096, "high", 1105),
        (4096, 8192, "low", 85),
        (512, 512, "auto", 255),
        (0, 0, "", 1200),
        (1, 100_000, "high", 85 + 4 * 170),
    ],
)
def test_images_count_by_tiles(width: int, height: int, detail: str, tokens: int) -> None:
    assert count_image(width, height, detail=detail) == tokens


COOKBOOK_TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
                "unit": {
                    "type": "string",
                    "description": "The unit of temperature to return",
                    "enum": ["celsius", "fahrenheit"],
                },
            },
            "required": ["location"],
        },
    },
}


def test_tool_definitions_count_as_the_cookbook_says() -> None:
    described = words("get_current_weather:Get the current weather in a given location")
    location = 3 + words("location:string:The city and state, e.g. San Francisco, CA")
    unit = 3 + (-3 + 2 * (3 + 1)) + words("unit:string:The unit of temperature to return")
    assert count_tools([COOKBOOK_TOOL], words) == 7 + described + 3 + location + unit + 12
    assert count_tools([COOKBOOK_TOOL], words, layout=GPT_4_TOOLS) == count_tools([COOKBOOK_TOOL], words) + 3


@pytest.mark.parametrize("tool", [None, 5, {}, {"type": "web_search"}, {"function": {"name": "f", "parameters": [1]}}])
def test_an_odd_tool_is_counted_by_its_text(tool: object) -> None:
    assert count_tools([tool], words) > 12
    assert count_tools([], words) == 0


def test_without_an_encoder_a_token_is_four_characters() -> None:
    assert [estimate(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_calibration_starts_with_the_mean_and_then_forgets_slowly() -> None:
    first = Calibration().observe(estimated=1000, reported=1200)
    assert first == Calibration(ratio=1.2, samples=1)
    assert first.apply(100) == 120
    settled = Calibration(ratio=1.2, samples=50).observe(estimated=1000, reported=1700)
    assert settled.ratio == pytest.approx(1.3)


def test_small_requests_and_odd_reports_teach_nothing() -> None:
    assert Calibration().observe(estimated=10, reported=100) == Calibration()
    assert Calibration().observe(estimated=1000, reported=0) == Calibration()


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(-5, 10**7)), max_size=20))
def test_calibration_stays_in_bounds(reports: list[tuple[int, int]]) -> None:
    calibration = Calibration()
    for estimated, reported in reports:
        calibration = calibration.observe(estimated=estimated, reported=reported)
    assert 0.5 <= calibration.ratio <= 3.0


# The totals that the cookbook prints for its own example, as the provider reported them.
@pytest.mark.parametrize(("model", "layout", "total"), [("gpt-4o", GPT_4O_TOOLS, 101), ("gpt-4", GPT_4_TOOLS, 105)])
def test_cookbook_example_counts_as_the_provider_reported(model: str, layout: ToolFormat, total: int) -> None:
    replies = [
        system("You are a helpful assistant that can answer to questions about the weather."),
        user("What's the weather like in San Francisco?"),
    ]
    name = encoding_for(model)

    def encode(text: str) -> int:
        return count_text(text, name)

    messages = sum(count_message(each, encode) for each in replies)
    assert messages + REPLY_PRIMING + count_tools([COOKBOOK_TOOL], encode, layout=layout) == total
