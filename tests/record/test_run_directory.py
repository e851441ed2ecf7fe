"""The run directory: made once, locked by one process, refused where it is damaged; no link is followed."""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import everstep
import warm
from everstep import checkpoint, hazard
from everstep.checkpoint import CheckpointName, Draft, Retention, Store
from everstep.cli.group import commands
from everstep.errors import CheckpointError, RunDirError, RunLockedError
from everstep.record import Journal, RunDir, RunLock, remove, to_read, trail_path
from everstep.services import CSV, Export
from everstep.state import Encoded
from tiny_runs import Tiny


def test_a_new_run_gets_a_name_and_a_seed_and_keeps_them(tmp_path):
    run = RunDir.open(tmp_path / "runs" / "my digits")
    again = RunDir.open(tmp_path / "runs" / "my digits", seed=3)
    name, _, random = run.id.rpartition("-")
    assert (name, len(random)) == ("my-digits", 6) and 0 <= run.seed < 2**31
    assert again.facts == run.facts
    assert (run.facts["seed_given"], run.facts["versions"]) == (False, {"run": 1, "journal": 2})
    assert os.listdir(run.path) == ["run.json"]
    assert RunDir.open(tmp_path / "elsewhere" / "my digits").id != run.id
    given = RunDir.open(tmp_path / "given", seed=0)
    assert (given.seed, given.facts["seed_given"]) == (0, True)


def test_segments_are_counted_from_the_files(tmp_path):
    run = RunDir.open(tmp_path)
    assert run.next_segment() == 1
    for number in (1, 2):
        Journal.open(run.path, number, None, {}).close()
    (run.path / "journal/segment-0001.evj").unlink()
    assert run.next_segment() == 3


def test_what_was_opened_may_be_another_run_by_now(tmp_path):
    run = RunDir.open(tmp_path / "a")
    run.require_same()
    run.path.rename(tmp_path / "b")
    with pytest.raises(RunDirError, match=f"the run {run.id} in .* was removed while it was opened"):
        run.require_same()
    now = RunDir.open(tmp_path / "a")
    with pytest.raises(RunDirError, match=f"was replaced by {now.id} .*start again"):
        run.require_same()


def test_what_is_no_run_directory_is_refused(tmp_path):
    for path, words in ((tmp_path / "x", "does not exist"), (tmp_path, "has no run.json")):
        with pytest.raises(RunDirError, match=f"{words}; check the path"):
            RunDir.open(path, create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".cache").mkdir()
    RunDir.open(tmp_path)


def test_a_disk_that_refuses_is_an_error_with_a_remedy(tmp_path):
    for error in ("ENOSPC", "EROFS", "EACCES"):
        hazard.arm(f"{error}:run.json.write:1")
        with pytest.raises(RunDirError, match=r"cannot be used: .*; give a path that can be written"):
            RunDir.open(tmp_path / "x")
        assert os.listdir(tmp_path / "x") == []
    for error in ("ENOLCK", "EOPNOTSUPP", "ENOSYS"):
        hazard.arm(f"{error}:lock.lock:1")
        with pytest.raises(RunDirError, match=r"file system without locks.*pass lock=False"):
            RunLock(tmp_path).acquire()


def test_a_read_only_directory_is_refused(read_only_dir):
    with pytest.raises(RunDirError, match=r"cannot be written \(read-only\); change its permissions"):
        RunDir.open(read_only_dir)


def test_a_flip_of_any_byte_is_noticed_and_a_lost_file_is_not_made_again(tmp_path):
    RunDir.open(tmp_path, seed=12345)
    (tmp_path / "checkpoints").mkdir()
    whole = (tmp_path / "run.json").read_bytes()
    for at in range(len(whole)):
        (tmp_path / "run.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for create in (True, False):
            with pytest.raises(RunDirError, match=r"run.json is damaged.*restore it from a backup"):
                RunDir.open(tmp_path, create=create)
    (tmp_path / "run.json").unlink()
    with pytest.raises(RunDirError, match=r"holds a run \(checkpoints\) but no run.json; restore it"):
        RunDir.open(tmp_path)


def test_a_newer_layout_is_refused_naming_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("everstep.record.rundir.VERSION", 2)
    RunDir.open(tmp_path)
    monkeypatch.undo()
    with pytest.raises(RunDirError, match="format 2, this everstep reads up to 1; upgrade"):
        RunDir.open(tmp_path)


OPEN = "import sys; from everstep.record import RunDir; print(RunDir.open(sys.argv[1], seed=5).id)"


def python(code, run_dir, hazard=None, start=warm.run, **options):
    """A process that runs this code with the path of a run; what it prints is kept."""
    environment = os.environ | ({"EVERSTEP_HAZARD": hazard} if hazard else {})
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment, **options}
    return start([sys.executable, "-c", code, str(run_dir)], **options)


