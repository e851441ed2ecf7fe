"""Program that is executed, struck and executed again, in a root of its own; where two executions differ.

What its starts find comes as `StepDigests`, lines of JSON in the file that EVERSTEP_DRILL names.  Whoever
writes these lines in a process can be drilled; today it is a service of each run
(`everstep.services.witness`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.drill.processes import last_lines, owned_process, with_environment
from everstep.errors import DrillError
from everstep.polling import wait_until
from everstep.proof.compare import compare_runs, differing_rows
from everstep.record import ABSENT, WARNED, Difference, RunJournal, first_difference
from everstep.record.rundir import ROOT
from everstep.services.witness import FILE

LEAVING = 30.0
"""Seconds within which ranks have to leave whose torchrun was killed."""
HAZARD, INDEX = "EVERSTEP_HAZARD", "EVERSTEP_INDEX"
TORCHRUN, ALL_RANKS = "torchrun", "all ranks"


class Strike(NamedTuple):
    """Harm to a start: a hazard (`everstep.hazard`); where `spec` is "", SIGKILL some seconds after its first
    run opened.  On several ranks `target` is struck: "rank N", `ALL_RANKS` or `TORCHRUN`.
    """

    spec: str = ""
    seconds: float = 0.0
    target: str = ""

    @property
    def rank(self) -> int:
        """Number of the rank whose steps tell the place of the strike."""
        return int(self.target.removeprefix("rank ")) if self.target.startswith("rank ") else 0

    @property
    def last(self) -> tuple[str, str]:
        """What the last hazard does, and where: ("kill", "checkpoint.rename")."""
        action, _, place = self.spec.split(" then ")[-1].partition(":")
        return (action, place.rpartition(":")[0]) if self.spec else ("kill", "")

    def __str__(self) -> str:
        if self.spec:
            return f"{self.spec} @ {self.target}" if self.target else self.spec
        return " ".join(filter(None, ["kill", self.target, f"after {self.seconds:.3f} s"]))


class StepDigests(NamedTuple):
    """Digests of all parts of a run at a place, see `everstep.services.witness`; `run` is relative."""

    run: str
    rank: int
    pid: int
    time: float
    at: str
    epoch: int
    step: int
    parts: dict[str, str]

    @property
    def place(self) -> tuple[str, int, str, int, int]:
        """The place, to be found in another execution."""
        return self.run, self.rank, self.at, self.epoch, self.step


@dataclass(frozen=True)
class ProgramStart:
    """Start of the program: the exit status, or the negative number of the signal that ended it.

    Of several ranks it is the status of the rank that was struck: torchrun turns a kill into 1, and the run a
    planned stop into 0.  `began` is in seconds since 1970, and `witnessed` what was found on all ranks.
    """

    strike: Strike | None
    status: int
    began: float
    seconds: float
    witnessed: list[StepDigests]
    log: Path

    @property
    def records(self) -> list[StepDigests]:
        return self.of_rank(0)

    def of_rank(self, rank: int) -> list[StepDigests]:
        return [record for record in self.witnessed if record.rank == rank]

    @property
    def steps(self) -> list[tuple[str, int, int]]:
        """The steps that rank 0 completed, in order: (run, epoch, step)."""
        return [(each.run, each.epoch, each.step) for each in self.records if each.at == "step"]

    @property
    def tail(self) -> str:
        return last_lines(self.log)


@dataclass
class Program:
    """Program, and all that a chain of its starts leaves in a folder; `root` inside has the run directories.

    `timeout`: seconds that a start may take; `env`: further variables of each start's environment.
    """

    command: tuple[str, ...]
    folder: Path
    timeout: float | None = None
    ranks: int = 1
    starts: list[ProgramStart] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def runs(self) -> list[str]:
        """Run directories, relative to the root, in the order in which they were made."""
        files = sorted(self.root.rglob("run.json"), key=lambda path: json.loads(path.read_bytes())["created"])
        return [str(path.parent.relative_to(self.root)) for path in files]

    def journal(self, run: str) -> RunJournal:
        return RunJournal(self.root / run)

    def start(
        self, strike: Strike | None = None, trace: Path | None = None, *, witness: bool = True
    ) -> ProgramStart:
        """Start the program, and wait until it ends; with `witness`, digests of each step are written.

        `trace`: file for the names of the hazards that the start passes, with "{rank}" in its name.
        """
        name = f"start-{len(self.starts) + 1}"
        log, file = self.folder / f"{name}.log", self.folder / f"{name}.jsonl"
        # the runs of these programs do not belong in the user's index
        env = {**os.environ, **self.env, ROOT: str(self.root), INDEX: "off"}
        for variable in (HAZARD, FILE):
            env.pop(variable, None)
        env |= {FILE: str(file)} if witness else {}
        if trace is not None:
            env[HAZARD] = f"trace:{trace}"
        elif strike is not None and strike.spec:
            env[HAZARD] = str(strike)
        began, clock = time.time(), time.monotonic()
        with owned_process(self.command, env, log, ROOT, self.cwd) as process:
            status = self._wait(process, file, strike)
        if self.ranks > 1:
            status = self._of_ranks(status, strike, began)
        start = ProgramStart(strike, status, began, time.monotonic() - clock, self._read(file), log)
        self.starts.append(start)
        return start

    def _read(self, file: Path) -> list[StepDigests]:
        records = (StepDigests(**line) for line in read_lines(file))
        return [record._replace(run=os.path.relpath(record.run, self.root)) for record in records]

    def _wait(self, process: subprocess.Popen[bytes], file: Path, strike: Strike | None) -> int:
        try:
            if strike is not None and not strike.spec:
                self._kill(process, file, strike)
            return process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            raise too_long(" ".join(self.command[1:]), self.timeout or 0.0) from None

    def _kill(self, process: subprocess.Popen[bytes], file: Path, strike: Strike) -> None:
        """Kill whom a strike aims at, some seconds after the first run is open on all ranks."""
        deadline = time.monotonic() + (self.timeout or 0.0)
        while process.poll() is None and time.monotonic() < deadline:
            if len({record.rank for record in self._read(file)}) == self.ranks:
                break
            time.sleep(0.001)
        with suppress(subprocess.TimeoutExpired):
            process.wait(strike.seconds)
            return
        pids = {f"rank {record.rank}": record.pid for record in self._read(file)}
        if strike.target in ("", TORCHRUN):
            process.kill()
        for rank, pid in pids.items():
            if strike.target in (ALL_RANKS, rank):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        mark = os.fsencode(f"{ROOT}={self.root}")
        if strike.target == TORCHRUN and not wait_until(
            lambda: not {*pids.values()} & {*with_environment(mark)}, LEAVING
        ):
            raise DrillError(
                f"ranks still run {LEAVING:g} s after their torchrun was killed; check what they wait for"
            )

    def _of_ranks(self, status: int, strike: Strike | None, began: float) -> int:
        """Return the status of the rank that was struck, by torchrun's and the journals."""
        if status == 1 and strike is not None and strike.last[0] == "kill":
            return -signal.SIGKILL
        events = (each for run in self.runs for each in self.journal(run).events("interrupted", valid=False))
        statuses = (int(event.data["status"]) for event in events if event.time >= began)
        return status or next(statuses, 0)  # see `everstep.group.exit_status`


