"""tfutils' doors: a tree of parameters is translated into a task, streams and services for a `Trainer`."""

from __future__ import annotations

import importlib
import math
import re
import shutil
import sys
import time
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator

from everstep.arguments import checked_keywords, plain
from everstep.checkpoint import CheckpointName, Store, find_checkpoint
from everstep.contracts.data import Stream
from everstep.contracts.services import Boundary, BuiltIn, EvalStep, Moment, RunView, Service
from everstep.contracts.tasks import Task
from everstep.data import arrays, as_stream
from everstep.data.adapt import SequenceStream
from everstep.durable import require_no_link, write_whole
from everstep.errors import ConfigError, HiLossError, LossBoundError, MetricError, NoCheckpointError, nearest
from everstep.experiment.calls import ConfigMistakes, Mistake, argument_faults, mistakes_of
from everstep.experiment.experiment import note_uncommitted
from everstep.experiment.import_paths import CALL, admit, imported
from everstep.experiment.predictions import as_array, npz
from everstep.record import Evaluation, RunDir, RunJournal, located, record_evaluation, to_read
from everstep.record.trust import distrust
from everstep.redaction import without_credentials
from everstep.schedule import Every
from everstep.services.checkpoints import Checkpoints, Index
from everstep.services.evaluate import Evaluate
from everstep.services.judges import LossBound, NaNGuard
from everstep.state import isolated, seed_all
from everstep.supervisor import InitFrom, Loaded, load
from everstep.supervisor.opening.configuration import Configuration
from everstep.supervisor.opening.init_from import names_in
from everstep.supervisor.settings import LoopOptions
from everstep.trainer import MultiRun, Trainer
from everstep.trainer.eval_loop import evaluate
from everstep.trainer.named_streams import TrainInputs

__all__ = ["intermediate_results", "recorded_params", "test_from_params", "train_from_params"]

# ------------------------------------------------------------------------- the tree, and its record


def _validation_name(name: str) -> str:
    if not name or "/" in name or name == "train":
        raise ConfigError(f"{name!r} cannot name a validation; give another name, without '/'")
    return name


Text = Annotated[str, Field(min_length=1)]
Names = Text | list[Text]
Number = Annotated[float, BeforeValidator(plain)]
Count = Annotated[int, BeforeValidator(plain), Field(ge=1)]
Seed = Annotated[int, BeforeValidator(plain), Field(ge=0)]
AnyFunction = Callable[..., Any]
Options = dict[str, Any]