def test_a_kill_at_every_operation_leaves_a_directory_that_opens(tmp_path):
    trace = tmp_path / "trace"
    python(OPEN, tmp_path / "whole", f"trace:{trace}")
    points = trace.read_text().split()
    assert len(points) == 9
    for number, point in enumerate(points):
        path = tmp_path / str(number)
        nth = points[: number + 1].count(point)
        assert python(OPEN, path, f"kill:{point}:{nth}").returncode == -9
        run = RunDir.open(path, seed=5)
        assert (run.seed, RunDir.open(path).facts) == (5, run.facts)


def test_of_two_that_make_the_same_run_at_once_the_first_counts(tmp_path):
    """The second one arrives between the first one's look and its write."""
    seen = []

    def other(name):
        if name == "run.json.rename" and not seen:
            seen.append(python(OPEN, tmp_path).stdout.strip())

    hazard._action = other
    run = RunDir.open(tmp_path, seed=6)
    assert [run.id] == seen and run.seed == 5


def test_a_root_moves_run_directories_and_only_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_ROOT", "root")
    root = tmp_path / "root"
    for path in ("runs/x", str(tmp_path / "runs" / "x"), "runs/../runs/x"):
        opened = RunDir.open(path)
        assert opened.path == root.joinpath(*tmp_path.parts[1:], "runs", "x")
        assert RunDir.open(opened.path).id == opened.id, "what lies below the root is taken as it is"
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    (tmp_path / "pretrained").mkdir()
    assert to_read("pretrained") == Path("pretrained") and to_read("runs/x") == opened.path


HOLD = """
import sys
from everstep.record import RunLock
lock = RunLock(sys.argv[1])
print(lock.acquire(), flush=True)
sys.stdin.readline()
"""

TRY = """
import sys
from everstep.errors import RunLockedError
from everstep.record import RunLock
lock = RunLock(sys.argv[1])
try:
    lock.acquire()
except RunLockedError as error:
    sys.exit(str(error))
lock.release()
"""


@pytest.fixture
def holder(tmp_path):
    with python(HOLD, tmp_path, start=warm.Popen, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "None\n"
        yield process
        process.kill()


def refused(run_dir):
    """What another process is told when it tries; "" if it gets the lock."""
    return python(TRY, run_dir, stderr=subprocess.PIPE).stderr


def test_a_second_process_is_refused_naming_pid_and_host(tmp_path, holder, monkeypatch):
    who = f"process {holder.pid} on host {platform.node()} since .*; wait for it"
    with pytest.raises(RunLockedError, match=who):
        RunLock(tmp_path).acquire()
    (tmp_path / "lock.json").unlink()
    with pytest.raises(RunLockedError, match="another process"):
        RunLock(tmp_path).acquire()


def test_a_dead_holders_lock_is_taken_over_and_a_clean_release_leaves_no_trace(tmp_path, holder):
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path)
    said = lock.acquire()
    assert f"process {holder.pid} on host {platform.node()}" in said
    assert "ended without releasing it" in said
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    for _ in range(2):
        lock.release()
    assert os.listdir(tmp_path) == ["lock"] and lock.acquire() is None
    lock.release()


