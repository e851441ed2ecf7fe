"""`test_from_params`: the validations of a tree, run on a checkpoint.  After tfutils."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.arguments import checked_keywords
from everstep.errors import ConfigError
from everstep.state import isolated, seed_all
from everstep.supervisor import load
from everstep.tfutils.checkpoint_from_params import chosen, run_dir_of, source
from everstep.tfutils.data_from_params import Example, data_of, tagged
from everstep.tfutils.params_as_json import ParamsRecord
from everstep.tfutils.params_schema import Given, Test, TestSaveParams, each_model
from everstep.tfutils.services_from_params import evaluation
from everstep.tfutils.task_from_params import ParamsTask
from everstep.tfutils.test_record import recording_test
from everstep.trainer.eval_loop import evaluate


@checked_keywords
def test_from_params(
    load_params: Given | list[Given],
    model_params: Given | list[Given],
    validation_params: Given | list[Given],
    save_params: Given | list[Given] | None = None,
    dont_run: bool = False,
    skip_check: bool = False,
) -> Any:
    """Run validations on a checkpoint of a run, and record their metrics.

    Args:
        load_params: names the checkpoint, as for `train_from_params`.
        model_params: as in training; its function gets `train=False`.
        validation_params: as in training.
        save_params: place of the record, a run of its own that names the checkpoint under `validates`; None:
            beside the tested run (`everstep.evaluations`).  With `save_intermediate_freq` n, the results of
            every n-th batch are kept: `everstep.experiment.intermediate_results`.
        dont_run: build everything and test nothing.
        skip_check: do not ask git for the commits of functions.

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
    found = [_tested(Test.of(each), dont_run, skip_check) for each in each_model(given)]
    return found if any(isinstance(value, list) for value in given.values()) else found[0]


test_from_params.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test where it is imported


def _tested(tree: Test, dont_run: bool, skip_check: bool) -> Any:
    path = source(tree.load_params, tree.save_params)
    if path is None:
        raise ConfigError("load_params name no checkpoint to test; give exp_id, query or from_ckpt")
    if not tree.validation_params:
        raise ConfigError("validation_params name no validation; give at least one")
    record = ParamsRecord(tree.tree(), git=not skip_check)
    data = {
        name: data_of(one.data_params, f"validation_params.{name}.data_params", shuffle=False)
        for name, one in tree.validation_params.items()
    }
    streams = {name: tagged(name, each) for name, each in data.items()}
    seed = tree.model_params.seed
    task = ParamsTask(tree.model_params, tree.validation_params, Example(next(iter(data.values())), seed))
    with isolated():
        seed_all(seed)
        task.build()
    if dont_run:
        return task
    where = load(chosen(path, tree.load_params, entries=("model",))[0], task.state())
    seed = seed if where.seed is None else where.seed
    frequency = None if tree.save_params is None else tree.save_params.save_intermediate_freq
    results: dict[str, dict[str, float]] = {}
    with recording_test(_run_dir_of_test(tree.save_params), where, seed, record, frequency) as test:
        for name, one in tree.validation_params.items():
            steps, how = one.num_steps or -1, evaluation(name, one)
            results[name] = evaluate(task, streams[name], name, steps, seed, how, seen=test.see)
            test.add(name, steps, {f"{name}/{metric}": value for metric, value in results[name].items()})
    return results


def _run_dir_of_test(save: TestSaveParams | None) -> Path | None:
    if save is None or not save.do_save:
        return None
    if save.exp_id is None:
        raise ConfigError("save_params.exp_id is missing; give the test a name, or leave save_params out")
    return run_dir_of(save)
