"""Links of README and docs lead to files and headings that exist, and every page can be reached."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.wrap_pages import wrap
from tests.docs.pages import NAMES, ROOT, anchors, links, prose, read


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings_that_exist(name: str) -> None:
    broken = []
    for target in links(name):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        if (
            not file.exists()
            or not file.is_relative_to(ROOT)
            or (anchor and file.suffix == ".md" and anchor not in anchors(str(file.relative_to(ROOT))))
        ):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("name", NAMES)
def test_pages_link_to_other_pages_instead_of_naming_them(name: str) -> None:
    assert re.findall(r"(?<!\[)`(?:\.\./)?(?:docs/)?[a-z][\w-]*\.md`(?!\])", prose(name)) == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[str](), ["README.md"]
    while waiting:
        name = waiting.pop()
        if name in reached or not name.endswith(".md"):
            continue
        reached.add(name)
        for target in links(name):
            path = target.partition("#")[0]
            if path and "://" not in path:
                waiting.append(str(((ROOT / name).parent / path).resolve().relative_to(ROOT)))
    assert set(NAMES) <= reached


@pytest.mark.parametrize("name", NAMES)
def test_prose_is_wrapped_at_120_characters(name: str) -> None:
    assert wrap(read(name)) == read(name), "run: make fmt"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_shown_and_have_title_description_and_dark_colours(picture: Path) -> None:
    root = ET.parse(picture).getroot()
    parts = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    assert parts["title"]
    assert parts["desc"]
    assert "prefers-color-scheme: dark" in parts["style"]
    assert any(picture.name in read(name) for name in NAMES)
