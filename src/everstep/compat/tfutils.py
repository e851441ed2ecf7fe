"""tfutils' door: a tree of parameters is translated into a task, streams and services for a `Trainer`."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np

from everstep.arguments import checked_keywords
from everstep.checkpoint import CheckpointName, Store, find_checkpoint
from everstep.compat.tfutils_params import (
    Load,
    Place,
    SaveOfTest,
    TrainingTree,
    Tree,
    TreeOfTest,
    Validation,
    checked,
    configuration,
    each_model,
)
from everstep.compat.tfutils_params import recorded_params as recorded_params
from everstep.compat.tfutils_task import Data, ParamsTask, ValidationBatch
from everstep.contracts.data import Stream
from everstep.contracts.services import Boundary, BuiltIn, EvalStep, Moment, RunView, Service
from everstep.data import as_stream
from everstep.durable import require_no_link, write_whole
from everstep.errors import ConfigError, HiLossError, LossBoundError, MetricError, NoCheckpointError, nearest
from everstep.experiment.experiment import note_uncommitted
from everstep.experiment.predictions import as_array, npz
from everstep.record import Evaluation, RunDir, located, record_evaluation, to_read
from everstep.schedule import Every
from everstep.services.checkpoints import Checkpoints, Index
from everstep.services.evaluate import Evaluate
from everstep.services.judges import LossBound, NaNGuard
from everstep.state import isolated, seed_all
from everstep.supervisor import InitFrom, Loaded, load
from everstep.supervisor.opening.configuration import Configuration
from everstep.supervisor.opening.init_from import names_in
from everstep.trainer import MultiRun, Trainer
from everstep.trainer.eval_loop import evaluate
from everstep.trainer.named_streams import TrainInputs

__all__ = ["intermediate_results", "recorded_params", "test_from_params", "train_from_params"]

_Models: TypeAlias = Mapping[str, Any] | list[Mapping[str, Any]]


@checked_keywords
def train_from_params(
    save_params: _Models,
    model_params: _Models,
    train_params: _Models,
    loss_params: _Models | None = None,
    learning_rate_params: _Models | None = None,
    optimizer_params: _Models | None = None,
    validation_params: _Models | None = None,
    load_params: _Models | None = None,
    dont_run: bool = False,
    skip_check: bool = False,
    on_change: Literal["error", "override"] = "error",
    on_divergence: Literal["stop", "warn"] | None = None,
) -> Any:
    """Train by a tree of parameters; the same call again resumes the run.

    Each argument is a dictionary; docs/coming-from/tfutils.md has all keys, and the arguments and results of
    the functions.  If some arguments are lists, with a dictionary for each model, several models train on the
    same reading of the data; an argument that is not a list is for all models.

    Args:
        load_params: checkpoint of another run to begin with; used only if the run has no checkpoint yet.
        dont_run: build everything and train nothing.
        skip_check: do not check that the code is committed.
        on_change: if the run was begun with other parameters: "error" shows both and refuses, "override"
            resumes with the given parameters.
        on_divergence: as for `everstep.Supervisor`.

    Returns:
        The `Ending`; for several models a list.  With `dont_run` the `Trainer` or `MultiRun`.

    Raises:
        HiLossError: the loss was above `thres_loss`; that step is not saved.
    """
    sections = {name: value for name, value in locals().items() if name.endswith("_params")}
    trees = [checked(TrainingTree, each) for each in each_model(sections)]
    data_params = trees[0].train_params.data_params
    if any(each.train_params.data_params != data_params for each in trees):
        raise ConfigError("train_params.data_params differ between models; give all the same data_params")
    if len({index_of(each.save_params, "save_params") for each in trees}) > 1:
        raise ConfigError("save_params.host and port differ between models; give all the same host and port")
    saves = [tree.save_params for tree in trees]
    with TemporaryDirectory(prefix="everstep-do_save-") as folder:
        paths = [run_dir_of(s) if s.do_save else Path(folder, str(n)) for n, s in enumerate(saves)]
        run_dirs = [
            path.with_name(f"{path.name}_model_{number}") if paths.count(path) > 1 else path
            for number, path in enumerate(paths)
        ]
        records = _records(trees, skip_check)
        train = Data(data_params, "train_params.data_params", shuffle=True)
        trainers = []
        for tree, run_dir, record in zip(trees, run_dirs, records, strict=True):
            begin, step = _beginning(tree, run_dir)
            data, streams = _validations(tree)
            trainers.append(
                Trainer(
                    ParamsTask(tree, {"train": train, **data}, step),
                    {"train": train.data, **streams},
                    run_dir,
                    services=_services(tree),
                    seed=tree.model_params.seed,
                    max_step=tree.train_params.num_steps,
                    config=record,
                    on_change=on_change,
                    on_divergence=on_divergence,
                    init_from=begin,
                    resume=tree.load_params is None or tree.load_params.do_restore,
                )
            )
        training: Any = MultiRun(trainers) if len(trainers) > 1 else trainers[0]
        if dont_run:
            return training
        try:
            return training.run_training()
        except LossBoundError as error:
            raise HiLossError(str(error)) from error


def _records(trees: list[Any], skip_check: bool) -> list[Configuration]:
    """Record the parameters; unless `skip_check`, note code that is not committed."""
    records = [configuration(each) for each in trees]
    for folder in dict.fromkeys(folder for each in records for folder in each.code if not skip_check):
        note_uncommitted(folder)
    return records


def _beginning(tree: TrainingTree, run_dir: Path) -> tuple[InitFrom | None, int]:
    """Find what a new run begins with, and the step from which its learning rate counts."""
    params, num_steps = tree.load_params, tree.train_params.num_steps
    if params is None or not params.do_restore:
        return None, 0
    if Store(located(run_dir)).names():
        print(f"load_params are not used: {run_dir} has a checkpoint of its own")
        return None, 0
    if (path := source(params, tree.save_params)) is None:
        return None, 0
    init, step = chosen(path, params)
    if not params.restore_global_step:
        return init, 0
    if num_steps is not None and step >= num_steps:
        raise ConfigError(
            f"load_params: {path} stands at step {step}, and train_params.num_steps={num_steps} would train "
            "none; give load_params restore_global_step=False to count from 0, or more num_steps"
        )
    return init, step


def _services(tree: TrainingTree) -> list[Service]:
    """Make the guards, evaluations, checkpoints and index of a training."""
    save, train = tree.save_params, tree.train_params
    permanent = Every(steps=save.save_filters_freq)
    every = Every(steps=save.cache_filters_freq) | permanent
    services: list[Service] = [
        NaNGuard(),
        Index(index_of(save, "save_params")),
        Checkpoints(every, keep_last=save.cache_max_num, keep_every=permanent),
    ]
    if train.thres_loss is not None:
        services.append(LossBound("loss", bound=train.thres_loss))
    for name, params in tree.validation_params.items():
        validation = _evaluation(name, params, Every(steps=save.save_valid_freq), train.validate_first)
        services.append(validation)
    return [*services, _PinInitial()] if save.save_initial_filters else services


def _evaluation(
    name: str, params: Validation, every: Every | None = None, validate_first: bool = False
) -> Evaluate:
    return Evaluate(
        name,
        every,
        num_steps=params.num_steps or -1,
        validate_first=validate_first,
        agg_func=params.agg_func,
        online_agg_func=params.online_agg_func,
    )


class _PinInitial(BuiltIn):
    moments = frozenset({Moment.AFTER_CHECKPOINT})

    def __init__(self) -> None:
        super().__init__("save_initial_filters")

    def open(self, run: RunView) -> None:
        self._store = Store(Path(run.run_dir))

    def run(self, boundary: Boundary) -> None:
        name = CheckpointName.parse(boundary.payload)
        if name == CheckpointName(0, 0) and name not in self._store.pins() and name in self._store.names():
            self._store.pin(name)


def _validations(tree: Tree) -> tuple[dict[str, Data], dict[str, Stream]]:
    """Make the data of the validations, and the streams, whose batches come with the name."""

    def named(name: str, batches: Iterator[Any]) -> ValidationBatch:
        return ValidationBatch(name, next(batches))

    data = {
        name: Data(params.data_params, f"validation_params.{name}.data_params", shuffle=False)
        for name, params in tree.validation_params.items()
    }
    return data, {n: TrainInputs(as_stream(each.data), partial(named, n)) for n, each in data.items()}


@checked_keywords
def test_from_params(
    load_params: _Models,
    model_params: _Models,
    validation_params: _Models,
    save_params: _Models | None = None,
    dont_run: bool = False,
    skip_check: bool = False,
) -> Any:
    """Run validations on a checkpoint of a run, and record their metrics (`everstep.runs.evaluations`).

    Args:
        load_params: names the checkpoint, as for `train_from_params`.
        model_params: as in training; its function gets `train=False`.
        save_params: place of the record, a run of its own that names the checkpoint under `validates`; None:
            that of the tested run.  With `save_intermediate_freq` n, the results of every n-th batch are
            kept there: `everstep.compat.tfutils.intermediate_results`.
        dont_run: build everything and test nothing.

    Returns:
        Name of the validation to its results, which are numbers by name; for several models a list.  With
        `dont_run` the task, or a list of tasks.
    """
    sections = {name: value for name, value in locals().items() if name.endswith("_params")}
    results = [_test(checked(TreeOfTest, each), dont_run, skip_check) for each in each_model(sections)]
    return results if any(isinstance(value, list) for value in sections.values()) else results[0]


test_from_params.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test where it is imported


def _test(tree: TreeOfTest, dont_run: bool, skip_check: bool) -> Any:
    path = source(tree.load_params, tree.save_params)
    if path is None:
        raise ConfigError("load_params name no checkpoint to test; give exp_id, query or from_ckpt")
    if not tree.validation_params:
        raise ConfigError("validation_params name no validation; give at least one")
    (record,) = _records([tree], skip_check)
    (data, streams), seed = _validations(tree), tree.model_params.seed
    task = ParamsTask(tree, data)
    with isolated():
        seed_all(seed)
        task.build()
    if dont_run:
        return task
    loaded = load(chosen(path, tree.load_params, entry="model")[0], task.state())
    seed = seed if loaded.seed is None else loaded.seed
    home, see = _home(loaded, tree.save_params, seed)
    facts = record.facts(seed, ())
    results: dict[str, dict[str, float]] = {}
    for name, params in tree.validation_params.items():
        how = _evaluation(name, params)
        results[name] = evaluate(task, streams[name], name, how.num_steps, seed, how, seen=see)
        metrics = {f"{name}/{metric}": value for metric, value in results[name].items()}
        at = (loaded.name, loaded.digest, loaded.step, loaded.epoch)
        record_evaluation(home, Evaluation(name, *at, how.num_steps, metrics, time.time()), facts, {})
    return results


def _home(loaded: Loaded, save: SaveOfTest | None, seed: int) -> tuple[Path, Callable[[EvalStep], None]]:
    """Return the run that records a test, and the function that keeps a batch's results there."""
    tested = next((folder for folder in Path(loaded.path).parents if (folder / "run.json").exists()), None)
    if tested is None:
        raise ConfigError(f"{loaded.path} is in no run directory; give a checkpoint inside one")
    if save is None or not save.do_save:
        return tested, lambda step: None
    validates = {
        "run": RunDir.open(tested, create=False).id,
        "checkpoint": loaded.name,
        "digest": loaded.digest,
        "step": loaded.step,
        "path": str(Path(loaded.path).absolute()),
    }
    home = RunDir.open(run_dir_of(save), seed=seed, about={"kind": "test", "validates": validates})
    if home.facts.get("kind") != "test":
        raise ConfigError(f"{home.path} is the run {home.id}, which is not a test; give another exp_id")
    require_no_link(home.path / "intermediate", home.path)
    shutil.rmtree(home.path / "intermediate", ignore_errors=True)
    frequency = save.save_intermediate_freq

    def keep(step: EvalStep) -> None:
        if frequency is None or step.number % frequency:
            return
        arrays = {name: as_array(value) for name, value in step.outputs.items()}
        for name, array in arrays.items():
            if array.dtype.kind not in "biufcUS":
                kind = type(step.outputs[name]).__name__
                raise MetricError(f"save_intermediate_freq keeps arrays of numbers, and {name!r} is a {kind}")
        path = home.path / "intermediate" / step.stream / f"batch-{step.number:08d}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, npz(arrays), "intermediate")

    return home.path, keep


