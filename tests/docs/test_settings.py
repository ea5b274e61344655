"""docs/settings.md: every setting has a row, and an example that the service takes."""

from __future__ import annotations

import re
import tomllib

from tersely.settings import LimitSettings, Settings
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
