"""Report of a drill: a table for people, JSON for machines, an exit status for CI."""

from __future__ import annotations

import signal
import textwrap
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from everstep.checkpoint import CheckpointName
from everstep.drill.divergence import DrillDivergence
from everstep.drill.timeline import AGAIN, ONCE, STRUCK, WIDTH

Verdict = Literal["exact", "differs", "failed", "not hit", "no such place"]

EXACT, NOT_EXACT, NONDETERMINISTIC, NOT_DRILLED = 0, 1, 3, 4
"""Exit statuses; 2 means a wrong command line."""

UNSEEDED = (
    "the run has no seed: give seed= to the loop; if the runs differ then, too: the clock, the order of "
    "a set, a generator that is not seeded"
)
UNSTABLE = (
    "the clock, a generator that is not seeded, the order of a set (of strings it hangs on PYTHONHASHSEED, "
    "of objects on their addresses), a thread, or a kernel that is not deterministic"
)

NOT_RESUMED = (
    "not covered: after no kill did a start resume from a later checkpoint than that of step 0; save more "
    "often, as in Checkpoints(Every(steps=10)), or give more --kills"
)

NOT_COVERED_ON_RANKS = (
    "not covered: several machines, and a stop that ranks agree on between two boundaries: drilled ranks "
    "meet at every step"
)

_MARKS = {"exact": "✓", "differs": "✗", "failed": "✗", "not hit": " ", "no such place": " "}
_HAZARD, _STRUCK = 16, 34


def _is_first(checkpoint: str) -> bool:
    return CheckpointName.parse(checkpoint).step == 0


@dataclass(frozen=True)
class StartSummary:
    """Summary of a start: its strike, its end and its steps.

    Attributes:
        strike: description of the strike; None if the start was not struck.
        status: exit status; negative: the signal that ended the start.
        seconds: duration of the start.
        resumed_from: checkpoints from which its runs were resumed; empty for a fresh start.
        steps: number of completed steps.
        said: messages of its resumes ("resume verified: ...").
    """

    strike: str | None
    status: int
    seconds: float
    resumed_from: list[str]
    steps: int
    said: list[str]