def intermediate_results(run_dir: str | Path, validation: str | None = None) -> list[dict[str, Any]]:
    """List the results that the newest test in a run directory has kept of single batches, in their order.

    Args:
        validation: name of the only validation to list; None for all.

    Returns:
        A dictionary for each batch: "validation", "batch" (its number, from 1), "results": names to numbers
        and NumPy arrays.
    """
    batches = []
    for path in sorted((to_read(run_dir) / "intermediate").glob("*/batch-*.npz")):
        if validation not in (None, path.parent.name):
            continue
        with np.load(path, allow_pickle=False) as arrays:
            results = {name: arrays[name] for name in arrays.files}
        numbers = {n: each.item() for n, each in results.items() if not each.ndim and each.dtype.kind != "U"}
        number = int(path.stem.removeprefix("batch-"))
        batches.append({"validation": path.parent.name, "batch": number, "results": results | numbers})
    return batches


_COUNTER = "global_step"
"""State entry that is restored with the counters, not by the names that are chosen."""


def folder_of(place: Place, exp_id: str | None = None) -> Path:
    """Return CACHE_DIR/DBNAME/COLLNAME, and below it the folder of a run."""
    parts = [part for part in (place.dbname, place.collname, exp_id) if part is not None]
    for part in parts:
        if "/" in part or part in (".", ".."):
            raise ConfigError(f"{part!r} names a folder; give a string that has no '/'")
    return Path(place.cache_dir or "runs", *parts)


