"""docs/clients.md, the pages of the clients, the marks and the programs that are run name the same clients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tersely.dialects.clients.known import SEEN
from tests.clients.__main__ import PROGRAMS
from tests.clients.marks import client_table

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
DOCS = PAGE.read_text()
ROW = re.compile(
    r"(?m)^\| \[([^|\]]+?)(?: CLI)?\]\((clients/[^)]+)\) \| (\d[^|]*) \| (?:chat|Anthropic|Responses|Gemini)"
)
ROWS = {client: version for client, _, version in ROW.findall(DOCS)}
PAGES = {client: (PAGE.parent / path).read_text() for client, path, _ in ROW.findall(DOCS)}
SECTIONS = ("## Set it up", "## See that it works", "## What was tried")


def test_the_table_of_marks_is_the_generated_one() -> None:
    shown = DOCS.partition("<!-- marks -->\n")[2].partition("<!-- /marks -->")[0]
    assert shown == client_table(), "run: python -m tests.clients.marks"


def test_every_version_is_the_one_that_was_checked() -> None:
    assert {client.removesuffix(" CLI"): version for client, version in SEEN.items()} == ROWS


@pytest.mark.parametrize("client", PAGES)
def test_page_of_a_client_has_setup_and_tested_versions(client: str) -> None:
    assert [section for section in SECTIONS if f"\n{section}\n" not in PAGES[client]] == []
    assert f"\nVersion {ROWS[client]}," in PAGES[client]
    assert "127.0.0.1:8484" in PAGES[client].split("## Set it up")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_its_figures_on_one_page(name: str) -> None:
    assert sum(f"\n| {name} | " in page for page in PAGES.values()) == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_run_in_a_version_of_the_table(name: str) -> None:
    assert PROGRAMS[name].version in SEEN.values()


def test_newest_client_versions_are_installed_unpinned() -> None:
    newest = PROGRAMS["claude-code"].with_newest()
    assert newest.npm == ("@anthropic-ai/claude-code@latest",)
    assert PROGRAMS["vercel-ai-sdk-chat"].with_newest().npm[0] == "ai@latest"
    assert PROGRAMS["pydantic-ai-openai-chat"].with_newest().pip == ("pydantic-ai-slim[openai,anthropic]",)
