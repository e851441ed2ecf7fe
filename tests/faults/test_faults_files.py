"""Faults 11 to 19: files that a disk, a power cut or a person has harmed.

Each test harms a run that was stopped in step 14; it has the checkpoints of the steps 9, 12 and 14.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults_support import STEPS, Run

from everstep.checkpoint.manifest import ARRAYS, MANIFEST
from everstep.proof.compare import compare_runs

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]
Harm = Callable[[Path], None]
PassedOver = Callable[[Harm, str], None]

PAGE = 4096
NEWEST, PREVIOUS = 14, 12


@pytest.fixture
def passed_over(
    stopped: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str, request: Any
) -> PassedOver:
    """Harms the newest checkpoint's folder: the warning names the file, the previous one is used, exactly."""
    count = 0

    def require(harm: Harm, file: str) -> None:
        nonlocal count
        count += 1
        run = stopped.copied_to(another(f"run {count}"))
        harm(run.newest())
        named = str(run.newest() / file)
        said = run.ends(0)
        (line,) = (line for line in said.splitlines() if "passed over" in line)
        assert named in line, f"{named} is not named\n{said}"
        assert run.last_bodies() == list(range(PREVIOUS + 1, STEPS + 1)), said
        run.require_equal(undisturbed())
        run.require_clean()
        tally("damages", 1, fault=request.node.originalname[11:13], door=door, file="checkpoint")

    return require


