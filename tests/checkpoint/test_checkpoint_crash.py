"""Every I/O operation of a save killed or refused, every byte damaged: the newest whole one is used."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_samples import SCENARIOS, at, commit, logging_to, resumed, seed_of, store_in

from everstep import hazard
from everstep.checkpoint import Retention, Store
from everstep.checkpoint.format import ARRAYS, MANIFEST, read
from everstep.durable import TMP
from everstep.errors import CheckpointError, DamagedCheckpointError

REACHED = {"choose": {10, 30}, "best": {1, 2}}
"""Seeds that the kills of a scenario leave, each at least once."""


BEFORE = {**dict.fromkeys(("save_twice", "replace_damaged", "replace_whole"), 10), "interim": 19}
"""Seed of the newest checkpoint before a scenario that saves."""


def last(folder: Path, word: str, default: int) -> int:
    """Seed of the last save that the victim began or ended."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return next((int(line.split()[1]) for line in reversed(lines) if line.startswith(word)), default)


def goes_on(run_dir: Path) -> None:
    """After any crash the next save works, nothing is left behind, and pins can be read."""
    store = store_in(run_dir, segment=3)
    commit(store, at(500))
    store.retain(Retention(keep_last=1))
    assert seed_of(store.find(True)[0]) == 500 and not list(run_dir.rglob(".tmp-*"))
    store.pins()


def require_sound(scenario: str, folder: Path) -> int:
    """Require that nothing is lost or half done in `folder`/run; returns the seed of the next start."""
    run_dir = folder / "run"
    store = store_in(run_dir, segment=2)
    store.clean()
    if scenario == "best":
        seeds = {seed_of(read(path)) for path in (run_dir / "best/valid/loss").iterdir()}
        assert seeds and seeds <= {1, 2} and not list(run_dir.rglob(".tmp-*"))
        goes_on(run_dir)
        return max(seeds)
    names, found = store.names(), store.find(True)[0]
    seed = -1 if found is None else seed_of(found)
    if scenario == "start_over":
        assert seed == (names[-1].step if names else -1)
        store.supersede_all()
        assert store.find(True) == (None, [])
    elif scenario in ("supersede", "choose"):
        assert seed == 10 or (scenario, seed, names) == ("choose", 30, [at(10), at(20), at(30)])
        store.supersede_after(at(seed))  # as every start does
        assert store.names() == [at(step) for step in (10, 20, 30) if step <= seed]
    elif scenario == "pin":
        assert store.pins() <= {at(10)} and seed == 10
    else:
        before = BEFORE.get(scenario, -1)
        said, begun = last(folder, "end", before), last(folder, "begin", before)
        assert seed in {said, begun}, f"{seed} is neither {said} nor {begun}"
    goes_on(run_dir)
    return seed


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


def fresh(folder: Path, scenario: str) -> Path:
    """A folder with a run, ready for the scenario."""
    (folder / "run").mkdir(parents=True)
    SCENARIOS[scenario][0](folder / "run")
    return folder


