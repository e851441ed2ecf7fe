"""`everstep sweep`: train a config with many settings, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import click

from everstep.cli import common as cli
from everstep.cli.experiments import ship_to, split
from everstep.errors import EverstepError

if TYPE_CHECKING:
    from everstep.experiment.sweep import Trial

_DRY, _WAITS = "not run (--dry-run)", "not begun"
_TAIL = 2000
"""Characters shown from the end of a failed training's output."""
_SPACE = "PATH=[VALUE,...]|{low: A, high: B, log: true}"


@cli.command(profile=cli.PROFILE, schedule=cli.SCHEDULE, **cli.TRAINING)
def sweep_command(
    arguments: tuple[str, ...] = cli.CONFIG,
    grid: tuple[str, ...] = cli.option("PATH=[VALUE,...]", "Values, all combined.", multiple=True),
    draws: tuple[str, ...] = cli.option(_SPACE, "Values or a range to draw from.", "--random", multiple=True),
    count: int = cli.option(cli.COUNT, "Number of settings to draw.", "-n", default=10),
    seed: int = cli.option(click.IntRange(min=0), "Seed of the draws.", default=0),
    jobs: int = cli.option(cli.COUNT, "Number of trainings at once.", "-j --jobs", default=1),
    shown: tuple[str, ...] = cli.option("METRIC", "Metric to show in the table.", "--show", multiple=True),
    run_dir: Path | None = cli.option(cli.PATH, "Beginning of run directories, not the config's run_dir."),
    dry_run: bool = cli.DRY_RUN,
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
    **options: Any,
) -> None:
    """Train config FILEs with many settings, each in a process and a run of its own.

    \b
      everstep sweep digits.yaml --grid optimizer.lr=[0.1,0.01] --grid seed=[1,2,3] -j 2
      everstep sweep digits.yaml --random 'optimizer.lr={low: 1e-4, high: 1e-1, log: true}' -n 20

    A run directory is named by its settings: runs/digits-optimizer.lr-0.1-seed-1.  The same command again
    resumes every run that is not finished.  A failed run does not stop the others; the exit status is then 1.
    """
    files, overrides = split(arguments)
    ship_to(index)
    from everstep.experiment.sweep import trials

    place = {"run_dir": run_dir, "profile": options["profile"]}
    varied = trials(files, overrides, grid=grid, draws=draws, count=count, seed=seed, **place)
    distinct = list({trial.run_dir: trial for trial in varied}.values())
    if len(distinct) < len(varied):
        cli.note([f"{len(varied)} draws gave {len(distinct)} different settings; each is trained once"])
    if dry_run:
        _print([_row(trial, _DRY) for trial in distinct], shown, as_json)
        return
    line = [*map(str, files), *overrides]
    for name, value in options.items():  # as `everstep train` takes them
        name = f"--{name.replace('_', '-')}"
        line += [name] * value if isinstance(value, bool) else [name, value] if value is not None else []
    trainings = _Trainings(line, distinct, jobs, skips=options["schedule"] == "train")
    cli.leave_in_order()
    try:
        trainings.run()
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):  # the terminal may be gone
            _print(trainings.rows(), shown, as_json)
            cli.note(["the same command again resumes every run that is not finished"])
        raise
    _print(trainings.rows(), shown, as_json)
    sys.exit(int(any(trainings.codes.values())))


def _row(trial: Trial, status: str) -> dict[str, Any]:
    return {"run": str(trial.run_dir), "settings": trial.settings, "status": status}


def _print(rows: list[dict[str, Any]], metrics: Sequence[str], as_json: bool) -> None:
    """Print the rows, each with the last values of some metrics; None where the run has no value."""
    from everstep.record import RunJournal

    for metric in metrics:
        missing = []
        for row in rows:
            row[metric] = None
            try:
                if row["status"] not in (_DRY, _WAITS):
                    row[metric] = RunJournal(row["run"]).series(metric)[1][-1]
            except EverstepError as error:
                missing.append(f"{row['run']}: {error}")
        cli.note(missing[:1])
    if as_json:
        cli.print_json(rows)
    else:
        flat = [{"run": row["run"], **row["settings"], **row} for row in rows]
        cli.print_table(flat, [name for name in flat[0] if name != "settings"])


_Training: TypeAlias = "tuple[Trial, subprocess.Popen[bytes], IO[bytes]]"
"""A trial, its process, and the file of its output."""


class _Trainings:
    """Trainings, each in a process; a signal to this process is passed on to them, and each saves."""

    def __init__(self, line: Sequence[str], trials: Sequence[Trial], jobs: int, skips: bool) -> None:
        self._line, self._trials, self._jobs, self._skips = line, trials, jobs, skips
        self.codes: dict[Path, int] = {}

    def run(self) -> None:
        from everstep.polling import wait_until

        waiting, running = list(self._trials), list[_Training]()
        try:
            while waiting or running:
                while waiting and len(running) < self._jobs:
                    trial = waiting.pop(0)
                    # schedules that evaluate have work to do in a finished run, too
                    if self._skips and trial.is_finished():
                        self._report_end(trial, 0, "finished, before this sweep")
                    else:
                        running.append(self._start(trial))
                if running:
                    wait_until(lambda: any(process.poll() is not None for _, process, _ in running), 60.0)
                for each in [each for each in running if each[1].poll() is not None]:
                    running.remove(each)
                    self._collect(each)
        except (KeyboardInterrupt, SystemExit) as error:
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0
            number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else code - 128
            for _, process, _ in running:
                process.send_signal(number)  # recorded in the run as the reason of its end
            for each in running:
                each[1].wait()
                self._collect(each)
            raise

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial, in their order."""
        statuses = {path: cli.in_words(code) for path, code in self.codes.items()}
        return [_row(trial, statuses.get(trial.run_dir, _WAITS)) for trial in self._trials]

    def _start(self, trial: Trial) -> _Training:
        from everstep.drill.processes import with_parent
        from everstep.record.provenance import SWEEP_VARIABLE

        # the child looks for modules where this process does
        flags = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
        line = [sys.executable, *flags, "-m", "everstep", "train", *self._line, *trial.overrides]
        output = tempfile.TemporaryFile()  # noqa: SIM115 # closed when the training has ended
        process = subprocess.Popen(
            [*line, "--run-dir", str(trial.run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, SWEEP_VARIABLE: trial.sweep},
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
            preexec_fn=with_parent(signal.SIGTERM),
        )
        return trial, process, output

    def _collect(self, training: _Training) -> None:
        trial, process, output = training
        code = process.returncode
        with output:
            output.seek(max(0, output.seek(0, 2) - _TAIL))
            lines = output.read().decode(errors="replace").splitlines() if code else []
        self._report_end(trial, code, "\n  ".join([cli.in_words(code), *lines]))

    def _report_end(self, trial: Trial, code: int, outcome: str) -> None:
        self.codes[trial.run_dir] = code
        cli.say(f"[{len(self.codes)}/{len(self._trials)}] {trial.run_dir}: {outcome}", err=True)
