"""docs/settings.md: every setting has a row, and an example that the service takes."""

from __future__ import annotations

import re
import tomllib

import pytest
from annotated_types import Ge, Gt, Le
from pydantic import ValidationError

from tersely.settings import MOST_LIVE_SESSIONS, LimitSettings, Settings
from tests.docs.pages import blocks, read

TEXT = read("docs/settings.md")
(EXAMPLE,) = (
    tomllib.loads(block.code) for block in blocks("docs/settings.md") if block.language == "toml"
)  # fmt: skip


def variables_with_a_row() -> set[str]:
    """Return the settings of the table; `..._NAME_...` stands for a name like that of the row's first one."""
    table = TEXT.split("## All settings")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`([A-Z_]+)`", cell)}
    names |= {f"TERSELY_{name}_API_KEY" for cell in cells for name in re.findall(r"`\.\.\._([A-Z]+)_\.\.\.`", cell)}
    return {name.removeprefix("TERSELY_").lower() for name in names}


def test_every_setting_has_a_row() -> None:
    assert variables_with_a_row() == set(Settings.model_fields)


def test_every_setting_and_default_limit_has_an_example() -> None:
    assert set(EXAMPLE) == set(Settings.model_fields)
    assert set(EXAMPLE["limits"]) == set(LimitSettings.model_fields)


def test_example_file_is_accepted() -> None:
    settings = Settings.model_validate({"DATABASE_URL": EXAMPLE["database_url"], **EXAMPLE})
    assert settings.strategy == EXAMPLE["strategy"]
    assert settings.upstreams["ollama"].models == ("llama*", "qwen*")
    assert settings.limits.concurrent == 20


def rows(heading: str) -> dict[str, str]:
    """Return what stands beside each setting in the table under ``heading``; a row may have several settings."""
    table = re.split(r"\n#+ ", TEXT.split(f"# {heading}\n")[1])[0]
    found: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names = re.findall(r"`([A-Z_]+)`", line.split("|")[1])
            cells = re.split(r", (?=`|none)", line.split("|")[2].strip()) if len(names) > 1 else []
            beside = cells if len(cells) == len(names) else [line.split("|")[2].strip()] * len(names)
            found |= {name.removeprefix("TERSELY_").lower(): cell for name, cell in zip(names, beside, strict=True)}
    return found


def described_range(name: str) -> str:
    """Return the range of a numeric setting in the words of the page; empty if the setting has none."""
    bounds = {type(each).__name__: getattr(each, type(each).__name__.lower()) for each in metadata(name)}
    low, above, high = bounds.get("Ge"), bounds.get("Gt"), bounds.get("Le")
    if above is not None:
        return f"more than {above:,}" + (f", at most {high:,}" if high is not None else "")
    if low is None:
        return ""
    return f"{low:,} to {high:,}" if high is not None else f"{low:,} or more"


def metadata(name: str) -> list[Ge | Gt | Le]:
    return [each for each in Settings.model_fields[name].metadata if isinstance(each, Ge | Gt | Le)]


def test_table_of_ranges_is_that_of_the_code() -> None:
    ranges = {name: described_range(name) for name in Settings.model_fields if described_range(name)}
    ranges["live_sessions"] = f"`off`, or 0 to {MOST_LIVE_SESSIONS:,}"
    assert rows("Ranges") == ranges


@pytest.mark.parametrize("name", sorted(rows("Ranges")))
def test_settings_outside_of_their_range_are_refused(name: str) -> None:
    numbers = [float(each.replace(",", "")) for each in re.findall(r"\d[\d,.]*", rows("Ranges")[name])]
    is_open = "more than" in rows("Ranges")[name]
    is_float = "float" in str(Settings.model_fields[name].annotation)
    inside = [(0.001 if is_open else numbers[0]), *numbers[1:]]
    outside = [
        numbers[0] if is_open else numbers[0] - 1,
        *(number + (0.5 if is_float else 1) for number in numbers[1:]),
    ]
    for number in inside:
        Settings.model_validate({name: f"{number:.3f}" if is_float else f"{number:.0f}"})
    for number in outside:
        with pytest.raises(ValidationError):
            Settings.model_validate({name: f"{number:.3f}" if is_float else f"{number:.0f}"})


def test_defaults_are_those_of_the_code() -> None:
    for name, cell in rows("All settings").items():
        default = Settings.model_fields[name].get_default(call_default_factory=True)
        if isinstance(default, bool):
            shown = f"`{default:d}`"
        elif isinstance(default, str | int | float):
            shown = f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        else:
            continue  # no value by default: the cell says what happens then
        assert cell == shown, name