def run_dir_of(place: Place) -> Path:
    """Return the run directory: CACHE_DIR/DBNAME/COLLNAME/EXP_ID."""
    if place.exp_id is None:
        raise ConfigError("save_params.exp_id is missing; give the run a name, or do_save=False")
    return folder_of(place, place.exp_id)


def index_of(place: Place, section: str) -> str | None:
    """Return the URL of the database that `host` and `port` name; None for the file beside the runs."""
    host, port = place.host, place.port
    if host is None and port is None:
        return None
    if host is None or port == 27017 or ("://" in host and port is not None):
        raise ConfigError(
            f"{section}: port={port} with host={host!r}; give a PostgreSQL's host and port, or a URL as host"
        )
    return host if "://" in host else f"postgresql://{host}:{port or 5432}/everstep"


def source(load: Load, save: Place | None) -> Path | None:
    """Return the checkpoint, or the run, that `load_params` name; None if they name the run that saves."""
    if load.from_ckpt is not None:
        return Path(load.from_ckpt)
    place, own = load, None
    if save is not None:
        lacking = {n for n in Place.model_fields if n != "exp_id" and getattr(load, n) is None}
        place = load.model_copy(update={name: getattr(save, name) for name in lacking})
        own = None if save.exp_id is None else run_dir_of(save)
    there = None if load.exp_id is None else run_dir_of(place)
    if load.query is None:
        return None if there == own else there
    if own is not None and there == own:
        raise ConfigError(
            f"loading pointlessly: load_params.query asks for {there}, where this run saves; leave it out"
        )
    return _queried(place)


