"""`everstep sweep`"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any

import click

from everstep.cli import experiments
from everstep.cli.finding import json_option
from everstep.cli.leaving import leave_in_order
from everstep.cli.output import print_json, print_table

if TYPE_CHECKING:
    from everstep.experiment.sweep import Trial

_STATUS = {0: "finished", 3: "out of time", 4: "requirement not met"}
_TAIL = 2000
"""Characters of what a failed training printed last."""


@click.command("sweep")
@click.argument("arguments", nargs=-1, metavar="FILE... [PATH=VALUE...]")
@click.option("--grid", multiple=True, metavar="PATH=[VALUE,...]", help="Every combination of these.")
@click.option(
    "--random",
    "draws",
    multiple=True,
    metavar="PATH=[VALUE,...]|{low: A, high: B, log: true}",
    help="Drawn from these.",
)
@click.option(
    "-n", "count", type=click.IntRange(min=1), default=10, show_default=True, help="How often to draw."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Trainings at once."
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Instead of the config's.")
@experiments.profile_option
@experiments.training_options
@json_option
def command(
    arguments: tuple[str, ...],
    grid: tuple[str, ...],
    draws: tuple[str, ...],
    count: int,
    seed: int,
    jobs: int,
    run_dir: Path | None,
    profile: str | None,
    on_change: str,
    schedule: str,
    dry_run: bool,
    strict_git: bool,
    skip_check: bool,
    as_json: bool,
) -> None:
    """Train config FILEs with many settings, each in a process and a run of its own.

    \b
      everstep sweep digits.yaml --grid optimizer.lr=[0.1,0.01] --grid seed=[1,2,3] -j 2
      everstep sweep digits.yaml --random 'optimizer.lr={low: 1e-4, high: 1e-1, log: true}' -n 20

    Every config is checked before the first training.  A run directory is named by its settings:
    runs/digits-lr-0.1-seed-1.  The same line again goes on where each of them stands.  One that fails is
    no obstacle for the others; the exit status is 1 then.
    """
    files, overrides = experiments.split(arguments)
    from everstep.experiment.sweep import trials

    found = trials(
        files,
        overrides,
        grid=grid,
        draws=draws,
        count=count,
        seed=seed,
        run_dir=run_dir,
        profile=profile,
    )
    options = [*map(str, files), *overrides, "--schedule", schedule, "--on-change", on_change]
    options += ["--profile", profile] if profile is not None else []
    options += ["--strict-git"] * strict_git + ["--skip-check"] * skip_check
    if dry_run:
        codes: list[int] = []
    else:
        leave_in_order()
        codes = _Trainings(found, options, jobs).run()
    rows = _rows(found, codes)
    if as_json:
        print_json(rows)
    else:
        flat = [{"run": row["run"], **row["settings"], "status": row["status"]} for row in rows]
        print_table(flat, tuple(flat[0]))
    if any(codes):
        sys.exit(1)


def _rows(found: Sequence[Trial], codes: Sequence[int]) -> list[dict[str, Any]]:
    told = [_told(code) for code in codes] or ["not run (--dry-run)"] * len(found)
    return [
        {"run": str(trial.run_dir), "settings": trial.settings, "status": status}
        for trial, status in zip(found, told, strict=True)
    ]


def _told(code: int) -> str:
    number = -code if code < 0 else code - 128
    if number > 0:
        return f"{'killed' if code < 0 else 'stopped'} by {signal.Signals(number).name}"
    return _STATUS.get(code, "failed")


class _Trainings:
    """Trainings in processes of their own; if this one is to end, they are told to, which saves them.

    Args:
        trials: what to train.
        options: of `everstep train`, the same for all.
        jobs: how many at once.
    """

    def __init__(self, trials: Sequence[Trial], options: Sequence[str], jobs: int) -> None:
        self._trials, self._options, self._jobs = trials, options, jobs
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stopping = False

    def run(self) -> list[int]:
        """Train all of them; returns their exit statuses."""
        pool = ThreadPoolExecutor(self._jobs)
        try:
            waiting = {pool.submit(self._train, trial): trial for trial in self._trials}
            for done, future in enumerate(as_completed(waiting), 1):
                code, printed = future.result()
                self._say(done, waiting[future], code, printed)
            return [future.result()[0] for future in waiting]
        finally:
            with self._lock:
                self._stopping = True
                for process in self._running:
                    process.terminate()
            pool.shutdown(cancel_futures=True)

    def _train(self, trial: Trial) -> tuple[int, str]:
        """Its exit status, and the end of what it printed."""
        line = [sys.executable, "-m", "everstep", "train", *self._options, *trial.overrides]
        with tempfile.TemporaryFile() as printed:
            with self._lock:
                if self._stopping:
                    return 128 + signal.SIGTERM, ""
                process = subprocess.Popen(
                    [*line, "--run-dir", str(trial.run_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which tells the others
                )
                self._running.add(process)
            code = process.wait()
            with self._lock:
                self._running.remove(process)
            return code, _end(printed) if code else ""

    def _say(self, done: int, trial: Trial, code: int, printed: str) -> None:
        click.echo(f"[{done}/{len(self._trials)}] {trial.run_dir}: {_told(code)}", err=True)
        for line in printed.splitlines():
            click.echo(f"  {line}", err=True)


def _end(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, 2) - _TAIL))
    return file.read().decode(errors="replace")
