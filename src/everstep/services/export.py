"""Files for programs without everstep: weights while a run trains and of what it has saved, and outputs."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

from everstep import hazard
from everstep.arguments import checked_keywords, integer
from everstep.backends import torch_files
from everstep.checkpoint import Checkpoint, CheckpointName, files, find_checkpoint, is_finite, place_apart
from everstep.contracts.services import Boundary, BuiltIn, EvalStep, Moment, RunView, Stage
from everstep.contracts.state import BESIDE, HostArray
from everstep.display.cells import with_leaves
from everstep.durable import require_no_link, temporary
from everstep.errors import ConfigError, MetricError, NoCheckpointError, nearest
from everstep.formats import DISTRIBUTED, byte_count, write_shards
from everstep.metrics.collector import all_stats, is_wall
from everstep.record import RunDir, to_read, user_path
from everstep.schedule import Never, Schedule
from everstep.services.judges import Condition, Conditional
from everstep.services.sink import json_leaf
from everstep.state import Encoded, array_name, array_paths, children, digest, encode, make_entry, within

FORMATS = ("safetensors", "torch.export")
SAVED_FORMATS = ("safetensors", DISTRIBUTED)
ABOUT = "export.json"
"""Name of the file with an export's run, step and metrics; JSON."""


def _folder_name(name: str) -> str:
    if name.startswith("."):
        raise ConfigError(f"name={name!r} becomes a folder's name: give a name without a leading '.'")
    return name


def _retire(folder: Path, top: Path, keep: int | None, step: float = math.inf) -> None:
    """Delete what is of a later step, and of the rest all but the newest `keep`; names say the step."""
    require_no_link(folder, top)
    paths = [path for path in folder.glob("*") if CheckpointName.matches(path.stem)]
    paths.sort(key=lambda path: CheckpointName.parse(path.stem).step)
    reached = [path for path in paths if CheckpointName.parse(path.stem).step <= step]
    for path in {*paths} - {*(reached if keep is None else reached[-keep:])}:
        if path.is_dir():
            files.retire(path, top=top)
        else:
            files.unlink(path)