def _queried(place: Load) -> Path:
    """Return the newest run that a query finds, or its newest checkpoint if the query asks for a step."""
    from everstep.index.location import id_at
    from everstep.index.query import query as ask

    query = place.query or {}
    index = index_of(place, "load_params") or located(folder_of(place))
    where = {name: value for name, value in query.items() if name != "step"}
    for run in reversed(ask("runs", where, index=index)):
        path = Path(str(run["path"]))
        # The index may name a folder in which another run lies by now.
        if place.exp_id not in (None, path.name) or id_at(path) != run["name"]:
            continue
        if "step" not in query:
            if Store(path).names():
                return path
            continue
        at = {"run": run["name"], "step": query["step"]}
        for checkpoint in reversed(ask("checkpoints", at, index=index)):
            if (folder := path / "checkpoints" / str(checkpoint["name"])).is_dir():
                return folder
    raise NoCheckpointError(
        f"load_params.query {query!r} finds no checkpoint in {folder_of(place)}; change the query"
    )


def chosen(path: Path, load: Load, *, entry: str | None = None) -> tuple[InitFrom, int]:
    """Choose what to load, `entry` or all but the counter; returns the choice and the checkpoint's step."""
    checkpoint = find_checkpoint(to_read(path), print)
    if checkpoint is None:
        raise NoCheckpointError(f"{path} has no checkpoint to load; check load_params")
    known = [name for name in names_in(checkpoint) if name != _COUNTER]
    known = [name for name in known if entry in (None, name.partition("/")[0])]
    include, exclude = (None, f"^{_COUNTER}$") if entry is None else (f"^{re.escape(entry)}(?:/|$)", None)
    wanted = None
    rename: dict[str, str] = {}
    if load.load_param_dict is not None:
        wanted = []
        for old, new in load.load_param_dict.items():
            old = _complete(old, known)
            top, slash, _ = old.partition("/")  # a new name without an entry gets the old one's
            wanted.append(f"{top}/{new}" if slash and not new.startswith(f"{top}/") else new)
            rename[f"^{re.escape(old)}$"] = wanted[-1].replace("\\", r"\\")
    elif (choice := load.to_restore) is not None:
        if isinstance(choice, str | re.Pattern):
            wanted = [name for name in known if re.search(choice, name)]
        else:
            names: Iterable[str] = choice(list(known)) if callable(choice) else choice
            wanted = [_complete(name, known) for name in names]
        if not wanted:
            raise ConfigError(f"load_params.to_restore chooses nothing of {path}; known: {', '.join(known)}")
    if wanted is not None:
        include, exclude = f"^(?:{'|'.join(map(re.escape, wanted))})$", None
    reset = () if load.restore_global_step else ("step",)
    return InitFrom(path, include=include, exclude=exclude, rename=rename, reset=reset), checkpoint.step


def _complete(name: str, known: list[str]) -> str:
    """Complete a name to a name in the checkpoint; names of the model may leave out "model/"."""
    for each in (name, f"model/{name}"):
        if each in known:
            return each
    raise ConfigError(f"load_params: the checkpoint has no {name!r}; {nearest(name, known)}")
