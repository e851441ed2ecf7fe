"""SIGKILL, ENOSPC and EIO at every I/O operation of saving: the newest or the previous one, whole."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections import Counter
from pathlib import Path

import pytest
from checkpoint_samples import SCENARIOS, at, commit, logging_to, resumed, seed_of, store_in
from crash_verdicts import goes_on, require_sound

from everstep import hazard
from everstep.checkpoint import Retention
from everstep.durable import TMP

REACHED = {"choose": {10, 30}, "best": {1, 2}}
"""Seeds that the kills of a scenario leave, each at least once."""


def die(folder: Path, scenario: str, spec: str) -> int:
    """Act in a forked process with a hazard armed; its wait status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does not use
        pid = os.fork()
    if pid == 0:
        try:
            hazard.arm(spec)
            SCENARIOS[scenario][1](folder / "run", logging_to(folder / "log"))
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_anywhere(tmp_path: Path, scenario: str) -> None:
    def fresh(name: str) -> Path:
        (tmp_path / name / "run").mkdir(parents=True)
        SCENARIOS[scenario][0](tmp_path / name / "run")
        return tmp_path / name

    assert die(fresh("traced"), scenario, f"trace:{tmp_path}/trace") == 0
    points = Counter((tmp_path / "trace").read_text().split())
    assert points.total() > 5
    outcomes = Counter[int]()
    for spec in [f"kill:{point}:{n}" for point, count in points.items() for n in range(1, count + 1)]:
        folder = fresh(spec)
        assert die(folder, scenario, spec) == signal.SIGKILL
        try:
            outcomes[require_sound(scenario, folder)] += 1
        except AssertionError as error:
            raise AssertionError(f"{spec}: {error}") from error
    assert set(outcomes) >= REACHED.get(scenario, set())


# ---------------------------------------------------------------------------------------------- errors


def points_of(scenario: str, root: Path) -> list[tuple[str, int]]:
    prepare, act = SCENARIOS[scenario]
    root.mkdir()
    prepare(root)
    hazard.arm(f"trace:{root}.trace")
    act(root, lambda line: None)
    hazard.arm(None)
    counts = Counter(Path(f"{root}.trace").read_text().split())
    return [(point, n) for point, count in counts.items() for n in range(1, count + 1)]


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("scenario", ["save_twice", "replace_damaged", "replace_whole"])
def test_a_failing_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, scenario: str, error: str, lasting: bool
) -> None:
    prepare, act = SCENARIOS[scenario]
    for index, (point, n) in enumerate(points_of(scenario, tmp_path / "traced")):
        run_dir = tmp_path / str(index)
        run_dir.mkdir()
        prepare(run_dir)
        log: list[str] = []
        hazard.arm(f"{error}:{point}:{n}{'-9999' if lasting else ''}")
        with contextlib.suppress(OSError):
            act(run_dir, log.append)
        hazard.arm(None)
        if not lasting:
            left = [path for path in run_dir.rglob(".tmp-*") if not path.name.startswith(".tmp-trash")]
            assert not left, "bytes of a failed save are left on the full disk"
        saved = [int(line.split()[1]) for line in log if line.startswith("end")]
        begun = [int(line.split()[1]) for line in log if line.startswith("begin")]
        found = seed_of(resumed(run_dir))
        # Only where even undoing the rename fails may the save that was reported as failed be there.
        allowed = {(saved or [10])[-1]} | (
            set(begun[-1:]) if lasting and point == "checkpoint.rename" else set()
        )
        assert found in allowed, (point, n)
        goes_on(run_dir)


def test_what_was_to_be_replaced_is_put_back_when_replacing_fails(tmp_path: Path) -> None:
    commit(store := store_in(tmp_path), at(20))
    hazard.arm("EIO:checkpoint.rename:2")  # the first moves the old one away
    with pytest.raises(OSError, match="rename:2"):
        commit(store, at(20), seed=7)
    hazard.arm(None)
    assert store.names() == [at(20)] and seed_of(store.read(at(20))) == 20


def test_a_checkpoint_that_cannot_be_deleted_durably_gets_its_name_back(tmp_path: Path) -> None:
    """Under a temporary name no later retention would find it."""
    commit(store := store_in(tmp_path), at(10))
    commit(store, at(20))
    hazard.arm("EIO:checkpoint.fsync_folder:1")
    assert store.retain(Retention(1)) == []
    hazard.arm(None)
    assert store.names() == [at(10), at(20)]
    assert store.retain(Retention(1)) == [at(10)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_real_calls_put_data_then_the_name_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str
) -> None:
    """A power cut tears what has its name before its content, or the names in it, are on the disk."""
    synced: list[Path] = []
    inodes: set[int] = set()
    renamed: list[Path] = []
    made: list[Path] = []
    fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

    def see_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        inodes.add(os.fstat(descriptor).st_ino)
        for new in renamed, made:
            new[:] = [path for path in new if path.parent != synced[-1]]

    def see_rename(source: Path, target: Path) -> None:
        assert renamed == made == [], "the folder of the name before is not on the disk"
        whole = [*source.iterdir(), source] if source.is_dir() else [source]
        assert {path.stat().st_ino for path in whole} <= inodes, (source, synced)
        if source.name.startswith(TMP):
            assert [path for path in synced if source in (path, path.parent)][-1] == source, synced
        replace(source, target)
        renamed.append(target)
        names.append(target.name)

    def see_mkdir(path: Path, *mode: int) -> None:
        mkdir(path, *mode)
        made.append(Path(path))

    (run_dir := tmp_path.resolve() / "run").mkdir()
    monkeypatch.setattr(os, "fsync", see_fsync)
    monkeypatch.setattr(os, "mkdir", see_mkdir)
    monkeypatch.setattr(os, "replace", see_rename)
    names: list[str] = []
    prepare, act = SCENARIOS[scenario]
    prepare(run_dir)
    act(run_dir, lambda line: None)
    assert renamed == made == [] and names


def test_a_deleted_folder_comes_back_with_the_next_save(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(10)).path.rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").rmdir()
    commit(store, at(20))
    assert seed_of(store.find(True)[0]) == 20
