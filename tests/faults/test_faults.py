"""Checkpoints that a disk, a power cut or a person has harmed, at each door.

Kills, signals, a disk that refuses and workers that die are in `laws`; every other file of a run in
record/test_damaged_run.py.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from law_support.forkserver import ForkServer
from law_support.program import Program

from everstep.checkpoint import Store
from everstep.checkpoint.format import ARRAYS, MANIFEST

pytestmark = pytest.mark.parametrize("door", ["loop", "supervisor", "trainer"])

Harm = Callable[[Path], object]
PAGE = 4096


class Run(Program):
    """A run of the laws' program, of 24 steps, behind one door."""

    def __init__(self, server: ForkServer, folder: Path, door: str) -> None:
        super().__init__(server, folder, "--door", door, "--batch", "16", "--epochs", "3", "--every", "3")

    def checkpoints(self) -> list[Path]:
        """Folders, oldest first."""
        return [self.run_dir / "checkpoints" / str(name) for name in Store(self.run_dir).names()]

    def last_said(self, status: int) -> str:
        """What the next start says, which ends with a status."""
        before = len(self.said())
        assert self.run() == status, self.said()
        return self.said()[before:]


@pytest.fixture
def straight(server: ForkServer, tmp_path: Path, door: str) -> Run:
    run = Run(server, tmp_path / "straight", door)
    run.finish()
    return run


@pytest.fixture
def stopped(server: ForkServer, tmp_path: Path, door: str) -> Run:
    """A run that was told to stop in step 14."""
    run = Run(server, tmp_path / "stopped", door)
    assert run.run(hazard="SIGTERM:law.body:14") == 143, run.said()
    assert len(run.checkpoints()) >= 2
    return run


def write(file: str, change: Callable[[bytes], bytes]) -> Harm:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def of_another_step(file: str) -> Harm:
    return lambda folder: shutil.copyfile(sorted(folder.parent.iterdir())[-2] / file, folder / file)


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


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
def test_the_newest_is_harmed_in_any_way(
    server: ForkServer, straight: Run, stopped: Run, tmp_path: Path, door: str, tally: Callable[..., None]
) -> None:
    """The warning names the file, and the previous one is used, exactly."""
    previous = Store(stopped.run_dir).names()[-2].step
    for count, (harm, file) in enumerate(harms(stopped.checkpoints()[-1], door)):
        run = Run(server, tmp_path / f"run {count}", door)
        shutil.copytree(stopped.run_dir, run.run_dir)
        harm(newest := run.checkpoints()[-1])
        said = run.last_said(0)
        (line,) = (line for line in said.splitlines() if "passed over" in line)
        assert str(newest / file) in line, said
        assert min(run.bodies()) == previous + 1
        run.require_equal(straight.run_dir)
    tally("damages", count + 1, fault="checkpoint", door=door, file="checkpoint")


@pytest.mark.campaign("long")
def test_all_checkpoints_are_damaged(straight: Run, stopped: Run, door: str) -> None:
    harmed = [folder / (ARRAYS, MANIFEST)[n % 2] for n, folder in enumerate(stopped.checkpoints())]
    before = [path.read_bytes() for path in harmed]
    for path, content in zip(harmed, before, strict=True):
        path.write_bytes(flipped(content, len(content) // 2))
    steps = stopped.bodies()
    for _ in range(2):  # again and again, until a person has seen to it
        said = stopped.last_said(1)
        assert all(str(path.parent) in said for path in harmed) and f"all {len(harmed)} checkpoints" in said
    assert stopped.bodies() == steps
    harmed[-1].write_bytes(before[-1])
    stopped.finish()
    stopped.require_equal(straight.run_dir)


@pytest.mark.campaign("long")
def test_the_folder_of_temporary_files_is_on_another_disk(
    server: ForkServer, straight: Run, tmp_path: Path, door: str
) -> None:
    """Nothing is ever made in it: each new file is prepared beside its name, where a rename is atomic."""
    run = Run(server, tmp_path / "run", door)
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as other:
        made = Path(other).stat().st_mtime_ns
        for strike in ("checkpoint.write:60", "checkpoint.rename:2"):
            assert run.start(hazard=f"kill:{strike}", TMPDIR=other).wait(120) == -9
            assert list(run.run_dir.rglob(".tmp-*")), "nothing was being prepared beside its name"
        assert run.start(TMPDIR=other).wait(120) == 0
        assert Path(other).stat().st_mtime_ns == made and not list(Path(other).iterdir())
    run.require_equal(straight.run_dir)
