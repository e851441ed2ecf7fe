"""CPU time that a library adds to a training step, over a bare PyTorch loop in the same process.

    python bench/steps.py [--only NAME ...] [--repeats 40] [--steps 1000] [--peers PYTHON]

A tiny MLP (32-32-1, batch 32, SGD) on one pinned core with one thread.  Each program (bench/step_programs.py)
trains in a process of its own, with a stream of ready batches.  The stream does the measuring: after each
block of steps it runs a block of the bare loop, so both take turns whatever drives the loop.  Values are CPU
time of all threads for a step; the difference is of neighbouring blocks.  Each block holds one save where a
program saves.  "bare loop" runs beside itself and must come out near 0.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Table, ask, program
from step_programs import PROGRAMS
from turns import SAVE_EVERY, Empty, Measured, Model, Turns, bare_loop, without_hooks

HERE = Path(__file__).resolve()
ENVIRONMENT = {
    "TERM": "xterm",
    # else giving memory back costs page faults every step
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def measure_one(name: str, repeats: int, steps: int) -> None:
    """Measure a program in this process; print its blocks as JSON."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.pop("CI", None)  # a console is live for the person that we pretend to be
    of = PROGRAMS[name]
    kind = Empty if of.empty else Model
    turns = Turns(without_hooks(bare_loop(kind())), repeats, steps)
    said = onto_a_terminal()
    with tempfile.TemporaryDirectory() as folder:
        try:
            of.run(kind(), turns, Path(folder))
        except Measured:
            print(json.dumps([turns.theirs, turns.ours]), file=said, flush=True)
        else:
            raise SystemExit(f"{name} ended before it was measured")
    os._exit(0)  # some libraries wait at the exit for what they upload


def onto_a_terminal() -> Any:
    """Make standard output a terminal, so that a console is live; return what it was."""
    ours, theirs = pty.openpty()
    subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(theirs, 1)
    return said


def measure(options: argparse.Namespace) -> Iterator[Table]:
    if options.one:
        measure_one(options.one, options.repeats, options.steps)
    rows: dict[bool, list[Figure]] = {False: [], True: []}
    for name, of in PROGRAMS.items():
        if (options.only and name not in options.only) or (of.peer and not options.peers):
            continue
        python = options.peers if of.peer else sys.executable
        command = [python, str(HERE), "--one", name]
        command += ["--repeats", str(options.repeats), "--steps", str(options.steps)]
        theirs, ours = ask(command, **ENVIRONMENT)
        rows[of.empty].append(Figure(name, "us", theirs, ours, None if of.empty else of.goal))
        print(f"{name}: measured", file=sys.stderr)
    yield Table("A step", __doc__.partition("\n\n")[2].partition("\n\n")[2].replace("\n", " "), rows[False])
    if rows[True]:
        how = "The same with a body that does nothing: the library's own instructions, with warm caches."
        yield Table("A step with an empty body", how, rows[True])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=SAVE_EVERY, help="steps in a block")
    parser.add_argument("--only", nargs="*", help="these programs alone")
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has bench/requirements.txt")
    parser.add_argument("--one", help=argparse.SUPPRESS)


if __name__ == "__main__":
    program(__doc__, measure, add_arguments)