def too_long(program: str, timeout: float) -> DrillError:
    """Make the error of a start that has taken longer than its time."""
    problem = f"{program} ran longer than {timeout:g} s in one start"
    return DrillError(f"{problem}; make it smaller by its arguments, or raise the timeout")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; none if it is missing."""
    lines = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):  # a kill may tear the last line
            lines.append(json.loads(line))
    return lines


def command(script: Path, args: tuple[str, ...], ranks: int = 1) -> tuple[str, ...]:
    """Return the command that starts a script, a config by `everstep train`, ranks by torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    program = ("-m", "everstep", "train") if script.suffix in (".yaml", ".yml") else ()
    return (sys.executable, *(launcher if ranks > 1 else ()), *program, str(script), *args)


# ------------------------------------------------------------------------- the first difference

CAUSES = {
    "samples": "the data reads something that is not in the state: a generator of its own, the clock, the "
    "order of a set. Give the generator to state=, or draw in everstep.data.loader, which keys it",
    "random state": "more, fewer or other random numbers were drawn: something draws between the resume "
    "point and here that did not draw before, or is seeded by the program in the loop",
    "loss": "the value is computed from something that is not in state=: a counter, an average of the "
    "weights, a generator of its own, a cache",
    "weights": "samples, random state and loss are equal, so the update reads a value that is kept between "
    "steps outside state=: a counter or a learning rate in a variable, a schedule, a momentum, an average",
    "optimizer": "a value that is not in state= changes its settings or moments: a counter that sets the "
    "rate",
    "state": "samples, random state and metrics are equal, so the lines that change it read a value that is "
    "kept between steps outside state=: a counter in a global variable, an average made by hand (EMA), a "
    "generator of its own. Put it into state=; everstep.Slot holds a number",
    "service": "the service decides by a value that its state_dict() does not return",
    "journal": "a row is missing, twice or new: the script collects it or not by a value that is not in "
    "state=",
}
"""Likely causes of a resume that differs."""

