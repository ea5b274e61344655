"""docs/clients.md, the tables of marks and the programs that are run name the same clients and versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tersely.dialects.clients.known import SEEN
from tests.clients.__main__ import PROGRAMS
from tests.clients.marks import client_table

DOCS = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
ROWS = dict(re.findall(r"(?m)^\| ([^|]+?)(?: CLI)? \| (\d[^|]*) \| (?:chat|Anthropic|Responses|Gemini)", DOCS))


def test_the_table_of_marks_is_the_generated_one() -> None:
    shown = DOCS.partition("<!-- marks -->\n")[2].partition("<!-- /marks -->")[0]
    assert shown == client_table(), "run: python -m tests.clients.marks"


def test_every_version_is_the_one_that_was_checked() -> None:
    assert {client.removesuffix(" CLI"): version for client, version in SEEN.items()} == ROWS


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_run_in_a_version_of_the_table(name: str) -> None:
    assert PROGRAMS[name].version in SEEN.values()


def test_the_newest_versions_are_asked_for_without_a_number() -> None:
    newest = PROGRAMS["claude-code"].with_newest()
    assert newest.npm == ("@anthropic-ai/claude-code@latest",)
    assert PROGRAMS["vercel-ai-sdk-chat"].with_newest().npm[0] == "ai@latest"
    assert PROGRAMS["pydantic-ai-openai-chat"].with_newest().pip == ("pydantic-ai-slim[openai,anthropic]",)
