"""Strike a recipe's program, in the environment with its libraries.

    python struck.py PROGRAM SEED KILLS KEEP [HAZARD...]   drills it, and prints the report as JSON; runs and
                                                           logs stay in the folder KEEP
    python struck.py PROGRAM < CHAINS                      CHAINS is JSON, [[folder, hazards], ...]: starts it
                                                           with each hazard, and prints the exit statuses of
                                                           each chain; start N writes into FOLDER/N.log

The libraries are imported once, which takes longer than such a program; each start is forked from this
process, which computes nothing.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import torch

from everstep import hazard
from everstep.drill import HAZARDS, RANK_HAZARDS, campaign, drill, program
from everstep.drill.processes import kill_marked

CHAIN = "five SIGTERMs"


def chain(points: campaign.Points, draw: Random) -> list[str]:
    """SIGTERM to each of five starts; there are steps left for the sixth."""
    most = max(1, points.count(campaign.STEP) // 6)
    return [f"SIGTERM:{campaign.STEP}:{draw.randint(1, most)}" for _ in range(5)]


class Forked:
    """A start, with what the drill uses of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.chdir(folder or ".")
                status = start(command, env, log)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            self._look(0)
        else:
            until = time.monotonic() + timeout
            while self.poll() is None:
                if time.monotonic() > until:
                    raise subprocess.TimeoutExpired("a start", timeout)
                time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """Become the program, as `python FILE` would; return its exit status."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(env)
    armed = env.get("EVERSTEP_HAZARD")
    hazard.arm(armed and armed.replace("{rank}", "0"))
    sys.argv[:] = command[1:]
    status: object = 0
    try:
        runpy.run_path(command[1], run_name="__main__")
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status if isinstance(status, int) else int(status is not None)


@contextmanager
def forked(
    command: Sequence[str], env: Mapping[str, str], log: Path, mark: str, cwd: Path | None = None
) -> Iterator[Forked]:
    """`everstep.drill.processes.owned_process`, forked."""
    process = Forked(command, env, log)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_marked(os.fsencode(f"{mark}={env[mark]}"))


def import_all(file: Path) -> None:
    for module in {"everstep.torch", *re.findall(r"^(?:import|from) ([\w.]+)", file.read_text(), re.M)}:
        importlib.import_module(module)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports half of what a cold start does
    gc.freeze()  # or each start's collector would copy the pages of all that was imported
    assert threading.active_count() == 1, "a thread would be missing in what is forked"


def statuses(file: str, folder: str, strikes: Sequence[str | None]) -> list[int]:
    """Start the program in its folder with each hazard in turn."""
    ends = []
    for number, strike in enumerate(strikes):
        env = os.environ | ({} if strike is None else {"EVERSTEP_HAZARD": strike})
        log = Path(folder, f"{number}.log").absolute()
        ends.append(Forked([sys.executable, file], env, log, Path(folder)).wait())
    return ends


if __name__ == "__main__":
    file, *options = sys.argv[1:]
    if not options:
        chains = json.load(sys.stdin)
        import_all(Path(chains[0][0], file))
        print(json.dumps([statuses(file, *each) for each in chains]))
        sys.exit()
    import_all(Path(file))
    seed, kills, keep, *hazards = options
    HAZARDS[CHAIN] = RANK_HAZARDS[CHAIN] = chain
    program.owned_process = forked  # type: ignore[assignment, attr-defined]
    report = drill(
        file,
        kills=int(kills),
        seed=int(seed),
        hazards=hazards or ["random instant", CHAIN],
        keep=keep,  # a temporary folder would be deleted by the first start that ends
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(report.as_dict()))