def test_a_second_loop_in_one_process_is_refused_and_the_first_keeps_its_lock(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    (tmp_path / "alias").symlink_to(tmp_path)
    for second in (RunLock(tmp_path), RunLock(tmp_path / "alias"), lock):
        with pytest.raises(RunLockedError, match=r"another loop of this process.*leave its `with`"):
            second.acquire()
    assert f"process {os.getpid()}" in refused(tmp_path)
    lock.release()
    assert refused(tmp_path) == ""


def in_child(action):
    """Fork, run `action` in the child, and return the child's exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_worker_cannot_drop_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()

    def second():
        with pytest.raises(RunLockedError, match=f"process {os.getppid()} on host"):
            RunLock(tmp_path).acquire()

    for action in (lock.release, lambda: os.close(lock._fd), second):
        assert in_child(action) == 0
    assert f"process {os.getpid()}" in refused(tmp_path)
    lock.release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_that_a_step_forks_leaves_the_run_alone(tmp_path):
    with everstep.Supervisor(tmp_path, {"slot": everstep.Slot(0)}, max_step=3, seed=1) as sv:
        while not sv.should_stop():
            sv.advance()
            if sv.step == 2:
                assert in_child(lambda: sv.__exit__(SystemExit, SystemExit(1), None)) == 0
    assert sv.ending.finished and sv.ending.step == 3 and not list(tmp_path.glob("failures/*"))


def test_a_forked_worker_does_not_keep_a_dead_holders_lock(tmp_path):
    """The worker outlives its killed parent, and its inherited file is open."""
    worker = "if os.fork() == 0:\n    os.write(1, b'here\\n')\n    os._exit(len(os.read(0, 1)))"
    program = HOLD.replace("sys.stdin", f"import os\n{worker}\nsys.stdin")
    with python(program, tmp_path, start=warm.Popen, stdin=subprocess.PIPE) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["None\n", "here\n"]
        assert refused(tmp_path)
        parent.kill()
        parent.wait()
        assert not select.select([parent.stdout], [], [], 0)[0]  # the worker has it, and is still there
        lock = RunLock(tmp_path)
        assert f"process {parent.pid}" in lock.acquire()
        lock.release()
        parent.stdin.close()
        assert parent.stdout.read() == ""  # its end


@pytest.mark.parametrize("anew", [True, False], ids=["replaced", "removed"])
def test_a_lock_in_a_directory_that_is_removed_meanwhile_is_refused(tmp_path, anew):
    """Else two processes train one directory: the second one locks the file of the new one."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    lock, stopped = RunLock(run_dir), {"start": subprocess.Popen, "stderr": subprocess.PIPE}
    with python(TRY, run_dir, "SIGSTOP:lock.lock:1", **stopped) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        run_dir.rename(tmp_path / "removed")
        if anew:
            run_dir.mkdir()
            lock.acquire()
        process.send_signal(signal.SIGCONT)
        assert "was removed or replaced by another process" in process.communicate()[1]
    if anew:
        assert f"process {os.getpid()}" in refused(run_dir)
        lock.release()
    else:
        assert not run_dir.exists()
        with pytest.raises(RunDirError, match="was removed"):
            lock.acquire()


def test_a_lock_that_fell_as_the_program_read_its_file_is_taken_again_at_a_save(tmp_path):
    """A copy of the run, by the program that trains it, let a second process in: the first one ended."""
    with (lock := RunLock(tmp_path)).held():
        lock.keep()
        assert "is in use by process" in refused(tmp_path)
        (tmp_path / "lock").read_bytes()
        lock.keep()
        assert "is in use by process" in refused(tmp_path)
        (tmp_path / "lock").read_bytes()
        with python(HOLD, tmp_path, start=warm.Popen, stdin=subprocess.PIPE) as process:
            assert process.stdout.readline()
            with pytest.raises(RunLockedError, match="another process has entered the run"):
                lock.keep()
            process.communicate("\n")


def test_services_write_into_the_run_wherever_the_program_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    program = Tiny(Path("run"), max_epoch=2, services=[Export(everstep.Every(epochs=1), entry="w"), CSV()])
    program.train(inside=lambda loop, step: os.chdir(tmp_path / "away"))
    assert program.loop.run_dir == tmp_path / "run" and not program.loop.ending.warnings
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"exports", "logs", "checkpoints"}
    assert not [*(tmp_path / "away").iterdir()]


def test_a_kill_at_every_operation_leaves_a_lock_that_can_be_taken(tmp_path):
    trace = tmp_path / "trace"
    assert python(TRY, tmp_path, f"trace:{trace}").returncode == 0
    for point in set(trace.read_text().split()):
        assert python(TRY, tmp_path, f"kill:{point}:1").returncode == -9
        with RunLock(tmp_path).held():
            assert (tmp_path / "lock.json").exists()


FOLDERS = ("best", "checkpoints", "damaged", "evaluations", "exports", "failures", "journal", "logs")
FOLDERS += ("superseded",)
FILES = ("lock", "checkpoint", "pins.json", "labels.json", "run.json")
EMPTY = Draft(CheckpointName(1), Encoded({}), "1")


