"""Random state of the global generators, Python's, NumPy's and each framework's, as a tree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everstep import backends
from everstep.backends.python import python_state, set_python_state


def capture() -> dict[str, Any]:
    """Return the global random state: {"python": ..., "numpy": ..., and each other framework in use}."""
    tree = {"python": python_state(random)}
    for backend in backends.active():
        tree[backend.name] = backend.random_state()
    return tree


def restore(tree: dict[str, Any]) -> None:
    """Restore what `capture` returned; a framework that is not imported yet is imported for this."""
    set_python_state(random, tree["python"])
    for name, state in tree.items():
        if name != "python":
            backends.get(name).set_random_state(state)


def seed_all(seed: int) -> None:
    """Seed the global generators of Python and of each framework in use."""
    random.seed(seed)
    for backend in backends.active():
        backend.seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the global random state after the block, whatever happens inside."""
    before = capture()
    try:
        yield
    finally:
        restore(before)
