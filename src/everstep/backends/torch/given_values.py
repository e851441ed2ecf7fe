"""Values that a program gives to its objects, apart from those that training makes of them.

Both are in the same places: a scheduler changes the rate of a group, a module counts in a plain attribute.
The given value is therefore the value when a loop was entered, unless an earlier loop of the same process
left that value: a notebook makes an optimizer once, and gives it to run after run.

*Options* of optimizers and schedulers are compared at a resume; of a schedule that is not torch's, the plain
attributes that its constructor has arguments for.  *Attributes* of modules, optimizers and
tasks, which no `state_dict` has, are saved where they differ from the given value, so that a setting that the
program changes between two starts is used as given.  Saved are numbers, NumPy's too, strings, None, tensors
without a graph, NumPy arrays, lists, tuples, sets, deques and dicts (Counter, defaultdict) of those, and
generators of random numbers.
"""

from __future__ import annotations

import copy
import inspect
import marshal
import pickle
import random
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary

from everstep.backends.describe_values import described
from everstep.backends.numpy import set_state_of, state_of
from everstep.backends.torch.model_wrappers import address
from everstep.backends.torch.optimizers import innermost
from everstep.contracts.state import StateDictEntry
from everstep.contracts.tasks import Task
from everstep.errors import RestoreError

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
SCALARS = (type(None), bool, int, float, complex, str, bytes)
_OF_LAYERS = (type(None), bool, int, float, str, tuple)
"""Types of what is looked at of a layer of torch; lists of it hold modules."""
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict, Counter, defaultdict)
_LARGE = 1 << 20
"""Bytes above which an array is not copied."""
_MANY = 10_000
"""Items of a list or dict with tensors above which changes inside are not seen; another length, or another
object in its place, is seen at any size."""


def is_saveable(value: Any) -> bool:
    """Whether an attribute with this value is saved."""
    return type(value) in GENERATORS or _is_plain(value)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _LISTS:
        return all(map(_is_plain, value))
    if kind in _DICTS:
        made_by = getattr(value, "default_factory", None)
        is_known = made_by in (None, bool, int, float, str, list, tuple, dict, set)
        return is_known and all(type(key) in (str, int) and _is_plain(each) for key, each in value.items())
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is Tensor:
        odd = value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested
        return not odd and value.grad_fn is None
    if isinstance(value, np.bool_ | np.number):
        return value.dtype.char not in "gG"  # long doubles, which have other bits on other machines
    return kind in SCALARS


def arrays(tree: Any) -> list[Any]:
    """List the tensors and NumPy arrays in nested lists, sets and dicts."""
    if isinstance(tree, Tensor | np.ndarray):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, _LISTS) else ()
    return [each for item in items for each in arrays(item)]


