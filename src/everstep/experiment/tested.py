"""The record of a test: a run directory of its own that names the checkpoint which it validates."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everstep.contracts import EvalStep
from everstep.durable import write_whole
from everstep.errors import ConfigError, MetricError
from everstep.experiment.recorded import Recorded
from everstep.record import (
    Block,
    Evaluation,
    Journal,
    Position,
    RunDir,
    RunJournal,
    RunLock,
    record_evaluation,
    to_read,
)
from everstep.supervisor import Loaded
from everstep.supervisor.configuration import Configuration

FOLDER = "intermediate"


class TestRecord:
    """What a test finds, recorded as it is found.

    Args:
        run_dir: where; None: beside the run that is tested.
        where: the checkpoint that is tested.
        seed: of the evaluations.
        record: the parameters.
        frequency: keep the results of every so many batches; None: of none.

    Raises:
        RunDirError, RunLockedError: the run directory cannot be used.
    """

    __test__ = False  # pytest takes it for a test where it is imported

    def __init__(
        self, run_dir: Path | None, where: Loaded, seed: int, record: Recorded, frequency: int | None
    ) -> None:
        self._where, self._frequency = where, frequency
        self._facts = Configuration(record.tree, code=tuple(record.code)).facts(seed, ())
        self._tested = run_of(Path(where.path))
        self._home: RunDir | None = None
        if run_dir is not None:
            self._begin(run_dir, seed)

    def _begin(self, run_dir: Path, seed: int) -> None:
        validates = {
            "run": RunDir.open(self._tested, create=False).id,
            "checkpoint": self._where.name,
            "digest": self._where.digest,
            "step": self._where.step,
            "path": str(Path(self._where.path).absolute()),
        }
        self._home = home = RunDir.open(run_dir, seed=seed, about={"kind": "test", "validates": validates})
        self._lock = RunLock(home.path)
        self._lock.acquire()
        self._segment = home.next_segment()
        said = {**self._facts, "validates": validates}
        ends = [each.end for each in RunJournal(home.path).segments()] if self._segment > 1 else []
        parent = Position(self._segment - 1, ends[-1]) if ends else None
        self._journal = Journal.open(home.path, self._segment, parent, said, warn=lambda message: None)

    def see(self, step: EvalStep) -> None:
        """Keep what a batch came to, if it is one of those that are kept."""
        if self._home is None or self._frequency is None or step.number % self._frequency:
            return
        results = {name: _plain(name, value) for name, value in step.outputs.items()}
        arrays = {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
        file = f"{FOLDER}/{self._segment:04d}/{step.stream}/batch-{step.number:08d}.npz" if arrays else None
        if file is not None:
            buffer = io.BytesIO()
            np.savez(buffer, allow_pickle=False, **arrays)
            path = self._home.path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, buffer.getvalue(), "intermediate")
        numbers = {name: value for name, value in results.items() if name not in arrays}
        told = {"validation": step.stream, "batch": step.number, "results": numbers, "file": file}
        self._journal.event("intermediate", told)

    def add(self, name: str, num_steps: int, found: Mapping[str, float]) -> None:
        """What a validation came to."""
        where, prefixed = self._where, {f"{name}/{metric}": value for metric, value in found.items()}
        if self._home is None:
            at = (name, where.name, where.digest, where.step, where.epoch, num_steps)
            record_evaluation(self._tested, Evaluation(*at, prefixed, time.time()), self._facts, {})
            return
        for metric, value in prefixed.items():
            row = ([where.step], [value], [1], [self._segment - 1])
            self._journal.append(Block(where.epoch, f"eval/{name}", metric, False, *row))

    def end(self, error: BaseException | None) -> None:
        """The test is over."""
        if self._home is None:
            return
        status = {"status": "finished", "reason": f"tested {self._where.name}"}
        if error is not None:
            status = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        try:
            self._journal.event("closed", status, wall=True)
            self._journal.sync()
        finally:
            self._journal.close()
            self._lock.release()


def intermediate_results(run_dir: str | Path, validation: str | None = None) -> list[dict[str, Any]]:
    """What a test has kept of single batches, in their order: of its newest start.

    Args:
        run_dir: the test's run directory.
        validation: of this one alone.

    Returns:
        A dictionary for each batch: "validation", "batch" (its number, from 1), "results": names to numbers
        and NumPy arrays.

    Raises:
        RunDirError: the path is no run.
    """
    journal = RunJournal(to_read(run_dir))
    events = list(journal.events("intermediate"))
    newest = max((event.segment for event in events), default=0)
    found = []
    for event in events:
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
    """The run directory that a checkpoint, or best weights, lie in.

    Raises:
        ConfigError: it lies in none.
    """
    for folder in checkpoint.parents:
        if (folder / "run.json").exists():
            return folder
    raise ConfigError(f"{checkpoint} lies in no run directory; give one where its run has it")


def _plain(name: str, value: Any) -> Any:
    """A number, or an array."""
    if isinstance(value, bool | int | float):
        return value
    host = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    if host.dtype.kind not in "biufcUS":
        raise MetricError(
            f"save_intermediate_freq keeps numbers and arrays of them, and {name!r} is a "
            f"{type(value).__name__}"
        )
    return host.item() if host.ndim == 0 and host.dtype.kind in "biuf" else host
