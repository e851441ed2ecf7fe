"""Memory that the machine, or the group of processes to which this one is limited, has left."""

from __future__ import annotations

import re
from pathlib import Path

SMALL = 256 << 20
"""Bytes up to which a copy is not worth a word."""


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process can still take without swapping; None if nobody says.

    The smallest counts of: what Linux estimates as available; and for the cgroup of this process and those
    above it (version 2, or 1) the limit less what is in use and cannot be dropped.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.M)
    amounts = [int(available[1]) << 10] if available else []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # in a container the path may be that of the host, and the group itself lies at the top
        group = top.joinpath(*Path(path.lstrip("/")).parts)
        for folder in {top, *(each for each in (group, *group.parents) if each.is_relative_to(top))}:
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            if most.isdigit() and now.isdigit():  # "max" is no limit
                # files in memory that nobody has used lately are dropped
                idle = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.M)
                amounts.append(max(0, int(most) - int(now) + (int(idle[1]) if idle else 0)))
    return min(amounts, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or another version of cgroups
        return ""


def too_large(needed: int, left: int | None) -> str | None:
    """Return a sentence where a copy of the state does not fit in memory; None where it fits."""
    if left is None or needed <= max(left, SMALL):
        return None
    new, free = (f"{count / (1 << 30):.1f} GiB" for count in (needed, left))
    return (
        f"saves copy the state, and {new} of that copy are still to come, where {free} of memory are left: "
        "the process may be killed for it; Checkpoints(copy=False) writes the state from where it lies, "
        "while training waits"
    )
