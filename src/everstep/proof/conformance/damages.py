"""Damage to the newest file of a run."""

from __future__ import annotations

import random
from pathlib import Path

from everstep.proof.conformance.starts import files

FLIPPED, TRUNCATED, ZEROED = (
    "newest file: a byte flipped",
    "newest file: truncated",
    "newest file: tail zeroed",
)
DAMAGES = (FLIPPED, TRUNCATED, ZEROED)

PAGE = 4096


def damage(run: Path, kind: str, rng: random.Random) -> tuple[Path, str]:
    """Damage the newest file that is nearly as large as the largest one; return it, and what was done.

    It is the bulk of the newest checkpoint, and no log that lies beside it.
    """
    found = files(run)
    least = 0.9 * max(size for size, _ in found.values())
    candidates = [(changed, path) for path, (size, changed) in found.items() if size >= least]
    path = Path(max(candidates)[1])
    content = bytearray(path.read_bytes())
    name = path.relative_to(run)
    if kind == FLIPPED:
        at = rng.randrange(len(content))
        content[at] ^= rng.randint(1, 255)
        plan = f"{name}: byte {at} of {len(content)} changed"
    elif kind == TRUNCATED:
        length = rng.randrange(len(content))
        plan = f"{name}: {length} of {len(content)} bytes left"
        del content[length:]
    else:
        at = (
            len(content) // 2
            if len(content) < 2 * PAGE
            else rng.randrange(1, len(content) // PAGE + 1) * PAGE
        )
        at = min(at, (len(content) - 1) // PAGE * PAGE) or len(content) // 2
        content[at:] = bytes(len(content) - at)
        plan = f"{name}: zeros from byte {at} of {len(content)} on"
    path.write_bytes(content)
    return path, plan