def mark_of(value: Any, read: bool = False, same: bool = True) -> Any:
    """Mark a value, to tell later by `is_same_mark` whether it has changed.

    Tensors are known by torch's count of their changes, or with `read` by their elements.  Unless it must be
    the `same`, another tensor with equal elements counts as no change.
    """
    kind = type(value)
    if read and kind is Tensor and _is_plain(value):
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        elements = plain.reshape(-1).view(torch.uint8).numpy().data
        reference = weakref.ref(value) if same else None
        return kind, reference, xxhash.xxh3_128_digest(elements), str(value.dtype), tuple(value.shape)
    if isinstance(value, Tensor):
        return kind, weakref.ref(value), version_of(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        elements = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return kind, _digest(elements), value.dtype.str, value.shape
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if kind in GENERATORS:
        state = state_of(value)
        return kind, id(value), bytes(state.numpy()) if isinstance(state, Tensor) else pickle.dumps(state)
    if kind in _LISTS + _DICTS:
        plain = dict(value) if kind in _DICTS else [*value] if kind is deque else value
        try:
            return kind, _digest(marshal.dumps(plain, 2))  # 2: equal values give equal bytes
        except ValueError:  # with arrays, tensors or objects inside
            pass
        if len(value) > _MANY:
            return kind, id(value), len(value)
        items = [each for pair in value.items() for each in pair] if kind in _DICTS else value
        return kind, [mark_of(each, read, same) for each in items]
    return kind, value if kind in SCALARS else id(value)


def version_of(tensor: Tensor) -> int:
    """Return torch's count of a tensor's changes; 0 where there is none: of a lazy one, in inference mode."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _digest(data: bytes | memoryview) -> bytes:
    """Return few bytes as they are, and a digest of many."""
    return bytes(data) if len(data) <= _LARGE else xxhash.xxh3_128_digest(data)


def is_same_mark(a: Any, b: Any) -> bool:
    """Whether two marks are of a value that has not changed in between."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(is_same_mark, a, b))
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is b()  # both None: it was collected after the second mark was made
    # The type counts: 1 differs from 1.0 and True.
    return type(a) is type(b) and bool(a == b)


@dataclass(frozen=True)
class _GivenValue:
    """A given value.

    Attributes:
        mark: its mark.
        copy: a copy, or what stands in its place.
        source: the value itself, if it is a container or NumPy array that was copied; a mark knows a tensor.
        content: mark of its tensors' elements, if there are some.  torch's count of changes is not enough: it
            leaves out writes through `.data`, and counts what a resume has written to the base of a view.
        is_small: whether its tensors are read at each save, and not only where torch has counted a change.
    """

    mark: Any
    copy: Any
    source: Any = None
    content: Any = None
    is_small: bool = False

    @classmethod
    def of(cls, value: Any, mark: Any, copy: Any) -> _GivenValue:
        if copy is _NOT_SAVED:
            return cls(mark, copy)
        is_held = copy is not _NOT_COPIED and type(value) in (np.ndarray, *_LISTS, *_DICTS)
        sizes = [each.nbytes for each in arrays(value) if isinstance(each, Tensor)]
        content = mark_of(value, read=True) if sizes else None
        return cls(mark, copy, value if is_held else None, content, sum(sizes) <= _LARGE)

    def is_still(self, value: Any) -> bool:
        """Whether a value is the given one, unchanged."""
        if self.content is None or not self.is_small:
            is_same = is_same_mark(self.mark, mark_of(value))
            if self.content is None or is_same:
                return is_same
        return is_same_mark(self.content, mark_of(value, read=True))


_NONE_GIVEN = _GivenValue(None, None)
"""In place of the given value where the program gave none."""


class _GivenValues:
    """By owner and name: the given values, copied by `make_copy` and marked by `mark`."""

    def __init__(self, make_copy: Callable[[Any], Any], mark: Callable[[Any], Any] = mark_of) -> None:
        self._copy, self._mark = make_copy, mark
        # by identity: the hash of a metric of torchmetrics follows from what it has collected
        self._values: MutableMapping[Any, dict[str, _GivenValue]] = WeakIdKeyDictionary()
        self._left_marks: MutableMapping[Any, dict[str, Any]] = WeakIdKeyDictionary()
        """Marks of the values that the last loop left."""

    def enter(self, owner: Any, live: Mapping[Any, Any]) -> None:
        """Note the given values; called when a loop is entered."""
        before, left_marks = self._values.get(owner, {}), self._left_marks.get(owner, {})
        # what training has deleted was given, too
        gone = before.keys() - live.keys() - left_marks.keys() if owner in self._left_marks else ()
        values = {name: before[name] for name in gone}
        for name, value in live.items():
            mark = self._mark(value)
            if not (name in left_marks and is_same_mark(left_marks[name], mark)):
                values[name] = _GivenValue.of(value, mark, self._copy(value))
            elif name in before:  # or training made what has this name
                values[name] = before[name]
        self._values[owner] = values

    def leave(self, owner: Any, live: Mapping[Any, Any]) -> None:
        """Mark the present values as made by training, not given; called when a loop is left."""
        self._left_marks[owner] = {name: self._mark(value) for name, value in live.items()}

    def of(self, owner: Any) -> dict[str, _GivenValue]:
        return self._values.get(owner, {})

    def copies(self, owner: Any) -> dict[Any, Any]:
        return {name: given_value.copy for name, given_value in self.of(owner).items()}

    def made_before(self, owner: Any) -> set[str]:
        """Return the names that the last loop left and no program gave: training made these values."""
        return self._left_marks.get(owner, {}).keys() - self.of(owner).keys()

    def forget(self, owner: Any) -> None:
        """Take all present values for given at the next `enter`."""
        self._left_marks.pop(owner, None)


_OWN = {
    Module: frozenset(vars(Module())),
    Optimizer: frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "_opt_called"},
    Task: frozenset({"batch_weight", "epoch"}),
}
"""Attributes of every such object, which are saved in other places or belong to no step."""
_GENERATOR = "everstep: state of a generator"
"""First item of the pair that is saved for a generator."""
_IN_PLACE, _SHARED = "everstep: changed in place", "everstep: changed with the state"
"""First item of the pair that is saved for the given object, written to: other names may hold it, too, or a
view of it, so that it is written to at a resume, and not replaced.  The second one: it lies in the memory of
a parameter or buffer of the state.  One that did so when the program made it, and no longer at the save, is
replaced: the parameter has got another place since, and a resume writes to the first one."""
_DELETED = "everstep: deleted"
"""First item of the pair that is saved for an attribute that training has deleted."""
_NOT_SAVED, _NOT_COPIED = object(), object()
"""In place of the copy of a value that is no state, or too large."""