class Section(BaseModel):
    """Dictionary of a tree: its keys with types and defaults."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Function(Section):
    """A function and, under all other keys, its arguments; `positional` and `by_name` come from elsewhere."""

    model_config = ConfigDict(extra="allow")
    positional: ClassVar[int] = 0
    by_name: ClassVar[tuple[str, ...]] = ()
    func: AnyFunction

    def __call__(self, *positional: Any, **by_name: Any) -> Any:
        arguments = {name: value for name, value in self if name != "func"}
        return self.func(*positional, **{**arguments, **by_name})

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _require_arguments(self.func, self.model_extra or {}, self.positional, self.by_name)
        return self


class Model(Function):
    by_name = ("inputs", "train", "seed")
    seed: Seed = 0


class TrainData(Function):
    by_name = ("batch_size",)
    batch_size: Count


class OfStep(Function):
    positional = 2


class Rate(Function):
    by_name = ("global_step",)


class OptimizerParams(Section):
    model_config = ConfigDict(extra="allow")
    optimizer: AnyFunction
    optimizer_class: AnyFunction | None = None
    clip: bool | Options | None = None
    trainable_names: Names | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _require_arguments(self.optimizer_class or self.optimizer, self.model_extra or {}, 1, ("lr",))
        return self


class Place(Section):
    host: Text | None = None
    port: Count | None = None
    dbname: Text | None = None
    collname: Text | None = None
    exp_id: Text | None = None
    cache_dir: Text | Path | None = None


class Save(Place):
    do_save: bool = True
    save_initial_filters: bool = True
    save_metrics_freq: Count = 100
    save_valid_freq: Count = 3000
    save_filters_freq: Count = 30000
    cache_filters_freq: Count = 3000
    cache_max_num: Count = 6


class SaveOfTest(Place):
    do_save: bool = True
    save_intermediate_freq: Count | None = None


class Load(Place):
    do_restore: bool = True
    restore_global_step: bool = True
    query: Options | None = None
    from_ckpt: Text | Path | None = None
    to_restore: Names | re.Pattern[str] | AnyFunction | None = None
    load_param_dict: dict[str, str] | None = None


class Validation(Section):
    data_params: Function = Field(validation_alias=AliasChoices("data_params", "data"))
    targets: OfStep
    num_steps: Count | None = None
    agg_func: AnyFunction | None = None
    online_agg_func: AnyFunction | None = None


class Train(Section):
    data_params: TrainData
    targets: OfStep | None = None
    validate_first: bool = True
    thres_loss: Number | None = 100
    num_steps: Count | None = None
    minibatch_size: Count | None = None
    train_loop: OfStep | None = None


class Loss(Section):
    pred_targets: Names
    loss_func: AnyFunction
    loss_func_kwargs: Options = {}
    agg_func: AnyFunction | None = None
    agg_func_kwargs: Options = {}


class Tree(Section):
    """What the trees of a training and of a test have in common."""

    model_params: Model
    validation_params: dict[Annotated[str, AfterValidator(_validation_name)], Validation] = {}
    train_params: Train | None = None
    loss_params: Loss | None = None
    learning_rate_params: Rate | None = None
    optimizer_params: OptimizerParams | None = None


class TrainingTree(Tree):
    save_params: Save
    train_params: Train
    load_params: Load | None = None


class TreeOfTest(Tree):
    load_params: Load
    save_params: SaveOfTest | None = None


_GONE = {
    "save_params.save_to_gfs": "arrays are kept by save_intermediate_freq of test_from_params, or a service",
    "save_params.save_intermediate_freq": "it is test_from_params's: training records every step",
    "validation_params.valid_loop": "each batch goes to the targets' func; combine them by online_agg_func",
    "train_params.queue_params": "give data that reads ahead: everstep.data.prefetch, or a loader's workers",
    "loss_params.loss_per_case_func": "it is loss_func",
    "loss_params.targets": "it is pred_targets",
}
"""Keys of tfutils that are refused -> the replacement."""

_Tree = TypeVar("_Tree", bound=Tree)


def check_tree(kind: type[_Tree], arguments: Mapping[str, Any]) -> _Tree:
    """Check the arguments of a program, and fill in the defaults."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        mistakes = mistakes_of(error, arguments, kind)
    for at, (place, text) in enumerate(mistakes):
        reason = _GONE.get(f"{place[0]}.{place[-1]}") if text.startswith("unknown key") else None
        mistakes[at] = Mistake(place[:-1], f"{place[-1]} is gone: {reason}") if reason else mistakes[at]
    raise ConfigMistakes(mistakes)


def _require_arguments(
    function: Any, arguments: Mapping[str, Any], positional: int, by_name: tuple[str, ...]
) -> None:
    name = getattr(function, "__name__", function)
    if faults := [fault for _, fault in argument_faults(function, arguments, positional, by_name)]:
        raise ConfigMistakes(Mistake((), f"{name}() {fault}") for fault in faults)


def each_model(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each model: lists have one dictionary for each, the others are shared."""
    lengths = {name: len(value) for name, value in arguments.items() if isinstance(value, list)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise ConfigError(f"lists of parameters need one dictionary for each model: {counts}")
    for number in range(next(iter(lengths.values()), 1)):
        yield {name: value[number] if isinstance(value, list) else value for name, value in arguments.items()}


_FREE = (
    *("save_params", "load_params", "validation_params"),
    *("train_params.num_steps", "train_params.validate_first", "train_params.thres_loss"),
)
"""Parameters that may change between two starts: they touch no step; a resume compares services by itself."""
_ORIGIN = ("source", "version")
"""Keys of a function's origin, beside its import path under `CALL`."""
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "a": re.ASCII}
"""Flags of a regular expression, as it names them in itself."""


