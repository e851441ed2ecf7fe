"""The lock: one process per run, whatever dies, forks or closes files; real processes."""

import json
import os
import platform
import select
import signal
import subprocess
import sys

import pytest

import warm
from everstep import hazard
from everstep.errors import RunDirError, RunLockedError
from everstep.record import RunLock

HOLD = """
import sys
from everstep.record import RunLock
lock = RunLock(sys.argv[1])
print(lock.acquire(), flush=True)
if sys.stdin.readline() == "release\\n":
    lock.release()
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
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "None\n"
        yield process
        process.kill()


def refused(run_dir):
    """What another process is told when it tries; "" if it gets the lock."""
    command = [sys.executable, "-c", TRY, str(run_dir)]
    return warm.run(command, capture_output=True, text=True, check=False).stderr


def test_a_second_process_is_refused_naming_pid_and_host(tmp_path, holder, monkeypatch):
    who = f"process {holder.pid} on host {platform.node()} since .*; wait for it"
    with pytest.raises(RunLockedError, match=who):
        RunLock(tmp_path).acquire()
    monkeypatch.setattr("everstep.record.lock._NAME_WAIT", 0.0)
    (tmp_path / "lock.json").unlink()
    with pytest.raises(RunLockedError, match="another process"):
        RunLock(tmp_path).acquire()


def test_a_dead_holders_lock_is_taken_over_saying_so(tmp_path, holder):
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path)
    said = lock.acquire()
    assert f"process {holder.pid} on host {platform.node()}" in said
    assert "ended without releasing it" in said
    lock.release()


def test_a_clean_release_leaves_no_trace_of_its_holder(tmp_path, holder):
    holder.communicate("release\n")
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert os.listdir(tmp_path) == ["lock"]


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


def test_a_forked_worker_does_not_keep_a_dead_holders_lock(tmp_path):
    """The worker outlives its killed parent, and its inherited file is open."""
    worker = "if os.fork() == 0:\n    os.write(1, b'here\\n')\n    os._exit(len(os.read(0, 1)))"
    command = [sys.executable, "-c", HOLD.replace("if sys", f"import os\n{worker}\nif sys"), str(tmp_path)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
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


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_locks_is_refused_naming_the_way_out(tmp_path, error):
    hazard.arm(f"{error}:lock.lock:1")
    with pytest.raises(RunDirError, match=r"file system without locks.*pass lock=False"):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize("anew", [True, False], ids=["replaced", "removed"])
def test_a_lock_in_a_directory_that_is_removed_meanwhile_is_refused(tmp_path, anew):
    """Else two processes train one directory: the second one locks the file of the new one."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    environment = os.environ | {"EVERSTEP_HAZARD": "SIGSTOP:lock.lock:1"}
    command = [sys.executable, "-c", TRY, str(run_dir)]
    lock = RunLock(run_dir)
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
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


def test_a_kill_at_every_operation_leaves_a_lock_that_can_be_taken(tmp_path):
    trace = tmp_path / "trace"
    command = [sys.executable, "-c", TRY, str(tmp_path)]
    warm.run(command, env=os.environ | {"EVERSTEP_HAZARD": f"trace:{trace}"}, check=True)
    for point in set(trace.read_text().split()):
        killed = warm.run(command, env=os.environ | {"EVERSTEP_HAZARD": f"kill:{point}:1"})
        assert killed.returncode == -9
        with RunLock(tmp_path).held():
            assert (tmp_path / "lock.json").exists()
