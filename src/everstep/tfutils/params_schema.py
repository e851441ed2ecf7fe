"""Parameter trees of `train_from_params` and `test_from_params`: keys, types of values, defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from everstep.arguments import plain
from everstep.errors import ConfigError
from everstep.experiment.calls import misfits
from everstep.experiment.validation import problems_of, told

Given = Mapping[str, Any]
S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Dictionary of a tree, with certain keys; None means the default, unless a type allows None.

    Class attributes:
        gone: keys of tfutils that are refused -> the replacement.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True, protected_namespaces=()
    )
    gone: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls: type[S], given: Given) -> S:
        """Check a dictionary that a program gives.

        Raises:
            ConfigError: lists every mistake with its place; an unknown key with the nearest known key.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(told(problems_of(error, given, cls, ()))) from None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name, instead in cls.gone.items():
            if name in given:
                raise ValueError(f"{name} is gone: {instead}")
        found = {}
        for name, value in given.items():
            field = cls.model_fields.get(name)
            if field is None:
                found[name] = value
            elif value is not None or NoneType in get_args(field.annotation):
                found[name] = plain(value)
        return found

    def tree(self) -> dict[str, Any]:
        """Return the section as plain dictionaries, every default filled in."""
        return {name: _tree(value) for name, value in self}


def _tree(value: Any) -> Any:
    if isinstance(value, Section):
        return value.tree()
    if isinstance(value, dict):
        return {name: _tree(part) for name, part in value.items()}
    return value


def _require_fit(function: Any, given: Given, positional: int, by_name: tuple[str, ...]) -> None:
    faults = [fault for _, fault in misfits(function, given, positional, by_name)]
    if faults:
        raise ValueError(
            "; ".join(f"{getattr(function, '__name__', function)}() {fault}" for fault in faults)
        )


