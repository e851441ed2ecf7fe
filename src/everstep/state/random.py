"""Random state: Python's, NumPy's and each framework's global generators as one tree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everstep import backends
from everstep.backends.python import python_state, set_python_state


def capture() -> dict[str, Any]:
    """The global random state: {"python": ..., "numpy": ..., and each other framework in use}."""
    tree = {"python": python_state(random)}
    for backend in backends.active():
        tree[backend.name] = backend.random_state()
    return tree


def restore(tree: dict[str, Any]) -> None:
    """Put back what `capture` returned; a framework that is not imported yet is imported for it."""
    set_python_state(random, tree["python"])
    for name, state in tree.items():
        if name != "python":
            backends.get(name).set_random_state(state)


def seed_all(seed: int) -> None:
    """Seed the global generators, because the user gave a seed."""
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
