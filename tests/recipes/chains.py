"""Start a recipe's program again and again, each time with another hazard: python chains.py FILE < CHAINS

CHAINS is a JSON list of [folder, hazards]. The libraries are imported once; each start is forked from this
process, which computes nothing. Prints the exit statuses of each chain; start N writes into FOLDER/N.log.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
import threading
import traceback
from pathlib import Path

import everstep.torch  # noqa: F401
from everstep import hazard


def start(file: Path, log: Path, strike: str | None) -> int:
    """Become the program in its folder, as `python FILE` would; return its exit status."""
    os.chdir(file.parent)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    hazard.arm(strike)
    sys.argv[:] = [file.name]
    status: object = 0
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        status = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    return status if isinstance(status, int) else int(status is not None)


def forked(file: Path, log: Path, strike: str | None) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = start(file, log, strike)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    name, chains = sys.argv[1], json.load(sys.stdin)
    for module in set(re.findall(r"^(?:import|from) (\w+)", (Path(chains[0][0]) / name).read_text(), re.M)):
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in what is forked"
    statuses = [
        [
            forked(Path(folder, name), Path(folder, f"{number}.log"), strike)
            for number, strike in enumerate(strikes)
        ]
        for folder, strikes in chains
    ]
    print(json.dumps(statuses))