def write(file: str, change: Callable[[bytes], bytes]) -> Harm:
    """Harm a file of a checkpoint's folder."""

    def harm(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return harm


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def of_another_step(file: str) -> Harm:
    def harm(folder: Path) -> None:
        (other,) = folder.parent.glob(f"*{PREVIOUS}")
        shutil.copyfile(other / file, folder / file)

    return harm


def emptied(*files: str) -> Harm:
    def harm(folder: Path) -> None:
        for file in files:
            (folder / file).write_bytes(b"")

    return harm


@pytest.mark.campaign("long")
def test_fault_11_the_newest_is_truncated_anywhere(passed_over: PassedOver, stopped: Run) -> None:
    for file in (ARRAYS, MANIFEST):
        size = (stopped.newest() / file).stat().st_size
        for length in {1, 9, size // 3, size // PAGE * PAGE, size - 1}:
            passed_over(write(file, lambda content, length=length: content[:length]), file)


@pytest.mark.campaign("long")
def test_fault_12_the_newest_is_empty(passed_over: PassedOver) -> None:
    """Its names reached the disk, and its bytes did not: one file, all files, the folder."""
    passed_over(emptied(ARRAYS), ARRAYS)
    for harm in (emptied(MANIFEST), emptied(ARRAYS, MANIFEST), empty_folder):
        passed_over(harm, MANIFEST)


@pytest.mark.campaign("long")
def test_fault_13_the_tail_is_zeroed_from_a_page_on(passed_over: PassedOver, stopped: Run) -> None:
    for file in (ARRAYS, MANIFEST):
        size = (stopped.newest() / file).stat().st_size
        assert size > PAGE
        for start in {0, PAGE, (size - 1) // PAGE * PAGE}:
            passed_over(write(file, lambda content, at=start: content[:at] + bytes(len(content) - at)), file)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def is_read(name: Path) -> bool:
    """Whether a start after a clean stop, whose newest checkpoint is whole, reads this file of the run."""
    return name.parts[0] in ("best", "checkpoint", "run.json") or name.suffix == ".evj"


@pytest.mark.campaign("long")
def test_fault_14_one_byte_of_any_file_is_flipped(
    passed_over: PassedOver,
    stopped: Run,
    another: Another,
    undisturbed: Undisturbed,
    tally: Tally,
    door: str,
) -> None:
    """In the newest checkpoint the previous one is used; elsewhere the run heals."""
    draw = random.Random(f"14 {door}")
    harmed = 0
    for file in (ARRAYS, MANIFEST):
        size = (stopped.newest() / file).stat().st_size
        for at in (0, 8, size - 1, *(draw.randrange(size) for _ in range(3))):
            passed_over(write(file, lambda content, at=at: flipped(content, at)), file)
            harmed += 1
    others = [path for path in sorted(stopped.run_dir.rglob("*")) if path.is_file() and path.stat().st_size]
    for number, path in enumerate(others):
        name = path.relative_to(stopped.run_dir)
        if stopped.newest() in path.parents:
            continue
        run = stopped.copied_to(another(f"other {number}"))
        at = draw.randrange(path.stat().st_size)
        (run.run_dir / name).write_bytes(flipped(path.read_bytes(), at))
        said = run.ends(0)
        where = f"byte {at} of {name}\n{said}"
        assert str(name) in said or path.name in said or not is_read(name), where
        different = compare_runs(undisturbed(), run.run_dir)
        # a row that the disk has lost is nowhere else; that some are lost is said
        assert all(path.suffix == ".evj" and each.path.startswith("row/") for each in different), where
        harmed += 1
    tally("damages", harmed, fault="14", door=door, file="any")


@pytest.mark.campaign("long")
def test_fault_15_a_file_is_missing_or_of_another_step(passed_over: PassedOver) -> None:
    for file in (ARRAYS, MANIFEST):
        passed_over(lambda folder, file=file: (folder / file).unlink(), file)
        # whose manifest is another one's is told from its arrays
        passed_over(of_another_step(file), ARRAYS)


@pytest.mark.campaign("long")
def test_fault_16_all_checkpoints_are_damaged(
    stopped: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    run = stopped.copied_to(another("run"))
    harmed = []
    for number, name in enumerate(run.names()):
        file = (ARRAYS, MANIFEST)[number % 2]
        path = run.run_dir / "checkpoints" / str(name) / file
        kept = path.read_bytes()
        path.write_bytes(flipped(kept, len(kept) // 2))
        harmed.append(path)
    before = run.committed()
    for _ in range(2):  # again and again, until a person has seen to it
        said = run.ends(1)
        assert all(str(path.parent) in said for path in harmed), said
        assert "all 3 checkpoints" in said and run.last_bodies() == [] and run.committed() == before
    harmed[-1].write_bytes(kept)
    run.finish()
    assert run.last_bodies()[0] == NEWEST + 1
    run.require_equal(undisturbed())
    tally("damages", len(harmed), fault="16", door=door, file="checkpoint")


@pytest.mark.campaign("long")
def test_fault_17_a_manifest_is_torn(passed_over: PassedOver) -> None:
    passed_over(write(MANIFEST, lambda content: content[: len(content) // 2]), MANIFEST)


@pytest.mark.campaign("long")
def test_fault_18_the_rename_reached_the_disk_before_the_data(
    passed_over: PassedOver,
    another: Another,
    undisturbed: Undisturbed,
    tmp_path: Path,
    tally: Tally,
    door: str,
) -> None:
    """A disk that keeps names and only the bytes that were synced loses nothing, whenever the power fails.

    If one did it all the same, the new checkpoint would have holes; then the previous one is used.
    """
    places = [("checkpoint.rename", 1), ("checkpoint.rename", 2)]
    places += [("checkpoint.fsync_folder", n) for n in (2, 3, 4, 7, 8)]
    for number, (place, n) in enumerate(places):
        left = tmp_path / f"left {number}"
        run = another(f"cut {number}")
        run.ends(-9, "--do", f"cut:4:{place}:{n}:{left}")
        before, last = run.names(), run.bodies()[-1]
        shutil.rmtree(run.run_dir)
        left.rename(run.run_dir)
        assert run.names() == before and before[-1].step >= last - 6
        said = run.ends(0)
        assert "passed over" not in said, f"{place}:{n}\n{said}"
        run.require_equal(undisturbed())
    for size in (0, 1):

        def holes(folder: Path, size: int = size) -> None:
            for path in folder.iterdir():
                path.write_bytes(bytes(size * path.stat().st_size))

        passed_over(holes, MANIFEST)
    tally("power-cut states", len(places) + 2, fault="18", door=door)


@pytest.mark.campaign("long")
def test_fault_19_the_folder_of_temporary_files_is_on_another_disk(
    run: Run, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Nothing is ever made in it: each new file is prepared beside its name, where a rename is atomic."""
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as other:
        made = Path(other).stat().st_mtime_ns
        for strike in ("checkpoint.write:60", "checkpoint.rename:2"):
            assert run.once(hazard=f"kill:{strike}", TMPDIR=other) == -9
            assert list(run.run_dir.rglob(".tmp-*")), "nothing was being prepared beside its name"
        run.ends(0, TMPDIR=other)
        assert Path(other).stat().st_mtime_ns == made and not list(Path(other).iterdir())
    run.require_clean()
    run.require_equal(undisturbed())
    tally("kills", 2, fault="19", door=door, phase="commit")
