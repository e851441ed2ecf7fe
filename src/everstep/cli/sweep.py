"""`everstep sweep`"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import click

from everstep.cli.common_options import (
    ASKING,
    in_words,
    json_option,
    leave_in_order,
    profile_option,
    training_options,
)
from everstep.cli.experiments import ship_to, split
from everstep.cli.output import note, print_json, print_table, say
from everstep.errors import EverstepError

if TYPE_CHECKING:
    from everstep.experiment.sweep import Trial

_DRY, _WAITS = "not run (--dry-run)", "not begun"
_TAIL = 2000
"""Characters shown from the end of a failed training's output."""


@click.command("sweep")
@click.argument("arguments", nargs=-1, metavar="FILE... [PATH=VALUE...]")
@click.option(
    "--grid", multiple=True, metavar="PATH=[VALUE,...]", help="Values; every combination is trained."
)
@click.option(
    "--random",
    "draws",
    multiple=True,
    metavar="PATH=[VALUE,...]|{low: A, high: B, log: true}",
    help="Values or a range to draw from.",
)
@click.option(
    "--optuna",
    "searched",
    multiple=True,
    metavar="PATH=[VALUE,...]|{low: A, high: B, log: true}",
    help="Values or a range in which Optuna chooses, by the results of earlier trials.",
)
@click.option("--minimize", metavar="METRIC", help="Metric for --optuna to minimize.")
@click.option("--maximize", metavar="METRIC", help="Metric for --optuna to maximize.")
@click.option(
    "-n", "count", type=click.IntRange(min=1), default=10, help="Number of settings to draw or choose."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the draws.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), default=1, help="Number of trainings at once.")