def train(run_dir: Path, epochs: int = 2) -> Tiny:
    services = [
        everstep.Best("loss", mode="min"), everstep.Checkpoints(everstep.Every(steps=1), keep_last=100),
        Export(everstep.Every(epochs=1), entry="w"), CSV("logs/table.csv"),
    ]  # fmt: skip
    return Tiny(run_dir, max_epoch=epochs, services=services).train()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A run that somebody else's run must not touch."""
    return train(tmp_path / "victim").run_dir


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    return train(tmp_path / "evil", 1).run_dir


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, and every name."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def replaced(place: Path, target: Path) -> None:
    """Put a link in the place of something that a run has."""
    place.parent.mkdir(exist_ok=True)
    if os.path.lexists(place):
        place.rename(place.with_name(f"{place.name}.away"))
    place.symlink_to(target)


def refused_for_the_link(victim: Path, use: Callable[[], object]) -> None:
    """It is refused because of the link, and the victim is as it was."""
    before = content(victim)
    with pytest.raises(RunDirError, match="a link"):
        use()
    assert content(victim) == before


@pytest.mark.campaign("long")
def test_prune_does_not_delete_in_another_run(evil: Path, victim: Path) -> None:
    replaced(evil / "checkpoints", victim / "checkpoints")
    for more in ([], ["--delete"]):
        prune = ["checkpoints", str(evil), "prune", "--keep-last", "1", *more]
        refused_for_the_link(victim, lambda prune=prune: commands.main(prune, standalone_mode=False))  # type: ignore[misc]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_a_training_refuses_a_link_in_its_directory(evil: Path, victim: Path, name: str) -> None:
    (victim / name).mkdir(exist_ok=True) if name in FOLDERS else (victim / name).touch()
    replaced(evil / name, victim / name)
    refused_for_the_link(victim, lambda: train(evil, 3))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("place", ["best/loss", "exports/export", "logs/run.log", "logs/table.csv"])
def test_a_training_leaves_alone_what_a_deeper_link_leads_to(evil: Path, victim: Path, place: str) -> None:
    replaced(evil / place, victim / "checkpoints" if (evil / place).is_dir() else victim / "run.json")
    before = content(victim)
    try:
        said = train(evil, 3).lines
    except (RunDirError, CheckpointError) as error:
        said = [str(error)]
    assert content(victim) == before
    assert any("it is a link" in line for line in said), said


def test_a_checkpoint_that_is_a_link_is_not_followed(evil: Path, victim: Path) -> None:
    replaced(sorted((evil / "checkpoints").iterdir())[0], sorted((victim / "checkpoints").iterdir())[0])
    before, said = content(victim), list[str]()
    Store(evil, 9, said.append).retain(Retention(keep_last=1))
    assert content(victim) == before and "could not be deleted" in said[0]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", ["damaged", "superseded", "checkpoints"])
def test_a_store_moves_nothing_through_a_link(evil: Path, victim: Path, name: str) -> None:
    (victim / name).mkdir(exist_ok=True)
    replaced(evil / name, victim / name)
    store = Store(evil, 9, lambda _: None)
    newest = store.names()[-1]
    if name == "damaged":
        manifest = store.path(newest) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
        refused_for_the_link(victim, lambda: store.commit(Draft(newest, Encoded({}), "1")))
    else:
        refused_for_the_link(victim, store.supersede_all)


def test_what_is_kept_apart_is_not_kept_through_a_link(tmp_path: Path, victim: Path) -> None:
    run = tmp_path / "run"
    (run / "best").mkdir(parents=True)
    folder = run / "best" / "loss"
    folder.symlink_to(victim / "checkpoints")
    refused_for_the_link(victim, lambda: checkpoint.save_apart(folder, EMPTY, top=run))
    refused_for_the_link(victim, lambda: checkpoint.retire_others(folder, (), top=run))
    step = folder / "step-00000001"
    refused_for_the_link(victim, lambda: checkpoint.place_apart(step, lambda _: 0, top=run))


def test_links_among_a_runs_files_are_not_followed(evil: Path, victim: Path) -> None:
    """One beside a file that is written, one that comes while the run trains; and as the run is removed."""
    before = content(victim)
    (evil / "logs" / ".table.csv.tmp").symlink_to(victim / "run.json")
    train(evil, 2)
    run = Tiny(evil, max_epoch=3)
    run.train(inside=lambda loop, step: step == 10 and replaced(trail_path(evil, 3), victim / "run.json"))
    replaced(evil / "checkpoints", victim / "checkpoints")
    replaced(evil / "best" / "loss", victim / "best" / "loss")
    (evil / "mine").symlink_to(victim)
    remove(evil, RunDir.open(evil, create=False).id)
    assert content(victim) == before and not evil.exists()
