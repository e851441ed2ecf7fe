"""Evaluations outside the loop: recorded beside the run, found again by later starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.contracts.services import Service
from everstep.errors import ConfigError, RunDirError
from everstep.record import Evaluation, RunJournal, evaluations, located, record_evaluation, to_read
from everstep.services.evaluate import Evaluate
from everstep.supervisor import Loaded, best
from everstep.supervisor.opening.configuration import Configuration


class RecordedEvaluations:
    """The evaluations of a run that were made outside its loop.

    Args:
        run_dir: as the user gave it.
        services: the services of the Trainer, for the record.
        config: the configuration of the run, for the record.
    """

    def __init__(
        self,
        run_dir: str | Path,
        services: Sequence[Service],
        config: Mapping[str, Any] | Configuration | None,
    ) -> None:
        self._run_dir, self._services = run_dir, services
        self._config = Configuration.of(config) or Configuration({})
        self._facts: dict[str, Any] | None = None

    def add(self, found: Evaluation, seed: int, seconds: float) -> None:
        """Record the evaluation of a stream; warn of a disk that refuses.

        Args:
            seed: the seed of the run.
            seconds: duration of the evaluation.
        """
        if self._facts is None:
            self._facts = self._config.facts(seed, self._services)
        wall = {f"{found.stream}/eval_time": seconds}
        try:
            record_evaluation(to_read(self._run_dir), found, self._facts, wall)
        except OSError as error:
            warnings.warn(
                f"an evaluation is not recorded: {error}; repair the disk, or free space", RuntimeWarning, 4
            )

    def all(self) -> list[Evaluation]:
        """List the evaluations, oldest first; empty for a run that does not exist yet."""
        try:
            return evaluations(located(self._run_dir))
        except RunDirError:
            return []

    def find(self, stream: str, how: Evaluate | None, weights: Loaded) -> dict[str, float]:
        """Find the metrics of an earlier evaluation of the same weights; empty if there is none.

        Args:
            how: the service of the stream, if any; the evaluation took its number of batches and statistics.
        """
        num_steps = -1 if how is None else how.num_steps
        stats = {} if how is None else how.stats
        wanted = {f"{stream}/{metric}/{name}" for metric, names in stats.items() for name in names}
        run_dir = to_read(self._run_dir)
        for each in reversed(evaluations(run_dir)):
            same = (each.stream, each.num_steps, each.digest) == (stream, num_steps, weights.digest)
            if same and wanted <= each.metrics.keys():
                return each.metrics
        found = _in_the_loop(run_dir, {"stream": stream, "num_steps": num_steps}, weights)
        return found if wanted <= found.keys() else {}


def _in_the_loop(run_dir: Path, asked: Mapping[str, Any], weights: Loaded) -> dict[str, float]:
    """Find the metrics that a service with these settings wrote in the loop at the step of a checkpoint."""
    if Path(weights.path).resolve().parent != (run_dir / "checkpoints").resolve():
        return {}
    journal = RunJournal(run_dir)
    # per start: settings may have changed since a row was written
    phases = {
        (event.segment, f"eval/{name}")
        for event in journal.events("segment")
        for name, settings in event.data.get("facts", {}).get("observers", {}).items()
        if settings == asked
    }
    rows = (row for row in journal.rows() if row.step == weights.step and not row.wall)
    return {row.name: row.value for row in rows if (row.segment, row.phase) in phases}


def weights_of(run_dir: str | Path, asked: str | Path) -> Path:
    """Return the path of best weights ("best", "best/METRIC"), of a checkpoint by its name, or as given.

    Raises:
        ConfigError: the run keeps no best weights, or those of several metrics.
    """
    first, _, metric = str(asked).partition("/")
    if first == "best":
        kept = {name: record.path for name, record in best(run_dir).items() if record.path is not None}
        meant = [name for name in kept if metric in ("", name, name.replace("/", "."))]
        if len(meant) != 1:
            known = ", ".join(f"'best/{name}'" for name in kept) or "none; add Best(metric)"
            raise ConfigError(f"weights={str(asked)!r}: give one that the run keeps: {known}")
        return Path(kept[meant[0]])
    named = to_read(run_dir) / "checkpoints" / str(asked)
    return named if named.exists() else Path(asked)
