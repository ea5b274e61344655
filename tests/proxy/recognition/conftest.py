"""The recordings of real clients."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def recordings(shared_data: Path) -> Path:
    directory = shared_data / "clients"
    if not directory.is_dir():
        pytest.skip(f"no recorded clients at {directory}")
    return directory
