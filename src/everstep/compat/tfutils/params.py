"""Parameter trees of tfutils: a table of their keys, and their record as JSON."""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from everstep.arguments import plain
from everstep.contracts.state import Json
from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import misfits
from everstep.experiment.code_trust import admit, code_of
from everstep.experiment.config_layers import CALL, Place
from everstep.experiment.import_paths import imported
from everstep.experiment.open_experiment import findable
from everstep.experiment.validation import Problem, kind_of, told
from everstep.record import RunDir, RunJournal, to_read
from everstep.record.trust import distrust
from everstep.redaction import without_credentials

Given: TypeAlias = Mapping[str, Any]
Params: TypeAlias = dict[str, Any]
"""Checked section of a tree, every default filled in."""

_REQUIRED: Any = object()


class Key(NamedTuple):
    """Key of a section: the kinds of its value, or the section below it, and its default."""

    kinds: tuple[str, ...] | Section
    default: Any = None
    may_be_none: bool = False
    """Whether None is a value; elsewhere it stands for the default."""


@dataclass(frozen=True)
class Section:
    """Dictionary of a tree.

    Attributes:
        keys: its keys.
        gone: keys of tfutils that are refused -> the replacement.
        function: keys of which the first that is given is a function; other keys are its arguments.
        positional: number of positional arguments that the function gets from elsewhere.
        by_name: names of further arguments from elsewhere; those among `keys` are passed on.
    """

    keys: Mapping[str, Key]
    gone: Mapping[str, str] = field(default_factory=dict)
    function: tuple[str, ...] = ()
    positional: int = 0
    by_name: tuple[str, ...] = ()


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "a number": lambda value: _is_integer(value) or isinstance(value, float),
    "an integer of at least 0": lambda value: _is_integer(value) and value >= 0,
    "an integer of at least 1": lambda value: _is_integer(value) and value >= 1,
    "a string": lambda value: isinstance(value, str) and value != "",
    "a Path": lambda value: isinstance(value, Path),
    "a list of strings": lambda value: (
        isinstance(value, list | tuple) and value != [] and all(isinstance(each, str) for each in value)
    ),
    "a regular expression": lambda value: isinstance(value, re.Pattern),
    "a function": callable,
    "a mapping": lambda value: isinstance(value, Mapping),
    "a mapping of strings to strings": lambda value: (
        isinstance(value, Mapping) and all(isinstance(each, str) for pair in value.items() for each in pair)
    ),
}

_TEXT = Key(("a string",))
_NAMES = ("a string", "a list of strings")
_COUNT = Key(("an integer of at least 1",))
_FUNCTION = Key(("a function",))
_FUNC = Key(("a function",), _REQUIRED)
_OPTIONS = Key(("a mapping",), {})


def _count(default: int) -> Key:
    return Key(_COUNT.kinds, default)


def _flag(default: bool) -> Key:
    return Key(("true or false",), default)