@dataclass(frozen=True)
class Ordeal:
    """Program that was struck and started again until it ended.

    Attributes:
        hazard: name of the hazard.
        verdict: "exact"; "differs", with `divergence`; "failed": a start that was left alone did not end
            with status 0; "not hit": the program ended before a strike; "no such place".
        struck: description of the place of the strike.
        again: number of steps that were executed again.
        timeline: a line of characters, steps from left to right.
        starts: summaries of the starts, in order.
        divergence: first difference from the undisturbed program.
        message: last lines of the output, if the program failed.
    """

    hazard: str
    verdict: Verdict
    struck: str = ""
    again: int = 0
    timeline: str = ""
    starts: list[StartSummary] = field(default_factory=list)
    divergence: DrillDivergence | None = None
    message: str = ""

    @property
    def line(self) -> str:
        """Row of the table."""
        what = self.verdict if self.divergence is None else f"differs: {self.divergence}"
        again = self.again if self.starts else ""
        return (
            f"{self.hazard:<{_HAZARD}} {self.struck:<{_STRUCK}} {self.timeline:<{WIDTH}} {again:>5}  "
            f"{_MARKS[self.verdict]} {what}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        divergence = None if self.divergence is None else self.divergence.as_dict()
        return {
            **asdict(self),
            "divergence": divergence,
            "starts": [asdict(start) for start in self.starts],
        }


@dataclass
class DrillReport:
    """Findings of a drill.

    Attributes:
        script, args, seed: as given to the drill; the same seed aims the same kills.
        runs: absolute paths of the run directories that the script opened, without the drill's root.
        steps, seconds: number of steps and duration of an undisturbed start.
        nondeterminism: first difference between two undisturbed programs; the hazards are not tried then.
        ranks: number of processes that trained together.
        ordeals: an `Ordeal` for each program that was struck.
    """

    script: str
    args: list[str]
    seed: int
    runs: list[str]
    steps: int
    seconds: float
    ranks: int = 1
    nondeterminism: DrillDivergence | None = None
    seeded: bool = True
    """Whether every run was given a seed."""
    ordeals: list[Ordeal] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether at least one program was struck, and all ended as the undisturbed program."""
        struck = [one.verdict for one in self.ordeals if one.verdict not in ("not hit", "no such place")]
        return self.nondeterminism is None and bool(struck) and set(struck) == {"exact"}

    @property
    def kills_resumed(self) -> int:
        """Number of starts, each after a kill, that resumed from a later checkpoint than that of step 0."""
        return sum(
            before.status == -signal.SIGKILL and any(not _is_first(name) for name in after.resumed_from)
            for one in self.ordeals
            for before, after in pairwise(one.starts)
        )

    @property
    def exit_code(self) -> int:
        """Exit status: 0 exact; 1 a resume is not exact, or fails; 3 two undisturbed programs differ."""
        if self.nondeterminism is not None:
            return NONDETERMINISTIC
        return EXACT if self.exact else NOT_EXACT

    @property
    def first_divergence(self) -> DrillDivergence | None:
        """Divergence of two undisturbed programs if they differ, else the earliest of all ordeals."""
        found = [one.divergence for one in self.ordeals if one.divergence is not None]
        return self.nondeterminism or min(found, key=lambda one: one.order, default=None)

    def header(self) -> str:
        """Lines above the table."""
        what = " ".join([self.script, *self.args])
        runs = f"{len(self.runs)} runs, " if len(self.runs) > 1 else ""
        on = f"{self.ranks} ranks, " if self.ranks > 1 else ""
        title = (
            f"{what}: {on}{runs}{self.steps} steps, {self.seconds:.1f} s undisturbed; drill seed {self.seed}"
        )
        if self.nondeterminism is not None:
            return title
        legend = f"{ONCE} done  {AGAIN} again  {STRUCK} struck"
        return f"{title}\n\n{'hazard':<{_HAZARD}} {'struck':<{_STRUCK}} {legend:<{WIDTH}} again"

    def verdict(self) -> str:
        """Lines below the table."""
        if self.nondeterminism is not None:
            return self._nondeterministic(self.nondeterminism)
        count = {
            verdict: sum(one.verdict == verdict for one in self.ordeals)
            for verdict in ("exact", "differs", "failed", "not hit")
        }
        missed = f"; {count['not hit']} ended before they were struck" if count["not hit"] else ""
        if self.exact:
            on = f" on {self.ranks} ranks" if self.ranks > 1 else ""
            told = f"{count['exact']} of {count['exact']} ended as the run that nobody killed{on}{missed}"
            lines = [f"exact: {told}", *[NOT_RESUMED] * (not self.kills_resumed)]
            return "\n".join([*lines, *[NOT_COVERED_ON_RANKS] * (self.ranks > 1)])
        lines = []
        if count["failed"]:
            failed = next(one for one in self.ordeals if one.verdict == "failed")
            lines.append(f"{count['failed']} failed to resume; the first, after {failed.hazard!r}:")
            lines.append(textwrap.indent(failed.message, "    "))
        if count["differs"] and (first := self.first_divergence):
            lines.append(f"{count['differs']} of {count['differs'] + count['exact']} resumes differ{missed}")
            lines.append(f"first: {first}: {first.expected} undisturbed, {first.found} here")
            lines.append(f"likely: {first.cause}")
        return "\n".join(lines) or f"nothing was struck{missed}"

    def _nondeterministic(self, where: DrillDivergence) -> str:
        likely = where.note or UNSEEDED * (not self.seeded) or UNSTABLE
        return (
            "two undisturbed runs of this script differ, so its resume cannot be judged\n"
            f"first: {where}: {where.expected} in the first, {where.found} in the second\n"
            f"likely: {likely}"
        )

    def __str__(self) -> str:
        rows = "".join(f"{one.line}\n" for one in self.ordeals)
        return f"{self.header()}\n{rows}\n{self.verdict()}"

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        nondeterminism = None if self.nondeterminism is None else self.nondeterminism.as_dict()
        return {
            "script": self.script,
            "args": self.args,
            "seed": self.seed,
            "ranks": self.ranks,
            "runs": self.runs,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "exact": self.exact,
            "exit_code": self.exit_code,
            "kills_resumed": self.kills_resumed,
            "nondeterminism": nondeterminism,
            "ordeals": [one.as_dict() for one in self.ordeals],
        }