@click.option(
    "--show",
    "shown",
    multiple=True,
    metavar="METRIC",
    help="Metric whose last value the table shows; may be repeated.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Beginning of the run directories, instead of the config's run_dir.",
)
@profile_option
@training_options
@json_option
def command(
    arguments: tuple[str, ...],
    grid: tuple[str, ...],
    draws: tuple[str, ...],
    searched: tuple[str, ...],
    minimize: str | None,
    maximize: str | None,
    count: int,
    seed: int,
    jobs: int,
    shown: tuple[str, ...],
    run_dir: Path | None,
    dry_run: bool,
    index: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train config FILEs with many settings, each in a process and a run of its own.

    \b
      everstep sweep digits.yaml --grid optimizer.lr=[0.1,0.01] --grid seed=[1,2,3] -j 2
      everstep sweep digits.yaml --random 'optimizer.lr={low: 1e-4, high: 1e-1, log: true}' -n 20
      everstep sweep digits.yaml --optuna 'optimizer.lr={low: 1e-4, high: 1e-1, log: true}' \\
        --minimize valid/loss -n 20 -j 2

    --show valid/loss adds the last value of a metric to the final table; so do --minimize and --maximize.

    Every config is checked before it is trained; those of a grid or of draws, before the first training.  A
    run directory is named by its settings: runs/digits-lr-0.1-seed-1.  The same command again resumes every
    run that is not finished.  A failed run does not stop the others; the exit status is then 1.

    Optuna chooses as many settings at once as there are --jobs, and the next when these are trained; so the
    same command chooses the same settings.
    """
    files, overrides = split(arguments)
    ship_to(index)
    from everstep.experiment.sweep import Base, Search, distinct, spaces, trials

    base = Base(files, overrides, run_dir, options["profile"])
    search = None
    if searched or minimize or maximize:
        if grid or draws:
            raise click.UsageError("--optuna chooses all settings that vary; leave out --grid and --random")
        if (minimize is None) == (maximize is None):
            raise click.UsageError("--optuna needs a goal: give --minimize METRIC or --maximize METRIC")
        goal = minimize or maximize or ""
        search = Search(base, spaces(searched), goal, maximize=minimize is None, seed=seed)
        shown = (*shown, goal)
        found = search.ask(min(jobs, count))
    else:
        drawn = trials(base, grid=grid, draws=draws, count=count, seed=seed)
        found = distinct(drawn)
        if len(found) < len(drawn):
            note([f"{len(drawn)} draws gave {len(found)} different settings; each is trained once"])
        count = len(found)
    line = [*map(str, files), *overrides]
    for name, value in options.items():  # as `everstep train` takes them
        option = f"--{name.replace('_', '-')}"
        line += [option] * value if isinstance(value, bool) else [option, value] if value is not None else []
    trainings = _Trainings(line, jobs, count)
    if dry_run:
        _print([_row(trial, _DRY) for trial in found], shown, as_json)
        return
    leave_in_order()
    try:
        codes = trainings.run(found)
        while search is not None:
            search.tell({str(run_dir): code == 0 for run_dir, code in codes.items()})
            count -= len(found)
            if not count:
                break
            found = search.ask(min(count, len(found)))
            codes = trainings.run(distinct(found))
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):  # the terminal may be gone
            _print(trainings.rows(), shown, as_json)
            note(["the same command again resumes every run that is not finished"])
        raise
    _print(trainings.rows(), shown, as_json)
    if any(row["status"] != "finished" for row in trainings.rows()):
        sys.exit(1)


def _row(trial: Trial, status: str) -> dict[str, Any]:
    return {"run": str(trial.run_dir), "settings": trial.settings, "status": status}


def _print(rows: list[dict[str, Any]], shown: Sequence[str], as_json: bool) -> None:
    """Print the rows, each with the last values of some metrics; None where the run has no value."""
    from everstep.experiment.sweep import last_value

    for metric in shown:
        missing = []
        for row in rows:
            row[metric] = None
            try:
                if row["status"] not in (_DRY, _WAITS):
                    row[metric] = last_value(row["run"], metric)
            except EverstepError as error:
                missing.append(f"{row['run']}: {error}")
        note(missing[:1])
    if as_json:
        print_json(rows)
    else:
        flat = [{"run": row["run"], **row["settings"], **row} for row in rows]
        print_table(flat, [name for name in flat[0] if name != "settings"])


class _Trainings:
    """Trainings, each in a process; a signal to this process is passed on to them, and each saves.

    Args:
        line: arguments of `everstep train`, the same for all.
        jobs: number of trainings at once.
        total: number of trainings, for the lines of progress.
    """

    def __init__(self, line: Sequence[str], jobs: int, total: int) -> None:
        self._line, self._jobs, self._total, self._done = line, jobs, total, 0
        self._trials: dict[Path, Trial] = {}
        self._codes: dict[Path, int] = {}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stopped_by: int | None = None

    def run(self, trials: Sequence[Trial]) -> dict[Path, int]:
        """Train trials; return the exit status of each run directory."""
        self._trials |= {trial.run_dir: trial for trial in trials}
        pool = ThreadPoolExecutor(self._jobs)
        try:
            waiting = {pool.submit(self._train, trial): trial for trial in trials}
            for future in as_completed(waiting):
                self._done += 1
                printed = future.result()
                say(f"[{self._done}/{self._total}] {waiting[future].run_dir}: {printed}", err=True)
        except BaseException as error:
            with self._lock:
                code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0
                number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else code - 128
                self._stopped_by = number if number in ASKING else signal.SIGTERM
                for process in self._running:
                    process.send_signal(self._stopped_by)  # recorded in the run as the reason of its end
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return {trial.run_dir: self._codes[trial.run_dir] for trial in trials}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial so far, in their order."""
        return [
            _row(trial, in_words(self._codes[path]) if path in self._codes else _WAITS)
            for path, trial in self._trials.items()
        ]

    def _train(self, trial: Trial) -> str:
        """Train a trial; say how it ended, with the end of its output if it failed."""
        from everstep.record.provenance import SWEEP_VARIABLE

        if trial.is_finished():
            self._codes[trial.run_dir] = 0
            return "finished, before this sweep"
        # the child looks for modules where this process does
        here = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
        line = [sys.executable, *here, "-m", "everstep", "train", *self._line, *trial.overrides]
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if self._stopped_by is not None:
                    return _WAITS
                process = subprocess.Popen(
                    [*line, "--run-dir", str(trial.run_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, SWEEP_VARIABLE: trial.sweep},
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
                )
                self._running.add(process)
            code = process.wait()
            with self._lock:
                self._running.remove(process)
                self._codes[trial.run_dir] = code
            output.seek(max(0, output.seek(0, 2) - _TAIL))
            lines = output.read().decode(errors="replace").splitlines() if code else []
            return "\n  ".join([in_words(code), *lines])