def _copy_of(value: Any) -> Any:
    if not is_saveable(value):
        return _NOT_SAVED
    if type(value) in GENERATORS:
        return _GENERATOR, state_of(value)
    return _NOT_COPIED if any(each.nbytes > _LARGE for each in arrays(value)) else copy.deepcopy(value)


_attributes = _GivenValues(_copy_of)
Places = Callable[[], Collection[int]]
"""Returns the addresses of the memory of all parameters and buffers of the state."""
Skip = Callable[[Any], bool]
"""Whether a value is saved in another place."""


def _skip_nothing(value: Any) -> bool:
    return False


def owners(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects with attributes: those of the program's classes, and the layers of torch.nn."""
    for path, owner in root.named_modules() if isinstance(root, Module) else [("", root)]:
        ours = any(cls.__module__.split(".")[0] not in ("torch", "builtins") for cls in type(owner).__mro__)
        if ours or is_layer(owner):
            yield path, owner


def is_layer(owner: Any) -> bool:
    return type(owner).__module__.startswith("torch.nn.modules.")


def attributes(owner: Any, skip: Skip = _skip_nothing) -> dict[str, Any]:
    """Return the attributes that its own class may have added to an object; of torch's layers settings."""
    reserved = next((names for kind, names in _OWN.items() if isinstance(owner, kind)), frozenset())
    values = {name: value for name, value in vars(owner).items() if name not in reserved and not skip(value)}
    return {k: v for k, v in values.items() if type(v) in _OF_LAYERS} if is_layer(owner) else values


def enter_attributes(root: Any, skip: Skip = _skip_nothing) -> None:
    for _, owner in owners(root):
        _attributes.enter(owner, attributes(owner, skip))


def leave_attributes(root: Any, skip: Skip = _skip_nothing) -> None:
    for _, owner in owners(root):
        _attributes.leave(owner, attributes(owner, skip))


def save_attributes(root: Any, places: Places, skip: Skip = _skip_nothing) -> dict[str, dict[str, Any]]:
    """Return the attributes that differ from their given values, by the names of modules; "" is the root."""
    places = cache(places)
    changed = {path: _changed(owner, places, skip) for path, owner in owners(root)}
    return {path: values for path, values in changed.items() if values}


def load_attributes(
    root: Any, saved: dict[str, dict[str, Any]], places: Places, skip: Skip = _skip_nothing
) -> None:
    """Undo `save_attributes`: restore the saved attributes, set all others to their given values.

    What an earlier loop of the process has added is deleted.
    """
    places = cache(places)
    for path, owner in owners(root):
        values, given_values = saved.get(path, {}), _attributes.of(owner)
        made = _attributes.made_before(owner) - values.keys()
        for name, value in attributes(owner, skip).items():
            if name in made and is_saveable(value):
                del vars(owner)[name]
        for name in _changed(owner, places, skip).keys() - values.keys() & given_values.keys():
            value = given_values[name].copy
            if value is _NOT_COPIED:
                raise RestoreError(
                    f"{type(owner).__name__}.{name} was changed by a loop of this process, and is too large "
                    "to be kept twice: make a new model, or keep it in a buffer (register_buffer)"
                )
            if value is not _NOT_SAVED:
                _restore(owner, name, value, places, in_place=True)
        for name, value in values.items():
            _restore(owner, name, value, places)


def _restore(owner: Any, name: str, saved: Any, places: Places, in_place: bool = False) -> None:
    live = vars(owner)
    if _has_tag(saved, _DELETED):
        live.pop(name, None)
    elif _has_tag(saved, _GENERATOR):
        generator = live.get(name)
        if type(generator) not in GENERATORS:
            raise RestoreError(
                f"{type(owner).__name__}.{name} was a generator when it was saved and is {generator!r:.60}: "
                "make the generator where the object is made, not in a step"
            )
        set_state_of(generator, saved[1])
    else:
        given_value, current = _attributes.of(owner).get(name, _NONE_GIVEN), live.get(name)
        restored = _restored(saved, given_value.mark, places, given_value.source, in_place=in_place)
        if isinstance(current, Tensor) and isinstance(restored, Tensor):
            restored = restored.to(current.device)
        live[name] = restored


def _changed(owner: Any, places: Places, skip: Skip) -> dict[str, Any]:
    given_values, changed = _attributes.of(owner), dict[str, Any]()
    for name, value in attributes(owner, skip).items():
        given_value = given_values.get(name, _NONE_GIVEN)
        if is_saveable(value) and not given_value.is_still(value):
            changed[name] = _tagged(value, given_value.mark, places, given_value.source)
    members = (owner._parameters, owner._buffers, owner._modules) if isinstance(owner, Module) else ()
    deleted = given_values.keys() - set[str]().union(vars(owner), *members)
    return changed | dict.fromkeys(sorted(deleted), (_DELETED, None))


def _tagged(value: Any, mark: Any, places: Places, source: Any = None) -> Any:
    """Return what is saved of an attribute; what is still the given object, written to, has a tag."""
    if type(value) in GENERATORS:
        return _GENERATOR, state_of(value)
    if type(value) is Tensor:
        is_given = _tensor_of(mark) is value
        return (_SHARED if address(value) in places() else _IN_PLACE, value) if is_given else value
    inner = _marks_inside(mark)
    saved = value
    if inner and type(value) in (list, tuple):
        saved = type(value)(_tagged(v, inner.get(i), places) for i, v in enumerate(value))
    elif inner and type(value) in _DICTS:
        saved = copy.copy(value)  # of its class, with its factory
        dict.update(saved, {k: _tagged(v, inner.get(k), places) for k, v in value.items()})
    if source is not value or type(value) in SCALARS:
        return saved
    is_shared = type(value) is np.ndarray and address(value) in places()
    return _SHARED if is_shared else _IN_PLACE, saved


def _restored(saved: Any, mark: Any, places: Places, source: Any = None, *, in_place: bool = False) -> Any:
    """Return the value of an attribute: the given object, written to, where a tag says so, else a copy.

    With `in_place` all is written to the given objects: `saved` is a copy of the given value, without tags.
    """
    is_shared = _has_tag(saved, _SHARED)
    has_tag = is_shared or _has_tag(saved, _IN_PLACE)
    value = saved[1] if has_tag else saved
    inner = _marks_inside(mark)
    if type(value) in (list, tuple):
        items = (_restored(v, inner.get(i), places, in_place=in_place) for i, v in enumerate(value))
        value = type(value)(items)
    elif type(value) in _DICTS:
        pairs = {k: _restored(v, inner.get(k), places, in_place=in_place) for k, v in value.items()}
        value = copy.copy(value)
        dict.update(value, pairs)
    else:
        value = copy.deepcopy(value)
    target = (_tensor_of(mark) if isinstance(value, Tensor) else source) if has_tag or in_place else None
    if target is None or type(target) is not type(value):
        return value
    if isinstance(target, Tensor | np.ndarray) and not is_shared and address(target) in places():
        return value
    return target if _write(target, value) else value


def _write(target: Any, value: Any) -> bool:
    """Give an object the elements of another one; return False if it cannot have them."""
    if isinstance(target, list | deque | set | dict):
        target.clear()
        getattr(target, "extend" if isinstance(target, list | deque) else "update")(value)
        return True
    is_array = isinstance(target, Tensor | np.ndarray)  # else a tuple, or a frozen set
    if not is_array or target.shape != value.shape or target.dtype != value.dtype:
        return False
    if isinstance(target, np.ndarray):
        if target.flags.writeable:
            target[...] = value
        return target.flags.writeable
    if target.is_inference():
        return False
    # of a dimension that was expanded there is one element in memory
    first = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    with torch.no_grad():
        target[first].copy_(value[first])
    return True


def _has_tag(saved: Any, tag: str) -> bool:
    return type(saved) is tuple and len(saved) == 2 and type(saved[0]) is str and saved[0] == tag


def _tensor_of(mark: Any) -> Tensor | None:
    """Return the tensor that was marked, if it is still there."""
    if isinstance(mark, tuple) and len(mark) == 3 and isinstance(mark[1], weakref.ref):
        tensor: Tensor | None = mark[1]()
        return tensor
    return None


def _marks_inside(mark: Any) -> dict[Any, Any]:
    """Return the marks of the items of a list or dict with tensors inside, by number or key."""
    if not (isinstance(mark, tuple) and len(mark) == 2 and isinstance(mark[1], list)):
        return {}
    kind, marks = mark
    if kind in _DICTS:
        return {key[1]: value for key, value in zip(marks[::2], marks[1::2], strict=True)}
    return dict(enumerate(marks))


FLAGS = _GivenValues(bool)
"""Flags of modules."""
_flag_runs: MutableMapping[Module, str] = WeakIdKeyDictionary()
"""Run that was last entered with a module."""


def enter_flags(module: Module, flags: Mapping[Any, bool], run: str) -> None:
    """Note the given flags; what another run's training has left is given to this one."""
    if _flag_runs.get(module) != run:
        FLAGS.forget(module)
    _flag_runs[module] = run
    FLAGS.enter(module, flags)


_FREE = {"param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a group that are not compared: how (not what) the optimizer computes."""
_options = _GivenValues(copy.deepcopy, partial(mark_of, read=True, same=False))
"""An optimizer's options as "0.lr" (of group 0); a scheduler's state, whose tensors may be made anew; of a
schedule that is not torch's its settings."""


_texts: MutableMapping[Any, dict[str, str]] = WeakIdKeyDictionary()
"""Given options by object as strings, made once: each save asks, and a container makes entries anew."""


class OptionsEntry(StateDictEntry):
    """Entry of an object whose options a program gives and training changes.

    In an optimizer with several groups they are named "1.lr".
    """

    def enter(self, run: str | None = None) -> None:
        _enter_options(_unwrapped(self.obj))

    def leave(self) -> None:
        owner = _unwrapped(self.obj)
        _options.leave(owner, _live_options(owner))

    def options(self) -> dict[str, str]:
        given_options(self.obj)
        return _texts[_unwrapped(self.obj)]


class SchedulerEntry(OptionsEntry):
    def in_schedule(self, option: str) -> bool:
        return not option.endswith("base_lrs")

    def use_options(self, names: Collection[str]) -> None:
        """Bring the scheduler with its given options to where it stands, by as many steps as it has made.

        One that follows a metric cannot be brought there: its schedule begins again.
        """
        if not names:
            return
        scheduler = _unwrapped(self.obj)
        # Counted first: loading the given state sets the counter back.
        count, groups = _steps(scheduler), scheduler.optimizer.param_groups
        for name, value in given_options(scheduler.optimizer).items():
            index, _, key = name.partition(".")
            if int(index) < len(groups):
                set_option(groups[int(index)], key, value)
        scheduler.load_state_dict(copy.deepcopy(given_options(scheduler)))
        if not isinstance(scheduler, ReduceLROnPlateau):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if a scheduler steps before its optimizer
                for _ in range(count):
                    scheduler.step()


def _tensors(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    items = (
        tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list | tuple) else ())
    )
    for key, item in items:
        yield from _tensors(item, (*path, key))


class ScheduleEntry(OptionsEntry):
    """Entry of a schedule that is not torch's; its `state_dict` may have its settings, as timm's have."""

    def layouts(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        yield from _tensors(self.save(), ())

    def in_schedule(self, option: str) -> bool:
        return True

    def use_options(self, names: Collection[str]) -> None:
        settings = given_options(self.obj)
        for name in {name.partition(".")[0] for name in names} & settings.keys():
            vars(self.obj)[name] = copy.deepcopy(settings[name])


def _enter_options(owner: Any) -> None:
    _options.enter(owner, _live_options(owner))
    values, is_optimizer = _options.copies(owner), isinstance(owner, Optimizer)
    _texts[owner] = _optimizer_texts(values) if is_optimizer else _scheduler_texts(owner, values)


def given_options(obj: Any) -> dict[str, Any]:
    owner = _unwrapped(obj)
    if not _options.of(owner):
        _enter_options(owner)
    return _options.copies(owner)


def _unwrapped(obj: Any) -> Any:
    """Return the innermost optimizer of a wrapper, of which a scheduler may hold any, or its scheduler."""
    if isinstance(obj, Optimizer):
        return innermost(obj)
    # a scheduler around another one has options of its own
    inner = None if isinstance(obj, LRScheduler) else getattr(obj, "scheduler", None)
    return inner if isinstance(inner, LRScheduler) else obj


def _live_options(obj: Any) -> dict[str, Any]:
    if isinstance(obj, Optimizer):
        groups = enumerate(obj.param_groups)
        return {f"{i}.{key}": v for i, group in groups for key, v in group.items() if key != "params"}
    if isinstance(obj, LRScheduler):
        return dict(obj.state_dict())
    parameters = inspect.signature(type(obj).__init__).parameters
    numbers = ((name, value) for name, value in vars(obj).items() if name.lstrip("_") in parameters)
    return {name: value for name, value in numbers if _is_plain(value) and not arrays(value)}


def _optimizer_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as strings; the rate is that with which its schedule begins."""
    several, texts = any(name.startswith("1.") for name in options), dict[str, str]()
    for name, value in options.items():
        index, _, key = name.partition(".")
        if key == "lr":
            value = options.get(f"{index}.initial_lr", value)
        if key not in _FREE:
            texts |= described(value, name if several else key)
    return texts


def _scheduler_texts(scheduler: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of a scheduler's constructor, and those of the schedulers inside, as strings."""
    arguments = inspect.signature(type(scheduler).__init__).parameters.keys()
    names = tuple(arguments - {"self", "optimizer", "last_epoch"})
    texts = described(type(scheduler).__qualname__, "class")
    for name, value in state.items():
        if name.lstrip("_") in names or name == "base_lrs":
            texts |= described(value, name)
    for name, value in vars(scheduler).items():  # functions, which torch's own state lacks
        items = value if isinstance(value, list | tuple) else [value]
        if name.lstrip("_").startswith(names) and any(map(callable, items)):
            texts |= described(value, name)
    inner = zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    for index, each in enumerate(inner):
        texts |= {f"{index}.{name}": text for name, text in _scheduler_texts(*each).items()}
    return texts


def _steps(scheduler: Any) -> int:
    inner = getattr(scheduler, "_schedulers", ())
    epoch = getattr(scheduler, "last_epoch", None)
    return int(epoch) if epoch is not None else _steps(inner[0]) if inner else 0


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option; a tensor stays the same object, because a compiled step reads it."""
    live = group.get(key)
    if isinstance(live, Tensor):
        live.fill_(value)
    else:
        group[key] = copy.deepcopy(value)
