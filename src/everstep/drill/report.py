"""Report of a drill: a table for people, JSON for machines, an exit status for CI."""

from __future__ import annotations

import re
import signal
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from everstep.drill.divergence import Undisturbed, as_json, cause
from everstep.drill.program import Program, ProgramStart, Strike
from everstep.record import Difference, first_difference

Verdict = Literal["exact", "differs", "failed", "not hit", "no such place"]

EXACT, NOT_EXACT, NONDETERMINISTIC, NOT_DRILLED = 0, 1, 3, 4
"""Exit statuses; 2 means a wrong command line."""

UNSEEDED = (
    "the run has no seed, so the drill gave it one as it was opened; what the lines before that draw is not "
    "seeded: give seed= to the loop, and seed the generators where the program begins; if the runs differ "
    "then, too: "
)
UNSTABLE = (
    "the clock, a generator that is not seeded, the order of a set (of strings it depends on PYTHONHASHSEED, "
    "of objects on their addresses), a thread, or a kernel that is not deterministic"
)
CHANCE = (
    "chance: of three undisturbed runs two are equal and one differs, so the resume is not to blame. A "
    "thread, the clock, the order of a set, or a kernel that is not deterministic"
)
NOT_RESUMED = (
    "not covered: after no kill did a start resume from a later checkpoint than that of step 0; save more "
    "often, as in Checkpoints(Every(steps=10)), or give more --kills"
)
NOT_COVERED_ON_RANKS = (
    "not covered: several machines, and a stop that ranks agree on between two boundaries: drilled ranks "
    "meet at every step"
)

_MARKS = {"exact": "✓", "differs": "✗", "failed": "✗"}
_HAZARD, _STRUCK, WIDTH = 16, 34, 32
"""Characters of the columns."""
ONCE, AGAIN, STRUCK, NEVER = "━", "▓", "✗", "·"


