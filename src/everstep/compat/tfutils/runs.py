"""`train_from_params` and `test_from_params`: runs described by their parameters alone.  After tfutils."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from everstep.arguments import checked_keywords
from everstep.checkpoint import CheckpointName, Store
from everstep.compat.tfutils.checkpoints import chosen, index_of, run_dir_of, source
from everstep.compat.tfutils.params import TEST, TRAINING, Given, Params, ParamsRecord, checked, each_model
from everstep.compat.tfutils.task import Example, ParamsTask, data_of
from everstep.contracts.data import Stream
from everstep.contracts.services import Boundary, EvalStep, Moment, RunView, Service
from everstep.data import as_stream
from everstep.durable import require_no_link, write_whole
from everstep.errors import ConfigError, HiLossError, LossBoundError, MetricError
from everstep.experiment.experiment import note_uncommitted
from everstep.experiment.predictions import npz
from everstep.record import (
    Evaluation,
    RunDir,
    RunJournal,
    evaluation_segment,
    located,
    record_evaluation,
    to_read,
)
from everstep.schedule import Every
from everstep.services.checkpoints import Checkpoints, Index
from everstep.services.evaluate import Evaluate
from everstep.services.judges import LossBound, NaNGuard
from everstep.state import isolated, seed_all
from everstep.supervisor import InitFrom, Loaded, load
from everstep.supervisor.opening.configuration import Configuration
from everstep.trainer import MultiRun, Trainer
from everstep.trainer.eval_loop import evaluate
from everstep.trainer.named_streams import TrainInputs

_FREE = (
    "save_params",
    "load_params",
    "validation_params",
    "train_params.num_steps",
    "train_params.validate_first",
    "train_params.thres_loss",
)
"""Parameters that may change between two starts: they touch no step.  The threshold is a service's, which
a resume compares by itself."""

_Models: TypeAlias = Given | list[Given]


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
        save_params: place of the run (cache_dir, dbname, collname, exp_id), and how often it saves.
        model_params: `func(inputs, train, seed, ...)` makes the model.
        train_params: data, number of steps, threshold of the loss, minibatches.
        loss_params: `loss_func(outputs, *labels, ...)`.
        learning_rate_params: `func(global_step, ...)`.
        optimizer_params: `optimizer(parameters, lr, ...)`.
        validation_params: name to data, targets and aggregations.
        load_params: checkpoint of another run to begin with; used only if the run has no checkpoint yet.
        dont_run: build everything and train nothing.
        skip_check: do not check that the code is committed.
        on_change: if the run was begun with other parameters: "error" shows both and refuses, "override"
            resumes with the given parameters.
        on_divergence: as for `everstep.Supervisor`.

    Returns:
        The `Ending`; for several models a list.  With `dont_run` the `Trainer` or `MultiRun`.

    Raises:
        ConfigError: a key is unknown, missing or of another type; names its place, and the nearest key.
        RestoreError: a checkpoint does not fit the model; lists missing, unexpected and reshaped names.
        HiLossError: the loss was above `thres_loss`; that step is not saved.
    """
    given = {name: value for name, value in locals().items() if name.endswith("_params")}
    models = [checked(TRAINING, each) for each in each_model(given)]
    data_params = models[0]["train_params"]["data_params"]
    if any(each["train_params"]["data_params"] != data_params for each in models):
        raise ConfigError(
            "train_params.data_params differ, but all models train on the same data; give equal data_params"
        )
    if len({index_of(each["save_params"], "save_params") for each in models}) > 1:
        raise ConfigError(
            "save_params.host and port differ, but runs that train together share an index; give the same "
            "host and port"
        )
    with _run_dirs(models) as run_dirs:
        records = _records(models, skip_check)
        data = data_of(data_params, "train_params.data_params", shuffle=True)
        example = Example(data, 0)
        trainers = []
        for tree, run_dir, record in zip(models, run_dirs, records, strict=True):
            begin = _beginning(tree, run_dir)
            trainers.append(
                Trainer(
                    ParamsTask(tree, example, begin.step),
                    {"train": data, **_validation_streams(tree)[0]},
                    run_dir,
                    services=_services(tree),
                    seed=tree["model_params"]["seed"],
                    max_step=tree["train_params"]["num_steps"],
                    config=Configuration(record.tree, (*_FREE, *record.origins), tuple(record.code)),
                    on_change=on_change,
                    on_divergence=on_divergence,
                    init_from=begin.init_from,
                    resume=begin.resume,
                )
            )
        made: Any = MultiRun(trainers) if len(trainers) > 1 else trainers[0]
        if dont_run:
            return made
        try:
            return made.run_training()
        except LossBoundError as error:
            raise HiLossError(str(error)) from error


def _records(models: list[Params], skip_check: bool) -> list[ParamsRecord]:
    """Record the parameters; unless `skip_check`, note code that is not committed."""
    records = [ParamsRecord(each) for each in models]
    for folder in {folder: None for each in records for folder in each.code if not skip_check}:
        note_uncommitted(folder)
    return records


