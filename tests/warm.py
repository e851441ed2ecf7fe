"""Python processes that start in milliseconds: a server that has imported everything forks them.

`warm.run` and `warm.Popen` are `subprocess.run` and `subprocess.Popen` for three kinds of commands:

    [sys.executable, "FILE.py", ...]
    [sys.executable, "-c", TEXT, ...]
    [sys.executable, "-m", MODULE, ...]

The process is one of its own, with the environment, folder and files that it is given, and runs the program
up to the interpreter's exit.  It inherits imported modules and nothing else: the server starts no thread and
computes nothing.  The ranks that a warm torchrun starts are warm, too, and its own children: it waits for
them, signals them and takes them along when it dies (that of group/test_lost_group.py is cold).

Use `subprocess` for what is true of a fresh interpreter only: which modules are imported, the seed of
hashes, variables that libraries read when they are imported, /proc/PID/environ.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_STANDARD = ("p2cread", "c2pwrite", "errwrite")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_TORCHRUN = "torch.distributed.run"
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_PR_SET_CHILD_SUBREAPER = 36


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A process that another one forks, as `_fork` asks it to."""

    def _execute_child(self, *given: Any) -> None:
        said = inspect.signature(super()._execute_child).bind(*given).arguments
        job = {
            "command": [os.fspath(each) for each in said["args"]],
            "folder": os.fspath(said["cwd"] or os.getcwd()),
            "environment": dict(os.environ if said["env"] is None else said["env"]),
            "new_session": said["start_new_session"],
        }
        assert job["command"][0] == sys.executable, f"{job['command'][0]} is not the server's interpreter"
        files = [number if said[name] == -1 else said[name] for number, name in enumerate(_STANDARD)]
        self.pid = self._fork(json.dumps(job), files)
        self._child_created = True
        self._close_pipe_fds(*(said[name] for name in _PIPES))

    def _fork(self, job: str, files: list[int]) -> int:
        raise NotImplementedError


class Popen(_Forked):
    """A process that the server forks; only the server, its parent, can see how it ended, and tells."""

    def _fork(self, job: str, files: list[int]) -> int:
        address = _address()
        with contextlib.ExitStack() as closed_if_it_fails:
            self._line = closed_if_it_fails.enter_context(socket.socket(socket.AF_UNIX))
            self._line.connect(address)
            socket.send_fds(self._line, [b"+"], files)
            self._answers = closed_if_it_fails.enter_context(self._line.makefile("rw"))
            self._answers.write(job + "\n")
            self._answers.flush()
            pid = int(self._answers.readline())
            closed_if_it_fails.pop_all()
        return pid

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._line], [], [], 0)[0]:
            return 0, 0
        with self._line, self._answers:  # also if the server is gone, and has no answer
            status = json.loads(self._answers.readline())
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, *_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                    self._handle_exitstatus(ended[1])  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    command: list[str],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a warm process."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


@functools.cache
def _address() -> str:
    """Where this process's server, which is started here, listens; it ends when this process does."""
    folder = tempfile.mkdtemp(prefix="everstep-warm-")
    address = os.path.join(folder, "server")
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env={**os.environ, **ONE_THREAD},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"  # it has imported everything

    @atexit.register
    def end() -> None:
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    return address


# ------------------------------------------------------------------------------ in the server


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each job until the client is gone; in the forked process: return its job at once."""
    children: dict[int, socket.socket] = {}
    number = 0
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it writes to `wake`
    while True:
        ready = select.select([listener, woken, sys.stdin], [], [])[0]
        if sys.stdin in ready:  # the client has closed it
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return None
        if woken in ready:
            woken.recv(4096)
            _tell_the_ended(children)
        if listener in ready:
            line = listener.accept()[0]
            number += 1
            files = socket.recv_fds(line, 1, 3)[1]
            job = json.loads(line.makefile().readline())
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (listener, woken, wake, line, *children.values()):
                    each.close()
                return {**job, "files": files, "number": number}
            children[pid] = line
            line.sendall(b"%d\n" % pid)
            for each in files:
                os.close(each)


def _tell_the_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as line:
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                line.sendall(b"%d\n" % status)


# ------------------------------------------------------------------------------ in a torchrun


def fork_ranks() -> dict[str, Any] | None:
    """Let the torchrun that this process becomes have forked ranks; in a rank: return its job.

    A fork from before torchrun's threads forks the ranks.  Each is the child of a process that ends at once,
    so that the kernel makes it torchrun's child: torchrun takes in orphans for that moment.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()

        class Rank(_Forked):
            def _fork(self, job: str, files: list[int]) -> int:
                libc = ctypes.CDLL(None)
                assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
                socket.send_fds(ours, [job.encode()], files)
                pid = int(ours.recv(20))
                assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
                return pid

        importlib.import_module(_HANDLER).Popen = Rank  # type: ignore[attr-defined]
        return None
    ours.close()
    number = 0
    while True:
        message, files, _, _ = socket.recv_fds(theirs, 1 << 20, 3)
        if not message:  # torchrun has ended
            os._exit(0)
        number += 1
        orphaned, open_until_then = os.pipe()
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            os.close(open_until_then)
            os.read(orphaned, 1)
            os.close(orphaned)
            theirs.sendall(b"%d" % os.getpid())
            theirs.close()
            return {**json.loads(message), "files": files, "number": number}
        os.waitpid(between, 0)
        for each in (orphaned, open_until_then, *files):
            os.close(each)


# ------------------------------------------------------------------------------ in a forked process


def become(job: dict[str, Any]) -> NoReturn:
    """Turn this forked process into the program of the job.

    It ends as `python FILE.py` ends, but for taking down torch's modules, which takes longer than most
    programs.
    """
    if job["new_session"]:
        os.setsid()
    for number, descriptor in enumerate(job["files"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable()  # a crash below Python leaves its stack on stderr
    command = job["command"][1:]
    if command[0] == "-u":
        del command[0]
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), write_through=True)
    else:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    tempfile.tempdir = None
    random.seed(job["number"])  # each process finds other states, as fresh interpreters do
    np.random.seed(job["number"])
    if command[:2] == ["-m", _TORCHRUN] and (rank := fork_ranks()) is not None:
        become(rank)
    hazard.arm(os.environ.get("EVERSTEP_HAZARD"))
    status = _status_of(command)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def _status_of(command: list[str]) -> int:
    try:
        _run(*command)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run(what: str, *arguments: str) -> None:
    """The program, as __main__."""
    sys.path[:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    if what == "-m":
        import runpy

        sys.path.insert(0, os.getcwd())
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if what == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
        return
    sys.path.insert(0, str(Path(what).resolve().parent))
    sys.argv = [what, *arguments]
    main.__file__ = what
    code = SourceFileLoader("__main__", what).get_code("__main__")
    assert code is not None
    exec(code, vars(main))


if __name__ == "__main__":
    import numpy as np
    import torch

    import everstep
    from everstep import hazard

    for module in pkgutil.walk_packages(everstep.__path__, "everstep."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports torch._dynamo: half of a cold start
    gc.freeze()  # or each process's collector would copy the pages of all that was imported
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        print("ready", flush=True)
        work = serve(listening)
    if work is not None:
        become(work)
