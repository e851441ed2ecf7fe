"""Kill a start at each hazard of its mirror, and see what an empty machine makes of what is left there.

`python mirror_victim.py FOLDER PLAN` reads the plan, JSON: {"mirrors": URL with {n}, "at_most": times for
each point, "scenario": "uploading" or "restoring"}.  It prints a JSON list of what went wrong, the
points, and the number of kills.  Each start is a process of its own, killed by SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirror_program import make, train

from everstep import hazard
from everstep.mirror import RunMirror
from waiting import PATIENCE


def in_a_process(act: Callable[[], Any], answer: Path, spec: str | None = None) -> int:
    """Act in a process of its own, with a hazard armed; its wait status.  What it returns is in `answer`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            hazard.arm(spec)
            answer.write_text(repr(act()))
            status = 0
        os._exit(status)
    return os.waitpid(pid, 0)[1]


def picked(points: list[str], at_most: int) -> list[str]:
    """Specs that kill at each point at its first time, near its last and, spread between, further times."""
    specs = []
    for point, count in Counter(points).items():
        last = count - count // 8  # rows are flushed by the clock: a start has a part more or less to upload
        times = sorted({1 + round(i * (last - 1) / max(1, at_most - 1)) for i in range(at_most)})
        specs += [f"kill:{point}:{n}" for n in times]
    return specs


_hand_over = RunMirror.retain_and_upload


def _uploaded(self: RunMirror, *arguments: Any, **options: Any) -> None:
    """Hand over what is committed, and wait: else a newer save takes the place of one that waits."""
    _hand_over(self, *arguments, **options)
    self._await_upload(PATIENCE)


def settled(loop: Any, step: int) -> None:
    """Go on when the save before is written and uploaded: a newer one would take its place."""
    loop._engine.saver.announce_commits(wait=True)


class Campaign:
    def __init__(self, folder: Path, mirrors: str, scenario: str) -> None:
        self._folder, self._mirrors, self._scenario = folder, mirrors, scenario
        self.wrong: list[str] = []
        self.killed = 0
        self._answer = folder / "answer"
        assert in_a_process(lambda: train(make(folder / "plain", None), settled).result(), self._answer) == 0
        self._right = self._answer.read_text()

    def run(self, at_most: int) -> list[str]:
        trace = self._folder / "trace"
        assert self._start(0, f"trace:{trace}") == 0
        points = trace.read_text().split()
        rooms: tuple[str, ...] = ("mirror.",)
        if self._scenario == "restoring":  # what is brought, until the mirror is taken over
            points = points[: points.index("mirror.contents")]
            rooms = ("mirror.", "checkpoint.")
        points = [each for each in points if each.startswith(rooms)]
        specs = picked(points, at_most)
        for number, spec in enumerate(specs, 1):
            # the last folder is made, or was there, by when rows of the journal were flushed
            allowed = [signal.SIGKILL] if spec.endswith(":1") else [signal.SIGKILL, 0]
            if (status := self._start(number, spec)) not in allowed:
                self.wrong.append(f"{spec}: not killed there, but ended with {status}")
            self.killed += status == signal.SIGKILL
            # the disk has vanished: an empty directory, and what is in the mirror
            self._must_end_right(number, "empty", spec)
        return specs

    def _start(self, number: int, spec: str) -> int:
        """Make a start that `spec` kills: of a fresh run, or of an empty machine that gets it back."""
        mirror = self._mirrors.format(n=number)
        first = self._folder / f"first-{number}"
        if self._scenario == "uploading":
            return in_a_process(lambda: train(make(first, mirror), settled), self._answer, spec)
        assert in_a_process(lambda: train(make(first, mirror, 2), settled), self._answer) == 0
        second = self._folder / f"second-{number}"
        status = in_a_process(lambda: train(make(second, mirror), settled), self._answer, spec)
        # killed while the run was brought back, the directory itself goes on, too
        if status == signal.SIGKILL:
            self._must_end_right(number, "second", spec)
        return status

    def _must_end_right(self, number: int, name: str, spec: str) -> None:
        folder, mirror = self._folder / f"{name}-{number}", self._mirrors.format(n=number)
        self._answer.unlink(missing_ok=True)
        status = in_a_process(lambda: train(make(folder, mirror)).result(), self._answer)
        if status != 0 or self._answer.read_text() != self._right:
            self.wrong.append(f"{spec}: {name} ended with {status}, not as the run that nobody killed")
        elif left := list(folder.rglob(".tmp-*")):
            self.wrong.append(f"{spec}: {left} are left")


if __name__ == "__main__":
    plan = json.loads(sys.argv[2])
    if plan["mirrors"].startswith("s3:"):
        import s3fs  # noqa: F401  # once, and not in each process
    RunMirror.retain_and_upload = _uploaded  # type: ignore[method-assign]  # or starts reach a point unequally often
    campaign = Campaign(Path(sys.argv[1]), plan["mirrors"], plan["scenario"])
    specs = campaign.run(plan["at_most"])
    print(json.dumps([campaign.wrong, specs, campaign.killed]))
