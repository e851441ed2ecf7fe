"""Parts of each step of a replay: digests of what goes into a step, and of what comes out, in their order.

Before a step: the entries of the state, gradients that wait for an update, the batch, random state.  In the
step, where torch is used: what models are given, their weights, gradients and the optimizer just before an
update.  Its metrics.  After it: random state, the entries of the state, gradients that wait for an update.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from everstep.contracts.services import Boundary, Moment, RunView, Service, Stage
from everstep.errors import StateError
from everstep.schedule import Every
from everstep.state import Encoded, capture, encode, leaves

FORWARDS = 4
"""Number of forward passes of a model in a step that are told apart; later ones are left out."""


class StepParts(Service):
    """Tells the parts of the steps from `first` on.

    Args:
        first: number of the first step.
        values: number of a step whose arrays are told, too; 0: none.
        objects: the live objects of the state, by name.
        save: returns the branches `user` (the entries of the state as trees, by name) and `gradients`.
        tell: called with (step, {part: digest}, {part: (type, bytes)}) after each step; parts of a step's
            inside are in the order in which they happened.
    """

    stage = Stage.REPORT
    moments = frozenset({Moment.BEFORE_STEP, Moment.METRICS_COLLECTED, Moment.AFTER_STEP})
    window = "none"
    every_rank = True

    def __init__(
        self,
        first: int,
        values: int,
        objects: Mapping[str, Any],
        save: Callable[[], Mapping[str, Any]],
        tell: Callable[[int, dict[str, str], dict[str, tuple[str, bytes]]], None],
    ) -> None:
        super().__init__("replay parts", Every(steps=1))
        self._first, self._values = first, values
        self._objects, self._save, self._tell = objects, save, tell
        self._open_step = 0
        self._times: Counter[str] = Counter()
        self._parts: dict[str, str] = {}
        self._values_told: dict[str, tuple[str, bytes]] = {}
        self._hooks: Any = None

    def open(self, run: RunView) -> None:
        if "torch" in sys.modules:
            hooks = importlib.import_module("everstep.backends.torch.step_hooks")
            self._hooks = hooks.TorchStepHooks(self._objects, self._inside)

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    def run(self, boundary: Boundary) -> None:
        if boundary.moment is Moment.BEFORE_STEP:
            if boundary.step + 1 >= self._first:
                self._begin(boundary)
        elif boundary.moment is Moment.METRICS_COLLECTED:
            for name, value in boundary.payload.items() if self._open_step else ():
                self._take("loss", {name: np.array([value]) if isinstance(value, float) else value})
        elif self._open_step:
            self._end()

    def _begin(self, boundary: Boundary) -> None:
        self._open_step = boundary.step + 1
        self._parts, self._values_told, self._times = {}, {}, Counter()
        self._state("before")
        self._take("data", {"batch": boundary.payload})
        self._take("random before", capture())

    def _inside(self, kind: str, name: str, tree: Any) -> None:
        """Take a part that a hook has seen; of several of a kind each has its number."""
        if not self._open_step:
            return
        self._times[f"{kind}/{name}"] += 1
        time = self._times[f"{kind}/{name}"]
        if time <= FORWARDS:
            self._take(f"{kind} inside", {str(time): {name: tree}})

    def _end(self) -> None:
        self._take("random after", capture())
        self._state("after")
        self._tell(self._open_step, self._parts, self._values_told)
        self._open_step = 0

    def _state(self, when: str) -> None:
        saved = self._save()
        for name, tree in saved["user"].items():
            self._take(f"{_kind(tree)} {when}", {name: tree})
        for backend, tree in saved["gradients"].items():
            self._take(f"gradient {when}", {backend: tree.get("grad", {})})

    def _take(self, place: str, tree: dict[str, Any]) -> None:
        """Take the leaves of a tree; what cannot be encoded counts by its type alone."""
        try:
            encoded = encode(tree)
        except StateError:
            for name, part in tree.items():
                self._parts[f"{place}/{name}"] = type(part).__qualname__
            return
        for path, data in leaves(encoded):
            self._parts[f"{place}/{path}"] = f"{xxhash.xxh3_64_intdigest(data):016x}"
        if self._open_step == self._values:
            self._values_told |= {f"{place}/{path}": value for path, value in _values(encoded)}


def _values(encoded: Encoded) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """Yield the path of each leaf, safetensors' name of its type ("" where it is not an array), its bytes."""
    for path, data in leaves(encoded):
        array = encoded.arrays.get(path)
        yield path, ("" if array is None else array.dtype, bytes(data))


def _kind(tree: Any) -> str:
    if isinstance(tree, Mapping) and tree.keys() >= {"state", "param_groups"}:
        return "optimizer"
    try:
        return "weights" if encode(tree).arrays else "state"
    except StateError:
        return "state"
