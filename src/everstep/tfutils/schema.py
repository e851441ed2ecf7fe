"""The tree of parameters that `train_from_params` takes: its keys, and what their values must be."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import ConfigError, nearest
from everstep.experiment.calls import misfits
from everstep.experiment.mistakes import kind_of
from everstep.keywords import plain

Params = dict[str, Any]

NEEDED: Any = object()
"""The default of a key that must be given."""


class Key(NamedTuple):
    """What a value must be.

    Attributes:
        wanted: in words.
        right: whether a value is that.
        default: where it is not given; None is always allowed where this is None.
    """

    wanted: str
    right: Callable[[Any], bool]
    default: Any = NEEDED


class FunctionSection(NamedTuple):
    """A dictionary of a function and its arguments.

    Attributes:
        key: the function's key; the other keys are arguments.
        keys: those that are no arguments, or that the function gets, too.
        positions: how many arguments it gets before them.
        names: which it gets by name, whether they are written or not.
        default: where it is not given.
    """

    key: str = "func"
    keys: Mapping[str, Key] = {}
    positions: int = 0
    names: Collection[str] = ()
    default: Any = NEEDED


class Section(NamedTuple):
    """A dictionary with certain keys; those of `gone` are answered."""

    keys: Mapping[str, Key | FunctionSection | Section]
    default: Any = NEEDED
    gone: Mapping[str, str] = {}


def _text(default: Any = NEEDED) -> Key:
    return Key("a text", lambda value: isinstance(value, str), default)


def _path(default: Any = NEEDED) -> Key:
    return Key("a path", lambda value: isinstance(value, str | Path), default)


def _flag(default: bool) -> Key:
    return Key("true or false", lambda value: isinstance(value, bool), default)


def _whole(default: Any = NEEDED, least: int = 1) -> Key:
    return Key(
        f"a whole number, {least} or more",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
        default,
    )


def _number(default: Any) -> Key:
    return Key(
        "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool), default
    )


def _function(default: Any = NEEDED) -> Key:
    return Key("a function", callable, default)


def _mapping(default: Any) -> Key:
    return Key("a mapping", lambda value: isinstance(value, Mapping), default)


def _is_choice(value: Any) -> bool:
    listed = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return listed or isinstance(value, str | re.Pattern) or callable(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) for name in value)
    )


def _is_mapping_of_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(part, str) for pair in value.items() for part in pair
    )


_LOCATION: dict[str, Key | FunctionSection | Section] = {
    "host": _text(None),
    "port": _whole(None),
    "dbname": _text(None),
    "collname": _text(None),
    "exp_id": _text(None),
    "cache_dir": _path(None),
}
SAVE = Section(
    {
        **_LOCATION,
        "do_save": _flag(True),
        "save_initial_filters": _flag(True),
        "save_metrics_freq": _whole(100),
        "save_valid_freq": _whole(3000),
        "save_filters_freq": _whole(30000),
        "cache_filters_freq": _whole(3000),
        "cache_max_num": _whole(6),
    },
    gone={
        "save_to_gfs": "a training step records numbers, so return the mean of an array; arrays are kept of "
        "validations, by save_intermediate_freq of test_from_params, and of training steps by a service of a "
        "Trainer that names them in outputs",
        "save_intermediate_freq": "it is test_from_params's: training records every step",
    },
)
TEST_SAVE = Section(
    {**_LOCATION, "do_save": _flag(True), "save_intermediate_freq": _whole(None)},
    default=None,
    gone={name: "a test trains nothing" for name in SAVE.keys if name not in (*_LOCATION, "do_save")},
)
MODEL = FunctionSection(
    keys={"seed": _whole(0, 0)},
    names=("inputs", "train", "seed"),
)
TRAIN = Section(
    {
        "data_params": FunctionSection(keys={"batch_size": _whole()}, names=("batch_size",)),
        "targets": FunctionSection(positions=2, default=None),
        "validate_first": _flag(True),
        "thres_loss": _number(100),
        "num_steps": _whole(None),
        "minibatch_size": _whole(None),
        "train_loop": FunctionSection(positions=2, default=None),
    },
    gone={"queue_params": "give data that reads ahead: everstep.data.prefetch, or a loader's workers"},
)
LOSS = Section(
    {
        "pred_targets": Key("a name, or a list of names", _is_names),
        "loss_func": _function(),
        "loss_func_kwargs": _mapping({}),
        "agg_func": _function(None),
        "agg_func_kwargs": _mapping({}),
    },
    default=None,
    gone={"loss_per_case_func": "it is loss_func", "targets": "it is pred_targets"},
)
LEARNING_RATE = FunctionSection(names=("global_step",), default=None)
OPTIMIZER = FunctionSection(
    key="optimizer",
    keys={
        "optimizer_class": _function(None),
        "clip": Key("true or false or a mapping", lambda value: isinstance(value, bool | Mapping), None),
        "trainable_names": Key("a name, or a list of names", _is_names, None),
    },
    positions=1,
    names=("lr",),
    default=None,
)
VALIDATION = Section(
    {
        "data_params": FunctionSection(),
        "targets": FunctionSection(positions=2),
        "num_steps": _whole(None),
        "agg_func": _function(None),
        "online_agg_func": _function(None),
    },
    gone={"valid_loop": "each batch goes to the targets' func; combine them by online_agg_func"},
)
LOAD = Section(
    {
        **_LOCATION,
        "do_restore": _flag(True),
        "restore_global_step": _flag(True),
        "query": _mapping(None),
        "from_ckpt": _path(None),
        "to_restore": Key("a list of names, a regular expression or a function", _is_choice, None),
        "load_param_dict": Key("a dictionary of names to names", _is_mapping_of_texts, None),
    },
    default=None,
)


def checked(what: Key | FunctionSection | Section, given: Any, place: str) -> Any:
    """`given` with every default filled in; `place` is its path in messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value is of another type; names the place.
    """
    if given is None and what.default is not NEEDED:
        return what.default
    if isinstance(what, Key):
        given = plain(given)
        if given is NEEDED or not what.right(given):
            raise _wrong(given, what.wanted, place)
        return given
    if given is NEEDED or not isinstance(given, Mapping):
        raise _wrong(given, "a mapping", place)
    return _section(what, given, place) if isinstance(what, Section) else _call(what, given, place)


def _wrong(given: Any, wanted: str, place: str) -> ConfigError:
    if given is NEEDED:
        return ConfigError(f"{place}: {place.rpartition('.')[2]!r} is needed; give it")
    return ConfigError(f"{place}: {given!r} is {kind_of(given)}; give {wanted}")


def _section(section: Section, given: Mapping[str, Any], place: str) -> Params:
    for name in given:
        if name in section.gone:
            raise ConfigError(f"{place}: {name} is gone: {section.gone[name]}")
        if name not in section.keys:
            raise ConfigError(f"{place}.{name}: unknown key {name!r}; {nearest(str(name), section.keys)}")
    return _filled(section.keys, given, place)


def _filled(
    keys: Mapping[str, Key | FunctionSection | Section], given: Mapping[str, Any], place: str
) -> Params:
    return {
        name: checked(what, given.get(name, what.default), f"{place}.{name}") for name, what in keys.items()
    }


def _call(call: FunctionSection, given: Mapping[str, Any], place: str) -> Params:
    function = checked(_function(), given.get(call.key, NEEDED), f"{place}.{call.key}")
    own = {name: value for name, value in _filled(call.keys, given, place).items() if value is not None}
    arguments = {name: value for name, value in given.items() if name not in (call.key, *call.keys)}
    passed = set(arguments) | {name for name in call.keys if name in given and name in call.names}
    called = own.get("optimizer_class", function)
    for _, fault in misfits(called, passed, call.positions, call.names):
        raise ConfigError(f"{place}: {getattr(called, '__name__', called)}() {fault}")
    return {call.key: function, **own, **arguments}


def checked_validations(given: Any, place: str = "validation_params") -> dict[str, Params]:
    """The validations by name; `data` is another name of `data_params`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _wrong(given, "a mapping", place)
    found = {}
    for name, one in given.items():
        if isinstance(one, Mapping) and "data" in one and "data_params" not in one:
            one = {"data_params": one["data"], **{key: value for key, value in one.items() if key != "data"}}
        if not isinstance(name, str) or not name or "/" in name or name == "train":
            raise ConfigError(f"{place}: {name!r} is no name of a validation; give a text without '/'")
        found[name] = checked(VALIDATION, one, f"{place}.{name}")
    return found


def arguments(call: Params, *besides: str) -> Params:
    """The arguments of a call's function."""
    return {name: value for name, value in call.items() if name not in ("func", "optimizer", *besides)}


def functions(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every function in a tree, with its place."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from functions(value, f"{place}.{name}" if place else str(name))
    elif isinstance(tree, list | tuple):
        for at, value in enumerate(tree):
            yield from functions(value, f"{place}.{at}")
    elif callable(tree):
        yield place, tree
