"""Environments of their own for programs that benchmarks compare with or need: never dependencies of the project."""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent


def ensure_installed(requirement: str, name: str) -> Path:
    """Return the directory of the commands of the environment ``.venv/NAME``, with ``requirement`` installed if it is
    not there yet.
    """
    environment = ROOT / ".venv" / name
    stamp = environment / "installed"
    if not stamp.exists() or stamp.read_text() != requirement:
        print(f"installing {requirement} into {environment.relative_to(ROOT)} (once, some minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, requirement], check=True)
        stamp.write_text(requirement)
    return environment / "bin"
