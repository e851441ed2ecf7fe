"""Random state of the global generators, Python's, NumPy's and each framework's, as a tree."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from everstep import backends
from everstep.backends.numpy import set_state_of, state_of


def capture() -> dict[str, Any]:
    """Return the global random state: {"python": ..., "numpy": ..., and each other framework in use}."""
    return {"python": state_of(random), **{b.name: b.random_state() for b in backends.active()}}


def restore(tree: dict[str, Any]) -> None:
    """Restore what `capture` returned; a framework that is not imported yet is imported for this."""
    set_state_of(random, tree["python"])
    for name, state in tree.items():
        if name != "python":
            backends.get(name).set_random_state(state)


def portable(tree: dict[str, Any]) -> dict[str, Any]:
    """Return of what `capture` returned what another rank can have: without the devices of other ranks."""
    return {
        name: state if name == "python" else backends.get(name).portable_random(state)
        for name, state in tree.items()
    }


def seed_all(seed: int) -> None:
    """Seed the global generators of Python and of each framework in use."""
    random.seed(seed)
    for backend in backends.active():
        backend.seed(seed)


def rekey(seed: int, rank: int, step: int = 0) -> None:
    """Seed the global generators of a rank, from (seed, rank, step), so that ranks draw other numbers.

    Rank 0 keeps its generators as they are: it draws what one process draws.
    """
    if rank:
        text = json.dumps(["everstep", "rank", seed, rank, step])
        seed_all(xxhash.xxh3_64_intdigest(text.encode("ascii")))


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the global random state after the block, whatever happens inside."""
    before = capture()
    try:
        yield
    finally:
        restore(before)