def configuration(tree: Tree) -> Configuration:
    """Make the record of a tree: functions by import path, paths and regular expressions as strings.

    Its code are the folders of the functions that belong to no package with a version.
    """
    origins: list[str] = []
    code: list[Path] = []

    def described(value: Any, place: str) -> Any:
        if isinstance(value, Mapping | BaseModel):
            return {k: described(part, f"{place}.{k}" if place else k) for k, part in dict(value).items()}
        if isinstance(value, list | tuple):
            return [described(part, f"{place}.{at}") for at, part in enumerate(value)]
        if isinstance(value, re.Pattern):
            flags = "".join(letter for letter, flag in _FLAGS.items() if value.flags & flag)
            return f"(?{flags}){value.pattern}" if flags else value.pattern
        if not (callable(value) and hasattr(value, "__qualname__")):
            return value
        module = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
        source = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" and source is not None:
            module = Path(source).stem
        record = {CALL: f"{module}:{value.__qualname__}", "source": source}
        version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", None)
        if isinstance(version, str):
            record["version"] = version
        elif source is not None:
            code.append(Path(source).absolute().parents[module.count(".")])
        origins.extend(f"{place}.{name}" for name in _ORIGIN)
        return record

    config = Configuration.of(described(tree, ""), _FREE)
    assert config is not None
    return replace(config, free=(*_FREE, *origins), code=tuple(dict.fromkeys(code)))