@contextmanager
def _run_dirs(models: list[Params]) -> Iterator[list[Path]]:
    """Yield the run directory of each model; without `do_save`, a folder that is deleted after the block."""
    with TemporaryDirectory(prefix="everstep-do_save-") as folder:
        saves = [tree["save_params"] for tree in models]
        paths = [run_dir_of(s) if s["do_save"] else Path(folder, str(n)) for n, s in enumerate(saves)]
        yield [
            path.with_name(f"{path.name}_model_{number}") if paths.count(path) > 1 else path
            for number, path in enumerate(paths)
        ]


class _Beginning(NamedTuple):
    """The Trainer's `init_from` and `resume`, and the step from which the learning rate counts."""

    init_from: InitFrom | None = None
    step: int = 0
    resume: bool = True


def _beginning(tree: Params, run_dir: Path) -> _Beginning:
    """Find where the runs begin."""
    params = tree["load_params"]
    if params is None:
        return _Beginning()
    if not params["do_restore"]:
        return _Beginning(resume=False)
    if Store(located(run_dir)).names():
        print(f"load_params are not used: {run_dir} has a checkpoint of its own")
        return _Beginning()
    path = source(params, tree["save_params"])
    if path is None:
        return _Beginning()
    init, step = chosen(path, params)
    if not params["restore_global_step"]:
        return _Beginning(init)
    num_steps = tree["train_params"]["num_steps"]
    if num_steps is not None and step >= num_steps:
        raise ConfigError(
            f"load_params: {path} stands at step {step}, from which the steps count on, so that "
            f"train_params.num_steps={num_steps} would train none; give load_params "
            "restore_global_step=False to count from 0, or more num_steps"
        )
    return _Beginning(init, step)


# ------------------------------------------------------------------------------------ the services


def _services(tree: Params) -> list[Service]:
    """Make the guards, evaluations, checkpoints and index of a training."""
    save, train = tree["save_params"], tree["train_params"]
    permanent = Every(steps=save["save_filters_freq"])
    services: list[Service] = [
        NaNGuard(),
        Index(index_of(save, "save_params")),
        Checkpoints(
            Every(steps=save["cache_filters_freq"]) | permanent,
            keep_last=save["cache_max_num"],
            keep_every=permanent,
        ),
        _Flush(Every(steps=save["save_metrics_freq"])),
    ]
    if train["thres_loss"] is not None:
        services.append(LossBound("loss", bound=train["thres_loss"]))
    for name, params in tree["validation_params"].items():
        every = Every(steps=save["save_valid_freq"])
        services.append(_evaluation(name, params, every, train["validate_first"]))
    return [*services, _PinInitial()] if save["save_initial_filters"] else services


def _evaluation(
    name: str, params: Params, every: Every | None = None, validate_first: bool = False
) -> Evaluate:
    return Evaluate(
        name,
        every,
        num_steps=params["num_steps"] or -1,
        validate_first=validate_first,
        agg_func=params["agg_func"],
        online_agg_func=params["online_agg_func"],
    )


class _Flush(Service):
    """Hand the rows of the record to the operating system, at the schedule."""

    isolate = False
    window = "none"

    def __init__(self, every: Every) -> None:
        super().__init__("save_metrics_freq", every)

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        self._run.flush()


class _PinInitial(Service):
    """Pin the checkpoint of step 0."""

    isolate = False
    window = "none"
    moments = frozenset({Moment.AFTER_CHECKPOINT})

    def __init__(self) -> None:
        super().__init__("save_initial_filters")

    def open(self, run: RunView) -> None:
        self._store = Store(Path(run.run_dir))

    def run(self, boundary: Boundary) -> None:
        name = CheckpointName.parse(boundary.payload)
        if name == CheckpointName(0, 0) and name not in self._store.pins() and name in self._store.names():
            self._store.pin(name)


def _validation_streams(tree: Params) -> tuple[dict[str, Stream], Any]:
    """Make the streams of the validations, whose batches come with the name; also returns the first data."""
    made = {
        name: data_of(params["data_params"], f"validation_params.{name}.data_params", shuffle=False)
        for name, params in tree["validation_params"].items()
    }

    def tag(name: str) -> Callable[[Iterator[Any]], Any]:
        return lambda batches: (name, next(batches))

    streams: dict[str, Stream] = {
        name: TrainInputs(as_stream(data), tag(name)) for name, data in made.items()
    }
    return streams, next(iter(made.values()), None)


# ------------------------------------------------------------------------------------------- tests


