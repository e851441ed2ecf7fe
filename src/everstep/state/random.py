"""Random state: Python's, NumPy's and each framework's global generators as one tree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from everstep import backends
from everstep.errors import RestoreError


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


@contextmanager
def isolated() -> Iterator[None]:
    """Whatever happens inside leaves the global random state as it was."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


def python_state(source: Any) -> dict[str, Any]:
    """The state of Python's generator (the module, or a `random.Random`), its 625 words as an array."""
    version, words, gauss = source.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def set_python_state(target: Any, tree: dict[str, Any]) -> None:
    """Restore what `python_state` returned."""
    if tree["version"] != 3:
        raise RestoreError(
            f"Python's random state is saved in version {tree['version']}, this Python has 3: "
            "resume with the Python that wrote it"
        )
    target.setstate((3, tuple(tree["words"].tolist()), tree["gauss"]))
