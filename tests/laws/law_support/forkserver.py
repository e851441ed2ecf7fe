"""Victims that start in milliseconds: a process that has imported torch forks them.

A victim is a process of its own, in a session of its own, and runs its script as `python script.py`
would, up to the interpreter's exit.  What it inherits of the server is only imported modules: the server
starts no thread and computes nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, Protocol

HERE = Path(__file__).resolve().parent
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Victim(Protocol):
    """A running script: the part of `subprocess.Popen` that a campaign needs."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit status (negative: the signal), None while it runs."""

    def wait(self, timeout: float) -> int:
        """The exit status; TimeoutExpired if it does not end in so many seconds."""


class ForkServer:
    """Starts victims, warm or cold; `close` ends it and all that is left of them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **_ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._groups: list[int] = []
        self.ask({"do": "nothing"})  # it answers when it has imported everything

    def start(
        self, script: str, arguments: list[str], log: Path, *, hazard: str | None = None, cold: bool = False
    ) -> Victim:
        """Run `script` (in this folder) in a new session; its output is appended to `log`."""
        start = self._cold if cold else self._warm
        victim = start({"script": script, "arguments": arguments, "log": str(log), "hazard": hazard})
        self._groups.append(victim.pid)
        return victim

    def run(self, script: str, arguments: list[str], log: Path, *, hazard: str | None = None) -> int:
        """Run a script to its end; its exit status."""
        return self.start(script, arguments, log, hazard=hazard).wait(60)

    def _cold(self, job: dict[str, Any]) -> Victim:
        env = {**os.environ, **_ONE_THREAD, **({"EVERSTEP_HAZARD": job["hazard"]} if job["hazard"] else {})}
        command = [sys.executable, str(HERE / f"{job['script']}.py"), *job["arguments"]]
        with open(job["log"], "a") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def _warm(self, job: dict[str, Any]) -> Victim:
        assert job["script"] == "victim", "only the torch victim is worth a warm start"
        return _Warm(self, self.ask({"do": "start", **job}))

    def ask(self, request: dict[str, Any]) -> Any:
        """One question to the server process, one answer."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the server, and every victim and loader worker that still runs."""
        self._process.communicate()
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


class _Warm:
    """A forked victim; only its parent, the server, can see how it ended."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._server.ask({"do": "poll", "pid": self.pid})
        return self._status

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"victim {self.pid}", timeout)
            time.sleep(0.002)
        assert self._status is not None
        return self._status


def serve() -> dict[str, Any] | None:
    """Answer questions until the client is gone; in a forked victim: return its job at once."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: int | None = None
        if request["do"] == "poll":
            done, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif request["do"] == "start":
            answer = os.fork()
            if answer == 0:
                return dict(request)
        print(json.dumps(answer), flush=True)
    return None


def become(job: dict[str, Any]) -> NoReturn:
    """Turn this forked process into a run of the job's script.

    It ends as `python script.py` ends, but for taking down torch's modules, which takes longer than the
    run; cold victims do that too.
    """
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    np.random.seed()  # as in a fresh interpreter; Python reseeds its own generator after a fork
    sys.argv = [f"{job['script']}.py", *job["arguments"]]
    hazard.arm(job["hazard"])
    status = 0
    try:
        victim.main(job["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    import numpy as np
    import torch

    import everstep
    from everstep import hazard
    from law_support import victim

    for name in everstep.__all__:  # everything public is imported at its first use
        getattr(everstep, name)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports torch._dynamo: half of a cold start
    gc.freeze()  # or each victim's collector would copy the pages of all that was imported
    if (job := serve()) is not None:
        become(job)
