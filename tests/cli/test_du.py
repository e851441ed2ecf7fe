"""`everstep du`: every byte on the disk, once, where it belongs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_runs import as_json, everstep

import everstep as house
from everstep import Every
from tiny_runs import Tiny


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, saves in (("small", 99), ("large", 1)):
        services = [house.Checkpoints(Every(steps=saves), keep_last=9), house.Best("loss", mode="min")]
        Tiny(tmp_path / "runs" / name, max_epoch=2, services=services).train()
    for kind in ("damaged", "superseded", "dumps"):
        (tmp_path / "runs" / "large" / kind).mkdir(exist_ok=True)
        (tmp_path / "runs" / "large" / kind / "file").write_bytes(b"x" * 70_000)
    (tmp_path / "runs" / "large" / "checkpoints" / ".tmp-step-4-77").mkdir()
    (tmp_path / "runs" / "large" / "checkpoints" / ".tmp-step-4-77" / "file").write_bytes(b"x" * 70_000)
    (tmp_path / "notes.txt").write_bytes(b"x" * 70_000)
    return tmp_path


def on_disk(*paths: Path) -> int:
    """What du(1) counts, without the blocks of folders themselves."""
    said = subprocess.run(["du", "-ac", "--block-size=1", *paths], capture_output=True, text=True, check=True)
    lines = [line.split("\t") for line in said.stdout.splitlines()[:-1]]
    return sum(int(count) for count, path in lines if not Path(path).is_dir())


def test_the_bytes_are_those_of_the_system(here: Path) -> None:
    found = as_json("du", cwd=here)
    assert found["total"] == on_disk(here) == found["outside"] + sum(run["total"] for run in found["runs"])
    assert [Path(run["run"]).name for run in found["runs"]] == ["large", "small"]
    for run in found["runs"]:
        path = Path(run["run"])
        assert run["total"] == on_disk(path) == sum(run["kinds"].values())
        for kind in ("best", "shared", "superseded", "damaged", "dumps"):
            assert run["kinds"].get(kind, 0) == (on_disk(path / kind) if (path / kind).exists() else 0)
        trails = on_disk(*(path / "journal").glob("*.trail"))
        assert run["kinds"]["trails"] == trails
        assert run["kinds"]["journal"] == on_disk(path / "journal") - trails
    large = found["runs"][0]["kinds"]
    assert large["unfinished"] == on_disk(here / "runs" / "large" / "checkpoints" / ".tmp-step-4-77")
    assert large["checkpoints"] == on_disk(here / "runs" / "large" / "checkpoints") - large["unfinished"]


@pytest.mark.campaign("long")
def test_shared_bytes_count_once_and_links_not_at_all(here: Path) -> None:
    before = as_json("du", cwd=here)
    os.link(here / "runs" / "large" / "dumps" / "file", here / "runs" / "small" / "again")
    (here / "runs" / "small" / "link").symlink_to(here / "runs" / "large" / "dumps" / "file")
    (here / "runs" / "small" / "round").symlink_to(here / "runs")
    after = as_json("du", cwd=here)
    link = os.lstat(here / "runs" / "small" / "round").st_blocks * 512
    assert after["total"] - before["total"] in (0, 2 * link)


@pytest.mark.campaign("long")
def test_the_table_adds_up_and_says_units(here: Path) -> None:
    said = everstep("du", "runs", cwd=here)[0].splitlines()
    assert said[0].split()[:3] == ["run", "total", "checkpoints"]
    assert [line.split()[0] for line in said[1:-1]][:2] == ["large", "small"] and said[-1].startswith("total")
    assert "73.7 kB" in said[1]
    one: Any = everstep("du", "runs/small", cwd=here)[0].splitlines()
    assert len(one) == 2 and one[1].startswith("small")


@pytest.mark.campaign("long")
def test_odd_places(tmp_path: Path) -> None:
    assert everstep("du", cwd=tmp_path)[0] == "nothing takes space there\n"
    assert "does not exist" in everstep("du", "nowhere", cwd=tmp_path, status=2)[1]
    Tiny(tmp_path / "a\x1b[2Jb", max_epoch=1).train()
    assert "\x1b" not in everstep("du", cwd=tmp_path)[0]
