"""The console lines of README.md and docs/guide/doors.md run in order, with what their install brings."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
PAGES = README + (ROOT / "docs" / "guide" / "doors.md").read_text()
LINES = re.findall(
    r"^\$ (.*?)(?: {2,}#.*)?$", "".join(re.findall(r"```console\n(.*?)```", PAGES, re.S)), re.M
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
EVERSTEP = "everstep"


def test_the_readme_takes_five_minutes() -> None:
    assert len(README.partition("## Where to go next")[0].split()) <= 600


def test_each_line_that_installs_names_extras_and_targets_that_there_are() -> None:
    installing = [line for line in LINES if " install " in line]
    named = {
        extra for line in installing for found in re.findall(r"\[(.*?)\]", line) for extra in found.split(",")
    }
    assert "demo" in named and named <= EXTRAS.keys()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    made = [line.split()[1] for line in LINES if line.startswith("make")]
    assert made and set(made) <= set(targets)
    walked = {line.split()[0] for line in LINES if line not in installing}
    assert walked == {"make", "everstep"}, "a line that nobody tries"


def test_a_block_of_commands_begins_with_what_installs_them() -> None:
    blocks = re.findall(r"```console\n(.*?)```", PAGES, re.S)
    with_commands = [block for block in blocks if "$ everstep" in block]
    assert len(with_commands) == 2
    assert all(block.startswith('$ pip install -e ".[demo]"') for block in with_commands)


def brought_by(extra: str) -> set[str]:
    """The distributions that `pip install -e ".[extra]"` installs."""
    found: set[str] = set()
    waiting = [(EVERSTEP, frozenset({extra}))]
    while waiting:
        name, extras = waiting.pop()
        found.add(name)
        for each in map(Requirement, requirements(name, extras)):
            wanted = each.marker is None or any(each.marker.evaluate({"extra": one}) for one in (*extras, ""))
            if wanted and (each.extras or canonical(each.name) not in found):
                waiting.append((canonical(each.name), frozenset(each.extras)))
    return found


def requirements(name: str, extras: frozenset[str]) -> list[str]:
    """Of ours what pyproject.toml says now, whatever was installed once."""
    if name == EVERSTEP:
        return [*PROJECT["dependencies"], *(each for extra in extras for each in EXTRAS[extra])]
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # it is for another system
        return []


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which no package can be imported but those of the extra `demo`."""
    brought = brought_by("demo")
    assert {"torch", "click", "sqlalchemy", "pydantic", "scikit-learn"} <= brought
    hidden = [
        package
        for package, owners in metadata.packages_distributions().items()
        if not brought & {canonical(owner) for owner in owners} and package not in ("pip", "setuptools")
    ]
    assert {"pytest", "hypothesis", "optuna"} <= set(hidden)
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "sitecustomize.py").write_text(HIDING.format(hidden=set(hidden)))
    return {**os.environ, "PYTHONPATH": str(tmp_path / "hiding"), "EVERSTEP_INDEX": ""}


def shortened(line: str) -> str:
    """The same line with less to train; a drill with one kill in place of twelve."""
    for long, short in (("max_epoch=10", "max_epoch=1"), ('max_epoch": 10', 'max_epoch": 1')):
        line = line.replace(long, short)
    return line.replace("--kills 1", "--kills 1 --hazard commit").replace("--epochs 3", "--epochs 1")


@pytest.mark.campaign("long")
def test_every_command_of_the_readme_runs_with_what_its_install_line_brings(
    tmp_path: Path, installed: dict[str, str]
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    config = tmp_path / "examples" / "digits.yaml"
    config.write_text(config.read_text().replace("max_epoch: 40", "max_epoch: 1"))
    said = {}
    for line in [line for line in LINES if line.startswith("everstep")]:
        command = [sys.executable, "-m", *shlex.split(shortened(line))]
        done = subprocess.run(
            command, cwd=tmp_path, env=installed, capture_output=True, text=True, check=False
        )
        said[line.split()[1]] = done.stdout
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "config.optimizer.lr" in said["compare"]
    assert "digits-config" in said["runs"]
    assert "exact: 1 of 1" in said["drill"]
