"""Checks for authors of objects with state: that they come back to the bit, that stamps tell the truth."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from everstep.checkpoint import CheckpointName, read_checkpoint, save_apart
from everstep.contracts.state import Entry
from everstep.state import (
    Encoded,
    capture,
    decode,
    digest,
    encode,
    isolated,
    leaves,
    make_entry,
    restore,
    stamps,
)

T = TypeVar("T")


@contextmanager
def stamps_checked() -> Iterator[None]:
    """Compare, in the block, each copy that a save leaves alone with the live array; other values raise.

    A save leaves alone the copies of those chunks of a `everstep.data.RingBuffer` that nobody wrote to.  The
    comparison reads the whole memory at each save.  EVERSTEP_CHECK_STAMPS=1 does it in a whole process.
    """
    before, stamps.checking = stamps.checking, True
    try:
        yield
    finally:
        stamps.checking = before


_ROUNDS = 3
_EXTRA = "not a part of this state"


def check_stateful(make: Callable[[], T], mutate: Callable[[T], object], *, strict: bool = True) -> None:
    """Check that an object's state survives a restart, through a real checkpoint on disk.

    1. Changes by `mutate` show in the state.
    2. Saving changes nothing, and gives the same state a second time.
    3. A fresh object that loads the state then saves the same state, to the bit.
    4. From there on both objects do the same: nothing that `mutate` needs is left out of the state.
    5. A state with a missing or an additional part is refused (if the state is a dict).

    Args:
        make: makes the object as a new process would make it; called many times.
        mutate: changes the object as training does; may draw from the global random state.
        strict: False leaves out rule 5, for objects that load any state.

    Raises:
        AssertionError: says which rule is broken, and which leaves of the state differ.
    """
    with isolated(), tempfile.TemporaryDirectory() as folder:
        original = make()
        _check_mutation_shows(original, mutate)
        _check_saving_changes_nothing(make, mutate)
        saved = _through_disk(_encoded(original), Path(folder))
        again = make()
        _entry(again).load(decode(saved))
        _require_same(_encoded(again), saved, "what was restored is not what was saved")
        _check_same_future(original, again, mutate)
        if strict:
            _check_strict(make, decode(saved))


def _entry(obj: Any) -> Entry:
    return make_entry("state", obj)


def _encoded(obj: Any) -> Encoded:
    """Take a snapshot through a new entry: the state must lie in the object, not in its entry."""
    return encode(_entry(obj).save())


def _through_disk(encoded: Encoded, folder: Path) -> Encoded:
    name = CheckpointName(1)
    save_apart(
        folder,
        name,
        encoded.structure,
        encoded.arrays,
        digest=digest(encoded),
        epoch=1,
        phase="step",
        top=folder,
    )
    found = read_checkpoint(folder / str(name))
    return Encoded(found.structure, found.arrays)


def _check_mutation_shows(obj: T, mutate: Callable[[T], object]) -> None:
    before = digest(_encoded(obj))
    mutate(obj)
    assert digest(_encoded(obj)) != before, "mutate() changed nothing that the state shows"


def _check_same_future(one: T, other: T, mutate: Callable[[T], object]) -> None:
    for count in range(1, _ROUNDS + 1):
        random_state = capture()
        mutate(one)
        restore(random_state)
        mutate(other)
        where = f"after {count} more mutate() the restored object differs"
        _require_same(_encoded(other), _encoded(one), where)


def _check_saving_changes_nothing(make: Callable[[], T], mutate: Callable[[T], object]) -> None:
    random_state = capture()
    quiet, watched = make(), make()
    for obj, watching in ((quiet, False), (watched, True)):
        restore(random_state)
        for _ in range(_ROUNDS):
            if watching:
                _require_same(_encoded(obj), _encoded(obj), "saved twice in a row, the state differs")
            mutate(obj)
    _require_same(_encoded(watched), _encoded(quiet), "saving it between two mutate() changed it")


def _check_strict(make: Callable[[], Any], tree: Any) -> None:
    if not isinstance(tree, dict):
        return
    for key in tree:
        without = {name: value for name, value in tree.items() if name != key}
        _require_refused(make, without, f"a state without {key!r} is accepted without an error")
    if all(isinstance(key, str) for key in tree):
        more = {**tree, _EXTRA: 0}
        _require_refused(make, more, f"a state with an unknown part {_EXTRA!r} is accepted without an error")


def _require_refused(make: Callable[[], Any], tree: Any, broken: str) -> None:
    entry = _entry(make())
    try:
        if any(entry.check(tree)):
            return
        entry.load(tree)
    except Exception:
        return
    raise AssertionError(f"{broken}; raise in load_state_dict, or check with strict=False")


def _require_same(got: Encoded, expected: Encoded, broken: str) -> None:
    left, right = _leaves(got), _leaves(expected)
    different = [path for path in sorted(left.keys() | right.keys()) if left.get(path) != right.get(path)]
    assert not different, f"{broken}: {', '.join(different[:5])}"


def _leaves(encoded: Encoded) -> dict[str, bytes]:
    return {path: bytes(data) for path, data in leaves(encoded)}
