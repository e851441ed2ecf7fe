"""`train_from_params`, `test_from_params`: a run that is its parameters.  After tfutils."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from everstep.checkpoint import CheckpointName, Store
from everstep.contracts.services import Boundary, Moment, RunView, Service
from everstep.errors import ConfigError, HiLossError, LossBoundError
from everstep.experiment import params as schema
from everstep.experiment.experiment import note_uncommitted
from everstep.experiment.foreign import admit, code_of
from everstep.experiment.opening import findable
from everstep.experiment.params import Params, checked, checked_validations
from everstep.experiment.params_loading import chosen, index_of, run_dir_of, source
from everstep.experiment.params_task import Example, ParamsTask, data_of, tagged
from everstep.experiment.recorded import ParamsRecord, restored
from everstep.experiment.tested import recording_test
from everstep.keywords import checked_keywords
from everstep.record import RunDir, RunJournal, located, to_read
from everstep.record.trust import distrust
from everstep.redaction import without_credentials
from everstep.schedule import Every
from everstep.services import LossBound
from everstep.services.checkpoints import Checkpoints
from everstep.services.evaluate import Evaluate
from everstep.services.index import Index
from everstep.services.nan_guard import NaNGuard
from everstep.state import isolated, seed_all
from everstep.supervisor import load
from everstep.supervisor.configuration import Configuration
from everstep.trainer import MultiRun, Trainer
from everstep.trainer.evaluation import evaluate

Given = Mapping[str, Any]

_TRAINING: dict[str, Any] = {
    "save_params": schema.SAVE,
    "model_params": schema.MODEL,
    "train_params": schema.TRAIN,
    "loss_params": schema.LOSS,
    "learning_rate_params": schema.LEARNING_RATE,
    "optimizer_params": schema.OPTIMIZER,
    "load_params": schema.LOAD,
}
FREE = (
    "save_params",
    "load_params",
    "validation_params",
    "train_params.num_steps",
    "train_params.validate_first",
    "train_params.thres_loss",
)
"""What may change between two starts: it touches no step (the threshold is compared by itself)."""


@checked_keywords
def train_from_params(
    save_params: Given | list[Given],
    model_params: Given | list[Given],
    train_params: Given | list[Given],
    loss_params: Given | list[Given] | None = None,
    learning_rate_params: Given | list[Given] | None = None,
    optimizer_params: Given | list[Given] | None = None,
    validation_params: Given | list[Given] | None = None,
    load_params: Given | list[Given] | None = None,
    dont_run: bool = False,
    skip_check: bool = False,
    on_change: Literal["error", "override"] = "error",
    on_divergence: Literal["stop", "warn"] | None = None,
) -> Any:
    """Train what a tree of parameters describes; called again, it goes on where the run stands.

    Each argument is a dictionary; docs/coming-from/tfutils.md has all keys, and what the functions get and
    return.  Several models train on one reading of the data where some arguments are lists, one dictionary
    for each model; what is no list is for all of them.

    Args:
        save_params: where the run lies (cache_dir, dbname, collname, exp_id), and how often it saves.
        model_params: `func(inputs, train, seed, ...)` makes the model.
        train_params: data, number of steps, threshold of the loss, minibatches.
        loss_params: `loss_func(outputs, *labels, ...)`.
        learning_rate_params: `func(global_step, ...)`.
        optimizer_params: `optimizer(parameters, lr, ...)`.
        validation_params: name to data, targets and aggregations.
        load_params: a checkpoint of another run to begin from; used where the run has none of its own.
        dont_run: build everything and train nothing.
        skip_check: do not look whether the code is committed.
        on_change: where the run was begun with other parameters: "error" shows both and refuses,
            "override" goes on with these.
        on_divergence: as for `everstep.Supervisor`.

    Returns:
        The `Ending`; of several models a list.  With `dont_run` the `Trainer` or `MultiRun`.

    Raises:
        ConfigError: a key is unknown, missing or of another type; names its place, and the nearest key.
        RestoreError: a checkpoint does not fit the model; lists missing, unexpected and reshaped names.
        HiLossError: the loss was above `thres_loss`; that step is not saved.
    """
    given = {name: value for name, value in locals().items() if name.endswith("_params")}
    models = [_resolved(each) for each in _each(given)]
    with _run_dirs(models) as run_dirs:
        chosen = {"on_change": on_change, "on_divergence": on_divergence}
        runs = _Runs(models, run_dirs, skip_check, chosen)
        if dont_run:
            return runs.built
        return runs.train()


class _Runs:
    """The runs of some resolved trees."""

    def __init__(
        self, models: list[Params], run_dirs: list[Path], skip_check: bool, chosen: Mapping[str, Any]
    ) -> None:
        first = models[0]["train_params"]["data_params"]
        if any(each["train_params"]["data_params"] != first for each in models):
            raise ConfigError(
                "train_params.data_params differ, and the models train on one reading of the data; give one"
            )
        if len({index_of(each["save_params"], "save_params") for each in models}) > 1:
            raise ConfigError(
                "save_params.host and port differ, and what trains together is in one index; give one"
            )
        records = [ParamsRecord(each, git=not skip_check) for each in models]
        if not skip_check:
            for folder in dict.fromkeys(folder for each in records for folder in each.code):
                note_uncommitted(folder)
        data = data_of(first, "train_params.data_params", shuffle=True)
        example = Example(data, 0)
        trainers = [
            _trainer(each, run_dir, record, data, example, chosen)
            for each, run_dir, record in zip(models, run_dirs, records, strict=True)
        ]
        self.built: Trainer | MultiRun = MultiRun(trainers) if len(trainers) > 1 else trainers[0]

    def train(self) -> Any:
        try:
            return self.built.run_training()
        except LossBoundError as error:
            raise HiLossError(str(error)) from error


def _trainer(
    tree: Params, run_dir: Path, record: ParamsRecord, data: Any, example: Example, chosen: Mapping[str, Any]
) -> Trainer:
    save, training = tree["save_params"], tree["train_params"]
    seed = tree["model_params"]["seed"]
    validations = tree["validation_params"]
    streams = {"train": data}
    for name, one in validations.items():
        made = data_of(one["data_params"], f"validation_params.{name}.data_params", shuffle=False)
        streams[name] = tagged(name, made)
    begin, step = _beginning(tree, run_dir)
    return Trainer(
        ParamsTask(tree, validations, example, global_step=step),
        streams,
        run_dir,
        services=_services(save, training, validations),
        seed=seed,
        max_step=training["num_steps"],
        config=Configuration(record.tree, (*FREE, *record.about), tuple(record.code)),
        **chosen,
        **begin,
    )


def _services(save: Params, training: Params, validations: Mapping[str, Params]) -> list[Service]:
    cache, permanent = save["cache_filters_freq"], save["save_filters_freq"]
    services: list[Service] = [NaNGuard(), Index(index_of(save, "save_params"))]
    if training["thres_loss"] is not None:
        services.append(LossBound("loss", bound=training["thres_loss"]))
    for name, one in validations.items():
        services.append(
            evaluation(
                name, one, Every(steps=save["save_valid_freq"]), validate_first=training["validate_first"]
            )
        )
    services.append(
        Checkpoints(
            Every(steps=cache) | Every(steps=permanent),
            keep_last=save["cache_max_num"],
            keep_every=Every(steps=permanent),
        )
    )
    services.append(_Written(Every(steps=save["save_metrics_freq"])))
    if save["save_initial_filters"]:
        services.append(_InitialFilters())
    return services


def evaluation(
    name: str, one: Params, every: Every | None = None, *, validate_first: bool = False
) -> Evaluate:
    """The service that a validation describes."""
    return Evaluate(
        name,
        every,
        num_steps=one["num_steps"] or -1,
        validate_first=validate_first,
        agg_func=one["agg_func"],
        online_agg_func=one["online_agg_func"],
    )


class _Written(Service):
    """Hands the rows of the record to the operating system every so often."""

    isolate = False
    window = "none"

    def __init__(self, every: Every) -> None:
        super().__init__("save_metrics_freq", every)
        self._run: RunView | None = None

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        assert self._run is not None
        self._run.flush()


class _InitialFilters(Service):
    """Pins the checkpoint of step 0."""

    isolate = False
    window = "none"
    moments = frozenset({Moment.AFTER_CHECKPOINT})

    def __init__(self) -> None:
        super().__init__("save_initial_filters")
        self._run: RunView | None = None

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        assert self._run is not None
        store = Store(Path(self._run.run_dir), 0, lambda _: None)
        name = CheckpointName.parse(boundary.payload)
        if name == CheckpointName(0, 0) and name not in store.pins() and name in store.names():
            store.pin(name)


def _beginning(tree: Params, run_dir: Path) -> tuple[dict[str, Any], int]:
    """Arguments of the Trainer for where it begins, and the step from which the learning rate counts."""
    given = tree["load_params"]
    if given is None:
        return {}, 0
    if not given["do_restore"]:
        return {"resume": False}, 0
    if Store(located(run_dir), 0, lambda _: None).names():
        print(f"load_params are not used: {run_dir} has a checkpoint of its own")
        return {}, 0
    path = source(given, tree["save_params"])
    if path is None:
        return {}, 0
    init, step = chosen(path, given)
    if not given["restore_global_step"]:
        return {"init_from": init}, 0
    num_steps = tree["train_params"]["num_steps"]
    if num_steps is not None and step >= num_steps:
        raise ConfigError(
            f"load_params: {path} stands at step {step}, from which the steps count on, so that "
            f"train_params.num_steps={num_steps} would train none; give load_params "
            "restore_global_step=False to count from 0, or more num_steps"
        )
    return {"init_from": init}, step


# ------------------------------------------------------------------------------------- the trees


def _each(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each model."""
    lengths = {name: len(value) for name, value in given.items() if isinstance(value, list)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        told = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise ConfigError(f"lists of parameters need one dictionary for each model: {told}")
    for number in range(next(iter(lengths.values()), 1)):
        yield {name: value[number] if isinstance(value, list) else value for name, value in given.items()}


def _resolved(given: Mapping[str, Any]) -> Params:
    tree = {name: checked(what, given[name], name) for name, what in _TRAINING.items()}
    return {**tree, "validation_params": checked_validations(given["validation_params"])}


@contextmanager
def _run_dirs(models: list[Params]) -> Iterator[list[Path]]:
    """The run directory of each model; without `do_save` one that is deleted afterwards."""
    with TemporaryDirectory(prefix="everstep-do_save-") as folder:
        found: list[Path] = []
        for number, tree in enumerate(models):
            save = tree["save_params"]
            if save["do_save"] and save["exp_id"] is None:
                raise ConfigError("save_params.exp_id is missing; give the run a name, or do_save=False")
            found.append(run_dir_of(save) if save["do_save"] else Path(folder, str(number)))
        twice = {path for path in found if found.count(path) > 1}
        yield [
            path.with_name(f"{path.name}_model_{number}") if path in twice else path
            for number, path in enumerate(found)
        ]


def recorded_params(run_dir: str | Path, *, trust: bool = False) -> Params:
    """The parameters of a run, as its newest start recorded them: `train_from_params` makes it again.

        params = everstep.experiment.recorded_params("runs/digits/basic")
        everstep.train_from_params(**params)

    Args:
        trust: import what the run names, though it does not count as this user's: docs/guide/trust.md.

    Raises:
        TrustError: it does not, and `trust` is not given.
        ConfigError: it is no run of `train_from_params`, or a function is not found by its import path.
    """
    run_dir = to_read(run_dir)
    start = RunJournal(run_dir).newest_start()
    facts: dict[str, Any] = {} if start is None else start.data.get("facts", {})
    tree = without_credentials(facts.get("config") or {})
    if not isinstance(tree, dict) or "model_params" not in tree:
        raise ConfigError(
            f"the run in {run_dir} was not made by train_from_params; start it by its own program"
        )
    code = code_of(facts, run_dir)
    admit(run_dir, RunDir.open(run_dir, create=False).id, tree, code, distrust(run_dir, facts), trust)
    findable(code)
    found: Params = restored(tree)
    return found


# ------------------------------------------------------------------------------------------ tests


@checked_keywords
def test_from_params(
    load_params: Given | list[Given],
    model_params: Given | list[Given],
    validation_params: Given | list[Given],
    save_params: Given | list[Given] | None = None,
    dont_run: bool = False,
    skip_check: bool = False,
) -> Any:
    """Run validations on a checkpoint of a run, and record what they find.

    Args:
        load_params: which checkpoint: as for `train_from_params`.
        model_params: as in training; its function gets `train=False`.
        validation_params: as in training.
        save_params: where the record lies, as a run of its own that names the checkpoint under `validates`;
            None: beside the run that is tested (`everstep.evaluations`).  With `save_intermediate_freq`
            every so many batches' results are kept: `everstep.experiment.intermediate_results`.
        dont_run: build everything and test nothing.
        skip_check: do not ask git for the commits of functions.

    Returns:
        Name of the validation to its results, which are numbers by name; of several models a list of such.
        With `dont_run` the task, or tasks.

    Raises:
        ConfigError: as `train_from_params`; at the place of `save_params` is a run that is no test.
        RestoreError: the checkpoint does not fit the model.
        NoCheckpointError: there is no such checkpoint.
        RunLockedError: another process records a test in that place.
    """
    given = {name: value for name, value in locals().items() if name.endswith("_params")}
    found = [_tested(each, dont_run, skip_check) for each in _each(given)]
    return found if any(isinstance(value, list) for value in given.values()) else found[0]


test_from_params.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test where it is imported


def _tested(given: Mapping[str, Any], dont_run: bool, skip_check: bool) -> Any:
    tree: Params = {
        "load_params": checked(schema.LOAD, given["load_params"] or {}, "load_params"),
        "model_params": checked(schema.MODEL, given["model_params"], "model_params"),
        "validation_params": checked_validations(given["validation_params"]),
        "save_params": checked(schema.TEST_SAVE, given["save_params"], "save_params"),
    }
    save = tree["save_params"]
    path = source(tree["load_params"], save)
    if path is None:
        raise ConfigError("load_params say no checkpoint to test; give exp_id, query or from_ckpt")
    record = ParamsRecord(tree, git=not skip_check)
    none = dict.fromkeys(("train_params", "loss_params", "learning_rate_params", "optimizer_params"))
    data = {
        name: data_of(one["data_params"], f"validation_params.{name}.data_params", shuffle=False)
        for name, one in tree["validation_params"].items()
    }
    if not data:
        raise ConfigError("validation_params name no validation; give at least one")
    streams = {name: tagged(name, each) for name, each in data.items()}
    example = Example(next(iter(data.values())), tree["model_params"]["seed"])
    task = ParamsTask({**tree, **none}, tree["validation_params"], example, train=False)
    with isolated():
        seed_all(tree["model_params"]["seed"])
        task.build()
    if dont_run:
        return task
    where = load(chosen(path, tree["load_params"], entries=("model",))[0], task.state())
    seed = tree["model_params"]["seed"] if where.seed is None else where.seed
    frequency = None if save is None else save["save_intermediate_freq"]
    results: dict[str, dict[str, float]] = {}
    with recording_test(_run_dir_of_test(save), where, seed, record, frequency) as test:
        for name, one in tree["validation_params"].items():
            steps, how = one["num_steps"] or -1, evaluation(name, one)
            results[name] = evaluate(task, streams[name], name, steps, seed, how, seen=test.see)
            test.add(name, steps, {f"{name}/{metric}": value for metric, value in results[name].items()})
    return results


def _run_dir_of_test(save: Params | None) -> Path | None:
    if save is None or not save["do_save"]:
        return None
    if save["exp_id"] is None:
        raise ConfigError("save_params.exp_id is missing; give the test a name, or leave save_params out")
    return run_dir_of(save)
