"""Parameter trees of tfutils: their keys with types and defaults, and their record as JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from everstep.arguments import plain
from everstep.errors import ConfigError
from everstep.experiment.calls import misfits
from everstep.experiment.import_paths import CALL, admit, imported
from everstep.experiment.validation import Mistakes, Problem, problems_of
from everstep.record import RunJournal, to_read
from everstep.record.trust import distrust
from everstep.redaction import without_credentials
from everstep.supervisor.opening.configuration import Configuration


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


def checked(kind: type[_Tree], arguments: Mapping[str, Any]) -> _Tree:
    """Check the arguments of a program, and fill in the defaults."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        problems = problems_of(error, arguments, kind)
    for at, (place, text) in enumerate(problems):
        why = _GONE.get(f"{place[0]}.{place[-1]}") if text.startswith("unknown key") else None
        problems[at] = Problem(place[:-1], f"{place[-1]} is gone: {why}") if why else problems[at]
    raise Mistakes(problems)


def _require_arguments(
    function: Any, arguments: Mapping[str, Any], positional: int, by_name: tuple[str, ...]
) -> None:
    who = getattr(function, "__name__", function)
    if faults := [fault for _, fault in misfits(function, arguments, positional, by_name)]:
        raise Mistakes(Problem((), f"{who}() {fault}") for fault in faults)


def each_model(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each model: lists have one dictionary for each, the others are shared."""
    lengths = {name: len(value) for name, value in arguments.items() if isinstance(value, list)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise ConfigError(f"lists of parameters need one dictionary for each model: {counts}")
    for number in range(next(iter(lengths.values()), 1)):
        yield {name: value[number] if isinstance(value, list) else value for name, value in arguments.items()}


_FREE = (
    "save_params",
    "load_params",
    "validation_params",
    "train_params.num_steps",
    "train_params.validate_first",
    "train_params.thres_loss",
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


def restored(tree: Any, place: str = "") -> Any:
    """Turn the record of a tree into parameters again."""
    if isinstance(tree, list):
        return [restored(part, f"{place}.{at}") for at, part in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    if not (CALL in tree and tree.keys() <= {CALL, *_ORIGIN}):
        return {k: restored(part, f"{place}.{k}" if place else str(k)) for k, part in tree.items()}
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
    params: dict[str, Any] = restored(tree)
    return params
