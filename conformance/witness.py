"""What a program under judgement writes: a line of JSON per step, and digests at its end.

The program needs this file only for convenience, and may copy it: it imports the standard library alone.

    {"about": {"lightning": "2.6.6"}}                            once, if it likes: versions
    {"step": 17, "samples": [3, 44, 12], "loss": "3fe62e42fefa39ef"}     after each step that it has executed
    {"end": {"weights/0.bias": "5f1c...", "optimizer/0": "..."}}         when all steps are done

Steps count from 1 and go on over starts, as the program's library counts them.  `samples` are numbers of
samples, in the order of the batch.  `loss` is the loss as a big-endian double, in hex: all its bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Any

TRACE = "EVERSTEP_CONFORMANCE"
"""Environment variable with the path of the file; without it, nothing is written."""


class Witness:
    """Writes the lines.  Each is handed to the kernel whole, at once: SIGKILL loses none.

    Args:
        versions: versions of the libraries by name, for the score.
    """

    def __init__(self, **versions: str) -> None:
        path = os.environ.get(TRACE)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) if path else None
        if versions:
            self._write({"about": versions})

    def step(self, number: int, samples: Iterable[int], loss: float) -> None:
        """Tell of a step that is executed: its number from 1, the numbers of its samples, its loss."""
        bits = struct.pack(">d", float(loss)).hex()
        self._write({"step": int(number), "samples": [int(each) for each in samples], "loss": bits})

    def end(self, **tensors: Mapping[str, Any]) -> None:
        """Tell that all is trained, with a digest per tensor: `end(weights=model.state_dict())`.

        Values are arrays or tensors of whatever library, as far as NumPy can read them, or numbers.
        """
        found = {
            f"{group}/{name}": digest(value)
            for group, named in tensors.items()
            for name, value in named.items()
        }
        self._write({"end": found})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            os.write(self._file, json.dumps(line).encode() + b"\n")


def digest(value: Any) -> str:
    """Digest of all bits of an array, a tensor or a number."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if hasattr(value, "tobytes"):
        return hashlib.sha256(f"{value.dtype} {value.shape} ".encode() + value.tobytes()).hexdigest()[:32]
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