_FROM_OUTSIDE = ("random state", "loss", "weights", "optimizer", "state")
"""Components that differ by what the state lacks, or by a kernel that was chosen otherwise."""
_SECONDS = re.compile(r"time|second|duration|elapsed|(?<![a-z])secs?(?![a-z])")
_CLOCK = (
    "differ, which no two runs measure alike: keep measured seconds out of state= (where the drill runs, at "
    "least), or collect them as a metric whose name ends in time, which is not compared"
)
Digests: TypeAlias = dict[tuple[str, int, str, int, int], StepDigests]
"""Digests by their places."""


def cause(difference: Difference) -> str:
    """Return the likely cause and the remedy, for people."""
    return difference.note or CAUSES[difference.component]


def first_divergence(undisturbed: Program, other: Program) -> Difference | None:
    """Find where a program first differs from an undisturbed one; None if its runs ended the same."""
    runs, differences = undisturbed.runs, list[Difference]()
    for run in {*runs} ^ {*other.runs}:
        values = ("there", ABSENT) if run in runs else (ABSENT, "there")
        differences.append(Difference("journal", "the run itself", *values, place="end", run=run))
    digests = by_place(record for start in undisturbed.starts for record in start.witnessed)
    for number, start in enumerate(other.starts):
        # a later start enters with the state of a checkpoint, the one of step 0 included: that has the
        # changes made by the lines between `with` and the loop
        differences += differing_digests(digests, start.witnessed, enters=number == 0)
    common = [run for run in other.runs if run in runs]
    for run in common:  # all rows that were ever written, also those superseded later
        expected = dict(undisturbed.journal(run).comparable())
        differences += differing_rows(expected, other.journal(run).comparable(valid=False), run)
    if not differences:  # the ends can differ even if all steps are the same
        for run in common:
            ends = compare_runs(undisturbed.root / run, other.root / run)
            differences += [one._replace(run=run) for one in ends]
    first = first_difference(differences, runs)
    if first is None or first.component not in _FROM_OUTSIDE or first.run not in runs:
        return first
    ends = compare_runs(undisturbed.root / first.run, other.root / first.run)
    first = in_entry(first, ends, any(one.name != first.name for one in differences))
    # what the run itself has warned of is a likelier cause than those that every program may have
    warned = undisturbed.journal(first.run).events(WARNED, valid=False)
    return first._replace(note=first.note or "; ".join(str(event.data["message"]) for event in warned))


def in_entry(first: Difference, ends: Sequence[Difference], more: bool) -> Difference:
    """Name what differs inside an entry at the ends of two runs: a path, and the clock if it seems to be it.

    `more`: whether anything but the entry differed before.
    """
    within = [one for one in ends if one.component == "state" and one.name.startswith(f"{first.name}/")]
    texts = [each for one in within for each in (one.expected, one.actual)]
    is_float = all(re.fullmatch(r"-?\d+\.\d+(e-\d+)?", text) for text in texts)
    is_named = all(_SECONDS.search(one.name.lower()) for one in within)
    is_clock = is_float and (is_named or not (more or len(within) < len(ends)))
    if not within or not (is_clock or first.component == "state"):
        return first
    name = re.sub(r"/(\d+)(?![^/])", r"[\1]", within[0].name).replace("/", ".")
    what = f"{name} and {len(within) - 1} more" if len(within) > 1 else name
    values = f"{within[0].expected} and {within[0].actual} at the ends"
    why = "as the name says" if is_named else "as all else agrees"
    note = f"the clock, {why}: {what} ({values}) {_CLOCK}" if is_clock else ""
    return first._replace(name=name, note=note)


def by_place(records: Iterable[StepDigests]) -> Digests:
    return {record.place: record for record in records}


def differing_digests(
    expected: Digests, records: Iterable[StepDigests], *, enters: bool = True
) -> Iterator[Difference]:
    """Yield the parts that differ; `enters`: also those of the state at the entry."""
    for record in records:
        reference = expected.get(record.place)
        place = (record.step, record.epoch, record.at, record.run, record.rank)
        if reference is None and record.at == "step":
            yield Difference("journal", "a step that was not there", ABSENT, "there", *place)
        elif reference is not None and (record.at != "enter" or enters):
            for part in reference.parts.keys() & record.parts.keys():
                expected_digest, digest = reference.parts[part][:8], record.parts[part][:8]
                if reference.parts[part] != record.parts[part]:
                    kind, _, name = part.partition("/")
                    component = {"random": "random state"}.get(kind, kind)
                    yield Difference(component, name, expected_digest, digest, *place)
