"""The user's part of the state tree: named entries, their gradients, their updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from operator import getitem
from typing import Any

from everstep import backends
from everstep.arguments import valid_name
from everstep.contracts.services import SetValue
from everstep.contracts.state import BASE, Entry, Mismatch, Region, Regions, UpdateCounter
from everstep.errors import ConfigError, RestoreError, StateError, nearest, some
from everstep.redaction import redacted
from everstep.state import PerRank, Slot, array_name, array_paths, decode, encode, make_entry, undeclared

_ATTRIBUTES = "attributes"
"""Key of the task's attributes in `wall`."""


class UserState:
    """The objects that the user passed as `state=`."""

    def __init__(self, state: Mapping[str, Any] | Sequence[tuple[str, Any]] | None) -> None:
        objects: dict[str, Any] = {}
        for name, value in _named_pairs(state):
            if valid_name("state", name) in objects:
                raise ConfigError(f"two state entries are named {name!r}; give each its own name")
            objects[name] = value
        per_rank = {name: value for name, value in objects.items() if isinstance(value, PerRank)}
        self.per_rank = frozenset(per_rank)
        """Names of the entries that are each rank's own."""
        self.merges = {name: each.merge for name, each in per_rank.items() if each.merge is not None}
        """Functions that merge them for another number of ranks, by name."""
        self.objects: dict[str, Any] = undeclared(objects)
        """Object by name, bare also where it was declared by `PerRank`."""
        values = objects | {name: each.value for name, each in per_rank.items()}
        self.entries: dict[str, Entry] = {name: make_entry(name, value) for name, value in values.items()}
        every = dict(_all_entries(self.entries.items()))
        for entry in every.values():
            entry.relate(every)
        self.counters: dict[str, UpdateCounter] = {}
        """They count the updates of the optimizers, by the name of the framework."""
        self._guarded: tuple[list[str], frozenset[str]] = ([], frozenset())
        """Names of all arrays when `guarded` last looked, and its answer."""
        self._updates = 0
        self.tainted = False
        """Whether a guard has found the state bad, so that it is not saved."""
        self.task: Any = None
        """The task whose steps change the state; None where the program has steps of its own."""
        self._attributes: Entry | None = None
        """Entry of the task's own attributes."""
        self._shared: Collection[tuple[str, str]] | None = None
        """Pairs of entries, or parameters, that share an array; None until the look at the first step."""

    def set_task(self, task: Any, *, saved: bool) -> None:
        """Name the task of the state, before it is opened; `saved`: its own attributes are saved, too."""
        self.task = task
        attributes = (each.attributes(task, self.objects) for each in backends.active() if saved)
        self._attributes = next((entry for entry in attributes if entry is not None), None)

    @property
    def replicated(self) -> dict[str, Any]:
        """The objects that are the same on all ranks, by name."""
        return {name: value for name, value in self.objects.items() if name not in self.per_rank}

    def rank_paths(self) -> list[tuple[str, ...]]:
        """List the paths of what is a rank's own: whole entries, and keys of others."""
        entries = [("user", name) for name in self.per_rank]
        keys = [
            ("user", name, key)
            for name, entry in self.entries.items()
            for key in entry.rank_keys
            if name not in self.per_rank
        ]
        # in an open window each rank has the sum of its own gradients, until they are averaged
        return [*entries, *keys, ("gradients",)]

    def describe(self) -> dict[str, str]:
        """Describe each entry by its class, or as each rank's own: equal on all ranks of one program."""
        return {
            name: "PerRank"
            if name in self.per_rank
            else f"{type(value).__module__}.{type(value).__qualname__}"
            for name, value in self.objects.items()
        }

    def open(self, stack: ExitStack, run: str | None = None) -> None:
        """Start counting updates; the hooks are removed when `stack` closes.  `run`: id, if it is trained."""
        self._expected = {name: each.expects() for name, each in self.entries.items()}
        own = [] if self._attributes is None else [self._attributes]
        for entry in (*(part for name in self.entries for _, part in self._parts(name)), *own):
            entry.enter(run)
            stack.callback(entry.leave)
        for backend in backends.active():
            counter = backend.update_counter(self.objects)
            if counter is not None:
                self.counters[backend.name] = counter
                stack.callback(counter.close)
                counter.outside.watch(self.task, saved=self._attributes is not None)

    def growth_warnings(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yield a warning of each entry with other parts than at the start: a resume would refuse it."""
        for name, expects in list(self._expected.items()):
            if name in saved and any(differing := expects(saved[name])):
                del self._expected[name]
                others = some([*differing.unexpected, *differing.missing, *differing.reshaped])
                yield (
                    f"state entry {name!r}: its parts are not those that it had at the start: {others}; a "
                    f"resume makes the object without them and is refused: {self.entries[name].on_growth}"
                )

    def sharing_warnings(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a warning of each two entries, or parameters of one, that have come to share an array.

        What shares one at the first call is known.
        """
        holders: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        shared: dict[tuple[str, str], str] = {}
        for name, tree in saved.items():
            entry = self.entries[name]
            for path in array_paths(tree):
                array = reduce(getitem, path, tree)
                backend = backends.of(array)
                place = None if backend is None else backend.facts(array).place
                other, first = (name, path) if place is None else holders.setdefault(place, (name, path))
                if other != name:
                    shared.setdefault((other, name), f", {array_name((name, *path))}")
                elif first != path and entry.copies and entry.guarded(first) and entry.guarded(path):
                    shared[array_name((name, *first)), array_name((name, *path))] = ""
        known = shared.keys() if self._shared is None else self._shared
        self._shared = known | shared.keys()
        return [
            f"state entries {other!r} and {name!r} have come to share an array{where}: a resume gives one to "
            "each, so that a change of one is no longer a change of the other; "
            + (
                "hand over a copy, as in copy.deepcopy(first.state_dict()) (docs/guide/exactness.md)"
                if where
                else "tie parameters before the loop opens"
            )
            for (other, name), where in shared.items()
            if (other, name) not in known
        ]

    @property
    def updates(self) -> int:
        return self._updates + sum(counter.updates for counter in self.counters.values())

    def update_digest(self) -> int | None:
        """Digest a small parameter that the optimizers step; None without one in host memory."""
        return next((d for c in self.counters.values() if (d := c.digest()) is not None), None)

    def require_whole(self) -> None:
        """Refuse a state whose optimizers step what it does not save."""
        user = {name: _save_entry(name, entry) for name, entry in self.entries.items()}
        unsaved = [text for counter in self.counters.values() for text in counter.unsaved(user)]
        if unsaved:
            raise StateError(
                f"the state does not save what its optimizers step: {some(unsaved)}; add the model they "
                "belong to, as in state={'model': model, 'optimizer': optimizer}"
            )
        unscheduled = [name for counter in self.counters.values() for name in counter.unscheduled()]
        if unscheduled:
            raise StateError(
                f"a scheduler was made for the learning rate of {', '.join(map(repr, unscheduled))}, and the "
                "state does not save it, so a resume would restart its schedule; add it, as in "
                "state={..., 'scheduler': scheduler}, or make the optimizer without one"
            )

    def save(self) -> dict[str, Any]:
        """Return the branches `user`, `gradients` (of an open accumulation window), and a part of `wall`."""
        gradients = {name: counter.gradients() for name, counter in self.counters.items()}
        return {
            "user": {name: _save_entry(name, entry) for name, entry in self.entries.items()},
            "gradients": {name: tree for name, tree in gradients.items() if tree is not None},
            "wall": {} if self._attributes is None else {_ATTRIBUTES: self._attributes.save()},
        }

    def prove(self) -> Callable[[], None] | None:
        """Return a function that tries what the last `save` claims, see `Entry.proof`; None for no claims."""
        parts = ((name, part) for name in self.entries for _, part in self._parts(name))
        proofs = [(name, proof) for name, part in parts if (proof := part.proof())]

        def prove() -> None:
            for name, proof in proofs:
                try:
                    proof()
                except StateError as error:
                    raise StateError(f"state entry {name!r}: {error}") from None

        return prove if proofs else None

    def regions(self) -> Regions:
        """Return the function that tells which region of a saved array of the state this process holds."""
        region_by_name: dict[str, Region] = {}
        for name, entry in self.entries.items():
            for path, array in _layouts(entry, ("user", name)):
                home = backends.of(array)
                region = None if home is None else home.region(array)
                if region is not None and name in self.per_rank:
                    raise ConfigError(
                        f"state entry {name!r} is each rank's own (PerRank), and the ranks hold it together "
                        "(it is sharded): leave out PerRank"
                    )
                if region is not None:
                    region_by_name[array_name(path)] = region

        def region_of(name: str, shape: tuple[int, ...]) -> Region | None:
            # state of an optimizer lies below the place of its parameter, and may have another shape
            region = region_by_name.get(name) or region_by_name.get(name.rpartition("/")[0])
            return region if region is not None and region.whole == shape else None

        return region_of

    def guarded(self, user: Mapping[str, Any], arrays: Iterable[str]) -> frozenset[str]:
        """Names of the arrays of a saved `user` branch that must be finite."""
        # the branch is walked only where the names of all arrays have changed
        names = list(arrays)
        if names != self._guarded[0]:
            guarded_names = frozenset(
                array_name(("user", name, *path))
                for name, tree in user.items()
                for path in array_paths(tree)
                if self.entries[name].guarded(path)
            )
            self._guarded = (names, guarded_names)
        return self._guarded[1]

    def check(self, user: Mapping[str, Any], where: str) -> None:
        mismatch = Mismatch(
            [name for name in self.entries if name not in user],
            [name for name in user if name not in self.entries],
            [],
        )
        for name, entry in self.entries.items():
            if name in user:
                with _about(name):
                    compared = entry.check(user[name])
                for problems, entry_problems in zip(mismatch, compared, strict=True):
                    problems += [f"{name}/{text}" for text in entry_problems]
        if any(mismatch):
            names, renamed = (*mismatch.missing, *mismatch.unexpected), "..."
            if [*map(len, mismatch)] == [1, 1, 0] and names[0] in self.entries and names[1] in user:
                renamed = f"..., rename={{{names[1]!r}: {names[0]!r}}}"
            raise RestoreError(
                f"{where} does not fit the state of this program; make the program as it was, or begin a new "
                f"run in another directory, with parts of it by init_from=InitFrom({renamed})"
                f"{base_hint(user, mismatch.reshaped, mismatch.missing)}",
                **mismatch._asdict(),
            )

    def amended(self, user: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved `user` branch with this state's entries: those that it lacks are as they are now."""
        live = {name: _save_entry(name, each) for name, each in self.entries.items() if name not in user}
        return {**{name: user[name] for name in self.entries if name in user}, **decode(encode(live))}

    def load(self, tree: Mapping[str, Any], updates: int) -> None:
        self.load_user(tree["user"])
        if self._attributes is not None:
            self._attributes.load(tree.get("wall", {}).get(_ATTRIBUTES, {}))
        # watches have counted since the loop was entered: their sum must begin at the checkpoint's
        self._updates = updates - sum(counter.updates for counter in self.counters.values())
        for name, counter in self.counters.items():
            counter.load_gradients(tree["gradients"].get(name))

    def load_user(self, user: Mapping[str, Any], part: Collection[str] | None = None) -> None:
        """Load each entry, or each of `part`, from its saved tree, in the order of the user's list."""
        for name, entry in self.entries.items():
            if part is None or name in part:
                with _about(name):
                    entry.load(user[name])

    def load_or_put_back(self, user: Mapping[str, Any], *, is_read_late: bool) -> None:
        """Load as `load_user`; if an entry raises, put all back as they were.

        Entries that may refuse are loaded first, and only they take memory for a copy.  Models and tensors
        that torch's own code alone loads from checked arrays come last, when only memory can fail.

        `is_read_late`: whether arrays are read, and may turn out to be damaged, as they are loaded.  Then all
        entries are copied.
        """
        refusing = [name for name, each in self.entries.items() if is_read_late or each.may_refuse]
        copies = encode({name: _save_entry(name, self.entries[name]) for name in refusing})
        try:
            self.load_user(user, refusing)
            self.load_user(user, self.entries.keys() - refusing)
        except Exception as error:
            for name, tree in decode(copies).items():
                try:
                    self.entries[name].load(tree)
                except Exception as again:
                    error.add_note(
                        f"state entry {name!r} could not be put back: {type(again).__name__}: {again}"
                    )
            raise

    def require_entries(self, what: str, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.entries:
                raise ConfigError(
                    f"{what} names {name!r}, which is not in the state; {nearest(name, self.entries)}"
                )

    def random_state(self) -> dict[str, Any]:
        return {path: entry.save() for path, entry in _all_entries(self.entries.items()) if entry.is_random}

    def set_random_state(self, saved: Mapping[str, Any]) -> None:
        for path, entry in _all_entries(self.entries.items()):
            if entry.is_random and path in saved:
                entry.load(saved[path])

    def options(self) -> dict[str, dict[str, str]]:
        """Return `Entry.options` by entry, where there are some: how the program made the object."""
        comparable = dict[str, dict[str, str]]()
        for name in self.entries:
            for place, part in self._parts(name):
                for option, text in part.options().items():
                    comparable.setdefault(name, {})[f"{place}{option}"] = text
        shown: dict[str, dict[str, str]] = redacted(comparable)
        return shown

    def in_schedule(self, name: str, option: str) -> bool:
        """Whether an option of an entry belongs to a schedule, see `Entry.in_schedule`."""
        parts = [(place, part) for place, part in self._parts(name) if option.startswith(place)]
        return any(part.in_schedule(option.removeprefix(place)) for place, part in parts)

    def _parts(self, name: str) -> Iterator[tuple[str, Entry]]:
        """Yield an entry, and those inside of it, with the beginning of the names of its options."""
        yield "", self.entries[name]
        for path, part in _all_entries(self.entries[name].inner()):
            yield f"{path}/", part

    def exact_on_any_ranks(self) -> bool:
        """Whether steps have the same bits on any number of ranks, as far as the backends know."""
        is_exact = any(backend.exact_on_any_ranks(self.objects) for backend in backends.active())
        return is_exact and not self.per_rank

    def use_options(self, changed: Mapping[str, Collection[str]]) -> None:
        """Use these options, by entry, as the program gave them; called after `load`."""
        for name, options in changed.items():
            for place, part in self._parts(name):
                part.use_options([each.removeprefix(place) for each in options if each.startswith(place)])

    def numbers(self, target: str) -> list[tuple[Any, Callable[[float], object]]]:
        """List the numbers that a target of `SetValue` names, one per group, each with its setter."""
        name, _, option = target.partition(".")
        if name not in self.objects:
            raise ConfigError(
                f"no state entry {name!r} for SetValue({target!r}); {nearest(name, self.objects)}"
            )
        obj = self.objects[name]
        if isinstance(obj, Slot) and not option:
            places: list[Any] = [{option: obj.value}]
        else:
            places = getattr(obj, "param_groups", None) or [obj if isinstance(obj, dict) else {}]
        setters: list[tuple[Any, Callable[[float], object]]] = []
        for place in places:
            value = place.get(option)
            fill = getattr(value, "fill_", None)  # a compiled step reads this very tensor
            if fill is None and (isinstance(value, bool) or not isinstance(value, int | float)):
                hint = nearest(option, map(str, place))
                raise ConfigError(f"state entry {name!r} has no number {option!r} to be set; {hint}")
            in_slot = isinstance(obj, Slot)
            put = partial(setattr, obj, "value") if in_slot else partial(place.__setitem__, option)
            setters.append((value, put if in_slot else fill or put))
        return setters

    def set_value(self, action: SetValue) -> list[tuple[str, float]]:
        """Set the numbers that an action names; return (name, new value) of each that has changed."""
        changed = []
        for index, (value, put) in enumerate(self.numbers(action.target)):
            new = action.applied(old := float(value))
            if new != old:
                put(new)
                changed.append((f"{action.target}.{index}" if index else action.target, new))
        return changed

    def recomputing(self, target: str) -> list[str]:
        """Descriptions of the schedulers that undo what `set_value` does to this target."""
        owner, _, option = target.partition(".")
        return [text for counter in self.counters.values() for text in counter.recomputing(owner, option)]

    @contextmanager
    def evaluation_mode(self, grad: bool) -> Iterator[None]:
        """Put the state's models in evaluation mode for the block; afterwards each flag is as before."""
        with ExitStack() as stack:
            for backend in backends.active():
                stack.enter_context(backend.evaluation_mode(self.objects, grad=grad))
            yield
        # what the evaluation changed outside the state is not the doing of a step
        for counter in self.counters.values():
            counter.outside.skip()


def base_hint(trees: Mapping[str, Any], misfits: Iterable[str], missing: Iterable[str] = ()) -> str:
    """Write the end of a sentence about weights of a base under trainable() that do not fit; or ""."""
    base = {
        f"{entry}/{name}"
        for entry, tree in trees.items()
        if isinstance(tree, Mapping)
        for name in tree.get(BASE, ())
    }
    if not base.isdisjoint(missing):
        return ". It has only what was trained: give everstep.torch.trainable(model), over the same base"
    names = sorted(base & {text.split(" ")[0] for text in misfits})
    if not names:
        return ""
    entries = ", ".join(sorted({repr(name.partition("/")[0]) for name in names}))
    return (
        f". {entries}: no checkpoint has the base under trainable() ({some(names)}): give it the same "
        'weights at each start, before the loop is entered, as by everstep.load(FILE, {"model": model}) '
        "before adapters are added"
    )


def _layouts(entry: Entry, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield from (((*place, *path), array) for path, array in entry.layouts())
    for key, inner in entry.inner():
        yield from _layouts(inner, (*place, key))


@contextmanager
def _about(name: str, done: str = "restored") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while state entry {name!r} was being {done}")
        raise


def _save_entry(name: str, entry: Entry) -> Any:
    with _about(name, "saved"):
        return entry.save()


def _all_entries(entries: Iterable[tuple[Any, Entry]]) -> Iterator[tuple[str, Entry]]:
    """Yield entries, and those inside of them, with their paths."""
    for name, entry in entries:
        yield str(name), entry
        yield from _all_entries((f"{name}/{key}", each) for key, each in entry.inner())


def _named_pairs(state: Any) -> list[tuple[Any, Any]]:
    if isinstance(state, Mapping):
        return list(state.items())
    # An object given by itself may well be iterable: a Sequential gives its layers.
    pairs = [] if state is None else list(state) if isinstance(state, Iterable) else [state]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ConfigError(
            f"state is a {type(state).__name__}, which gives no names to save its parts under; give names to "
            'objects, as in state={"model": model, "optimizer": optimizer}'
        )
    return [(name, value) for name, value in pairs]
