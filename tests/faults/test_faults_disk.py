"""Faults of a disk: files that were harmed, a disk that is full, no memory for a save; at each door.

A run that is harmed was stopped in step 14; it has the checkpoints of the steps 9, 12 and 14.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults_support import STEPS, Run

from everstep.checkpoint.manifest import ARRAYS, MANIFEST

Tally = Callable[..., None]
Undisturbed = Callable[..., Path]
Another = Callable[..., Run]
Harm = Callable[[Path], None]

PAGE = 4096
NEWEST, PREVIOUS = 14, 12


def write(file: str, change: Callable[[bytes], bytes]) -> Harm:
    """Harm a file of a checkpoint's folder."""

    def harm(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return harm


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def of_another_step(file: str) -> Harm:
    def harm(folder: Path) -> None:
        (other,) = folder.parent.glob(f"*{PREVIOUS}")
        shutil.copyfile(other / file, folder / file)

    return harm


def harms(newest: Path, seed: str) -> Iterator[tuple[Harm, str]]:
    """What befalls the newest checkpoint, and the file that is named then."""
    draw = random.Random(seed)
    yield empty_folder, MANIFEST
    for file in (ARRAYS, MANIFEST):
        size = (newest / file).stat().st_size
        assert size > PAGE
        for length in {0, 1, 9, size // 3, size // 2, size // PAGE * PAGE, size - 1}:
            yield write(file, lambda content, length=length: content[:length]), file
        for start in {0, PAGE, (size - 1) // PAGE * PAGE}:
            yield write(file, lambda content, at=start: content[:at] + bytes(len(content) - at)), file
        for at in (0, 8, size - 1, *(draw.randrange(size) for _ in range(3))):
            yield write(file, lambda content, at=at: flipped(content, at)), file
        yield lambda folder, file=file: (folder / file).unlink(), file
        yield of_another_step(file), ARRAYS  # whose manifest is another one's is told from its arrays


@pytest.mark.campaign("long")
def test_fault_11_the_newest_is_harmed_in_any_way(
    stopped: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """The warning names the file, and the previous one is used, exactly."""
    count = 0
    for harm, file in harms(stopped.newest(), f"11 {door}"):
        run = stopped.copied_to(another(f"run {(count := count + 1)}"))
        harm(run.newest())
        named = str(run.newest() / file)
        said = run.ends(0)
        (line,) = (line for line in said.splitlines() if "passed over" in line)
        assert named in line, f"{named} is not named\n{said}"
        assert run.last_bodies() == list(range(PREVIOUS + 1, STEPS + 1)), said
        run.require_equal(undisturbed())
        run.require_clean()
    tally("damages", count, fault="11", door=door, file="checkpoint")


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


def refused(run: Run, hazard: str | None, *more: str, remedy: str, failures: int | None = None) -> str:
    """A start that ends well although saves fail: each is said with what to do, and training goes on."""
    said = run.ends(0, *more, hazard=hazard)
    failed = [
        line for line in said.splitlines() if "a save failed, and the previous checkpoint is intact" in line
    ]
    assert failed and (failures is None or len(failed) == failures), said
    assert all(remedy in line for line in failed), said
    assert run.last_bodies() == list(range(1, STEPS + 1)), said
    return said


@pytest.mark.campaign("long")
def test_fault_21_the_disk_is_full_and_a_neighbour_takes_what_becomes_free(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Nothing is deleted before its successor is on the disk, so there is always something to resume from."""
    greedy = ("--do", "full:8", "--do", "room:19")
    said = refused(run, None, *greedy, remedy="the disk is full: free space")
    assert "the journal can be written again" in said or "journal" not in said, said
    run.require_equal(undisturbed())
    killed = another("killed")
    killed.ends(-9, "--do", "full:8", hazard="kill:faults.body:23")
    kept = killed.names()
    assert len(kept) >= 2 and killed.bodies()[-1] == 23
    killed.require_clean()
    killed.finish()
    assert killed.last_bodies()[0] == kept[-1].step + 1
    killed.require_equal(undisturbed())
    tally("crash points", 2, fault="21", door=door, error="ENOSPC")


@pytest.mark.campaign("long", gate=1)
def test_fault_22_the_disk_of_the_metric_log_is_full(
    run: Run, another: Another, undisturbed: Undisturbed, tally: Tally, door: str
) -> None:
    """Rows wait in memory until there is room, and this is said."""
    said = run.ends(0, hazard="ENOSPC:journal.write:3-5")
    assert "the journal cannot be written; training continues" in said, said
    assert "the journal can be written again; the rows that waited are written" in said, said
    assert run.last_bodies() == list(range(1, STEPS + 1))
    run.require_equal(undisturbed())
    never = another("never")
    said = never.ends(1, hazard="ENOSPC:journal.write:3-9999")
    assert "rows are lost: they could not be written before the run ended" in said, said
    assert "start again" in said.splitlines()[-1], said
    never.finish()
    never.require_equal(undisturbed())  # their steps were executed again
    tally("crash points", 2, fault="22", door=door, error="ENOSPC")


@pytest.mark.campaign("long")
def test_fault_42_a_save_finds_no_memory(run: Run, undisturbed: Undisturbed, tally: Tally, door: str) -> None:
    refused(run, None, "--do", "memory:8", remedy="there is too little memory: free some", failures=1)
    run.require_equal(undisturbed())
    tally("crash points", 1, fault="42", door=door, error="MemoryError")
