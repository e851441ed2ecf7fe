"""Random state of Python's generators as a tree, and the comparison of two random states."""

from __future__ import annotations

from typing import Any

import numpy as np

from everstep.errors import RestoreError


def python_state(source: Any) -> dict[str, Any]:
    """Return the state of Python's generator (the module, or a `random.Random`), 625 words as an array."""
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


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of a generator, Python's or a framework's, are equal."""
    if isinstance(a, dict):
        return all(same_state(value, b[key]) for key, value in a.items())
    return bool(np.array_equal(a, b))
