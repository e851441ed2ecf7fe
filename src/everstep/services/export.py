"""Exports of weights, in files that need no everstep."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from everstep.arguments import integer
from everstep.checkpoint import CheckpointName, files, finite, place_apart, retire_others
from everstep.contracts.services import Boundary, Moment, RunView, Service, Stage
from everstep.contracts.state import BESIDE, HostArray
from everstep.errors import ConfigError, nearest
from everstep.formats import write_shards
from everstep.metrics.collector import is_wall
from everstep.record import RunDir
from everstep.schedule import Never, Schedule
from everstep.services.condition import Condition, Trigger
from everstep.state import Encoded, array_name, array_paths, digest, encode, make_entry

FORMATS = ("safetensors", "torch.export")
ABOUT = "export.json"
"""Name of the file with an export's run, step and metrics; JSON."""


class Export(Service):
    """Export weights to `exports/NAME/step-00000120/`, for programs that know nothing of everstep.

        Export(OnBest("valid_loss"), entry="ema", keep=2)
        Export(Every(epochs=1), format="torch.export", inputs=(torch.zeros(1, 3, 32, 32),))
        Export()  # at the end of the training

    `model.safetensors` has the arrays by the names of the model's own `state_dict`; `model.pt2` is for
    `torch.export.load`.  Beside this file lies `export.json`: run, step, epoch, entry, the last metrics, and
    the name of a checkpoint at that moment.  An export is there whole or not at all; after a kill at any
    place and a new start, the folder ends as if the run had never been killed.  A state with NaN or infinity
    in its parameters is not exported.

    Args:
        when: a schedule, `OnBest(metric)`, a function of the boundary, or None: at the end of training.
        entry: name of the state's entry; an average of weights exports the averaged model.
        format: "safetensors" or "torch.export".
        inputs: for torch.export: the model's example inputs, a tuple.
        dynamic_shapes: for torch.export: the sizes of the inputs that may vary, as torch.export takes them.
        keep: number of the newest exports that stay, 1 or more; None for all.
        every: when a function is asked, or a best value judged; default each epoch.
        name: name of the folder and of the service.

    Raises:
        ConfigError: an argument is out of its range, or does not go with another; on entering the loop,
            the state has no such entry.
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
        self._trigger = Trigger(Never() if when is None else when, every)
        super().__init__(name, self._trigger.schedule)
        if name.startswith("."):
            raise ConfigError(
                f"Export(name={name!r}): the name becomes a folder's name; give a name without a leading '.'"
            )
        if format not in FORMATS:
            raise ConfigError(f"Export(format={format!r}): {nearest(format, FORMATS)}")
        if (format == "torch.export") != isinstance(inputs, tuple):
            raise ConfigError(
                f"Export(format={format!r}, inputs={inputs!r:.60}): give inputs=(x, ...), a tuple, with "
                'format="torch.export", and only there'
            )
        self.watches = self._trigger.watches
        self.entry, self.format, self.keep = entry, format, integer("keep", keep, none="for all")
        self._inputs, self._dynamic_shapes = inputs, dynamic_shapes
        self._kept: list[str] = []
        self._metrics: dict[str, float] = {}
        self._run: RunView
        """Set while the loop is open."""

    @property
    def folder(self) -> Path:
        """Folder of the exports, while the loop is open."""
        return Path(self._run.run_dir) / "exports" / self.name

    def open(self, run: RunView) -> None:
        self._run = run
        self._id = RunDir.open(run.run_dir, create=False).id
        obj = run.live_object(self.entry)
        if self.format == "torch.export":
            # refused at the start, not after hours at the first export
            importlib.import_module("everstep.backends.torch.model_export").require_module(self.entry, obj)
        if self.schedule.wall:  # such a schedule is not part of the state, so the folder says what is kept
            self._kept = sorted(p.name for p in self.folder.glob("*") if CheckpointName.matches(p.name))
        self._trigger.open(run)

    def run(self, boundary: Boundary) -> None:
        self._look(boundary)
        step = self._trigger.asked(boundary)
        boundary.readings.clear()
        if step == boundary.step and not self._run.tainted:
            self._export(boundary)
        elif step is not None and step != boundary.step:
            self._run.println(
                f"{self.name}: the best was measured at step {step}, and its weights were trained on until "
                f"step {boundary.step}: they are not exported; measure after the last step"
            )

    def finish(self, boundary: Boundary) -> None:
        self._look(boundary)
        if self._at_end and boundary.stop is not None and not self._run.tainted:
            self._export(boundary)
        if self.folder.is_dir():
            retire_others(self.folder, self._kept, top=Path(self._run.run_dir))

    def _look(self, boundary: Boundary) -> None:
        """Take in the newest value of each metric."""
        for name in boundary.readings.names():
            stats = boundary.readings.stats(name)
            if stats is not None and not is_wall(name):
                self._metrics[name] = stats.last

    def _export(self, boundary: Boundary) -> None:
        obj = _plain(self._run.live_object(self.entry))
        entry = make_entry(self.entry, obj)
        saved = entry.save()
        arrays = {n: a for n, a in encode(saved).arrays.items() if not BESIDE & {*n.split("/")}}
        guarded = {array_name(path) for path in array_paths(saved) if entry.guarded(path)}
        if bad := [n for n, array in arrays.items() if n in guarded and not finite(array)]:
            self._run.println(f"{self.name}: NaN or infinity in {bad[0]!r}: not exported")
            return
        name = CheckpointName(boundary.step)
        after_epoch = boundary.epoch and boundary.moment is not Moment.AFTER_STEP
        about = description(
            arrays,
            self._metrics,
            run=self._id,
            step=boundary.step,
            epoch=boundary.epoch,
            checkpoint=str(CheckpointName(boundary.step, boundary.epoch) if after_epoch else name),
            entry=self.entry,
            format=self.format,
        )
        target = self.folder / str(name)
        # an equal export stays: a step that runs again after a kill writes no file twice
        if about_export(target) != about:
            write_export(target, self._contents(obj, arrays), about, top=Path(self._run.run_dir))
        self._kept = [*(other for other in self._kept if other != target.name), target.name]
        if self.keep is not None:
            self._kept = self._kept[-self.keep :]
        retire_others(self.folder, self._kept, top=Path(self._run.run_dir))

    def _contents(self, obj: Any, arrays: Mapping[str, HostArray]) -> Callable[[Path], object]:
        """Return a function that writes the weights' file into a folder."""
        if self.format == "safetensors":
            return weights(arrays)
        exporting = importlib.import_module("everstep.backends.torch.model_export")
        data = exporting.program(obj, self._inputs, self._dynamic_shapes)
        return lambda folder: files.write_new(folder / "model.pt2", data)

    def state_dict(self) -> Any:
        if self.schedule.wall:
            return None
        return {"kept": list(self._kept), "metrics": dict(self._metrics), "when": self._trigger.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._kept, self._metrics = list(state["kept"]), dict(state["metrics"])
        self._trigger.load_state_dict(state["when"])


def _plain(obj: Any) -> Any:
    """Return the model inside the wrappers of training."""
    if "torch" not in sys.modules:
        return obj
    return importlib.import_module("everstep.backends.torch.model_export").unwrapped(obj)


def description(
    arrays: Mapping[str, HostArray], metrics: Mapping[str, float], **facts: Any
) -> dict[str, Any]:
    """Describe an export, for its `export.json`."""
    told = {name: v if math.isfinite(v) else str(v) for name, v in sorted(metrics.items())}
    return {**facts, "metrics": told, "digest": digest(Encoded(list(arrays), dict(arrays)))}


def weights(arrays: Mapping[str, HostArray], most: int | None = None) -> Callable[[Path], object]:
    """Return a function that writes arrays into a folder, as safetensors; see `write_shards`."""
    return lambda folder: write_shards(folder, arrays, most)


def write_export(
    target: Path, contents: Callable[[Path], object], about: dict[str, Any], *, top: Path
) -> None:
    """Make an export, whole or not at all; replace an existing export.

    Raises:
        RunDirError: a link below `top` leads to the target.
    """
    place_apart(target, partial(_write, contents=contents, about=about), top=top)


def about_export(folder: Path) -> Any:
    """Read an export's description; None if the description is missing or damaged."""
    try:
        return json.loads((folder / ABOUT).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _write(folder: Path, contents: Callable[[Path], object], about: dict[str, Any]) -> int:
    contents(folder)
    files.write_new(folder / ABOUT, json.dumps(about, indent=1, allow_nan=False).encode() + b"\n")
    files.fsync_folder(folder)
    return sum(path.stat().st_size for path in folder.iterdir())
