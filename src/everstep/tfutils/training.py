"""`train_from_params`: a run described by its parameters alone.  After tfutils."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from everstep.arguments import checked_keywords
from everstep.checkpoint import Store
from everstep.errors import ConfigError, HiLossError, LossBoundError
from everstep.experiment.experiment import note_uncommitted
from everstep.record import located
from everstep.supervisor.opening.configuration import Configuration
from everstep.tfutils.checkpoint_from_params import chosen, index_of, run_dir_of, source
from everstep.tfutils.data_from_params import Example, data_of, tagged
from everstep.tfutils.params_as_json import ParamsRecord
from everstep.tfutils.params_schema import Given, Training, each_model
from everstep.tfutils.services_from_params import services_of
from everstep.tfutils.task_from_params import ParamsTask
from everstep.trainer import MultiRun, Trainer

FREE = (
    "save_params",
    "load_params",
    "validation_params",
    "train_params.num_steps",
    "train_params.validate_first",
    "train_params.thres_loss",
)
"""Parameters that may change between two starts: they touch no step.  The threshold is a service's, which
a resume compares by itself."""


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
    models = [Training.of(each) for each in each_model(given)]
    options = {"on_change": on_change, "on_divergence": on_divergence}
    with _run_dirs(models) as run_dirs:
        made = _made(models, run_dirs, options, skip_check)
        if dont_run:
            return made
        try:
            return made.run_training()
        except LossBoundError as error:
            raise HiLossError(str(error)) from error


def _made(
    models: list[Training], run_dirs: list[Path], options: Mapping[str, Any], skip_check: bool
) -> Trainer | MultiRun:
    first = models[0].train_params.data_params
    if any(each.train_params.data_params != first for each in models):
        raise ConfigError(
            "train_params.data_params differ, but all models train on the same data; give equal data_params"
        )
    if len({index_of(each.save_params, "save_params") for each in models}) > 1:
        raise ConfigError(
            "save_params.host and port differ, but runs that train together share an index; give the same "
            "host and port"
        )
    records = [ParamsRecord(each.tree(), git=not skip_check) for each in models]
    if not skip_check:
        for folder in dict.fromkeys(folder for each in records for folder in each.code):
            note_uncommitted(folder)
    data = data_of(first, "train_params.data_params", shuffle=True)
    example = Example(data, 0)
    trainers = [
        _trainer(each, run_dir, record, data, example, options)
        for each, run_dir, record in zip(models, run_dirs, records, strict=True)
    ]
    return MultiRun(trainers) if len(trainers) > 1 else trainers[0]


def _trainer(
    tree: Training,
    run_dir: Path,
    record: ParamsRecord,
    data: Any,
    example: Example,
    options: Mapping[str, Any],
) -> Trainer:
    streams = {"train": data}
    for name, validation in tree.validation_params.items():
        place = f"validation_params.{name}.data_params"
        streams[name] = tagged(name, data_of(validation.data_params, place, shuffle=False))
    begin, step = _beginning(tree, run_dir)
    return Trainer(
        ParamsTask(tree.model_params, tree.validation_params, example, training=tree, global_step=step),
        streams,
        run_dir,
        services=services_of(tree),
        seed=tree.model_params.seed,
        max_step=tree.train_params.num_steps,
        config=Configuration(record.tree, (*FREE, *record.about), tuple(record.code)),
        **options,
        **begin,
    )


def _beginning(tree: Training, run_dir: Path) -> tuple[dict[str, Any], int]:
    """Arguments of the Trainer about the beginning, and the step from which the learning rate counts."""
    given = tree.load_params
    if given is None:
        return {}, 0
    if not given.do_restore:
        return {"resume": False}, 0
    if Store(located(run_dir)).names():
        print(f"load_params are not used: {run_dir} has a checkpoint of its own")
        return {}, 0
    path = source(given, tree.save_params)
    if path is None:
        return {}, 0
    init, step = chosen(path, given)
    if not given.restore_global_step:
        return {"init_from": init}, 0
    num_steps = tree.train_params.num_steps
    if num_steps is not None and step >= num_steps:
        raise ConfigError(
            f"load_params: {path} stands at step {step}, from which the steps count on, so that "
            f"train_params.num_steps={num_steps} would train none; give load_params "
            "restore_global_step=False to count from 0, or more num_steps"
        )
    return {"init_from": init}, step


@contextmanager
def _run_dirs(models: list[Training]) -> Iterator[list[Path]]:
    """Yield the run directory of each model; without `do_save`, a folder that is deleted after the block."""
    with TemporaryDirectory(prefix="everstep-do_save-") as folder:
        found: list[Path] = []
        for number, tree in enumerate(models):
            save = tree.save_params
            if save.do_save and save.exp_id is None:
                raise ConfigError("save_params.exp_id is missing; give the run a name, or do_save=False")
            found.append(run_dir_of(save) if save.do_save else Path(folder, str(number)))
        twice = {path for path in found if found.count(path) > 1}
        yield [
            path.with_name(f"{path.name}_model_{number}") if path in twice else path
            for number, path in enumerate(found)
        ]
