"""What `make dist` builds, and environments into which the wheel is installed without the source tree."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ran(command: Sequence[object], folder: Path, status: int = 0) -> str:
    """Run a program without the variables by which Python finds this source tree; return all that it says."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EVERSTEP"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=bare,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == status, f"{command}\n{done.stdout}"
    return done.stdout


def built(folder: Path, *options: str) -> Path:
    """Build as `make dist` does, into a folder."""
    tools = ROOT / ".venv" / "dist" / "bin" / "python"
    with open(ROOT / ".venv" / "dist.lock", "w") as lock:  # tests of several processes make one environment
        fcntl.lockf(lock, fcntl.LOCK_EX)
        ran(["make", ".venv/.dist", f"PYTHON={sys.executable}"], ROOT)
    ran([tools, "-m", "build", "--no-isolation", "--outdir", folder, *options, ROOT], ROOT)
    return folder


class Environment:
    """Virtual environment with the wheel and one of its extras."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        self.folder = folder
        venv.create(folder / "env")
        what = f"{wheel}[{extra}]" if extra else wheel
        self.pip("install", what, "-c", ROOT / "constraints.txt")

    def pip(self, *arguments: object) -> None:
        pip = [sys.executable, "-m", "pip", "-q", "--python", self.command("python")[0]]
        ran([*pip, *arguments, "--no-compile"], self.folder)

    def command(self, program: str, *arguments: object) -> list[str]:
        return [str(self.folder / "env" / "bin" / program), *map(str, arguments)]

    def python(self, *arguments: object, status: int = 0) -> str:
        return ran(self.command("python", *arguments), self.folder, status)

    def everstep(self, *arguments: object, status: int = 0) -> str:
        return ran(self.command("everstep", *arguments), self.folder, status)

    def has(self, module: str) -> bool:
        return self.python("-c", f"import importlib.util as u; print(u.find_spec({module!r}))") != "None\n"
