"""One checkpoint of several ranks, by real processes: whole or absent, and every save ends alike on all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import ended, outputs, started
from rank_saves import common_of, own_of, step_of

from everstep.checkpoint import CheckpointName, Retention, Store, read_checkpoint
from everstep.errors import RunLockedError
from tiny_runs import Tiny

HERE = Path(__file__).parent
PARTS = 8

BEGIN = f"""
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
import numpy as np
from everstep import hazard
from rank_saves import Rank, common_of, own_of
from everstep.state import Encoded, encode
group = find_group(limit=30)
def attempt(what, *arguments, **more):
    before = time.monotonic()
    try:
        done = mine.save(*arguments, **more)
        say(what, "saved", done.bytes, done.kept, done.digest)
    except Exception as error:
        say(what, type(error).__name__, error, getattr(error, "ranks", ""))
    return time.monotonic() - before
"""


def program(run_dir: Path, text: str, limit: float | None = None) -> str:
    return BEGIN + f"mine = Rank(Path({str(run_dir)!r}), group, {limit})\n" + text + "\ngroup.close()\n"


def said(printed: list[str], what: str) -> list[str]:
    """What each rank said of a save; the last line, if a save was tried twice."""
    found = []
    for rank, text in enumerate(printed):
        lines = [line for line in text.splitlines() if line.startswith(f"{rank}: {what} ")]
        assert lines, (what, text)
        found.append(lines[-1].removeprefix(f"{rank}: {what} "))
    return found


def alike(printed: list[str], what: str) -> str:
    """What all ranks said of a save, in equal words."""
    found = said(printed, what)
    assert len(set(found)) == 1, found
    return found[0]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# --------------------------------------------------------------------------------- how saves end


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """What three ranks say of a row of saves, and their run directory."""
    run_dir = tmp_path_factory.mktemp("ends") / "run"
    text = """
    attempt("first", 10)
    if rank == 2: hazard.arm("ENOSPC:checkpoint.write:1")
    attempt("full", 20)
    hazard.arm(None)
    attempt("after", 20)
    if rank == 0: hazard.arm("EIO:checkpoint.rename:1")
    attempt("rename", 30)
    hazard.arm(None)
    attempt("again", 20)
    bad = encode({"rng": {"x": np.array([np.nan if rank == 1 else 1.0])}})
    attempt("nan", 30, own=bad, guarded={"rng/x"})
    attempt("diverged", 30, replicated={"user/v": "same", "user/w": str(rank // 2)})
    def memory(): raise MemoryError("no memory for it")
    attempt("memory", 30, memory if rank == 1 else lambda: None)
    def broken(): raise KeyError("a bug")
    attempt("bug", 30, broken if rank == 1 else lambda: None)
    attempt("the writer's bug", 30, broken if rank == 0 else lambda: None)
    attempt("overlap", 30, own=encode({"user": {"w": 1}}) if rank == 2 else own_of(30, rank))
    try:
        with mine.exchange.save():
            if rank == 0: raise OSError(28, "No space left on device", "best")
    except Exception as error: say("best", type(error).__name__, error)
    with mine.exchange.save(): pass
    say("best", "well")
    attempt("last", 40)
    keys = [f"{n}/{name}" for n in range(1, 20) for name in ("folder", "verdict", "done", "part/1", "part/2")]
    group.barrier("all have left the last save")
    if rank == 0: say("keys", [key for key in keys if mine.exchange._store.has([key])])
    """
    return outputs(program(run_dir, textwrap.dedent(text)), 3), run_dir


def test_three_ranks_make_one_checkpoint(ends: tuple[list[str], Path]) -> None:
    printed, run_dir = ends
    assert re.fullmatch(r"saved \d\d+ False [0-9a-f]{32}", alike(printed, "first"))
    assert re.fullmatch(r"saved \d\d+ False [0-9a-f]{32}", alike(printed, "last"))
    assert names(run_dir) == [f"step-000000{step}" for step in (10, 20, 40)]
    for name in names(run_dir):
        found = Store(run_dir).read(CheckpointName.parse(name))
        assert step_of(found, 3) == found.step
    assert found.digest in alike(printed, "last")


def test_a_disk_error_on_one_rank_fails_the_save_on_all_and_the_next_succeeds(
    ends: tuple[list[str], Path],
) -> None:
    printed, _ = ends
    text = alike(printed, "full")
    assert "RankSaveError [Errno 28] rank 2: No space left" in text and text.endswith("free space (2,)")
    assert "saved" in alike(printed, "after")
    assert "RankSaveError [Errno 5] rank 0: Input/output error" in alike(printed, "rename")
    assert "RankSaveError [Errno 12] rank 1: MemoryError no memory for it" in alike(printed, "memory")


def test_an_equal_checkpoint_is_kept(ends: tuple[list[str], Path]) -> None:
    first, again = (alike(ends[0], what) for what in ("after", "again"))
    assert again == f"saved 0 True {first.split()[-1]}"


def test_a_refused_save_is_refused_on_all_as_on_one_process(ends: tuple[list[str], Path]) -> None:
    printed, _ = ends
    assert alike(printed, "nan").startswith("NonFiniteError rank 1: after step 30, NaN or infinity in rng/x")
    assert alike(printed, "overlap").startswith("CheckpointError rank 2: a rank cannot save as its own")


def test_what_differs_between_ranks_is_named_with_the_ranks(ends: tuple[list[str], Path]) -> None:
    text = alike(ends[0], "diverged")
    assert text.startswith("DivergedRanksError 'user/w' is not the same on all ranks: rank 2 and the writer")
    assert "PerRank" in text and text.endswith("(2,)")


def test_another_error_is_raised_where_it_is_and_named_on_the_others(ends: tuple[list[str], Path]) -> None:
    for what, failed in (("bug", 1), ("the writer's bug", 0)):
        for rank, text in enumerate(said(ends[0], what)):
            if rank == failed:
                assert text == "KeyError 'a bug' "
            else:
                assert text.startswith(
                    f"PeerFailedError rank {failed} has failed in a save (KeyError: 'a bug')"
                )


def test_a_save_without_a_checkpoint_ends_alike_too(ends: tuple[list[str], Path]) -> None:
    for rank, text in enumerate(ends[0]):
        failed, well = [line for line in text.splitlines() if line.startswith(f"{rank}: best ")]
        assert "RankSaveError [Errno 28] rank 0: No space left on device (best)" in failed
        assert well == f"{rank}: best well"


def test_keys_are_deleted_in_a_later_save_and_no_folder_is_left(ends: tuple[list[str], Path]) -> None:
    printed, run_dir = ends
    last = [f"14/{name}" for name in ("folder", "verdict", "done", "part/1", "part/2")]
    assert f"0: keys {last}" in printed[0]
    assert not list(run_dir.rglob(".tmp-*"))


# --------------------------------------------------------------------------------- time limits


@pytest.mark.campaign("long")
def test_a_rank_that_is_late_fails_the_save_on_all_and_the_next_succeeds(tmp_path: Path) -> None:
    text = """
took = attempt("rank", 10, (lambda: time.sleep(2.5)) if rank == 1 else lambda: None)
group.barrier("both are here")
attempt("after", 20)
took = attempt("writer", 30, (lambda: time.sleep(2.5)) if rank == 0 else lambda: None)
group.barrier("both are here")
attempt("last", 40)
"""
    printed = outputs(program(tmp_path / "run", text, limit=1), 2)
    late = "RankSaveError [Errno 110] rank"
    assert alike(printed, "rank").startswith(
        f"{late} 1 did not report its part within 1 s; see to the output"
    )
    assert alike(printed, "writer").startswith(f"{late} 0 did not begin the save within 1 s")
    assert "saved" in alike(printed, "after") and "saved" in alike(printed, "last")
    assert names(tmp_path / "run") == ["step-00000020", "step-00000040"]


def test_a_rank_that_is_slow_to_read_hears_how_each_save_ended(tmp_path: Path) -> None:
    """The writer's disk fails several saves at once, before the other rank has read of the first."""
    text = """
def slow(name):
    if name == "checkpoint.heard_done":
        hazard.arm(None)
        time.sleep(1)
if rank == 1: hazard._action = slow
began = time.monotonic()
for number in range(4):
    try:
        with mine.exchange.save():
            if rank == 0: raise OSError(28, "No space left on device", "best")
    except Exception as error: say(number, error)
attempt("after", 20)
assert time.monotonic() - began < 15  # the limit is 30 s
"""
    printed = outputs(program(tmp_path / "run", text), 2)
    for number in range(4):
        assert alike(printed, str(number)).startswith("[Errno 28] rank 0: No space left on device")
    assert "saved" in alike(printed, "after")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("point", "outcome"),
    [
        ("heard_part", "RankSaveError [Errno 110] rank 0 did not end the save within 1 s"),
        ("rename", "saved"),
    ],
)
def test_a_writer_that_stands_still_and_goes_on(tmp_path: Path, point: str, outcome: str) -> None:
    """Before its verdict the others withdraw; after that they wait."""
    text = f"""
def stand_still(name):
    if name == "checkpoint.{point}":
        hazard.arm(None)
        time.sleep(1.5)  # longer than the limit, shorter than two
if rank == 0: hazard._action = stand_still
attempt("asleep", 10)
attempt("after", 20)
"""
    printed = outputs(program(tmp_path / "run", text, limit=1), 2)
    assert alike(printed, "asleep").startswith(outcome)
    assert "saved" in alike(printed, "after")
    assert names(tmp_path / "run") == ["step-00000010", "step-00000020"][outcome != "saved" :]
    assert not list((tmp_path / "run").rglob(".tmp-*"))


def test_a_failure_that_a_rank_has_reported_ends_the_wait(tmp_path: Path) -> None:
    text = """
if rank == 2:
    group.fail("its data is gone")
else:
    assert attempt("save", 10) < 15
time.sleep(2 if rank == 0 else 0)  # it hosts the store
os._exit(0)
"""
    with started(program(tmp_path / "run", text), 3) as processes:
        printed = ended(processes)
    for rank in (0, 1):
        assert f"{rank}: save RankSaveError [Errno 103] rank 2 has failed (its data is gone)" in printed[rank]
    assert names(tmp_path / "run") == []


# --------------------------------------------------------------------------------- kills


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("size", [2, 3])
def test_killed_anywhere_in_a_save_it_is_the_newest_or_the_previous_whole(
    tmp_path: Path, size: int, part: int
) -> None:
    command = [sys.executable, str(HERE / "rank_saves.py"), str(tmp_path), str(size), str(part), str(PARTS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    kills = [line.split() for line in done.stdout.splitlines()]
    assert len(kills) >= 8
    shared = list((tmp_path / "0" / "run" / "shared").iterdir())
    assert len(shared) == 2 * (1 + size)  # of the common tree and of each rank's own, in two copies
    for number, rank, spec in kills:
        folder = tmp_path / number
        log = (folder / "log").read_text().split("\n") if (folder / "log").exists() else []
        saved = [int(line.split()[1]) for line in log if line.startswith("end")]
        begun = [int(line.split()[1]) for line in log if line.startswith("begin")]
        store = Store(folder / "run", 2)
        store.clean()
        found, notes = store.find(True)
        assert max(saved, default=-1) <= step_of(found, size) <= max(begun, default=-1), (rank, spec)
        assert notes == [] and not list((folder / "run").rglob(".tmp-*"))
        goes_on(store)


def goes_on(store: Store) -> None:
    """After any crash the next save works, here that of one process."""
    common = common_of(500)
    told = {"digest": "d", "epoch": 1, "phase": "step", "own": own_of(500, 0)}
    store.commit(CheckpointName(500), common.structure, common.arrays, **told)  # type: ignore[arg-type]
    store.retain(Retention(keep_last=1))
    assert step_of(store.find(True)[0], 1) == 500


# --------------------------------------------------------------------------------- an older start


def test_a_start_that_was_replaced_saves_no_more(tmp_path: Path) -> None:
    """It was stopped in a step, and has lost its lock: another start has trained the run to its end."""
    run_dir, whole = tmp_path / "run", Tiny(tmp_path / "whole", max_epoch=3).train()

    def replaced(loop: object, step: int) -> None:
        if step == 6:
            later.append(Tiny(run_dir, max_epoch=3, lock=False).train())

    later: list[Tiny] = []
    first = Tiny(run_dir, max_epoch=3, lock=False)
    with pytest.raises(RunLockedError, match=r"start 2 of the run in .* has taken over .* start 1"):
        first.train(inside=replaced)
    assert later[0].result() == whole.result()
    newest = max((run_dir / "checkpoints").iterdir())
    assert read_checkpoint(newest).segment == 2 and read_checkpoint(newest).digest == whole.result()[1]
    assert not list(run_dir.rglob(".tmp-*"))


def test_a_save_that_begins_before_a_later_start_and_ends_after_it_is_refused(tmp_path: Path) -> None:
    taken_over = False

    def require_newest() -> None:
        if taken_over:
            raise RunLockedError("a later start")

    store = Store(tmp_path, 1, require_newest=require_newest)
    common = common_of(10)
    told = {"digest": "d", "epoch": 1, "phase": "step"}
    store.commit(CheckpointName(10), common.structure, common.arrays, **told)  # type: ignore[arg-type]
    taken_over = True
    with pytest.raises(RunLockedError, match="a later start"):
        store.commit(CheckpointName(20), common.structure, common.arrays, **told)  # type: ignore[arg-type]
    with pytest.raises(RunLockedError, match="a later start"):  # nor is the old one moved away
        store.commit(CheckpointName(10), common.structure, common.arrays, **{**told, "digest": "e"})  # type: ignore[arg-type]
    assert names(tmp_path) == ["step-00000010"] and store.find(True)[0] is not None
