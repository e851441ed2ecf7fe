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

_FREE = {"param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a group that are not compared: how (not what) the optimizer computes."""
_FUNCTIONS = "functions"
"""Key of a scheduler's functions, as strings, in its given state; torch's own state lacks them."""
_given: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Given options by object: an optimizer's as "0.lr" (of group 0); a scheduler's state and functions."""
_left: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Options by object as the last loop left them."""
_texts: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
"""Given options by object as strings, made once, because each save asks for them."""


def enter(obj: Optimizer | LRScheduler) -> None:
    """Note the given options; called when a loop is entered."""
    obj = _itself(obj)
    before, left, live = _given.get(obj), _left.get(obj), _live(obj)
    if before is None:
        before = live
    elif left is not None:  # what is as the last loop left it was not given since
        kept = {k for k in before.keys() & left.keys() & live.keys() if _alike(left[k], live[k])}
        before = {key: before[key] if key in kept else value for key, value in live.items()}
    _given[obj] = before
    _texts[obj] = _of_optimizer(before) if isinstance(obj, Optimizer) else _of_scheduler(obj, before)


def leave(obj: Optimizer | LRScheduler) -> None:
    """Note the options as made by training, not given; called when a loop is left."""
    _left[_itself(obj)] = _live(_itself(obj))


def told(obj: Optimizer | LRScheduler) -> dict[str, str]:
    """Return the given options as strings; in an optimizer with several groups they are named "1.lr"."""
    _require_entered(obj)
    return _texts[_itself(obj)]


def use(optimizer: Optimizer, name: str) -> None:
    """Use an option of an optimizer as the program gave it."""
    index, _, key = name.rpartition(".")
    group = optimizer.param_groups[int(index or 0)]
    if key == "lr" and "initial_lr" in group:
        key = "initial_lr"
    _require_entered(optimizer)
    given = _given[_itself(optimizer)]
    if (name := f"{int(index or 0)}.{key}") in given:
        _put(group, key, given[name])


def replay(scheduler: Any) -> None:
    """Bring a scheduler with its given options to where it stands now, by as many steps as it has made.

    A scheduler that follows a metric cannot be brought there: its schedule begins again.
    """
    # Counted first: loading the given state sets the counter back.
    count, optimizer = _steps(scheduler), scheduler.optimizer
    _require_entered(optimizer)
    for name, value in _given[_itself(optimizer)].items():
        index, _, key = name.partition(".")
        if int(index) < len(optimizer.param_groups):
            _put(optimizer.param_groups[int(index)], key, value)
    begun = {key: value for key, value in _given[scheduler].items() if key != _FUNCTIONS}
    scheduler.load_state_dict(copy.deepcopy(begun))
    if not isinstance(scheduler, ReduceLROnPlateau):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if a scheduler steps before its optimizer
            for _ in range(count):
                scheduler.step()


def _require_entered(obj: Optimizer | LRScheduler) -> None:
    if _itself(obj) not in _given:
        enter(obj)


def _itself(obj: Optimizer | LRScheduler) -> Optimizer | LRScheduler:
    """Return the innermost optimizer of a wrapper: a scheduler may hold any of the wrappers."""
    return innermost(obj) if isinstance(obj, Optimizer) else obj


def _live(obj: Optimizer | LRScheduler) -> dict[str, Any]:
    if isinstance(obj, Optimizer):
        groups = enumerate(obj.param_groups)
        options = {f"{i}.{key}": v for i, group in groups for key, v in group.items() if key != "params"}
        return copy.deepcopy(options)
    return {**copy.deepcopy(obj.state_dict()), _FUNCTIONS: _functions(obj)}


def _alike(a: Any, b: Any) -> bool:
    return described(a, "") == described(b, "")


def _of_optimizer(given: Mapping[str, Any]) -> dict[str, str]:
    """Return options as strings; the rate is that with which its schedule begins."""
    several, texts = any(name.startswith("1.") for name in given), dict[str, str]()
    for name, value in given.items():
        index, _, key = name.partition(".")
        if key == "lr":
            value = given.get(f"{index}.initial_lr", value)
        if key not in _FREE:
            texts |= described(value, name if several else key)
    return texts


def _of_scheduler(scheduler: Any, state: Mapping[str, Any]) -> dict[str, str]:
    asked = _asked(scheduler)
    texts = described(type(scheduler).__qualname__, "class")
    for key, value in state.items():
        if key.lstrip("_") in asked or key == "base_lrs":
            texts |= described(value, key)
    inner = zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    return {**texts, **state.get(_FUNCTIONS, {})} | {
        f"{index}.{name}": text
        for index, each in enumerate(inner)
        for name, text in _of_scheduler(*each).items()
    }


def _functions(scheduler: Any) -> dict[str, str]:
    """Return the functions given to a scheduler's constructor, or to an inner one's, as strings."""
    asked, texts = tuple(_asked(scheduler)), dict[str, str]()
    for name, value in vars(scheduler).items():
        held = value if isinstance(value, list | tuple) else [value]
        if name.lstrip("_").startswith(asked) and any(map(callable, held)):
            texts |= described(value, name)
    for index, each in enumerate(getattr(scheduler, "_schedulers", ())):
        texts |= {f"{index}.{name}": text for name, text in _functions(each).items()}
    return texts


def _asked(scheduler: Any) -> set[str]:
    return inspect.signature(type(scheduler).__init__).parameters.keys() - {"self", "optimizer", "last_epoch"}


def _steps(scheduler: Any) -> int:
    inner = getattr(scheduler, "_schedulers", ())
    epoch = getattr(scheduler, "last_epoch", None)
    return int(epoch) if epoch is not None else _steps(inner[0]) if inner else 0


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option; a tensor stays the same object, because a compiled step reads it."""
    live = group.get(key)
    if isinstance(live, Tensor):
        live.fill_(value)
    else:
        group[key] = copy.deepcopy(value)
