"""`python fuzz_child.py RUN TARGET SEED FIRST COUNT`: hand hostile inputs to readers, within limits.

Prints one JSON object: how many inputs were read, how many ended in a value, and what went wrong.
An input follows from seed, target and number alone: to repeat number 17, give FIRST 17 and COUNT 1.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

ROOM = 1 << 29
"""Bytes of address space that all inputs of a process may take, beside those of the imports."""
SECONDS = 60.0
"""Seconds of the processor for one input: YAML of a thousand levels takes three, on a quick machine."""
MOST = 5
"""Most faults that are told."""

FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
ACTS: list[str] = []
"""What readers did that no file must make them do."""


def hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook of this process."""
    if event in FORBIDDEN:
        ACTS.append(f"{event} {arguments!r:.100}")


def limit_memory() -> None:
    """Let this process take `ROOM` bytes beside those that it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))


def one_input(target: Any, data: bytes) -> tuple[bool, str]:
    """Read an input; whether it ended in a value, and what is wrong with how that went, or ""."""
    begun, left, is_value = time.process_time(), "", False
    ACTS.clear()
    try:
        is_value = target.read(data) is not False
    except target.may:
        pass
    except BaseException as error:
        left = "".join(traceback.format_exception(error)[-3:])
    took = time.process_time() - begun
    if ACTS or took > SECONDS:
        return False, "; ".join(ACTS) or f"it took {took:.1f} s"
    return is_value, left


def main(run: Path, name: str, seed: str, first: int, count: int) -> dict[str, Any]:
    from fuzz_targets import Place, targets

    place = Place(run)
    target = targets(place)[name]
    for number in range(30):  # imports what the readers import
        one_input(target, target.make(Random(f"{seed}/{name}/warm {number}")))
    place.restore()
    limit_memory()
    sys.addaudithook(hear)
    faults: list[str] = []
    done = values = 0
    for number in range(first, first + count):
        data = target.make(Random(f"{seed}/{name}/{number}"))
        is_value, told = one_input(target, data)
        if told:
            faults.append(f"input {number} ({data[:200]!r}, {len(data)} bytes): {told}")
        done, values = done + 1, values + is_value
        if len(faults) == MOST:
            break
    return {"done": done, "values": values, "faults": faults}


if __name__ == "__main__":
    arguments = sys.argv[1:]
    print(json.dumps(main(Path(arguments[0]), *arguments[1:3], *map(int, arguments[3:5]))))