def restore_tree(tree: Any, place: str = "") -> Any:
    """Turn the record of a tree into parameters again."""
    if isinstance(tree, list):
        return [restore_tree(part, f"{place}.{at}") for at, part in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    if not (CALL in tree and tree.keys() <= {CALL, *_ORIGIN}):
        return {k: restore_tree(part, f"{place}.{k}" if place else str(k)) for k, part in tree.items()}
    if "<" in str(tree[CALL]):
        raise ConfigError(
            f"{place} was {tree[CALL]}, made inside a function; define it at the top level of its module"
        )
    return imported(str(tree[CALL]))


def recorded_params(run_dir: str | Path, *, trust: bool = False) -> dict[str, Any]:
    """Return the parameters that a run's newest start recorded; `train_from_params` makes the run again.

        params = everstep.compat.tfutils.recorded_params("runs/digits/basic")
        everstep.compat.tfutils.train_from_params(**params)

    Args:
        trust: import the code that the run names, even if the run is not marked as this user's:
            docs/guide/trust.md.
    """
    run_dir = to_read(run_dir)
    facts = RunJournal(run_dir).facts()
    tree = without_credentials(facts.get("config") or {})
    if not isinstance(tree, dict) or "model_params" not in tree:
        raise ConfigError(f"{run_dir} was not made by train_from_params; start it by its own program")
    admit(run_dir, tree, distrust(run_dir, facts), trust, facts)
    params: dict[str, Any] = restore_tree(tree)
    return params


# ------------------------------------------------------------------------- data and task


_RESERVED = ("loss", "learning_rate", "optimizer", "__grads__")
"""Names that a target may not have."""


class ValidationBatch(NamedTuple):
    """Batch of a validation, with the validation's name."""

    name: str
    batch: Any


class Data:
    """The data that `data_params` describe; a dictionary of arrays is divided into batches.

    In training they are shuffled with a seed of their own: models with different seeds can share the data.
    """

    def __init__(self, params: Function, place: str, *, shuffle: bool) -> None:
        self.data: Any = params()
        self.names: tuple[str, ...] | None = None
        """Names of a batch's parts, for a dictionary of arrays."""
        self.example: Mapping[str, Any] = Example(self.data)
        if not isinstance(self.data, Mapping):
            return
        size = getattr(params, "batch_size", None)
        if size is None:
            raise ConfigError(f"{place}.batch_size is missing; give the number of samples in a batch")
        if not self.data:
            raise ConfigError(f"{place}.func returned an empty dictionary; return arrays by name")
        self.names = tuple(self.data)
        self.example = {name: array[:size] for name, array in self.data.items()}
        self.data = arrays(*self.data.values(), batch_size=size, shuffle=shuffle, seed=0)


class Example(UserDict[str, Any]):
    """Batch that shows the shapes of the data, read when a model first looks at it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        stream = as_stream(self._source)
        if not isinstance(self._source, Stream) and not isinstance(stream, SequenceStream):
            raise ConfigError(
                "model_params.func looks at its inputs, and to read one of a "
                f"{type(self._source).__name__} would take it from the training; give sizes as arguments"
            )
        with closing(stream.open("example", 0, seed=0)) as batches:
            return by_name(next(batches))


def by_name(batch: Any) -> dict[str, Any]:
    """Copy a batch, which has its parts by name."""
    if not isinstance(batch, Mapping):
        raise ConfigError(f"a batch is a {type(batch).__name__}; let data_params.func return dictionaries")
    return dict(batch)


class ParamsTask(Task):
    """Task of `train_from_params` and `test_from_params`; a `train_loop` gets it as its argument."""

    def __init__(self, tree: Tree, data: Mapping[str, Data], global_step: int = 0) -> None:
        self._tree, self._data, self._train = tree, data, tree.train_params
        self._counter = {"global_step": global_step}
        self._rate: float | None = None
        """Learning rate of the current step; None if the tree has none."""
        self._torch: Any = None

    def build_model(self) -> Any:
        example = next(iter(self._data.values())).example
        model = self._tree.model_params(inputs=example, train=self._train is not None)
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            self._torch = importlib.import_module("everstep.backends.torch.tfutils")
        steps_itself = self._torch is None and self._train is not None and self._train.train_loop is None
        if not callable(model) or (steps_itself and not hasattr(model, "train_step")):
            raise ConfigError(
                f"model_params.func returned {model!r:.80}; return a torch.nn.Module, or a callable object "
                "with train_step(inputs, learning_rate), state_dict and load_state_dict"
            )
        return model

    def build_optimizer(self, model: Any) -> Any:
        if self._train is None:
            return None
        for name in ("loss_params", "optimizer_params"):
            is_given = getattr(self._tree, name) is not None
            if self._torch is None and is_given:
                raise ConfigError(f"{name}: a {type(model).__name__} trains itself; leave it out")
            if self._torch is not None and not is_given and self._train.train_loop is None:
                raise ConfigError(f"{name} is missing; give it: a torch model needs it")
        if (params := self._tree.optimizer_params) is None:
            return None
        # The rate of step 0, wherever the training begins: given options are compared at each resume.
        rate = {} if (lr := self._rate_of(0)) is None else {"lr": lr}
        more = {"inner": params.optimizer_class, "clip": params.clip, "names": params.trainable_names}
        return self._torch.optimizer(model, params.optimizer, {**(params.model_extra or {}), **rate}, **more)

    def state(self) -> Mapping[str, Any]:
        """Return the model, the optimizer if there is one, and the step that decides the learning rate."""
        return {**super().state(), **({} if self._train is None else {"global_step": self._counter})}

    def _inputs(self, name: str, batch: Any) -> dict[str, Any]:
        if (names := self._data[name].names) is not None:
            batch = dict(zip(names, batch, strict=True))
        inputs = by_name(batch)
        return inputs if self._torch is None else self._torch.inputs(inputs, self.model)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        assert self._train is not None
        inputs, self._rate = self._inputs("train", batch), self._rate_of(self._counter["global_step"])
        for group in () if self._rate is None or self.optimizer is None else self.optimizer.param_groups:
            group["lr"] = self._rate
        loop = self._train.train_loop
        metrics: Mapping[str, Any] = self.step(inputs) if loop is None else loop(self, inputs)
        self._counter["global_step"] += 1
        return metrics if self._rate is None else {**metrics, "learning_rate": self._rate}

    def _rate_of(self, step: int) -> float | None:
        if (params := self._tree.learning_rate_params) is None:
            return None
        rate = params(global_step=step)
        try:
            value = float(rate)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"learning_rate_params.func returned {rate!r} at step {step}; return a number")
        return value

    def step(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make an update, as without a `train_loop`; a `train_loop` may call this method."""
        assert self._train is not None
        if self._torch is None:
            return {**self.model.train_step(inputs, learning_rate=self._rate), **self._targets(inputs)}
        size = self._train.minibatch_size
        metrics: Mapping[str, Any] = self._torch.train(self.optimizer, self.loss, inputs, size)
        return metrics

    def loss(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss of a batch or minibatch, and the targets of `train_params`."""
        if (params := self._tree.loss_params) is None:
            raise ConfigError("loss_params is missing; give it, or leave task.loss() out of your train_loop")
        names = [params.pred_targets] if isinstance(params.pred_targets, str) else params.pred_targets
        for name in names:
            if name not in inputs:
                raise ConfigError(f"pred_targets: a batch has no {name!r}; {nearest(name, inputs)}")
        outputs = self.model(inputs)
        loss = params.loss_func(outputs, *(inputs[name] for name in names), **params.loss_func_kwargs)
        mean = self._torch.mean if params.agg_func is None else params.agg_func
        return {"loss": mean(loss, **params.agg_func_kwargs), **self._targets(inputs, outputs)}

    def _targets(self, inputs: Mapping[str, Any], outputs: Any = None) -> dict[str, Any]:
        assert self._train is not None
        if self._train.targets is None:
            return {}
        metrics = self._train.targets(inputs, self.model(inputs) if outputs is None else outputs)
        for name in _RESERVED:
            if name in metrics:
                raise ConfigError(f"train_params.targets: {name!r} is taken; give that target another name")
        return dict(metrics)

    def eval_step(self, batch: ValidationBatch) -> Mapping[str, Any]:
        inputs = self._inputs(*batch)
        targets = self._tree.validation_params[batch.name].targets
        metrics: Mapping[str, Any] = targets(inputs, self.model(inputs))
        return metrics

    def batch_size(self, batch: Any) -> float:
        return super().batch_size(batch.batch if isinstance(batch, ValidationBatch) else batch)

    def evaluating(self) -> AbstractContextManager[object]:
        return nullcontext() if self._torch is None else sys.modules["torch"].no_grad()


# ------------------------------------------------------------------------- the doors


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
    trees = [check_tree(TrainingTree, each) for each in each_model(sections)]
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
            options: LoopOptions = {"config": record, "on_change": on_change, "on_divergence": on_divergence}
            options["seed"], options["max_step"] = tree.model_params.seed, tree.train_params.num_steps
            options["resume"] = tree.load_params is None or tree.load_params.do_restore
            options["init_from"] = begin
            task, named = ParamsTask(tree, {"train": train, **data}, step), {"train": train.data, **streams}
            trainers.append(Trainer(task, named, run_dir, services=_services(tree), **options))
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
    init, step = choose_parts(path, params)
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
        services.append(_evaluation(name, params, Every(steps=save.save_valid_freq), train.validate_first))
    return [*services, _PinInitial()] if save.save_initial_filters else services


def _evaluation(
    name: str, params: Validation, every: Every | None = None, validate_first: bool = False
) -> Evaluate:
    functions: Any = {"agg_func": params.agg_func, "online_agg_func": params.online_agg_func}
    steps = params.num_steps or -1
    return Evaluate(name, every, num_steps=steps, validate_first=validate_first, **functions)


class _PinInitial(BuiltIn):
    moments = frozenset({Moment.AFTER_CHECKPOINT})

    def __init__(self) -> None:
        super().__init__("save_initial_filters")

    def open(self, run: RunView) -> None:
        self._store = Store(run.run_dir)

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
    results = [_test(check_tree(TreeOfTest, each), dont_run, skip_check) for each in each_model(sections)]
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
    loaded = load(choose_parts(path, tree.load_params, entry="model")[0], task.state())
    seed = seed if loaded.seed is None else loaded.seed
    home, see = _home(loaded, tree.save_params, seed)
    facts = record.facts(seed, ())
    results: dict[str, dict[str, float]] = {}
    for name, params in tree.validation_params.items():
        service = _evaluation(name, params)
        results[name] = evaluate(task, streams[name], name, service.num_steps, seed, service, on_step=see)
        metrics = {f"{name}/{metric}": value for metric, value in results[name].items()}
        at = (loaded.name, loaded.digest, loaded.step, loaded.epoch)
        record_evaluation(home, Evaluation(name, *at, service.num_steps, metrics, time.time()), facts, {})
    return results


def _home(loaded: Loaded, save: SaveOfTest | None, seed: int) -> tuple[Path, Callable[[EvalStep], None]]:
    """Return the run that records a test, and the function that keeps a batch's results there."""
    tested = next((folder for folder in Path(loaded.path).parents if (folder / "run.json").exists()), None)
    if tested is None:
        raise ConfigError(f"{loaded.path} is in no run directory; give a checkpoint inside one")
    if save is None or not save.do_save:
        return tested, lambda step: None
    at = {"checkpoint": loaded.name, "digest": loaded.digest, "step": loaded.step}
    path = str(Path(loaded.path).absolute())
    validates = {"run": RunDir.open(tested, create=False).id, **at, "path": path}
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
        remedy = "give a PostgreSQL's host and port, or a URL as host"
        raise ConfigError(f"{section}: port={port} with host={host!r}; {remedy}")
    return host if "://" in host else f"postgresql://{host}:{port or 5432}/everstep"


def source(load: Load, save: Place | None) -> Path | None:
    """Return the checkpoint, or the run, that `load_params` name; None if they name the run that saves."""
    if load.from_ckpt is not None:
        return Path(load.from_ckpt)
    place, own_home = load, None
    if save is not None:
        lacking = {n for n in Place.model_fields if n != "exp_id" and getattr(load, n) is None}
        place = load.model_copy(update={name: getattr(save, name) for name in lacking})
        own_home = None if save.exp_id is None else run_dir_of(save)
    home = None if load.exp_id is None else run_dir_of(place)
    if load.query is None:
        return None if home == own_home else home
    if own_home is not None and home == own_home:
        raise ConfigError(
            f"loading pointlessly: load_params.query asks for {home}, where this run saves; leave it out"
        )
    return _find_by_query(place)


def _find_by_query(place: Load) -> Path:
    """Return the newest run that a query finds, or its newest checkpoint if the query asks for a step."""
    from everstep.index.location import id_at
    from everstep.index.query import query as ask

    query = place.query or {}
    index = index_of(place, "load_params") or located(folder_of(place))
    condition = {name: value for name, value in query.items() if name != "step"}
    for run in reversed(ask("runs", condition, index=index)):
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


def choose_parts(path: Path, load: Load, *, entry: str | None = None) -> tuple[InitFrom, int]:
    """Choose what to load, of `entry` or of all but the counter; return it, and the checkpoint's step."""
    checkpoint = find_checkpoint(to_read(path), print)
    if checkpoint is None:
        raise NoCheckpointError(f"{path} has no checkpoint to load; check load_params")
    names_there = names_in(checkpoint)
    # from the checkpoint that the weights come from: a run that trains may have another one by then
    is_counted = load.restore_global_step and entry is None and _COUNTER in names_there
    known = [name for name in names_there if name != _COUNTER]
    known = [name for name in known if entry in (None, name.partition("/")[0])]
    selected = None
    rename: dict[str, str] = {}
    if load.load_param_dict is not None:
        selected = []
        for old, new in load.load_param_dict.items():
            old = _complete(old, known)
            top, slash, _ = old.partition("/")  # a new name without an entry gets the old one's
            selected.append(f"{top}/{new}" if slash and not new.startswith(f"{top}/") else new)
            rename[f"^{re.escape(old)}$"] = selected[-1].replace("\\", r"\\")
    elif (choice := load.to_restore) is not None:
        if isinstance(choice, str | re.Pattern):
            selected = [name for name in known if re.search(choice, name)]
        else:
            names: Iterable[str] = choice(list(known)) if callable(choice) else choice
            selected = [_complete(name, known) for name in names]
        if not selected:
            raise ConfigError(f"load_params.to_restore chooses nothing of {path}; known: {', '.join(known)}")
    if selected is not None and is_counted:
        selected.append(_COUNTER)
    include = None if selected is None else f"^(?:{'|'.join(map(re.escape, selected))})$"
    exclude, reset = None if is_counted else f"^{_COUNTER}$", () if load.restore_global_step else ("step",)
    return InitFrom(path, include=include, exclude=exclude, rename=rename, reset=reset), checkpoint.step


def _complete(name: str, known: list[str]) -> str:
    """Complete a name to a name in the checkpoint; names of the model may leave out "model/"."""
    for each in (name, f"model/{name}"):
        if each in known:
            return each
    raise ConfigError(f"load_params: the checkpoint has no {name!r}; {nearest(name, known)}")
