"""The three global random states that data code draws from: Python's, NumPy's and torch's on the CPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_state() -> dict[str, Any]:
    """The three states, as a tree that a checkpoint can hold."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.default_generator.get_state(),
    }


def set_state(state: dict[str, Any]) -> None:
    """Put back what `get_state` returned."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.default_generator.set_state(state["torch"])


def seed_all(key: int) -> None:
    """Seed the three from a 64-bit key.

    NumPy's classic seeding takes 32 bits: it gets the upper half.  torch's devices are left alone:
    `torch.manual_seed` would take 100 times as long to reach them.
    """
    random.seed(key)
    np.random.seed(key >> 32)
    torch.default_generator.manual_seed(key)
