"""The wheel, built from the tracked files and installed beside its declared requirements alone, is the whole service.

No network is used: hatchling builds from the development environment, and the new environment links to the
distributions that are installed there.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path, PurePosixPath

import asyncpg
import httpx
import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import OWNER, Server
from tests.support.http import STORED
from tests.support.processes import postgres_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello, who are you?"}]}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that the database's account can reach too."""
    with tempfile.TemporaryDirectory(prefix="tersely-wheel-", dir="/tmp", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


def copy_tracked_files(target: Path) -> None:
    """Copy what a clone of the repository would hold, as it is in this checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: the tracked files are not known")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    sources, target = folder / "sources", folder / "wheels"
    copy_tracked_files(sources)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=sources,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def files(wheel: Path) -> set[str]:
    """The paths inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment that holds the wheel and what the wheel requires."""

    folder: Path
    home: Path

    def variables(self, **given: str) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8", **given}

    def run(self, *arguments: str, **given: str) -> str:
        """Run the installed command and return what it printed."""
        done = subprocess.run(
            [self.folder / "bin" / "tersely", *arguments],
            cwd=self.home,
            env=self.variables(**given),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: str, **given: str) -> subprocess.Popen[str]:
        """Start the installed command."""
        return subprocess.Popen(
            [self.folder / "bin" / "tersely", *arguments],
            cwd=self.home,
            env=self.variables(**given),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def required_distributions(requirements: list[str]) -> set[str]:
    """Return the names of the installed distributions that ``requirements`` need, directly or not."""
    found: set[str] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        for each in importlib.metadata.requires(name) or ():
            waiting += [(Requirement(each), wanted) for wanted in ("", *requirement.extras)]
    return found


def link_distribution(name: str, target: Path) -> None:
    """Link the modules and the metadata of an installed distribution into ``target``."""
    distribution = importlib.metadata.distribution(name)
    tops = {PurePosixPath(each).parts[0] for each in distribution.files or ()}
    for top in tops - {"..", "__pycache__"}:
        source = Path(str(distribution.locate_file(top)))
        if source.exists() and not (target / top).exists():
            (target / top).symlink_to(source)


@pytest.fixture(scope="module")
def environment(folder: Path, wheel: Path) -> Environment:
    """The installed wheel, with an empty home directory."""
    place, home = folder / "venv", folder / "home"
    home.mkdir()
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needed = message_from_string(archive.read(metadata).decode()).get_all("Requires-Dist", [])
    for name in required_distributions(needed):
        link_distribution(name, packages)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install"),
            *("--quiet", "--no-deps", "--no-index", "--no-warn-script-location", wheel),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return Environment(folder=place, home=home)


def test_wheel_carries_code_data_migrations_and_licence(files: set[str]) -> None:
    tracked = {str(path.relative_to(ROOT / "app")) for path in (ROOT / "app" / "tersely").rglob("*") if path.is_file()}
    wanted = {name for name in tracked if "__pycache__" not in name}
    migrations = {f"tersely/_migrations/versions/{p.name}" for p in (ROOT / "migrations/versions").glob("*.py")}
    assert wanted <= files
    assert migrations | {"tersely/_migrations/env.py", "tersely/_migrations/script.py.mako"} <= files
    assert {"tersely/py.typed", "tersely/data/o200k_base.vocabulary"} <= files
    assert any(re.fullmatch(r"tersely/strategies/.*/prompts/\w+\.txt", name) for name in files)
    assert any(re.fullmatch(r"tersely-[\d.]+\.dist-info/licenses/LICENSE", name) for name in files)


def test_wheel_contains_only_the_package(files: set[str]) -> None:
    tops = {name.partition("/")[0] for name in files}
    assert {re.sub(r"-\d+(\.\d+)*", "", top) for top in tops} == {"tersely", "tersely.dist-info"}
    assert not [name for name in files if re.search(r"(^|/)(tests|bench|conftest\.py)(/|$)|__pycache__", name)]


def test_metadata_names_licence_readme_and_command(wheel: Path, files: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        read = {name.rpartition("/")[2]: archive.read(name).decode() for name in files if ".dist-info/" in name}
    metadata = message_from_string(read["METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "tersely = tersely.cli:main" in read["entry_points.txt"]
    assert (ROOT / "LICENSE").read_text(encoding="utf-8") == read["LICENSE"]


def test_installed_package_finds_its_data(environment: Environment) -> None:
    code = (
        "import tersely, tersely.service.common.vocabulary as v;"
        "from tersely.store.db.migrations import SCRIPTS;"
        "print(tersely.__file__); print(SCRIPTS); print(len(v.load_encoding('o200k_base').encode('Hello, world')))"
    )
    done = subprocess.run(
        [environment.folder / "bin" / "python", "-c", code],
        env=environment.variables(),
        capture_output=True,
        text=True,
        check=True,
    )
    package, scripts, tokens = done.stdout.splitlines()
    assert Path(package).is_relative_to(environment.folder)
    assert Path(scripts).is_relative_to(environment.folder)
    assert tokens == "3"


async def test_installed_command_migrates_an_empty_database(environment: Environment, server: Server) -> None:
    name = f"tersely_wheel_{os.getpid()}"
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(f"CREATE DATABASE {name} OWNER {OWNER}")
        environment.run("migrate", DATABASE_URL=server.dsn(name, user=OWNER))
        connection = await asyncpg.connect(server.dsn(name))
        head = await connection.fetchval("SELECT version_num FROM alembic_version")
        await connection.close()
    finally:
        await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await admin.close()
    assert head == max(path.name for path in (ROOT / "migrations/versions").glob("*.py"))[:4]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_installed_command_serves_a_chat(environment: Environment, folder: Path, workers: str) -> None:
    data = folder / f"data-{workers}"
    process = environment.start(
        *("serve", "--upstream", "scripted", "--port", "0", "--workers", workers), TERSELY_DATA_DIR=str(data)
    )
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        url = re.search(r"http://[\d.]+:\d+", greeting)
        assert url is not None, process.communicate(timeout=30)
        answer = httpx.post(f"{url[0]}/v1/chat/completions", json=QUESTION, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.headers["X-Tersely-Context"] in STORED
        session = answer.headers["X-Tersely-Session"]
        stored = httpx.get(f"{url[0]}/api/sessions/{session}/messages", timeout=60).json()
        assert [message["role"] for message in stored["items"]] == ["user", "assistant"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
        for each in postgres_of(data):
            each.kill()
        psutil.wait_procs(postgres_of(data), 10)