class Export(Conditional):
    """Export weights to `exports/NAME/step-00000120/`, for programs that know nothing of everstep.

        Export(OnBest("valid_loss"), entry="ema", keep=2)
        Export(Every(epochs=1), format="torch.export", inputs=(torch.zeros(1, 3, 32, 32),))
        Export()  # at the end of the training

    `model.safetensors` has the arrays by the names of the model's own `state_dict`; `model.pt2` is for
    `torch.export.load`.  Beside it, `export.json` has run, step, epoch, entry, the last metrics and the
    name of a checkpoint.  Parameters with NaN are not exported.

    Args:
        when: a schedule, `OnBest(metric)`, a function of the boundary, or None: at the end of training.
        entry: name of the state's entry; an average of weights exports the averaged model.
        format: "safetensors" or "torch.export".
        inputs, dynamic_shapes: of `torch.export.export`: example inputs (a tuple), and sizes that may vary.
        keep: number of the newest exports that stay, 1 or more; None for all.
        every: when a function is asked, or a best value judged; default each epoch.
    """

    stage = Stage.REPORT

    def __init__(
        self,
        when: Condition | None = None,
        *,
        entry: str = "model",
        format: str = "safetensors",
        inputs: tuple[Any, ...] | None = None,
        dynamic_shapes: Any = None,
        keep: int | None = 5,
        every: Schedule | None = None,
        name: str = "export",
    ) -> None:
        self._at_end = when is None
        if when is None and every is not None:
            raise ConfigError(f"Export(every={every!r}) has no condition: give it as when=, or leave it out")
        super().__init__(Never() if when is None else when, every, _folder_name(name))
        if format not in FORMATS:
            raise ConfigError(f"Export(format={format!r}): {nearest(format, FORMATS)}")
        if (format == "torch.export") != isinstance(inputs, tuple):
            raise ConfigError(
                f"Export(format={format!r}, inputs={inputs!r:.60}): give inputs=(x, ...), a tuple, with "
                'format="torch.export", and only there'
            )
        self.entry, self.format, self.keep = entry, format, integer("keep", keep, none="for all")
        self._inputs, self._dynamic_shapes = inputs, dynamic_shapes
        self._metrics: dict[str, float] = {}

    @property
    def folder(self) -> Path:
        """Folder of the exports, while the loop is open."""
        return self._run.run_dir / "exports" / self.name

    def open(self, run: RunView) -> None:
        self._run = run
        self._id = RunDir.open(run.run_dir, create=False).id
        obj = run.live_object(self.entry)
        if self.format == "torch.export":
            # refused at the start, not after hours at the first export
            torch_files().require_module(self.entry, obj)
        super().open(run)

    def run(self, boundary: Boundary) -> None:
        self._look(boundary)
        is_met = self.met(boundary, "exported")
        boundary.readings.clear()
        if is_met and not self._run.tainted:
            self._export(boundary)

    def finish(self, boundary: Boundary) -> None:
        self._look(boundary)
        if self._at_end and boundary.stop is not None and not self._run.tainted:
            self._export(boundary)

    def _look(self, boundary: Boundary) -> None:
        for name, stats in all_stats(boundary.readings).items():
            if not is_wall(name):
                self._metrics[name] = stats.last

    def _export(self, boundary: Boundary) -> None:
        obj = self._run.live_object(self.entry)
        if "torch" in sys.modules:  # the model inside the wrappers of training
            obj = torch_files().unwrapped(obj)
        entry = make_entry(self.entry, obj)
        saved = entry.save()
        arrays = {n: a for n, a in encode(saved).arrays.items() if not BESIDE & {*n.split("/")}}
        guarded = {array_name(path) for path in array_paths(saved) if entry.guarded(path)}
        if nonfinite := [n for n, array in arrays.items() if n in guarded and not is_finite(array)]:
            self._run.println(f"{self.name}: NaN or infinity in {nonfinite[0]!r}: not exported")
            return
        name = CheckpointName(boundary.step)
        after_epoch = boundary.epoch and boundary.moment is not Moment.AFTER_STEP
        about = _description(
            arrays,
            self._metrics,
            run=self._id,
            step=boundary.step,
            epoch=boundary.epoch,
            checkpoint=str(CheckpointName(boundary.step, boundary.epoch) if after_epoch else name),
            entry=self.entry,
            format=self.format,
        )
        target, top = self.folder / str(name), self._run.run_dir
        if _about(target) == about:
            pass
        elif self.format == "safetensors":
            _place(target, lambda folder: write_shards(folder, arrays, None), about, top=top)
        else:
            data = torch_files().program(obj, self._inputs, self._dynamic_shapes)
            _place(target, lambda folder: files.write_new(folder / "model.pt2", data), about, top=top)
        # what an earlier start exported of a later step goes once another export has taken its place
        _retire(self.folder, top, 1 if self._at_end else self.keep, boundary.step)

    def state_dict(self) -> Any:
        # when a schedule in seconds is due is no part of the state, and so is what it exports
        return None if self.schedule.wall else {"metrics": dict(self._metrics), "when": super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._metrics = dict(state["metrics"])
        super().load_state_dict(state["when"])


def _description(
    arrays: Mapping[str, HostArray], metrics: Mapping[str, float], **facts: Any
) -> dict[str, Any]:
    values = {name: v if math.isfinite(v) else str(v) for name, v in sorted(metrics.items())}
    weights = Encoded({name: {"$array": name} for name in arrays}, dict(arrays))
    return {**facts, "metrics": values, "digest": digest(weights)}


def _place(target: Path, contents: Callable[[Path], object], about: dict[str, Any], *, top: Path) -> None:
    def write(folder: Path) -> int:
        contents(folder)
        files.write_new(folder / ABOUT, json.dumps(about, indent=1, allow_nan=False).encode() + b"\n")
        files.fsync_folder(folder)
        return sum(path.stat().st_size for path in folder.iterdir())

    place_apart(target, write, top=top)


def _about(folder: Path) -> Any:
    try:
        return json.loads((folder / ABOUT).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


class Exported(NamedTuple):
    """Result of an export: its folder, the checkpoint's folder and step, and the number of arrays."""

    folder: str
    source: str
    step: int
    arrays: int


@checked_keywords
def export(
    source: str | Path,
    folder: str | Path,
    *,
    entry: str = "model",
    format: str = "safetensors",
    max_shard_size: int | str | None = None,
) -> Exported:
    """Write the weights that a run has saved into a folder, for programs without everstep.

        everstep.export("runs/digits/best/valid_loss", "digits-weights", max_shard_size="5GB")

    Names are those of the model's own `state_dict`; of an average of weights, the averaged model is written.

    Args:
        source: a run directory (its newest whole checkpoint), the folder of a checkpoint, or
            `RUN/best/METRIC` (the best weights).
        folder: folder to write, whole or not at all; an earlier export there is replaced.
        entry: name of the state's entry.
        format: "safetensors", or "torch.distributed.checkpoint", a folder for the `load` of that module.
        max_shard_size: most bytes of arrays in a file, as in 500_000_000, "5GB" or "2GiB"; a larger model
            becomes shards and an index, as Hugging Face has them.  None for one file.

    Raises:
        NoCheckpointError, CheckpointError: there is no checkpoint, or it is damaged.
    """
    target = user_path(folder, "folder")
    most = None if max_shard_size is None else byte_count(max_shard_size)
    if format not in SAVED_FORMATS:
        raise ConfigError(f"export(format={format!r}): {nearest(format, SAVED_FORMATS)}")
    if most is not None and format != "safetensors":
        raise ConfigError(f"export(format={format!r}, max_shard_size=...): leave out the size, or the format")
    if target.exists() and _about(target) is None:
        raise ConfigError(f"{target} exists and is not an export; give a folder that does not exist")
    place = user_path(source, "source")
    wanted = within([("user", entry)])
    notes: list[str] = []
    checkpoint = find_checkpoint(to_read(place), notes.append, interim=False, select=wanted)
    for note in notes:
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    if checkpoint is None:
        raise NoCheckpointError(f"there is no checkpoint yet in {place}; train the run, or check the path")
    arrays = _arrays(checkpoint, entry)
    meta: Any = checkpoint.meta or {}
    about = _description(
        arrays,
        {meta["metric"]: meta["value"]} if "metric" in meta else dict(meta.get("metrics", {})),
        run=meta.get("run"),
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        checkpoint=str(checkpoint.name),
        entry=entry,
        format=format,
    )

    def contents(to: Path) -> None:
        if format == "safetensors":
            write_shards(to, arrays, most)
        else:
            torch_files().write_distributed(to, arrays)

    _place(target, contents, about, top=target.parent)
    return Exported(str(target), str(checkpoint.path), checkpoint.step, len(arrays))


def _arrays(checkpoint: Checkpoint, entry: str) -> dict[str, HostArray]:
    structure: Any = checkpoint.structure
    entries = children(structure["user"]) or {}
    if entry not in entries:
        raise ConfigError(f"the state of the run has no {entry!r}; {nearest(entry, entries)}")
    root = array_name(["user", entry])  # no other arrays were read
    arrays = {
        name.removeprefix(f"{root}/") if name != root else array_name([]): array
        for name, array in checkpoint.arrays.items()
        if not BESIDE & {*name.split("/")}
    }
    if not arrays:
        raise ConfigError(f"{entry!r} has no arrays; give another entry: {', '.join(entries)}")
    if "n_averaged" in arrays:
        return {n.removeprefix("module."): a for n, a in arrays.items() if n != "n_averaged"}
    return arrays


Format = Literal["jsonl", "csv"]


class Dump(BuiltIn):
    """Write an evaluation's outputs for each example of a stream: `dumps/NAME/step-00000120.jsonl`.

        Dump(["name", "label", "prediction"], stream="valid")

    One file for each evaluation in the loop, one line for each example, in the order of the stream.
    Variables are results of `eval_step` and logs of `next_eval_inputs`: arrays, tensors or lists, whose first
    axis is the examples of the batch.  NaN is null, infinities are "inf" and "-inf"; in a table (csv) a list
    is JSON.

    Args:
        variables: names of the variables to write, in this order.
        stream: name of the stream that is evaluated.
        format: "jsonl" or "csv".
        keep: number of the newest files that stay, 1 or more; None for all.
        name: name of the folder and of the service; default "dump STREAM".
    """

    stage = Stage.MEASURE
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
        super().__init__(_folder_name(name or f"dump {stream}"))
        self.outputs = (variables,) if isinstance(variables, str) else tuple(variables)
        if not self.outputs:
            raise ConfigError('Dump() needs names of values that eval_step returns, as in Dump(["score"])')
        if format not in get_args(Format):
            raise ConfigError(f"Dump(format={format!r}): {nearest(format, get_args(Format))}")
        self.stream, self.format = stream, format
        self.keep = integer("keep", keep, none="for all")
        self._file: IO[str] | None = None
        self._beside = Path()

    @property
    def folder(self) -> Path:
        """Folder of the files, while the loop is open."""
        return self._run.run_dir / "dumps" / self.name

    def open(self, run: RunView) -> None:
        self._run = run
        if not run.rank:
            _retire(self.folder, self._run.run_dir, None, run.step or -1)  # steps from there on happen again

    def run(self, boundary: Boundary) -> None:
        # each rank evaluates the whole stream, as this service looks on; one of them writes
        if self._run.rank:
            return
        if boundary.moment is Moment.AFTER_EVALUATION:
            if self._file is not None:
                self._finish(f"{CheckpointName(boundary.step)}.{self.format}")
        elif boundary.payload.stream == self.stream:
            self._write_rows(boundary.payload)

    def _write_rows(self, step: EvalStep) -> None:
        if step.number == 1:  # a new evaluation begins: the file of an interrupted evaluation goes
            self.close()
            require_no_link(self.folder, self._run.run_dir)
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

    def _finish(self, name: str) -> None:
        """Make the file durable before the boundary's checkpoint: a resume from there does not evaluate."""
        assert self._file is not None
        file, self._file = self._file, None
        file.flush()
        hazard.reach("dump.fsync")
        os.fsync(file.fileno())
        file.close()
        files.rename(self._beside, self.folder / name)
        files.fsync_folder(self.folder)
        _retire(self.folder, self._run.run_dir, self.keep)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
            self._beside.unlink(missing_ok=True)  # the folder may have been deleted meanwhile


def _plain(value: Any) -> Any:
    """Turn arrays and tensors, also those in trees and in arrays of objects, into lists."""

    def plain(leaf: Any) -> Any:
        listed = leaf.tolist() if hasattr(leaf, "tolist") else leaf
        return listed if type(listed) is type(leaf) else _plain(listed)  # NumPy's longdouble stays as it is

    return with_leaves(value, plain)


def _json(value: Any) -> str:
    return json.dumps(with_leaves(value, json_leaf), ensure_ascii=False, default=str)
