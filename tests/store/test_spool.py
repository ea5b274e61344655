"""Spool files: what was acknowledged is read again, what was torn is not, and one process has a file at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tersely.store.commit import spool
from tersely.store.commit.spool import HEADER, SpoolFile, spool_directory

PAYLOADS = [b"first", b"", b"third" * 1000]


def written(directory: Path) -> Path:
    """A file with three records whose process has ended."""
    file = SpoolFile.create(directory, "a")
    places = file.append(PAYLOADS[:2]) + file.append(PAYLOADS[2:])
    assert [file.read(place) for place in places] == PAYLOADS
    file.close()
    return file.path


def read(path: Path) -> list[bytes]:
    file = SpoolFile.adopt(path)
    assert file is not None
    try:
        return [payload for _, payload in file.records()]
    finally:
        file.close()


def test_records_are_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "spool")
    assert read(path) == PAYLOADS
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("cut", [1, 10, 4999, 5000, 5010])
def test_a_torn_record_is_dropped_and_the_next_one_follows(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    assert read(path) == PAYLOADS[:2]
    file = SpoolFile.adopt(path)
    assert file is not None
    list(file.records())
    file.append([b"again"])
    file.close()
    assert read(path) == [*PAYLOADS[:2], b"again"]


def test_a_damaged_record_hides_no_other(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"first")] ^= 1
    path.write_bytes(content)
    file = SpoolFile.adopt(path)
    assert file is not None
    assert [payload for _, payload in file.records()] == PAYLOADS[1:]
    assert file.is_damaged
    file.set_aside()
    assert [each.suffix for each in tmp_path.iterdir()] == [spool.REFUSED]


def test_a_file_belongs_to_one_process(tmp_path: Path) -> None:
    path = written(tmp_path)
    program = (
        "import sys, pathlib, tersely.store.commit.spool as s; f = s.SpoolFile.adopt(pathlib.Path(sys.argv[1])); "
        "print(f is not None, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    assert SpoolFile.adopt(path) is None
    assert spool.has_others(tmp_path, frozenset())
    other.kill()
    other.communicate()
    assert read(path) == PAYLOADS


def test_other_files_in_the_spool_directory_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / f"b{spool.SUFFIX}"
    path.write_bytes(b"tersely spool 9\nsomething else")
    assert SpoolFile.adopt(path) is None
    assert path.read_bytes() == b"tersely spool 9\nsomething else"


def test_an_empty_file_waits_for_nothing(tmp_path: Path) -> None:
    file = SpoolFile.create(tmp_path, "a")
    file.append([b"one"])
    assert spool.has_others(tmp_path, frozenset())
    file.clear()
    assert file.path.read_bytes() == HEADER
    assert not spool.has_others(tmp_path, frozenset())
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_each_database_has_a_directory_of_its_own(tmp_path: Path) -> None:
    urls = [
        "postgresql://a:b@db:5432/one",
        "postgresql://other:secret@db/one",
        "postgresql://a:b@db:5432/two",
        "postgresql://a:b@db:6432/one",
        "postgresql://u@/one?host=%2Frun&port=5432",
    ]
    found = [spool_directory(tmp_path, url) for url in urls]
    assert found[0] == found[1]
    assert len(set(found)) == 4
