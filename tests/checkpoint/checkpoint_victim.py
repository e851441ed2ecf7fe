"""Run a scenario once per hazard point and count, and be killed there.

`python checkpoint_victim.py FOLDER SCENARIO` leaves FOLDER/NUMBER/run and .../log, and prints
"NUMBER SPEC" for each kill.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from checkpoint_samples import SCENARIOS, Log, logging_to

from everstep import hazard


def die(folder: Path, act: Callable[[Path, Log], None], spec: str) -> int:
    """Act in a process of its own with a hazard armed; its wait status."""
    pid = os.fork()
    if pid == 0:
        hazard.arm(spec)
        act(folder / "run", logging_to(folder / "log"))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(root: Path, scenario: str) -> None:
    prepare, act = SCENARIOS[scenario]

    def fresh(number: int) -> Path:
        folder = root / str(number)
        (folder / "run").mkdir(parents=True)
        prepare(folder / "run")
        return folder

    traced = fresh(0)
    assert die(traced, act, f"trace:{traced / 'trace'}") == 0
    points = Counter((traced / "trace").read_text().split())
    specs = [f"kill:{point}:{n}" for point, count in points.items() for n in range(1, count + 1)]
    for number, spec in enumerate(specs, 1):
        assert die(fresh(number), act, spec) == signal.SIGKILL
        print(number, spec)


main(Path(sys.argv[1]), sys.argv[2])