@dataclass(frozen=True)
class StartSummary:
    """Summary of a start.

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

    @property
    def goes_on(self) -> bool:
        """Whether it resumed from a later checkpoint than that of step 0."""
        return any(not name.endswith("step-00000000") for name in self.resumed_from)


@dataclass(frozen=True)
class KillResult:
    """Program killed at one hazard and restarted until it ended.

    Attributes:
        hazard: name of the hazard.
        verdict: "exact"; "differs", with `divergence`; "failed": a start without a strike did not end with
            status 0; "not hit": the program ended before a strike; "no such place".
        strikes: number of starts that were struck.
        struck: description of the place of the strike.
        again: number of steps that were executed again.
        timeline: a line of characters, steps from left to right.
        starts: summaries of the starts, in order.
        divergence: first difference from the undisturbed program.
        message: last lines of the output, if the program failed.
    """

    hazard: str
    verdict: Verdict
    strikes: int = 0
    struck: str = ""
    again: int = 0
    timeline: str = ""
    starts: list[StartSummary] = field(default_factory=list)
    divergence: Difference | None = None
    message: str = ""

    @property
    def line(self) -> str:
        """Row of the table."""
        what = self.verdict if self.divergence is None else f"differs: {self.divergence}"
        again = self.again if self.starts else ""
        return (
            f"{self.hazard:<{_HAZARD}} {self.struck:<{_STRUCK}} {self.timeline:<{WIDTH}} {again:>5}  "
            f"{_MARKS.get(self.verdict, ' ')} {what}"
        )


@dataclass
class DrillReport:
    """Findings of a drill.

    Attributes:
        script, args, seed: as given to the drill; the same seed aims the same kills.
        runs: absolute paths of the run directories that the script opened, without the drill's root.
        steps, seconds: number of steps and duration of an undisturbed start.
        nondeterminism: first difference between two undisturbed programs; the hazards are not tried then.
        ranks: number of processes that trained together.
        seeded: whether every run was given a seed; else the drill gave one.
        results: a `KillResult` for each program that was struck.
        undisturbed: number of programs that ran undisturbed and were compared.
        cut: step at which the drill left a run that would have gone on; None if all came to their end.
        save_every: number of steps between the checkpoints that the drill added; None if it added none.
        counts: what `steps` are: "steps" of a run, or "updates" of an optimizer.
        steps_again: the steps, by their number over all runs, that were executed again.
    """

    script: str
    args: list[str]
    seed: int
    runs: list[str]
    steps: int
    seconds: float
    ranks: int = 1
    nondeterminism: Difference | None = None
    seeded: bool = True
    results: list[KillResult] = field(default_factory=list)
    undisturbed: int = 2
    cut: int | None = None
    save_every: int | None = None
    counts: str = "steps"
    steps_again: set[int] = field(default_factory=set)

    @property
    def exact(self) -> bool:
        """Whether at least one program was struck, and all ended as the undisturbed program."""
        verdicts = {one.verdict for one in self.results} - {"not hit", "no such place"}
        return self.nondeterminism is None and verdicts == {"exact"}

    @property
    def kills_resumed(self) -> int:
        """Number of starts, each after a kill, that resumed from a later checkpoint than that of step 0."""
        return sum(
            before.status == -signal.SIGKILL and after.goes_on
            for one in self.results
            for before, after in pairwise(one.starts)
        )

    @property
    def exit_code(self) -> int:
        """Exit status: 0 exact; 1 a resume is not exact, or fails; 3 two undisturbed programs differ."""
        if self.nondeterminism is not None:
            return NONDETERMINISTIC
        return EXACT if self.exact else NOT_EXACT

    @property
    def first_divergence(self) -> Difference | None:
        """Difference of two undisturbed programs if they differ, else the earliest of all results."""
        found = [one.divergence for one in self.results if one.divergence is not None]
        return self.nondeterminism or first_difference(found, [run.removeprefix("/") for run in self.runs])

    def header(self) -> str:
        """Lines above the table."""
        what = " ".join([self.script, *self.args])
        runs = f"{len(self.runs)} runs, " if len(self.runs) > 1 else ""
        on = f"{self.ranks} ranks, " if self.ranks > 1 else ""
        steps = f"{self.steps} {self.counts}" + " (left there by the drill)" * (self.cut is not None)
        title = f"{what}: {on}{runs}{steps}, {self.seconds:.1f} s undisturbed; drill seed {self.seed}"
        if self.nondeterminism is not None:
            return title
        legend = f"{ONCE} done  {AGAIN} again  {STRUCK} struck"
        return f"{title}\n\n{'hazard':<{_HAZARD}} {'struck':<{_STRUCK}} {legend:<{WIDTH}} again"

    def verdict(self) -> str:
        """Lines below the table."""
        if (where := self.nondeterminism) is not None:
            runs = "two of three" if self.undisturbed > 2 else "two"
            return (
                f"{runs} undisturbed runs of this script differ, so its resume cannot be judged\n"
                f"first: {where}: {where.expected} in the first, {where.actual} in the last\n"
                f"likely: {where.note or UNSEEDED * (not self.seeded) + UNSTABLE}"
            )
        count = Counter(one.verdict for one in self.results)
        missed = f"; {count['not hit']} ended before they were struck" if count["not hit"] else ""
        lines = []
        if self.exact:
            on = f" on {self.ranks} ranks" if self.ranks > 1 else ""
            total = f"{count['exact']} of {count['exact']} killed runs"
            lines.append(f"exact: {total}{on} match the undisturbed run{missed}")
        if count["failed"]:
            failed = next(one for one in self.results if one.verdict == "failed")
            lines.append(f"{count['failed']} failed to resume; the first, after {failed.hazard!r}:")
            lines.append(textwrap.indent(failed.message, "    "))
        if count["differs"] and (first := self.first_divergence):
            lines.append(f"{count['differs']} of {count['differs'] + count['exact']} resumes differ{missed}")
            lines.append(f"first: {first}: {first.expected} undisturbed, {first.actual} here")
            lines.append(f"likely: {cause(first)}")
            lines += [f"not chance: {self.undisturbed} undisturbed runs are equal"] * (self.undisturbed > 2)
        lines = lines or [f"nothing was struck{missed}"]
        if strikes := sum(one.strikes for one in self.results):
            part = 100 * len(self.steps_again) / max(1, self.steps)
            struck = f"{strikes} strike{'s' * (strikes > 1)}"
            lines.append(f"covered: {struck}, {part:.0f} % of the {self.counts} executed again")
        lines += [NOT_RESUMED] * (self.exact and not self.kills_resumed)
        lines += [NOT_COVERED_ON_RANKS] * (self.exact and self.ranks > 1)
        if self.cut is not None:
            lines.append(
                f"left at step {self.cut}: later steps, the tail of that epoch and the lines after the loop "
                "are not covered"
            )
        if self.save_every is not None:
            lines.append(
                f"before step {self.cut} the script saves nothing, so the drill asked for a checkpoint every "
                f"{self.save_every} steps"
            )
        if not self.seeded:
            lines.append(
                "no seed=: the drill gave each run the same seed, where the script draws a new one. A resume "
                "keeps the seed that was drawn; two runs of the script will not be equal without seed="
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = "".join(f"{one.line}\n" for one in self.results)
        return f"{self.header()}\n{rows}\n{self.verdict()}"

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        return {
            **vars(self),
            "seconds": round(self.seconds, 3),
            "exact": self.exact,
            "exit_code": self.exit_code,
            "kills_resumed": self.kills_resumed,
            "strikes": sum(one.strikes for one in self.results),
            "steps_again": len(self.steps_again),
            "nondeterminism": as_json(self.nondeterminism),
            "results": [{**asdict(one), "divergence": as_json(one.divergence)} for one in self.results],
        }


# ------------------------------------------------------------------------------------- one start


def struck_at(starts: list[ProgramStart]) -> str:
    """Describe the first strike of these starts, and count the others."""
    if not starts:
        return ""
    start, more = starts[0], f", and {len(starts) - 1} more" if len(starts) > 1 else ""
    strike = start.strike or Strike()
    records = [record for record in start.of_rank(strike.rank) if record.at != "before"]
    if start.status != -signal.SIGKILL:  # it was closed in order, so its exit says nothing about the place
        records = [record for record in records if record.at != "exit"]
    if not records or records[-1].at == "enter":
        where = "start-up"
    elif records[-1].at == "exit":
        where = "shutdown"
    else:
        where = f"{'after' if records[-1].at == 'epoch' else 'at'} step {records[-1].step}"
    name = "" if start.status > 128 else strike.point
    if strike.target:  # a rank's name leaves less space
        name = name.removeprefix("checkpoint.")
    operation = f", {_NAMES.get(name, name)}" if name and not name.startswith("witness.") else ""
    return f"{strike.target} {where}{operation}{more}".lstrip()


_NAMES = {"loop.tail": "tail begins", "loop.tail_end": "tail ends", "loop.exit": "block ends"}


def summaries(program: Program) -> list[StartSummary]:
    """Describe each start by the journals and its witness; a start that wrote no segment by the witness."""
    segments = [
        (event.time, event.data, [e.data["report"] for e in segment.events if e.kind == "verified"])
        for run in program.runs
        for segment in program.journal(run).segments()
        for event in segment.events
        if event.kind == "segment"
    ]
    found = []
    for start in program.starts:
        within = [one for one in segments if start.began <= one[0] <= start.began + start.seconds]
        resumed = [data["facts"]["resumed_from"] for _, data, _ in within]
        found.append(
            StartSummary(
                strike=None if start.strike is None else str(start.strike),
                status=start.status,
                seconds=round(start.seconds, 3),
                resumed_from=[name for name in resumed if name is not None],
                steps=sum(record.at == "step" for record in start.records),
                said=[report for _, _, reports in within for report in reports],
            )
        )
    return found


# ---------------------------------------------------------------------------------------- the timeline

Positions = dict[tuple[str, int, int], int]
"""(run, epoch, step) -> the number of steps that the undisturbed program has then done, from 1."""


def positions(undisturbed: Undisturbed) -> Positions:
    """Number the steps of the undisturbed program."""
    records = [record for start in undisturbed.program.starts for record in start.records]
    steps = [(record.run, record.epoch, record.step) for record in records if record.at == "step"]
    return {step: n for n, step in enumerate(steps, 1)}


def _done_by(start: ProgramStart, place: Positions) -> list[int]:
    """List the steps that a start completed, as positions."""
    keys = [(record.run, record.epoch, record.step) for record in start.records if record.at == "step"]
    return [place[key] for key in keys if key in place]


def executed_again(starts: list[ProgramStart], place: Positions) -> Counter[int]:
    """Count, for each step that was completed more than once, how often it was executed again."""
    done = Counter(step for start in starts for step in _done_by(start, place))
    return Counter({step: times - 1 for step, times in done.items() if times > 1})


def draw_timeline(starts: list[ProgramStart], place: Positions, width: int = WIDTH) -> str:
    """Draw columns of steps: done once, done again, struck, never done."""
    total = max(place.values(), default=1)
    return bars(total, [(_done_by(each, place), bool(each.strike and each.status)) for each in starts], width)


def bars(total: int, starts: Iterable[tuple[list[int], bool]], width: int = WIDTH) -> str:
    """Draw columns of steps, given what each start did (from 1), and whether it was struck."""
    times = [0] * total
    struck: set[int] = set()
    reached = 1
    for done, hit in starts:
        for step in done:
            if step <= total:
                times[step - 1] += 1
        reached = done[-1] if done else reached
        if hit:
            struck.add(min(width - 1, (reached - 1) * width // total))
    cells = []
    for column in range(width):
        first = column * total // width
        most = max(times[first : max(first + 1, (column + 1) * total // width)])
        cells.append(STRUCK if column in struck else (NEVER, ONCE, AGAIN)[min(most, 2)])
    return "".join(cells)


_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(file: Path, script: str, result: DrillReport | str) -> None:
    """Write a JUnit file: a case for the undisturbed runs, and one for each program that was struck.

    Args:
        result: the report; or the reason why there is none, which is an error of the first case.
    """
    suite = ElementTree.Element("testsuite", name=f"everstep drill {_NOT_XML.sub('?', script)}")

    def add(name: str, seconds: float = 0.0, outcome: str = "", text: str = "") -> None:
        case = ElementTree.SubElement(suite, "testcase", classname=script, name=name, time=f"{seconds:.3f}")
        if outcome:
            text = _NOT_XML.sub("?", text)
            ElementTree.SubElement(case, outcome, message=text.partition("\n")[0]).text = text

    if isinstance(result, str):
        add("two undisturbed runs", 0.0, "error", result)
    else:
        differ = result.nondeterminism is not None
        add("two undisturbed runs", 0.0, "failure" if differ else "", result.verdict() if differ else "")
        turns: Counter[str] = Counter()
        for one in result.results:
            turns[one.hazard] += 1
            name = one.hazard if turns[one.hazard] == 1 else f"{one.hazard} {turns[one.hazard]}"
            seconds = sum(start.seconds for start in one.starts)
            if one.verdict == "exact":
                add(name, seconds)
            else:
                failed = one.verdict in ("differs", "failed")
                add(name, seconds, "failure" if failed else "skipped", f"{one.message}\n{one.line}".strip())
    suite.set("tests", str(len(suite)))
    for outcome, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(count, str(len(suite.findall(f"testcase/{outcome}"))))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    ElementTree.ElementTree(suites).write(file, encoding="utf-8", xml_declaration=True)
