"""Options that a program gives to optimizers and schedulers, apart from the values that training makes.

Both are in the same attributes: a scheduler changes the rate of a group, training moves a scheduler.
The given value is therefore the value when a loop was entered, unless an earlier loop of the same process
left that value: a notebook makes an optimizer once, and gives it to run after run.
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

from everstep.backends.describe_values import described
from everstep.backends.torch.optimizers import innermost

_FREE = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a group that are not compared: parameters, and how (not what) the optimizer computes."""
_given: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Given options by object: an optimizer's groups without parameters; a scheduler's state and functions."""
_left: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Options by object as the last loop left them."""
_told: WeakKeyDictionary[Any, tuple[Any, dict[str, str]]] = WeakKeyDictionary()
"""Given options by object, and the same as strings."""


def enter(obj: Optimizer | LRScheduler) -> None:
    """Note the given options; called when a loop is entered."""
    obj = _itself(obj)
    live = _live(obj)
    if obj not in _given:
        _given[obj] = live
    elif obj in _left:
        _given[obj] = _changed(_given[obj], _left[obj], live)


def leave(obj: Optimizer | LRScheduler) -> None:
    """Note the options as made by training, not given; called when a loop is left."""
    obj = _itself(obj)
    _left[obj] = _live(obj)


def given(obj: Optimizer | LRScheduler) -> Any:
    """Return the options as given when the loop was entered."""
    obj = _itself(obj)
    if obj not in _given:
        enter(obj)
    return _given[obj]


def told(obj: Optimizer | LRScheduler) -> dict[str, str]:
    """Return the given options as strings; in an optimizer with several groups they are named "1.lr".

    The strings are made once for each given value, because each save asks for them.
    """
    found = given(obj)
    obj = _itself(obj)
    if obj not in _told or _told[obj][0] is not found:
        if isinstance(obj, Optimizer):
            texts = {
                name if len(found) == 1 else f"{index}.{name}": text
                for index, group in enumerate(found)
                for name, text in _of_group(group).items()
            }
        else:
            texts = _of_scheduler(obj, found)
        _told[obj] = (found, texts)
    return _told[obj][1]


def _itself(obj: Optimizer | LRScheduler) -> Optimizer | LRScheduler:
    """Return the innermost optimizer of a wrapper: a scheduler may hold any of the wrappers."""
    return innermost(obj) if isinstance(obj, Optimizer) else obj


_FUNCTIONS = "functions"
"""Key of a scheduler's functions, as strings, in its given state; torch's own state lacks them."""


def _live(obj: Optimizer | LRScheduler) -> Any:
    if isinstance(obj, Optimizer):
        return [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in obj.param_groups
        ]
    return {**copy.deepcopy(obj.state_dict()), _FUNCTIONS: _functions(obj)}


def _functions(scheduler: Any) -> dict[str, str]:
    """Return the functions given to a scheduler's constructor, or to an inner one's, as strings."""
    asked = tuple(_asked(scheduler))
    own = {
        name: value
        for name, value in vars(scheduler).items()
        if name.lstrip("_").startswith(asked)
        and (callable(value) or (isinstance(value, list | tuple) and any(map(callable, value))))
    }
    inner = enumerate(getattr(scheduler, "_schedulers", ()))
    return _texts(own) | {
        f"{index}.{name}": text for index, each in inner for name, text in _functions(each).items()
    }


def _asked(scheduler: Any) -> set[str]:
    """Names of the constructor's arguments of a scheduler."""
    return inspect.signature(type(scheduler).__init__).parameters.keys() - {"self", "optimizer", "last_epoch"}


def _changed(given: Any, left: Any, live: Any) -> Any:
    """Return `given` with the values that differ between `left` and `live`: a person changed those since."""
    if isinstance(live, list) and isinstance(left, list) and len(given) == len(left) == len(live):
        return [_changed(*each) for each in zip(given, left, live, strict=True)]
    if isinstance(live, dict) and isinstance(left, dict):
        return {
            key: _changed(given.get(key, value), left[key], value) if key in left else value
            for key, value in live.items()
        }
    return given if described(left, "") == described(live, "") else live


def _of_group(group: Mapping[str, Any]) -> dict[str, str]:
    """Return a group's options as strings; its rate is the rate with which its schedule begins."""
    own = {key: value for key, value in group.items() if key not in _FREE}
    own["lr"] = group.get("initial_lr", group["lr"])
    return _texts(own)


def _of_scheduler(scheduler: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """Return a scheduler's class and the constructor's arguments in its state, as strings."""
    asked = _asked(scheduler)
    own = {"class": type(scheduler).__qualname__}
    own |= {key: v for key, v in state.items() if key.lstrip("_") in asked or key == "base_lrs"}
    inner = zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    return {**_texts(own), **state.get(_FUNCTIONS, {})} | {
        f"{index}.{name}": text
        for index, each in enumerate(inner)
        for name, text in _of_scheduler(*each).items()
    }


def replay(scheduler: Any) -> None:
    """Bring a scheduler with its given options to where it stands now, by as many steps as it has made.

    A scheduler that follows a metric cannot be brought there: its schedule begins again.
    """
    # Counted first: loading the given state sets the counter back.
    count = _steps(scheduler)
    optimizer = scheduler.optimizer
    for group, begun in zip(optimizer.param_groups, given(optimizer), strict=False):
        for key, value in begun.items():
            put(group, key, value)
    begun = {key: value for key, value in given(scheduler).items() if key != _FUNCTIONS}
    scheduler.load_state_dict(copy.deepcopy(begun))
    if not isinstance(scheduler, ReduceLROnPlateau):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if a scheduler steps before its optimizer
            for _ in range(count):
                scheduler.step()


def _steps(scheduler: Any) -> int:
    inner = getattr(scheduler, "_schedulers", ())
    epoch = getattr(scheduler, "last_epoch", None)
    return int(epoch) if epoch is not None else _steps(inner[0]) if inner else 0


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option; a tensor stays the same object, because a compiled step reads it."""
    live = group.get(key)
    if isinstance(live, Tensor):
        live.fill_(value)
    else:
        group[key] = copy.deepcopy(value)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for key, value in options.items() for name, text in described(value, key).items()}
