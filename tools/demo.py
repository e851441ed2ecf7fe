"""The demo: two twins train on the same digits; one is killed by SIGKILL twice; both end in the same state.

    make demo                               (about 20 s on two cores)
    make demo ARGS="--at 137 288"           kills at these steps, instead of at random ones

A twin is examples/digits.py in a process of its own; nothing in that file knows of the demo.  The demo reads
what `everstep drill` reads: a line for each step with digests of batch, random state and weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import timeline

from everstep.drill.program import INDEX, Program, ProgramStart, StepDigests, Strike, cause, first_divergence
from everstep.drill.report import bars
from everstep.proof.compare import compare_runs
from everstep.record import Difference, RunJournal
from everstep.services.witness import FILE

STEPS = 45
"""Steps of an epoch: 1,437 images in batches of 32."""

COLUMN = 38
"""Characters for each twin; both fit into a terminal of 80."""

SIGKILL = Strike("kill")


class Twin(Program):
    """One run, in as many starts as it takes.

    Attributes:
        kills: the steps at which it is still to be killed.
        killed: the last step that it had completed at each kill.
    """

    def __init__(self, folder: Path, script: Path, epochs: int, kills: list[int]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        command = (
            sys.executable,
            "-u",
            str(script),
            "--run",
            str(folder / "digits"),
            "--epochs",
            str(epochs),
        )
        super().__init__(command, folder, timeout=0.0)
        self.kills, self.killed = kills, list[int]()
        self.steps: dict[int, StepDigests] = {}
        self.epochs: dict[int, StepDigests] = {}
        self.accuracies: dict[int, str] = {}

    @property
    def root(self) -> Path:
        return self.folder

    @property
    def run_dir(self) -> Path:
        return self.root / "digits"

    def begin(self) -> None:
        """Start the process: the first time, or once more."""
        number = len(self.starts) + 1
        log, witness = self.folder / f"start-{number}.log", self.folder / f"start-{number}.jsonl"
        witness.touch()
        self.new_lines = open(witness, "rb")  # noqa: SIM115 - read as it grows
        env = {**os.environ, FILE: str(witness), INDEX: "off"}
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                self.command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.starts.append(ProgramStart(None, 0, time.time(), 0.0, [], log))

    def advance(self) -> bool:
        """Read what is new, kill if it is time to.  Whether it still runs."""
        status = self.process.poll()  # before reading: what a process that has ended wrote is all there
        self._read_new()
        if self.kills and self.completed() >= self.kills[0]:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self._read_new()
            self.kills.pop(0)
            self.killed.append(self.completed())
            self.starts[-1] = dataclasses.replace(self.starts[-1], strike=SIGKILL, status=-signal.SIGKILL)
            self.begin()
            return True
        if status:
            raise SystemExit(f"{self.folder.name} failed with status {status}:\n{self.starts[-1].tail}")
        return status is None

    def _read_new(self) -> None:
        while line := self.new_lines.readline():
            if not line.endswith(b"\n"):  # the rest comes, unless the kill tore the line
                self.new_lines.seek(-len(line), os.SEEK_CUR)
                return
            record = StepDigests(**{**json.loads(line), "run": "digits"})
            self.starts[-1].witnessed.append(record)
            if record.at in ("step", "epoch"):
                (self.steps if record.at == "step" else self.epochs)[record.step] = record

    def completed(self) -> int:
        """The last step that this start has completed."""
        return max((record.step for record in self.starts[-1].records if record.at == "step"), default=0)

    def end(self) -> None:
        """Leave no process behind."""
        self.process.kill()
        self.process.wait()

    def accuracy(self, epoch: int) -> str:
        """What the script has printed for an epoch."""
        if epoch not in self.accuracies:
            printed = "".join(start.log.read_text() for start in self.starts)
            found = re.findall(rf"Step {epoch * STEPS}\b.*valid accuracy: ([\d.]+)", printed)
            self.accuracies[epoch] = f"{float(found[-1]):.3f}" if found else "?"
        return self.accuracies[epoch]


# ------------------------------------------------------------------------------------------ the screen


class Screen:
    """The twins side by side: redrawn in place on a terminal, line by line as they are complete elsewhere."""

    def __init__(self, twins: tuple[Twin, Twin], epochs: int) -> None:
        self.twins, self.epochs = twins, epochs
        self.place = {("digits", (n - 1) // STEPS + 1, n): n for n in range(1, epochs * STEPS + 1)}
        self.is_live = sys.stdout.isatty() and shutil.get_terminal_size() >= (2 * COLUMN + 4, 20)
        self.shown = 0
        print(beside("undisturbed", "killed, and started again"))
        print(beside("-" * COLUMN, "-" * COLUMN))

    def draw(self, is_over: bool = False) -> None:
        rows = list(self.rows())
        if not self.is_live:
            # A line that lacks its left or its right half waits for it.
            whole = next((n for n, (left, right) in enumerate(rows) if left == "" or right == ""), len(rows))
            for left, right in rows[self.shown : whole]:
                print(beside(left, right), flush=True)
            self.shown = max(self.shown, whole)
            if is_over:
                print(self.bars())
            return
        lines = [beside(left, right) for left, right in rows] + [self.bars()]
        up = f"\x1b[{self.shown}A" if self.shown else ""
        print(up + "".join(f"\x1b[2K{line}\n" for line in lines), end="", flush=True)
        self.shown = len(lines)

    def rows(self) -> Iterator[tuple[str, str]]:
        """For each epoch both halves; an empty one has not come.  A kill is a row of its own."""
        calm, struck = self.twins
        for epoch in range(1, self.epochs + 1):
            for at, again in zip(struck.killed, struck.starts[1:], strict=False):
                if (at - 1) // STEPS + 1 == epoch and again.records:
                    yield " ", f"step {at:3} ✗ kill -9, again from step {again.records[0].step}"
            yield half(calm, epoch), half(struck, epoch)

    def bars(self) -> str:
        width = COLUMN - 8
        drawn = []
        for twin in self.twins:
            done = [[self.place[step] for step in start.steps] for start in twin.starts]
            struck = [start.strike is not None for start in twin.starts]
            drawn.append(bars(len(self.place), zip(done, struck, strict=True), width))
        counts = (f" {max(twin.steps, default=0):3}/{len(self.place)}" for twin in self.twins)
        return beside(*(bar + count for bar, count in zip(drawn, counts, strict=True)))


def beside(left: str, right: str) -> str:
    return f"{left:<{COLUMN}}    {right}".rstrip()


def half(twin: Twin, epoch: int) -> str:
    record = twin.epochs.get(epoch * STEPS)
    if record is None:
        return ""
    weights = next(digest for part, digest in record.parts.items() if part.startswith("weights/"))
    return f"step {record.step:3}  accuracy {twin.accuracy(epoch):5}  {weights[:12]}"


# ----------------------------------------------------------------------------------------- the verdict


def verdict(calm: Twin, struck: Twin) -> Difference | None:
    """The first thing that differs, in the steps, the rows or the end; None if nothing does."""
    return first_divergence(calm, struck)


def say_equal(calm: Twin, struck: Twin) -> None:
    digest = state_digest(calm)
    rows = sum(not row.wall for row in RunJournal(calm.run_dir).rows())
    again = sum(record.at == "step" for start in struck.starts for record in start.records) - len(
        struck.steps
    )
    print(
        f"\nEqual to the last bit: batches and random state of {len(struck.steps)} steps, {again} of them\n"
        f"executed twice, {rows:,} rows of metrics, all of the final state, best weights.\n"
    )
    kills = " and ".join(map(str, struck.killed))
    print(f"undisturbed {digest} / killed at {kills}: {state_digest(struck)}, equal")


def state_digest(twin: Twin) -> str:
    """Digest of the final state, as the script prints it."""
    found = re.search(r"digest of the state: (\w{16})", twin.starts[-1].log.read_text())
    if found is None:
        raise SystemExit(f"{twin.folder.name} printed no digest:\n{twin.starts[-1].tail}")
    return found[1]


def say_different(calm: Twin, struck: Twin, found: Difference) -> None:
    print("\n" + "!" * 80)
    print(f"DIFFERENT: killed at {' and '.join(map(str, struck.killed))}, the run ended as another one.")
    print(f"first: {found}: {found.expected} undisturbed, {found.actual} here")
    print(f"likely: {cause(found)}")
    for one in compare_runs(calm.run_dir, struck.run_dir)[:5]:
        print(f"at the end: {one.path}: {one.expected} undisturbed, {one.actual} here")
    print("!" * 80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help=f"of {STEPS} steps (default: %(default)s)")
    parser.add_argument("--at", type=int, nargs="+", metavar="STEP", help="kill at these (default: random)")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="where to draw it (default: demo.svg in the folder)")
    parser.add_argument("--script", type=Path, default=Path("examples/digits.py"), help="what the twins run")
    options = parser.parse_args()
    steps = options.epochs * STEPS
    kills = options.at or [
        random.randint(steps // 4, steps // 2),
        random.randint(steps * 3 // 5, steps * 4 // 5),
    ]

    folder = options.folder
    calm = Twin(folder / "undisturbed", options.script, options.epochs, [])
    struck = Twin(folder / "killed", options.script, options.epochs, sorted(kills))
    twins = (calm, struck)
    print(f"{options.script} trains twice, {steps} steps; after each epoch a digest of the weights.\n")
    screen = Screen(twins, options.epochs)
    for twin in twins:
        twin.begin()
    try:
        while any([twin.advance() for twin in twins]):
            screen.draw()
            time.sleep(0.03)
    finally:
        for twin in twins:
            twin.end()
    screen.draw(is_over=True)

    if struck.kills:
        print(f"\nthe run ended before it was killed at {struck.kills}; give smaller steps to --at")
        return 1
    found = verdict(calm, struck)
    if found is not None:
        say_different(calm, struck, found)
        return 1
    say_equal(calm, struck)
    drawn = options.picture or folder / "demo.svg"
    drawn.write_text(timeline.draw(calm.starts, struck.starts, state_digest(calm)))
    print(f"the picture: {drawn}")
    print("the same on your script: .venv/bin/everstep drill your_script.py")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nstopped; no process is left")
