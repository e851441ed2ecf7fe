"""requirements/, which `make lock` makes: set-up installs nothing without a version and a hash."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from everstep.errors import DISTRIBUTIONS

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def lines(name: str) -> list[tuple[str, str]]:
    """What is locked, and its hashes, in a file without those that it includes."""
    text = (FOLDER / f"{name}.txt").read_text().replace("\\\n", "")
    listed = [line for line in text.splitlines() if not line.startswith(("#", "-r "))]
    return [
        (line.partition(" --")[0], line.partition(" --")[2]) for line in map(" ".join, map(str.split, listed))
    ]


def locked(*names: str) -> dict[str, str]:
    """Versions by name, of what these files install here."""
    found = [Requirement(what) for name in names for what, _ in lines(name)]
    here = [each for each in found if each.marker is None or each.marker.evaluate()]
    return {each.name: str(each.specifier).removeprefix("==") for each in here}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.iterdir()))
def test_each_line_is_one_version_with_its_hashes(name: str) -> None:
    assert lines(name)
    for what, hashes in lines(name):
        assert re.fullmatch(r"[a-z0-9-]+==[\w.+]+( ; [\w. '()=!<>]+)?", what), what
        assert re.fullmatch(r"hash=sha256:[0-9a-f]{64}( --hash=sha256:[0-9a-f]{64})*", hashes), what


def test_nothing_is_locked_twice() -> None:
    names = [what.partition("==")[0] for path in FOLDER.iterdir() for what, _ in lines(path.stem)]
    assert sorted(name for name in names if names.count(name) > 1) == ["torch", "torch"]  # torch-cpu.txt


def test_messages_name_the_distributions_of_each_extra() -> None:
    """None says `pip install everstep`, in a page either: no package index has it."""
    for extra, named in DISTRIBUTIONS.items():
        needed = [Requirement(each) for each in EXTRAS[extra]]
        needed += [Requirement(each) for one in needed if one.extras == {"cli"} for each in EXTRAS["cli"]]
        allowed = {(e.name, *e.extras): {*e.specifier} for e in needed if e.name != "everstep"}
        asked = {(e.name, *e.extras): {*e.specifier} for e in map(Requirement, shlex.split(named))}
        assert asked.keys() == allowed.keys() and all(asked[e] <= allowed[e] for e in asked), extra
    wrong = re.compile(r"""pip install\s+(-\S+\s+)?['"]?everstep\b""")
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/everstep/**/*.py"), *ROOT.glob("examples/**/*.py")]
    for page in [ROOT / "README.md", *pages]:
        assert not wrong.search(page.read_text()), page


@pytest.mark.parametrize(
    ("extra", "files"),
    [
        ("demo", ("uv", "torch", "demo")),
        ("test", ("uv", "torch", "demo", "test")),
        ("campaign", ("uv", "torch", "demo", "test", "campaign")),
    ],
)
def test_the_lock_has_allowed_versions_of_all_that_an_extra_needs(extra: str, files: tuple[str, ...]) -> None:
    # set-up installs what a torch for CUDA needs where it has taken one
    cuda = ["cuda"] if any(each.startswith("cuda-") for each in metadata.requires("torch") or ()) else []
    versions, seen = locked(*files, *cuda), set()
    project = [f"everstep[{extra}]", *PYPROJECT["project"]["dependencies"]]
    project += [*PYPROJECT["build-system"]["requires"], *PYPROJECT["dependency-groups"]["setup"]]
    waiting = [("everstep", each, frozenset({""})) for each in project]
    while waiting:
        by, text, extras = waiting.pop()
        wanted = Requirement(text)
        name, further = canonicalize_name(wanted.name), frozenset({"", *wanted.extras})
        if wanted.marker and not any(wanted.marker.evaluate({"extra": each}) for each in extras):
            continue
        if name == "everstep":
            waiting += [("everstep", each, further) for one in wanted.extras for each in EXTRAS[one]]
            continue
        assert name in versions, f"{by} needs {text}: make lock"
        assert wanted.specifier.contains(versions[name], prereleases=True), f"{by} needs {text}: make lock"
        if (name, further) not in seen and is_installed(name, versions[name]):
            waiting += [(name, each, further) for each in metadata.requires(name) or ()]
        seen.add((name, further))
    assert len(seen) > 20


def is_installed(name: str, version: str) -> bool:
    """Whether its requirements can be read here, as those of the locked version."""
    try:
        return metadata.version(name).partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False
