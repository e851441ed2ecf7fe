"""Files with an evaluation's outputs for each example."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, get_args

from everstep import hazard
from everstep.arguments import integer
from everstep.checkpoint import CheckpointName, files
from everstep.contracts.services import Boundary, EvalStep, Moment, RunView, Service, Stage
from everstep.durable import require_no_link, temporary
from everstep.errors import ConfigError, MetricError, nearest
from everstep.services.sink import finite

Format = Literal["jsonl", "csv"]


class Dump(Service):
    """Write an evaluation's outputs for each example of a stream: `dumps/NAME/step-00000120.jsonl`.

        Dump(["name", "label", "prediction"], stream="valid")

    One file for each evaluation in the loop, one line for each example, in the order of the stream.
    Variables are results of `eval_step` and logs of `next_eval_inputs`: arrays, tensors or lists, whose first
    axis is the examples of the batch.  NaN is null, infinities are "inf" and "-inf"; in a table (csv) a list
    is JSON.  A file is there whole or not at all, and before the checkpoint after its evaluation.

    Args:
        variables: names of the variables to write, in this order.
        stream: name of the stream that is evaluated.
        format: "jsonl" or "csv".
        keep: number of the newest files that stay, 1 or more; None for all.
        name: name of the folder and of the service; default "dump STREAM".
    """

    stage = Stage.MEASURE
    isolate = False
    window = "none"
    moments = frozenset({Moment.AFTER_EVAL_STEP, Moment.AFTER_EVALUATION})

    def __init__(
        self,
        variables: Sequence[str] | str,
        *,
        stream: str = "valid",
        format: Format = "jsonl",
        keep: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or f"dump {stream}")
        if self.name.startswith("."):
            raise ConfigError(
                f"Dump(name={name!r}): the name becomes a folder's name; give a name without a leading '.'"
            )
        self.outputs = (variables,) if isinstance(variables, str) else tuple(variables)
        if not self.outputs:
            raise ConfigError(
                'Dump() needs names of values that eval_step returns, as in Dump(["prediction"])'
            )
        if format not in get_args(Format):
            raise ConfigError(f"Dump(format={format!r}): {nearest(format, get_args(Format))}")
        self.stream, self.format = stream, format
        self.keep = integer("keep", keep, none="for all")
        self._file: IO[str] | None = None
        self._beside = Path()

    @property
    def folder(self) -> Path:
        """Folder of the files, while the loop is open."""
        return Path(self._run.run_dir) / "dumps" / self.name

    def open(self, run: RunView) -> None:
        """Delete files from after the step at which this start begins: they will be written again."""
        self._run = run
        if run.rank:
            return
        for path in self._written():
            if run.step == 0 or CheckpointName.parse(path.stem).step > run.step:
                files.unlink(path)

    def _written(self) -> list[Path]:
        """List the files, oldest first."""
        require_no_link(self.folder, Path(self._run.run_dir))
        found = self.folder.glob(f"*.{self.format}")
        return sorted(path for path in found if CheckpointName.matches(path.stem))

    def run(self, boundary: Boundary) -> None:
        # each rank evaluates the whole stream, as this service looks on; one of them writes
        if self._run.rank:
            return
        if boundary.moment is Moment.AFTER_EVALUATION:
            if self._file is not None:
                self._place(f"{CheckpointName(boundary.step)}.{self.format}")
        elif boundary.payload.stream == self.stream:
            self._take(boundary.payload)

    def _take(self, step: EvalStep) -> None:
        if step.number == 1:  # a new evaluation begins: the file of an interrupted evaluation goes
            self.close()
            require_no_link(self.folder, Path(self._run.run_dir))
            self.folder.mkdir(parents=True, exist_ok=True)
            self._beside = temporary(self.folder / "unfinished")
            self._file = open(self._beside, "w", encoding="utf-8", errors="replace", newline="")  # noqa: SIM115
            if self.format == "csv":
                csv.writer(self._file, lineterminator="\n").writerow(self.outputs)
        if self._file is None:
            return
        columns = {name: self._column(name, step) for name in self.outputs}
        if len({len(column) for column in columns.values()}) > 1:
            lengths = ", ".join(f"{name!r} has {len(column)}" for name, column in columns.items())
            raise MetricError(
                f"Dump: batch {step.number} of stream {step.stream!r} has variables of different lengths: "
                f"{lengths}; return one value for each example"
            )
        for example in zip(*columns.values(), strict=True):
            if self.format == "csv":
                cells = [_json(each) if isinstance(each, list | dict) else each for each in example]
                csv.writer(self._file, lineterminator="\n").writerow(cells)
            else:
                self._file.write(_json(dict(zip(columns, example, strict=True))) + "\n")

    def _column(self, name: str, step: EvalStep) -> list[Any]:
        """Return the values of a variable, one for each example of the batch."""
        if name not in step.outputs:
            raise ConfigError(
                f"Dump: eval_step on stream {step.stream!r} did not return {name!r}; "
                f"{nearest(name, step.outputs)}"
            )
        value = _plain(step.outputs[name])
        if not isinstance(value, list):
            raise MetricError(
                f"Dump: {name!r} is {value!r}, a single value for a whole batch of stream {step.stream!r}; "
                "return one for each example, as an array or list"
            )
        return value

    def _place(self, name: str) -> None:
        """Make the file durable before the boundary's checkpoint: a resume from there does not evaluate."""
        assert self._file is not None
        file, self._file = self._file, None
        file.flush()
        hazard.reach("dump.fsync")
        os.fsync(file.fileno())
        file.close()
        files.rename(self._beside, self.folder / name)
        files.fsync_folder(self.folder)
        for old in self._written()[: -self.keep] if self.keep is not None else ():
            files.unlink(old)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
            self._beside.unlink(missing_ok=True)  # the folder may have been deleted meanwhile


def _plain(value: Any) -> Any:
    """Convert arrays and tensors, also inside lists, to lists of plain values."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    return json.dumps(finite(value), ensure_ascii=False, default=str)