def points_of(scenario: str, folder: Path) -> list[tuple[str, int]]:
    """Each I/O operation of the scenario, by its name and number."""
    assert die(fresh(folder, scenario), scenario, f"trace:{folder}/trace") == 0
    counts = Counter((folder / "trace").read_text().split())
    assert counts.total() > 5
    return [(point, n) for point, count in counts.items() for n in range(1, count + 1)]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_anywhere(tmp_path: Path, scenario: str) -> None:
    outcomes = set[int]()
    for point, n in points_of(scenario, tmp_path / "traced"):
        folder = fresh(tmp_path / f"{point}:{n}", scenario)
        assert die(folder, scenario, f"kill:{point}:{n}") == signal.SIGKILL
        try:
            outcomes.add(require_sound(scenario, folder))
        except AssertionError as error:
            raise AssertionError(f"{point}:{n}: {error}") from error
    assert outcomes >= REACHED.get(scenario, set())


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("scenario", ["save_twice", "replace_damaged", "replace_whole"])
def test_a_failing_disk_leaves_the_last_one(tmp_path: Path, scenario: str, error: str, lasting: bool) -> None:
    for point, n in points_of(scenario, tmp_path / "traced"):
        run_dir, log = fresh(tmp_path / f"{point}:{n}", scenario) / "run", list[str]()
        hazard.arm(f"{error}:{point}:{n}{'-9999' if lasting else ''}")
        with contextlib.suppress(OSError):
            SCENARIOS[scenario][1](run_dir, log.append)
        hazard.arm(None)
        if not lasting:
            left = [path for path in run_dir.rglob(".tmp-*") if not path.name.startswith(".tmp-trash")]
            assert not left, "bytes of a failed save are left on the full disk"
        saved = [int(line.split()[1]) for line in log if line.startswith("end")]
        begun = [int(line.split()[1]) for line in log if line.startswith("begin")]
        found = seed_of(resumed(run_dir))
        # Only where even undoing the rename fails may the save that was reported as failed be there.
        may_be_there = begun[-1:] if lasting and point == "checkpoint.rename" else []
        assert found in [(saved or [10])[-1], *may_be_there], (point, n)
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
    assert store.names() == [at(10), at(20)] and store.retain(Retention(1)) == [at(10)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_real_calls_put_data_then_the_name_then_its_folder(tmp_path, monkeypatch, scenario) -> None:
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


# ---------------------------------------------------------------------------------------------- damage
BOTH = pytest.mark.parametrize("file", [ARRAYS, MANIFEST])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = store_in(tmp_path)
    for step in (10, 20):
        commit(store, at(step))
    return store


def damages(raw: bytes) -> Iterator[bytes]:
    bits = random.Random(0)
    for index in range(len(raw)):
        yield raw[:index]
        yield raw[:index] + bytes([raw[index] ^ 1 << bits.randrange(8)]) + raw[index + 1 :]
        if any(raw[index:]):
            yield raw[:index] + bytes(len(raw) - index)
    yield raw + b"\0"
    yield raw + raw


@pytest.mark.campaign("long", gate=1)
@BOTH
def test_every_damage_of_every_byte_is_detected(store: Store, file: str) -> None:
    path = store.path(at(20)) / file
    raw = path.read_bytes()
    count = 0
    for wrong in damages(raw):
        path.write_bytes(wrong)
        with pytest.raises(DamagedCheckpointError, match=file):
            store.read(at(20))
        count += 1
    path.write_bytes(raw)
    assert seed_of(store.read(at(20))) == 20 and count > 800


@BOTH
@pytest.mark.parametrize(("harm", "how"), [
    (Path.unlink, "is missing"), (lambda path: path.write_bytes(b""), "is empty"),
    (lambda path: (path.unlink(), path.mkdir()), "(cannot be read|has .* bytes)"),
])  # fmt: skip
def test_how_a_file_is_damaged_is_said_and_the_one_before_used(store: Store, file: str, harm, how) -> None:
    harm(path := store.path(at(20)) / file)
    with pytest.raises(DamagedCheckpointError, match=f"{file} {how}"):
        store.read(at(20))
    found, notes = store.find(True)
    assert seed_of(found) == 10
    assert len(notes) == 1 and str(path) in notes[0] and "passed over" in notes[0]


@BOTH
def test_a_file_or_a_name_of_another_checkpoint_is_detected(store: Store, file: str) -> None:
    shutil.copytree(store.path(at(10)), store.path(at(30)))
    with pytest.raises(DamagedCheckpointError, match="belongs to step-00000010"):
        store.read(at(30))
    shutil.copy(store.path(at(10)) / file, store.path(at(20)) / file)
    with pytest.raises(DamagedCheckpointError, match=ARRAYS):
        store.read(at(20))


def test_all_damaged_is_an_error_that_lists_each(store: Store) -> None:
    (store.path(at(10)) / ARRAYS).unlink()
    (store.path(at(20)) / MANIFEST).write_bytes(b"")
    with pytest.raises(CheckpointError, match="all 2 checkpoints") as caught:
        store.find(True)
    text = str(caught.value)
    assert f"{at(10)}/{ARRAYS} is missing" in text and f"{at(20)}/{MANIFEST} is empty" in text


def test_damaged_ones_move_away_when_their_name_is_needed(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        (store.path(at(20)) / ARRAYS).write_bytes(b"")
        assert not commit(store, at(20)).kept and seed_of(store.find(True)[0]) == 20
    aside = {path.name for path in (tmp_path / "damaged").glob("*") if not (path / ARRAYS).read_bytes()}
    assert aside == {f"{at(20)}.segment-1", f"{at(20)}.segment-1.2"}


def test_superseding_after_a_fallback_tells_damaged_from_superseded(store: Store, tmp_path: Path) -> None:
    commit(store, at(30))
    (store.path(at(30)) / ARRAYS).write_bytes(b"")
    store.find(True)
    store.supersede_after(at(10))
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == [f"{at(30)}.segment-1"]
    assert [path.name for path in (tmp_path / "superseded").iterdir()] == [f"{at(20)}.segment-1"]


def test_one_that_was_asked_for_has_no_replacement(store: Store) -> None:
    (store.path(at(20)) / ARRAYS).write_bytes(b"")
    for which in (20, str(at(20))):
        with pytest.raises(DamagedCheckpointError, match=f"choose another one: {at(10)}"):
            store.find(which)
