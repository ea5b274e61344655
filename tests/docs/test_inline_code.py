"""Names in backticks exist: commands with their options, settings, endpoints, metrics and files."""

from __future__ import annotations

import json
import re

import pytest
from typer.exceptions import TyperException

from tersely.service.common.metrics import TABLE, Metrics
from tersely.settings import OF_COMPOSE, Settings
from tests.docs.pages import NAMES, ROOT, prose, read
from tests.docs.test_code_blocks import COMMAND_VARIABLES, parse_tersely

CODE = {name: re.findall(r"`([^`\n]+)`", prose(name)) for name in NAMES}
# Placeholders of the pages, and values that the parser takes in their place.
VALUES = {"N": "1", "TURN": "t1", "P": "60", "FILE": "file.json"}
# Other files that are named: of clients and of data that users bring.
OTHER_FILES = re.compile(r"^(~|/|\$)|[*<{]|^(file|requests|responses|session|config|opencode|models|context)\b")
ENDPOINTS = json.loads(read("openapi/openapi.json"))["paths"]


def metric_names() -> set[str]:
    """Return the names of all metrics, as Prometheus shows them."""
    text = Metrics(data_dir=ROOT).render().decode()
    return set(re.findall(r"(?m)^# TYPE (\w+)", text)) | set(re.findall(r"(?m)^(tersely_\w+)", text))


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_prose_can_be_parsed(name: str) -> None:
    errors = {}
    for code in CODE[name]:
        if not code.startswith("tersely ") or code == "tersely COMMAND --help":
            continue
        words = re.sub(r" \[[^\]]*\]", "", code).split()[1:]
        if words in (["keys"], ["COMMAND"]):
            continue
        try:
            parse_tersely([VALUES.get(word, word) for word in words])
        except TyperException as error:
            errors[code] = str(error)
    assert errors == {}


@pytest.mark.parametrize("name", NAMES)
def test_settings_in_prose_exist(name: str) -> None:
    known = {f"TERSELY_{field.upper()}" for field in Settings.model_fields} | COMMAND_VARIABLES | OF_COMPOSE
    named = {found for code in CODE[name] for found in re.findall(r"\bTERSELY_[A-Z_]+(?!\w|\*)", code)}
    assert {each for each in named if not each.endswith("_")} - known == set()


@pytest.mark.parametrize("name", NAMES)
def test_metrics_in_prose_exist(name: str) -> None:
    named = {found for code in CODE[name] for found in re.findall(r"^(tersely_\w+)", code)}
    exported = metric_names()
    assert {each for each in named if each not in exported and f"{each}_total" not in exported} == set()


def test_observe_page_lists_every_metric() -> None:
    text = read("docs/observe.md")
    assert [spec.name for spec in TABLE.values() if f"| `{spec.name}` |" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_endpoints_in_prose_exist(name: str) -> None:
    def pattern(path: str) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\\{[^}]*\\\}", r"[^/]+", re.escape(path)) + r"$")

    wrong = []
    for code in CODE[name]:
        found = re.match(r"(GET|POST|PUT|PATCH|DELETE) (/api/[^?\s]*)", code)
        if not found:
            continue
        methods = {
            method.upper() for path, each in ENDPOINTS.items() if pattern(path).match(found[2]) for method in each
        }
        if found[1] not in methods:
            wrong.append(code)
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_files_in_prose_exist(name: str) -> None:
    places = (ROOT, ROOT / "app" / "tersely", ROOT / "tests", ROOT / "tests" / "clients")
    missing = [
        code
        for code in CODE[name]
        if re.fullmatch(r"[\w./-]+/[\w.-]+\.(?:py|toml|json|md|lock|yml)|[\w.-]+\.(?:py|lock)", code)
        and not OTHER_FILES.search(code)
        and not any((place / code).exists() for place in places)
    ]
    known_by_role = {
        "read.py",
        "write.py",
        "stream.py",
        "whole.py",
        "tools.py",
        "tool_rounds.py",
        "local_reply.py",
        "completion.py",
    }
    roles = known_by_role | {"dialect.py", "registry.py"} if name == "docs/dialects.md" else set()
    assert set(missing) - roles == set()
    dialects = ROOT / "app" / "tersely" / "dialects"
    assert all(list(dialects.rglob(role)) for role in roles)
