"""Options that a program gives to optimizers and schedulers, told apart from what training makes of them.

Both live in the same attributes: a scheduler changes the rate of a group, training moves a scheduler.
So what an object had when a loop was entered counts as given, unless it is what a loop before it, in the
same process, left: a notebook gives the same optimizer to run after run, and has made it once.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from everstep.backends.described import described
from everstep.backends.torch.optimizers import innermost

_FREE = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Of a group's keys, those that are no options of the training: how it is computed is free."""
_given: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Object -> what it was given: an optimizer's groups without parameters; a scheduler's state, functions."""
_left: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Object -> the same as the last loop left it."""


def enter(obj: Optimizer | LRScheduler) -> None:
    """A loop is entered: note what the object is given."""
    obj = _itself(obj)
    live = _live(obj)
    if obj not in _given:
        _given[obj] = live
    elif obj in _left:
        _given[obj] = _changed(_given[obj], _left[obj], live)


def leave(obj: Optimizer | LRScheduler) -> None:
    """A loop is left: what the object has now is no gift."""
    obj = _itself(obj)
    _left[obj] = _live(obj)


def given(obj: Optimizer | LRScheduler) -> Any:
    """Options given when the loop was entered."""
    obj = _itself(obj)
    if obj not in _given:
        enter(obj)
    return _given[obj]


def _itself(obj: Optimizer | LRScheduler) -> Optimizer | LRScheduler:
    """Find the object that stands for an optimizer and its wrappers: a scheduler may know any of them."""
    return innermost(obj) if isinstance(obj, Optimizer) else obj


_FUNCTIONS = "functions"
"""Where a scheduler's given state has the texts of its functions, which torch's own state lacks."""


def _live(obj: Optimizer | LRScheduler) -> Any:
    if isinstance(obj, Optimizer):
        return [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in obj.param_groups
        ]
    return {**copy.deepcopy(obj.state_dict()), _FUNCTIONS: _functions(obj)}


def _functions(scheduler: Any) -> dict[str, str]:
    """The functions that a scheduler, or one inside it, was made with, as texts."""
    asked = tuple(_asked(scheduler))
    own = {
        name: value
        for name, value in vars(scheduler).items()
        if name.lstrip("_").startswith(asked) and _has_functions(value)
    }
    inner = enumerate(getattr(scheduler, "_schedulers", ()))
    return _texts(own) | {
        f"{index}.{name}": text for index, each in inner for name, text in _functions(each).items()
    }


def _has_functions(value: Any) -> bool:
    return callable(value) or (isinstance(value, list | tuple) and any(map(callable, value)))


def _asked(scheduler: Any) -> set[str]:
    """Names of what a scheduler's constructor takes."""
    return inspect.signature(type(scheduler).__init__).parameters.keys() - {"self", "optimizer", "last_epoch"}


def _changed(given: Any, left: Any, live: Any) -> Any:
    """`given`, with what differs between `left` and `live`: a person changed it since."""
    if isinstance(live, list) and isinstance(left, list) and len(given) == len(left) == len(live):
        return [_changed(*each) for each in zip(given, left, live, strict=True)]
    if isinstance(live, dict) and isinstance(left, dict):
        return {
            key: _changed(given.get(key, value), left[key], value) if key in left else value
            for key, value in live.items()
        }
    return given if described(left, "") == described(live, "") else live


def of_group(group: Mapping[str, Any]) -> dict[str, str]:
    """A group's options as texts; its rate is the one that its schedule begins with."""
    own = {key: value for key, value in group.items() if key not in _FREE}
    own["lr"] = group.get("initial_lr", group["lr"])
    return _texts(own)


def of_scheduler(scheduler: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """Part of a scheduler's state that its constructor was given, and its class."""
    asked = _asked(scheduler)
    own = {"class": type(scheduler).__qualname__}
    own |= {key: v for key, v in state.items() if key.lstrip("_") in asked or key == "base_lrs"}
    inner = zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    return {**_texts(own), **state.get(_FUNCTIONS, {})} | {
        f"{index}.{name}": text
        for index, each in enumerate(inner)
        for name, text in of_scheduler(*each).items()
    }


def replay(scheduler: Any) -> None:
    """Bring a scheduler, as it was given, to the epoch at which it stands: by as many steps as it made.

    One that follows a metric cannot be brought there: it goes on from its beginning.
    """
    count = _steps(scheduler)
    optimizer = scheduler.optimizer
    for group, begun in zip(optimizer.param_groups, given(optimizer), strict=False):
        for key, value in begun.items():
            put(group, key, value)
    begun = {key: value for key, value in given(scheduler).items() if key != _FUNCTIONS}
    scheduler.load_state_dict(copy.deepcopy(begun))
    if not isinstance(scheduler, ReduceLROnPlateau):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps without the optimizer's
            for _ in range(count):
                scheduler.step()


def _steps(scheduler: Any) -> int:
    inner = getattr(scheduler, "_schedulers", ())
    epoch = getattr(scheduler, "last_epoch", None)
    return int(epoch) if epoch is not None else _steps(inner[0]) if inner else 0


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option; a tensor, which a compiled step reads, stays the same tensor."""
    live = group.get(key)
    if isinstance(live, Tensor):
        live.fill_(value)
    else:
        group[key] = copy.deepcopy(value)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for key, value in options.items() for name, text in described(value, key).items()}
