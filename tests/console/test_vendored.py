"""The libraries that the console ships are those that it says."""

from __future__ import annotations

import json
from hashlib import sha256

from tersely.console.assets import FOLDER

VENDORED = FOLDER / "vendor"


def test_vendored_files_have_the_hashes_that_are_written_down() -> None:
    listed = json.loads((VENDORED / "vendored.json").read_text())
    files = {path.name for path in VENDORED.iterdir() if path.suffix in {".js", ".css"}}
    assert set(listed) == files
    for name, each in listed.items():
        assert sha256((VENDORED / name).read_bytes()).hexdigest() == each["sha256"], name


def test_scripts_ask_no_other_host() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in {".js", ".css"}:
            text = path.read_text()
            assert "http://" not in text
            assert "https://" not in text
