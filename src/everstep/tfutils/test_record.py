"""Record of a test: a run directory of its own that names the tested checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from everstep.contracts.services import EvalStep
from everstep.durable import require_no_link, write_whole
from everstep.errors import ConfigError, MetricError
from everstep.experiment.predictions import npz
from everstep.record import Evaluation, RunDir, RunJournal, evaluation_segment, record_evaluation, to_read
from everstep.record.evaluation_record import EvaluationSegment
from everstep.supervisor import Loaded
from everstep.supervisor.opening.configuration import Configuration
from everstep.tfutils.params_as_json import ParamsRecord

FOLDER = "intermediate"
_KIND = "test"


class TestRecord:
    """Record of a test's results beside the tested run, written as they are found.

    Args:
        tested: directory of the tested run.
        where: the tested checkpoint.
        facts: provenance of the test.
    """

    __test__ = False  # pytest takes it for a test where it is imported

    def __init__(self, tested: Path, where: Loaded, facts: Mapping[str, Any]) -> None:
        self._tested, self._where, self._facts = tested, where, facts

    def see(self, step: EvalStep) -> None:
        """Keep the results of a batch if its number is due; here none is kept."""

    def add(self, name: str, num_steps: int, found: Mapping[str, float]) -> None:
        """Record the metrics of a validation, by names with its prefix."""
        where = self._where
        at = (name, where.name, where.digest, where.step, where.epoch, num_steps)
        record_evaluation(self._tested, Evaluation(*at, dict(found), time.time()), self._facts, {})


class _OwnRecord(TestRecord):
    """Record of a test in a run directory of its own."""

    def __init__(self, home: RunDir, where: Loaded, record: EvaluationSegment, frequency: int | None) -> None:
        self._home, self._where, self._record, self._frequency = home, where, record, frequency

    def see(self, step: EvalStep) -> None:
        if self._frequency is None or step.number % self._frequency:
            return
        journal = self._record.journal
        results = {name: _plain(name, value) for name, value in step.outputs.items()}
        arrays = {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
        file = f"{FOLDER}/{journal.segment:04d}/{step.stream}/batch-{step.number:08d}.npz" if arrays else None
        if file is not None:
            path = self._home.path / file
            require_no_link(path, self._home.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, npz(arrays), "intermediate")
        numbers = {name: value for name, value in results.items() if name not in arrays}
        told = {"validation": step.stream, "batch": step.number, "results": numbers, "file": file}
        journal.event("intermediate", told)

    def add(self, name: str, num_steps: int, found: Mapping[str, float]) -> None:
        self._record.append(name, self._where.step, self._where.epoch, found)


@contextmanager
def recording_test(
    run_dir: Path | None, where: Loaded, seed: int, record: ParamsRecord, frequency: int | None
) -> Iterator[TestRecord]:
    """Open the record of a test for the length of the block.

    Args:
        run_dir: directory of the record; None: beside the tested run.
        where: the tested checkpoint.
        seed: seed of the evaluations.
        record: the parameters.
        frequency: keep the results of every n-th batch; None: of no batch.

    Raises:
        ConfigError: the directory has a run that is not a test.
        RunDirError, RunLockedError: the run directory cannot be used.
    """
    facts = Configuration(record.tree, code=tuple(record.code)).facts(seed, ())
    tested = run_of(Path(where.path))
    if run_dir is None:
        yield TestRecord(tested, where, facts)
        return
    validates = {
        "run": RunDir.open(tested, create=False).id,
        "checkpoint": where.name,
        "digest": where.digest,
        "step": where.step,
        "path": str(Path(where.path).absolute()),
    }
    home = RunDir.open(run_dir, seed=seed, about={"kind": _KIND, "validates": validates})
    if home.facts.get("kind") != _KIND:
        raise ConfigError(f"{home.path} is the run {home.id}, which is not a test; give another exp_id")
    with evaluation_segment(home, {**facts, "validates": validates}, f"tested {where.name}") as segment:
        yield _OwnRecord(home, where, segment, frequency)


def intermediate_results(run_dir: str | Path, validation: str | None = None) -> list[dict[str, Any]]:
    """List the results that a test's newest start has kept of single batches, in their order.

    Args:
        run_dir: the test's run directory.
        validation: name of the only validation to list; None for all.

    Returns:
        A dictionary for each batch: "validation", "batch" (its number, from 1), "results": names to numbers
        and NumPy arrays.

    Raises:
        RunDirError: the path is not a run.
    """
    journal = RunJournal(to_read(run_dir))
    newest = max((segment.number for segment in journal.segments()), default=0)
    found = []
    for event in journal.events("intermediate"):
        told = event.data
        if event.segment != newest or validation not in (None, told["validation"]):
            continue
        results = dict(told["results"])
        if told["file"] is not None:
            with np.load(journal.run_dir / told["file"], allow_pickle=False) as arrays:
                results |= {name: arrays[name] for name in arrays.files}
        found.append({"validation": told["validation"], "batch": told["batch"], "results": results})
    return found


def run_of(checkpoint: Path) -> Path:
    """Return the run directory in which a checkpoint, or best weights, lie.

    Raises:
        ConfigError: the path lies in no run directory.
    """
    for folder in checkpoint.parents:
        if (folder / "run.json").exists():
            return folder
    raise ConfigError(f"{checkpoint} is not in a run directory; give a checkpoint inside the run directory")


def _plain(name: str, value: Any) -> Any:
    """Convert a result to a number or an array of NumPy."""
    if isinstance(value, bool | int | float):
        return value
    host = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    if host.dtype.kind not in "biufcUS":
        raise MetricError(
            f"save_intermediate_freq keeps numbers and arrays of them, and {name!r} is a "
            f"{type(value).__name__}"
        )
    return host.item() if host.ndim == 0 and host.dtype.kind in "biuf" else host
