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
from typing import IO, TYPE_CHECKING, Any

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
    from everstep.experiment.optuna_sweep import Search
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
    "-n",
    "count",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Number of settings to draw or choose.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the draws.")
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of trainings at once.",
)
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
    profile: str | None,
    on_change: str,
    schedule: str,
    dry_run: bool,
    strict_git: bool,
    skip_check: bool,
    trust: bool,
    index: str | None,
    as_json: bool,
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
    from everstep.experiment.sweep import Base, distinct, spaces, trials

    base = Base(files, overrides, run_dir, profile)
    search = None
    if searched or minimize or maximize:
        from everstep.experiment.optuna_sweep import Search

        if grid or draws:
            raise click.UsageError("--optuna chooses all settings that vary; leave out --grid and --random")
        if (minimize is None) == (maximize is None):
            raise click.UsageError("--optuna needs a goal: give --minimize METRIC or --maximize METRIC")
        goal = minimize or maximize or ""
        search = Search(base, spaces(searched), goal, maximize=minimize is None, seed=seed)
        found = search.ask(min(jobs, count))
    else:
        drawn = trials(base, grid=grid, draws=draws, count=count, seed=seed)
        found = distinct(drawn)
        if len(found) < len(drawn):
            note([f"{len(drawn)} draws gave {len(found)} different settings; each is trained once"])
    options = [*map(str, files), *overrides, "--schedule", schedule, "--on-change", on_change]
    options += ["--profile", profile] if profile is not None else []
    options += ["--strict-git"] * strict_git + ["--skip-check"] * skip_check
    options += ["--trust"] * trust
    if dry_run:
        rows = [_row(trial, _DRY) for trial in found]
    else:
        leave_in_order()
        trainings = _Trainings(options, jobs, count if search else len(found))
        try:
            if search is None:
                rows = [_row(trial, in_words(code)) for trial, code in trainings.run(found)]
            else:
                rows = _searched(search, found, trainings, count)
        except (KeyboardInterrupt, SystemExit):
            with suppress(OSError):  # the terminal may be gone
                _print(trainings.standing(), shown, as_json)
                note(["the same command again resumes every run that is not finished"])
            raise
    _print(rows, shown, as_json)
    if any(row["status"] not in ("finished", _DRY) for row in rows):
        sys.exit(1)


def _print(rows: list[dict[str, Any]], shown: Sequence[str], as_json: bool) -> None:
    for metric in shown:
        _add(rows, metric)
    if as_json:
        print_json(rows)
    else:
        flat = [{"run": row["run"], **row["settings"], **row} for row in rows]
        print_table(flat, [name for name in flat[0] if name != "settings"])


def _add(rows: list[dict[str, Any]], metric: str) -> None:
    """Add the last value of a metric to each row; None where the run has no value."""
    from everstep.experiment.optuna_sweep import last_value

    missing = []
    for row in rows:
        row[metric] = None
        try:
            if row["status"] not in (_DRY, _WAITS):
                row[metric] = last_value(row["run"], metric)
        except EverstepError as error:
            missing.append(f"{row['run']}: {error}")
    note(missing[:1])


def _searched(search: Search, asked: list[Trial], trainings: _Trainings, count: int) -> list[dict[str, Any]]:
    """Train the settings that a search chooses, in rounds of len(asked); return rows in that order."""
    from everstep.experiment.sweep import distinct

    rows: list[dict[str, Any]] = []
    while True:
        codes = {str(trial.run_dir): code for trial, code in trainings.run(distinct(asked))}
        values = search.tell({path: code == 0 for path, code in codes.items()})
        for trial in asked:
            path = str(trial.run_dir)
            rows.append({**_row(trial, in_words(codes[path])), search.metric: values[path]})
        left = count - len(rows)
        if not left:
            return rows
        asked = search.ask(min(left, len(asked)))


def _row(trial: Trial, status: str) -> dict[str, Any]:
    return {"run": str(trial.run_dir), "settings": trial.settings, "status": status}


class _Trainings:
    """Trainings, each in a process; a signal to this process is passed on to them, and each saves.

    Args:
        options: options of `everstep train`, the same for all.
        jobs: number of trainings at once.
        total: number of trainings, for the lines of progress.
    """

    def __init__(self, options: Sequence[str], jobs: int, total: int) -> None:
        self._options, self._jobs, self._total, self._done = options, jobs, total, 0
        self._asked: dict[Path, Trial] = {}
        self._codes: dict[Path, int] = {}
        self._before: set[Path] = set()
        """Runs that were finished before."""
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stopped_by: int | None = None

    def run(self, trials: Sequence[Trial]) -> list[tuple[Trial, int]]:
        """Train trials; return each with its exit status, in their order."""
        self._asked |= {trial.run_dir: trial for trial in trials}
        pool = ThreadPoolExecutor(self._jobs)
        try:
            waiting = {pool.submit(self._train, trial): trial for trial in trials}
            for future in as_completed(waiting):
                self._say(waiting[future], *future.result())
            return [(trial, future.result()[0]) for future, trial in waiting.items()]
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

    def standing(self) -> list[dict[str, Any]]:
        """Return a row for each trial asked for so far, in their order."""
        return [
            _row(trial, in_words(self._codes[path]) if path in self._codes else _WAITS)
            for path, trial in self._asked.items()
        ]

    def _train(self, trial: Trial) -> tuple[int, str]:
        """Train a trial; return its exit status, and the end of its output if it failed."""
        from everstep.record.provenance import SWEEP_VARIABLE

        if trial.is_finished():
            with self._lock:
                self._before.add(trial.run_dir)
                self._codes[trial.run_dir] = 0
            return 0, ""
        here = (
            [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
        )  # the child looks for modules where this process does
        line = [sys.executable, *here, "-m", "everstep", "train", *self._options, *trial.overrides]
        with tempfile.TemporaryFile() as printed:
            with self._lock:
                if self._stopped_by is not None:
                    return 128 + self._stopped_by, ""
                process = subprocess.Popen(
                    [*line, "--run-dir", str(trial.run_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, SWEEP_VARIABLE: trial.sweep},
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
                )
                self._running.add(process)
            code = process.wait()
            with self._lock:
                self._running.remove(process)
                self._codes[trial.run_dir] = code
            return code, _end(printed) if code else ""

    def _say(self, trial: Trial, code: int, printed: str) -> None:
        self._done += 1
        told = f"{in_words(code)}, before this sweep" if trial.run_dir in self._before else in_words(code)
        say(f"[{self._done}/{self._total}] {trial.run_dir}: {told}", err=True)
        for line in printed.splitlines():
            say(f"  {line}", err=True)


def _end(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, 2) - _TAIL))
    return file.read().decode(errors="replace")