@checked_keywords
def test_from_params(
    load_params: _Models,
    model_params: _Models,
    validation_params: _Models,
    save_params: _Models | None = None,
    dont_run: bool = False,
    skip_check: bool = False,
) -> Any:
    """Run validations on a checkpoint of a run, and record their metrics.

    Args:
        load_params: names the checkpoint, as for `train_from_params`.
        model_params: as in training; its function gets `train=False`.
        validation_params: as in training.
        save_params: place of the record, a run of its own that names the checkpoint under `validates`; None:
            beside the tested run (`everstep.runs.evaluations`).  With `save_intermediate_freq` n, the results
            of every n-th batch are kept: `everstep.compat.tfutils.intermediate_results`.
        dont_run: build everything and test nothing.
        skip_check: do not check that the code is committed.

    Returns:
        Name of the validation to its results, which are numbers by name; for several models a list.  With
        `dont_run` the task, or a list of tasks.

    Raises:
        ConfigError: as for `train_from_params`; or `save_params` name a run that is not a test.
        RestoreError: the checkpoint does not fit the model.
        NoCheckpointError: there is no such checkpoint.
        RunLockedError: another process records a test in that place.
    """
    given = {name: value for name, value in locals().items() if name.endswith("_params")}
    results = [_test(checked(TEST, each), dont_run, skip_check) for each in each_model(given)]
    return results if any(isinstance(value, list) for value in given.values()) else results[0]


test_from_params.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test where it is imported


def _test(tree: Params, dont_run: bool, skip_check: bool) -> Any:
    path = source(tree["load_params"], tree["save_params"])
    if path is None:
        raise ConfigError("load_params name no checkpoint to test; give exp_id, query or from_ckpt")
    if not tree["validation_params"]:
        raise ConfigError("validation_params name no validation; give at least one")
    (record,) = _records([tree], skip_check)
    streams, first = _validation_streams(tree)
    seed = tree["model_params"]["seed"]
    task = ParamsTask(tree, Example(first, seed))
    with isolated():
        seed_all(seed)
        task.build()
    if dont_run:
        return task
    loaded = load(chosen(path, tree["load_params"], entry="model")[0], task.state())
    seed = seed if loaded.seed is None else loaded.seed
    results: dict[str, dict[str, float]] = {}
    with _recording(tree["save_params"], loaded, seed, record) as (see, add):
        for name, params in tree["validation_params"].items():
            how = _evaluation(name, params)
            found = evaluate(task, streams[name], name, how.num_steps, seed, how, seen=see)
            results[name] = found
            add(name, how.num_steps, {f"{name}/{metric}": value for metric, value in found.items()})
    return results


@contextmanager
def _recording(
    save: Params | None, loaded: Loaded, seed: int, record: ParamsRecord
) -> Iterator[tuple[Callable[[EvalStep], None], Callable[[str, int, dict[str, float]], None]]]:
    """Yield functions that keep the results of a batch, and that record a validation's metrics by name.

    The record lies in a run directory of its own, or beside the tested run.
    """
    facts = Configuration(record.tree, code=tuple(record.code)).facts(seed, ())
    tested = next((folder for folder in Path(loaded.path).parents if (folder / "run.json").exists()), None)
    if tested is None:
        raise ConfigError(f"{loaded.path} is in no run directory; give a checkpoint inside one")
    at = (loaded.name, loaded.digest, loaded.step, loaded.epoch)
    if save is None or not save["do_save"]:

        def add_beside(name: str, steps: int, metrics: dict[str, float]) -> None:
            evaluation = Evaluation(name, *at, steps, metrics, time.time())
            record_evaluation(tested, evaluation, facts, {})

        yield lambda step: None, add_beside
        return
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
    frequency = save["save_intermediate_freq"]
    with evaluation_segment(home, {**facts, "validates": validates}, f"tested {loaded.name}") as segment:

        def see(step: EvalStep) -> None:
            if frequency is not None and step.number % frequency == 0:
                _keep(home.path, segment.journal, step)

        yield see, lambda name, steps, metrics: segment.append(name, loaded.step, loaded.epoch, metrics)


def _keep(run_dir: Path, journal: Any, step: EvalStep) -> None:
    """Keep the results of a batch in a file."""
    arrays = {}
    for name, value in step.outputs.items():
        arrays[name] = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
        if arrays[name].dtype.kind not in "biufcUS":
            raise MetricError(
                f"save_intermediate_freq keeps numbers and arrays of them, and {name!r} is a "
                f"{type(value).__name__}"
            )
    file = f"intermediate/{journal.segment:04d}/{step.stream}/batch-{step.number:08d}.npz"
    path = run_dir / file
    require_no_link(path, run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, npz(arrays), "intermediate")
    journal.event("intermediate", {"validation": step.stream, "batch": step.number, "file": file})


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
    batches = []
    for event in journal.events("intermediate"):
        facts = event.data
        if event.segment != newest or validation not in (None, facts["validation"]):
            continue
        with np.load(journal.run_dir / facts["file"], allow_pickle=False) as arrays:
            results = {name: arrays[name] for name in arrays.files}
        results = {
            n: each if each.ndim or each.dtype.kind in "US" else each.item() for n, each in results.items()
        }
        batches.append({"validation": facts["validation"], "batch": facts["batch"], "results": results})
    return batches