class Function(Section):
    """Function with arguments, which are the keys that are not fields.

    Class attributes:
        positional: number of positional arguments, which come from elsewhere.
        by_name: further arguments, given by name; those that are fields, too, have the field's value.
    """

    model_config = ConfigDict(extra="allow")
    positional: ClassVar[int] = 0
    by_name: ClassVar[tuple[str, ...]] = ()

    func: Callable[..., Any]

    @model_validator(mode="after")
    def _fits(self) -> Function:
        _require_fit(self.func, self.model_extra or {}, self.positional, self.by_name)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that the tree has for the function."""
        own = {name: getattr(self, name) for name in self.by_name if name in type(self).model_fields}
        return {**(self.model_extra or {}), **own}

    def __call__(self, *positional: Any, **by_name: Any) -> Any:
        """Call the function with these arguments and those of the tree."""
        return self.func(*positional, **{**self.arguments, **by_name})


def _name_of_validation(name: str) -> str:
    if not name or "/" in name or name == "train":
        raise ValueError(f"{name!r} cannot name a validation; give another name, without '/'")
    return name


def _not_empty(names: Any) -> Any:
    if not names:
        raise ValueError(f"{names!r} names nothing; give a name, or a list of names")
    return names


Count = Annotated[int, Field(ge=1)]
Names = Annotated[str | list[str] | tuple[str, ...], AfterValidator(_not_empty)]
Options = Mapping[Any, Any]


class Location(Section):
    """Place of a run."""

    host: str | None = None
    port: Count | None = None
    dbname: str | None = None
    collname: str | None = None
    exp_id: str | None = None
    cache_dir: str | Path | None = None


class SaveParams(Location):
    """`save_params` of a training."""

    gone = {
        "save_to_gfs": "a training step records numbers, so return the mean of an array; arrays are kept of "
        "validations, by save_intermediate_freq of test_from_params, and of training steps by a service of a "
        "Trainer that names them in outputs",
        "save_intermediate_freq": "it is test_from_params's: training records every step",
    }
    do_save: bool = True
    save_initial_filters: bool = True
    save_metrics_freq: Count = 100
    save_valid_freq: Count = 3000
    save_filters_freq: Count = 30000
    cache_filters_freq: Count = 3000
    cache_max_num: Count = 6


class TestSaveParams(Location):
    """`save_params` of a test."""

    __test__ = False  # pytest takes it for a test where it is imported
    gone = {
        name: "a test trains nothing"
        for name in SaveParams.model_fields
        if name not in (*Location.model_fields, "do_save")
    }
    do_save: bool = True
    save_intermediate_freq: Count | None = None


class Load(Location):
    """`load_params`."""

    do_restore: bool = True
    restore_global_step: bool = True
    query: Options | None = None
    from_ckpt: str | Path | None = None
    to_restore: str | re.Pattern[str] | list[str] | tuple[str, ...] | Callable[..., Any] | None = None
    load_param_dict: dict[str, str] | None = None


class Model(Function):
    """`model_params`: the function that makes the model."""

    by_name = ("inputs", "train", "seed")
    seed: Annotated[int, Field(ge=0)] = 0


class TrainData(Function):
    """`data_params` of a training."""

    by_name = ("batch_size",)
    batch_size: Count


class OfStep(Function):
    """Function of two objects of a step: inputs and outputs, or the task and inputs."""

    positional = 2


class Train(Section):
    """`train_params`."""

    gone = {"queue_params": "give data that reads ahead: everstep.data.prefetch, or a loader's workers"}
    data_params: TrainData
    targets: OfStep | None = None
    validate_first: bool = True
    thres_loss: int | float | None = 100
    num_steps: Count | None = None
    minibatch_size: Count | None = None
    train_loop: OfStep | None = None


class Loss(Section):
    """`loss_params`."""

    gone = {"loss_per_case_func": "it is loss_func", "targets": "it is pred_targets"}
    pred_targets: Names
    loss_func: Callable[..., Any]
    loss_func_kwargs: Options = {}
    agg_func: Callable[..., Any] | None = None
    agg_func_kwargs: Options = {}


class LearningRate(Function):
    """`learning_rate_params`: the function that gives the learning rate of a step."""

    by_name = ("global_step",)


class Optimizer(Section):
    """`optimizer_params`: the function that makes the optimizer, and its arguments."""

    model_config = ConfigDict(extra="allow")
    optimizer: Callable[..., Any]
    optimizer_class: Callable[..., Any] | None = None
    clip: bool | Options | None = None
    trainable_names: Names | None = None

    @model_validator(mode="after")
    def _fits(self) -> Optimizer:
        _require_fit(self.optimizer_class or self.optimizer, self.arguments, 1, ("lr",))
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Keys that are not fields."""
        return self.model_extra or {}

    def tree(self) -> dict[str, Any]:
        """Return the section as a plain dictionary, without the fields that were not given."""
        return {name: v for name, v in super().tree().items() if v is not None or name in self.arguments}


class Validation(Section):
    """Validation under its name in `validation_params`."""

    gone = {"valid_loop": "each batch goes to the targets' func; combine them by online_agg_func"}
    data_params: Function = Field(validation_alias=AliasChoices("data_params", "data"))
    targets: OfStep
    num_steps: Count | None = None
    agg_func: Callable[..., Any] | None = None
    online_agg_func: Callable[..., Any] | None = None


Validations = dict[Annotated[str, AfterValidator(_name_of_validation)], Validation]


class Training(Section):
    """Tree of `train_from_params`."""

    save_params: SaveParams
    model_params: Model
    train_params: Train
    loss_params: Loss | None = None
    learning_rate_params: LearningRate | None = None
    optimizer_params: Optimizer | None = None
    load_params: Load | None = None
    validation_params: Validations = {}


class Test(Section):
    """Tree of `test_from_params`."""

    __test__ = False  # pytest takes it for a test where it is imported
    load_params: Load = Load()
    model_params: Model
    validation_params: Validations = {}
    save_params: TestSaveParams | None = None


def each_model(given: Given) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each model: lists give a dictionary to each model, other arguments are shared.

    Raises:
        ConfigError: the lists have different lengths, or are empty.
    """
    lengths = {name: len(value) for name, value in given.items() if isinstance(value, list)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise ConfigError(f"lists of parameters need one dictionary for each model: {found}")
    for number in range(next(iter(lengths.values()), 1)):
        yield {name: value[number] if isinstance(value, list) else value for name, value in given.items()}
