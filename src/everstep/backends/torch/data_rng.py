"""Random state from which data code draws: the three global states, and generators of its own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from everstep.backends.numpy import set_state_of, state_of

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_GLOBAL: dict[str, Any] = {"python": random, "numpy": np.random, "torch": torch.default_generator}


def get_state() -> dict[str, Any]:
    """Return the three global states as a tree that a checkpoint can hold."""
    return {name: state_of(generator) for name, generator in _GLOBAL.items()}


def set_state(state: dict[str, Any]) -> None:
    for name, generator in _GLOBAL.items():
        set_state_of(generator, state[name])


def mark() -> tuple[object, ...]:
    """Return what any draw from the global states changes, to be compared."""
    of_numpy: Any = np.random.get_state(legacy=False)
    place = of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"], of_numpy["has_gauss"]
    return random.getstate(), place, torch.default_generator.get_state().numpy().tobytes()


def seed_all(key: int) -> None:
    """Seed the three global generators with a 64-bit key.

    NumPy's classic seeding takes 32 bits: it gets the upper half.  torch's devices are left alone:
    `torch.manual_seed` would reach them, but takes 100 times as long.
    """
    random.seed(key)
    np.random.seed(key >> 32)
    torch.default_generator.manual_seed(key)


def keyed_state(key: int) -> dict[str, Any]:
    """Return the three global states that `seed_all` makes of a 64-bit key; nothing is changed here."""
    return {name: keyed_state_of(generator, key) for name, generator in _GLOBAL.items()}


def keyed_state_of(generator: Any, key: int) -> Any:
    """Return the state, as `state_of` does, of a generator of this kind that a 64-bit key seeds."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(key).get_state()
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator)(key).state
    if generator is np.random or isinstance(generator, np.random.RandomState):
        return state_of(np.random.RandomState(key >> 32))
    return state_of(random.Random(key))


_MOST_HOLDERS, _MOST_ITEMS = 4_000, 1_000
"""Objects that are searched for generators, and items of each list: of samples there may be millions."""
_NOT_SEARCHED = (type, ModuleType, torch.nn.Module)
"""Types of what an object holds that are not searched: code, and modules, whose generators the state has."""

Places: TypeAlias = Sequence[tuple[dict[str, Any], str]]
"""Attributes of objects, by the object's `__dict__`."""


def places_of(holders: Iterable[Any]) -> Places:
    """List the attributes of some objects that are generators now, in a fixed order.

    So are those of the objects that they hold, also in lists: datasets in a dataset, random transforms.
    """
    waiting, own = deque(holders), dict[int, dict[str, Any]]()
    while waiting and len(own) < _MOST_HOLDERS:
        holder = waiting.popleft()
        if id(holder) in own or not hasattr(holder, "__dict__"):
            continue
        own[id(holder)] = attributes = vars(holder)
        for value in attributes.values():
            items = value.values() if isinstance(value, dict) else value
            parts = islice(items, _MOST_ITEMS) if isinstance(value, dict | list | tuple) else [value]
            waiting += (part for part in parts if not isinstance(part, _NOT_SEARCHED))
    return [(each, n) for each in own.values() for n, v in each.items() if isinstance(v, Generator)]


def held_at(places: Places) -> list[Generator]:
    """List the generators there now, each once: a program may put others in their places at each epoch."""
    values = [own.get(name) for own, name in places]
    return list({id(value): value for value in values if isinstance(value, Generator)}.values())


def states_of(generators: Iterable[Generator]) -> list[Any]:
    return [state_of(generator) for generator in generators]


def set_states_of(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        set_state_of(generator, state)