_PLACE = {
    **dict.fromkeys(("host", "dbname", "collname", "exp_id"), _TEXT),
    "port": _COUNT,
    "cache_dir": Key(("a string", "a Path")),
}
_SAVE = Section(
    _PLACE
    | {
        "do_save": _flag(True),
        "save_initial_filters": _flag(True),
        "save_metrics_freq": _count(100),
        "save_valid_freq": _count(3000),
        "save_filters_freq": _count(30000),
        "cache_filters_freq": _count(3000),
        "cache_max_num": _count(6),
    },
    gone={
        "save_to_gfs": "a training step records numbers, so return the mean of an array; arrays are kept of "
        "validations, by save_intermediate_freq of test_from_params, and of training steps by a service of a "
        "Trainer that names them in outputs",
        "save_intermediate_freq": "it is test_from_params's: training records every step",
    },
)
_SAVE_OF_TEST = Section(
    _PLACE | {"do_save": _flag(True), "save_intermediate_freq": _COUNT},
    gone=dict.fromkeys(_SAVE.keys.keys() - _PLACE.keys() - {"do_save"}, "a test trains nothing"),
)
_LOAD = Section(
    _PLACE
    | {
        "do_restore": _flag(True),
        "restore_global_step": _flag(True),
        "query": Key(("a mapping",)),
        "from_ckpt": Key(("a string", "a Path")),
        "to_restore": Key((*_NAMES, "a regular expression", "a function")),
        "load_param_dict": Key(("a mapping of strings to strings",)),
    }
)
_MODEL = Section(
    {"func": _FUNC, "seed": Key(("an integer of at least 0",), 0)},
    function=("func",),
    by_name=("inputs", "train", "seed"),
)
_OF_STEP = Section({"func": _FUNC}, function=("func",), positional=2)
FUNCTION = Section({"func": _FUNC}, function=("func",))
_VALIDATION = Section(
    {
        "data_params": Key(FUNCTION, _REQUIRED),
        "targets": Key(_OF_STEP, _REQUIRED),
        "num_steps": _COUNT,
        "agg_func": _FUNCTION,
        "online_agg_func": _FUNCTION,
    },
    gone={"valid_loop": "each batch goes to the targets' func; combine them by online_agg_func"},
)
_TRAIN = Section(
    {
        "data_params": Key(
            Section(
                {"func": _FUNC, "batch_size": Key(_COUNT.kinds, _REQUIRED)},
                function=("func",),
                by_name=("batch_size",),
            ),
            _REQUIRED,
        ),
        "targets": Key(_OF_STEP),
        "validate_first": _flag(True),
        "thres_loss": Key(("a number",), 100, may_be_none=True),
        "num_steps": _COUNT,
        "minibatch_size": _COUNT,
        "train_loop": Key(_OF_STEP),
    },
    gone={"queue_params": "give data that reads ahead: everstep.data.prefetch, or a loader's workers"},
)
_LOSS = Section(
    {
        "pred_targets": Key(_NAMES, _REQUIRED),
        "loss_func": _FUNC,
        "loss_func_kwargs": _OPTIONS,
        "agg_func": _FUNCTION,
        "agg_func_kwargs": _OPTIONS,
    },
    gone={"loss_per_case_func": "it is loss_func", "targets": "it is pred_targets"},
)
OPTIMIZER = Section(
    {
        "optimizer": _FUNC,
        "optimizer_class": _FUNCTION,
        "clip": Key(("true or false", "a mapping")),
        "trainable_names": Key(_NAMES),
    },
    function=("optimizer_class", "optimizer"),
    positional=1,
    by_name=("lr",),
)
_VALIDATIONS = Section({})
"""Stands for a mapping of names to `_VALIDATION`."""
TRAINING = Section(
    {
        "save_params": Key(_SAVE, _REQUIRED),
        "model_params": Key(_MODEL, _REQUIRED),
        "train_params": Key(_TRAIN, _REQUIRED),
        "loss_params": Key(_LOSS),
        "learning_rate_params": Key(Section({"func": _FUNC}, function=("func",), by_name=("global_step",))),
        "optimizer_params": Key(OPTIMIZER),
        "load_params": Key(_LOAD),
        "validation_params": Key(_VALIDATIONS, {}),
    }
)
TEST = Section(
    {
        "load_params": Key(_LOAD, _REQUIRED),
        "model_params": Key(_MODEL, _REQUIRED),
        "validation_params": Key(_VALIDATIONS, {}),
        "save_params": Key(_SAVE_OF_TEST),
    }
)


def checked(section: Section, given: Given) -> Params:
    """Check a dictionary that a program gives, and fill in the defaults."""
    problems: list[Problem] = []
    params = _checked(section, given, (), problems)
    if problems:
        raise ConfigError(told(problems))
    return params


def _checked(section: Section, given: Any, place: Place, problems: list[Problem]) -> Params:
    if not isinstance(given, Mapping):
        problems.append(Problem(place, f"{given!r} is {kind_of(given)}; give a mapping"))
        return {}
    if section is _VALIDATIONS:
        for name in given:
            if not isinstance(name, str) or not name or "/" in name or name == "train":
                text = f"{name!r} cannot name a validation; give another name, without '/'"
                problems.append(Problem(place, text))
        return {name: _checked(_VALIDATION, part, (*place, name), problems) for name, part in given.items()}
    if section is _VALIDATION and "data" in given:
        given = {"data_params" if name == "data" else name: value for name, value in given.items()}
    faults, params = len(problems), {}
    for name, value in given.items():
        if name in section.gone:
            problems.append(Problem(place, f"{name} is gone: {section.gone[name]}"))
        elif name in section.keys:
            key = section.keys[name]
            if value is not None or key.may_be_none:
                params[name] = _checked_value(key, plain(value), (*place, name), problems)
        elif section.function:
            params[name] = value
        else:
            text = f"unknown key {name!r}; {nearest(str(name), section.keys)}"
            problems.append(Problem((*place, name), text))
    for name, key in section.keys.items():
        if params.setdefault(name, key.default) is _REQUIRED:
            problems.append(Problem(place, f"{name!r} is missing; give it"))
    if section.function and len(problems) == faults:
        function = next(params[name] for name in section.function if params[name] is not None)
        arguments = [name for name in params if name not in section.keys]
        problems += [
            Problem(place, f"{getattr(function, '__name__', function)}() {fault}")
            for _, fault in misfits(function, arguments, section.positional, section.by_name)
        ]
    return params


