"""The wheel has everything of the package alone, and is the same from the tree and from the sdist."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from installed import ROOT, built

pytestmark = pytest.mark.campaign("machine")


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked("src")}
    assert "everstep/py.typed" in names


def test_the_sdist_has_every_file_of_the_repository(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - {"PKG-INFO"} == tracked(".")


def test_the_sdist_and_the_tree_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (straight,) = built(tmp_path, "--wheel").glob("*.whl")
    assert straight.name == wheel.name
    assert straight.read_bytes() == wheel.read_bytes()