def _checked_value(key: Key, value: Any, place: Place, problems: list[Problem]) -> Any:
    if isinstance(key.kinds, Section):
        return _checked(key.kinds, value, place, problems)
    if not (value is None or any(_KINDS[kind](value) for kind in key.kinds)):
        text = f"{value!r} is {kind_of(value)}; give {' or '.join(key.kinds)}"
        problems.append(Problem(place, text))
    return value


def arguments_of(params: Params, but: Section = FUNCTION) -> Params:
    """Return the keys that are arguments of a section's function."""
    return {name: value for name, value in params.items() if name not in but.keys}


def call(params: Params, /, *positional: Any, **by_name: Any) -> Any:
    """Call a section's `func` with these arguments and those of the tree."""
    return params["func"](*positional, **{**arguments_of(params), **by_name})


def each_model(given: Given) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each model: lists have one dictionary for each, the others are shared."""
    lengths = {name: len(value) for name, value in given.items() if isinstance(value, list)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise ConfigError(f"lists of parameters need one dictionary for each model: {counts}")
    for number in range(next(iter(lengths.values()), 1)):
        yield {name: value[number] if isinstance(value, list) else value for name, value in given.items()}


# --------------------------------------------------------------------------------------- the record

_ORIGIN = ("source", "version")
"""Keys of a function's origin, beside its import path under `CALL`."""
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "a": re.ASCII}
"""Flags of a regular expression, as it names them in itself."""


class ParamsRecord:
    """Tree of parameters as JSON; tuples are recorded as lists, paths and regular expressions as strings.

    Attributes:
        tree: the parameters as JSON values.
        origins: dotted paths of the origins of functions.
        code: folders of the functions that belong to no package with a version.
    """

    def __init__(self, tree: Given) -> None:
        self.origins: list[str] = []
        self.code: list[Path] = []
        self.tree: dict[str, Json] = self._json(dict(tree), "")  # type: ignore[assignment]

    def _json(self, value: Any, place: str) -> Json:
        if isinstance(value, numbers.Integral):  # not floats: NumPy's may compute otherwise than Python's
            value = plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{place} is {value}, which JSON lacks; give None, or a string")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if isinstance(value, list | tuple):
            return [self._json(part, f"{place}.{at}") for at, part in enumerate(value)]
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
            flags = "".join(letter for letter, flag in _FLAGS.items() if value.flags & flag)
            return f"(?{flags}){value.pattern}" if flags else value.pattern
        if callable(value) and hasattr(value, "__qualname__"):
            return self._function(value, place)
        raise ConfigError(
            f"{place} is {value!r:.80}, which cannot be recorded; give numbers, strings, lists and "
            "dictionaries, and functions or classes of a module with their arguments beside them"
        )

    def _mapping(self, value: Mapping[Any, Any], place: str) -> Json:
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(
                    f"{place} has the key {name!r}, which is not a string; give strings as keys"
                )
        return {k: self._json(part, f"{place}.{k}" if place else k) for k, part in value.items()}

    def _function(self, function: Any, place: str) -> Json:
        module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        source = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" and source is not None:
            module = Path(source).stem
        record: dict[str, Json] = {CALL: f"{module}:{function.__qualname__}", "source": source}
        version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", None)
        if isinstance(version, str):
            record["version"] = version
        elif source is not None:
            folder = Path(source).absolute().parents[module.count(".")]
            self.code += [folder] if folder not in self.code else []
        self.origins += [f"{place}.{name}" for name in _ORIGIN]
        return record


def restored(tree: Any, place: str = "") -> Any:
    """Turn the JSON of a `ParamsRecord` into parameters again."""
    if isinstance(tree, list):
        return [restored(part, f"{place}.{at}") for at, part in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    if not (CALL in tree and tree.keys() <= {CALL, *_ORIGIN}):
        return {k: restored(part, f"{place}.{k}" if place else str(k)) for k, part in tree.items()}
    if "<" in str(tree[CALL]):
        raise ConfigError(
            f"{place} was {tree[CALL]}, made inside another function, where it cannot be found again; "
            "define it at the top level of its module"
        )
    return imported(str(tree[CALL]))


def recorded_params(run_dir: str | Path, *, trust: bool = False) -> dict[str, Any]:
    """Return the parameters that a run's newest start recorded; `train_from_params` makes the run again.

        params = everstep.compat.tfutils.recorded_params("runs/digits/basic")
        everstep.compat.tfutils.train_from_params(**params)

    Args:
        trust: import the code that the run names, even if the run is not marked as this user's:
            docs/guide/trust.md.

    Raises:
        TrustError: the run does not count as this user's, and `trust` is not given.
        ConfigError: `train_from_params` did not make the run, or a function is not found by its import path.
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
    params: dict[str, Any] = restored(tree)
    return params
