"""Report of a drill: a table for people, JSON for machines, an exit status for CI."""

from __future__ import annotations

import re
import signal
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from everstep.display.cells import in_line, plural
from everstep.drill.program import ProgramStart, Strike, cause
from everstep.record import Difference, first_difference

Verdict = Literal["exact", "differs", "failed", "not hit", "no such place", "no time"]

UNSTABLE = (
    "the clock, a generator that is not seeded, the order of a set (of strings by PYTHONHASHSEED), a thread, "
    "or a kernel that is not deterministic"
)
UNSEEDED = "no seed=, and lines before the run draw: give seed=, and seed the generators first; else "
CHANCE = f"chance, not the resume: of three undisturbed runs two are equal and one differs, by {UNSTABLE}"
NOT_RESUMED = (
    "not covered: after no kill did a start resume from a save of a later step than 0; save more often, or "
    "give more --kills, of any command more --strikes"
)
ON_RANKS = "not covered: several machines, and a stop that finds the ranks at different steps"
GIVEN_SEED = (
    "no seed=: the drill gave each run the same seed, which a resume keeps; without it two runs are equal "
    "only if the script itself seeds all that draws"
)

_ERROR = re.compile(r"(\[rank\d+\]: )?([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt)\b")
"""First line of an error, whose message may have several."""
_MARKS = {"exact": "✓", "differs": "✗", "failed": "✗"}
_HAZARD, _STRUCK, WIDTH = 16, 34, 32
"""Characters of the columns."""
ONCE, AGAIN, STRUCK, NEVER = "━", "▓", "✗", "·"


@dataclass(frozen=True)
class StartSummary:
    """Start of a program: the strike in words (None without one), the exit status (negative: the signal that
    ended it), its duration in seconds, the steps of the checkpoints from which runs were resumed, and the
    number of completed steps.
    """

    strike: str | None
    status: int
    seconds: float
    resumed_from: list[int]
    steps: int

    @classmethod
    def of(cls, start: ProgramStart) -> StartSummary:
        trained = {run for run, _, _ in start.steps}  # a finished run is entered, and left without a step
        enters = [record for record in start.records if record.at == "enter" and record.run in trained]
        resumed = [record.step for record in enters if record.step]
        strike = None if start.strike is None else str(start.strike)
        return cls(strike, start.status, round(start.seconds, 3), resumed, len(start.steps))


@dataclass(frozen=True)
class KillResult:
    """Program killed at one `hazard` and restarted until it ended, with summaries of its `starts`.

    Attributes:
        verdict: "exact"; "differs", with `divergence`; "failed": a start without a strike did not end with
            status 0, with its last lines as `message`; "not hit": the program ended before a strike;
            "no such place"; "no time": the budget was used up before.
        strikes: number of starts that were struck; `struck` describes the place.
        message: last lines of a program that failed; what else is to be said of an exact one.
        again: number of steps that were executed again.
        lost: number of these of which a complete save existed, which the resume did not take.
        timeline: a line of characters, steps from left to right.
        divergence: first difference from the undisturbed program.
    """

    hazard: str
    verdict: Verdict
    strikes: int = 0
    struck: str = ""
    again: int = 0
    lost: int = 0
    timeline: str = ""
    starts: list[StartSummary] = field(default_factory=list)
    divergence: Difference | None = None
    message: str = ""

    @property
    def line(self) -> str:
        result = self.verdict if self.divergence is None else f"differs: {self.divergence}"
        if self.divergence is None and self.message:
            lines = self.message.splitlines()
            last = next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])
            result += f"; {in_line(last)}"
        repeats = self.again if self.starts else ""
        return (
            f"{self.hazard:<{_HAZARD}} {self.struck:<{_STRUCK}} {self.timeline:<{WIDTH}} {repeats:>5}  "
            f"{_MARKS.get(self.verdict, ' ')} {result}"
        )


@dataclass
class DrillReport:
    """Findings of a drill of a `script` with its `args`; the same `seed` aims the same kills.

    Attributes:
        runs: absolute paths of the run directories that the script opened, without the drill's root.
        steps, seconds: number of steps and duration of an undisturbed start.
        nondeterminism: first difference between two undisturbed programs; the hazards are not tried then.
        seeded: whether every run was given a seed; else the drill gave one.
        results: a `KillResult` for each program that was struck.
        undisturbed: number of programs that ran undisturbed and were compared.
        cut: step at which the drill left a run that would have gone on; None if all came to their end.
        counts: what `steps` are: "steps" of a run, or "updates" of an optimizer.
        kinds: kinds of strikes that a drill of any command found places for, one by one.
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
    counts: str = "steps"
    kinds: list[str] = field(default_factory=list)
    steps_again: set[int] = field(default_factory=set)

    @property
    def exact(self) -> bool:
        """Whether at least one program was struck, and all ended as the undisturbed program."""
        verdicts = {one.verdict for one in self.results} - {"not hit", "no such place", "no time"}
        return self.nondeterminism is None and verdicts == {"exact"}

    @property
    def kills_resumed(self) -> int:
        """Number of starts, each after a kill, that resumed from a later checkpoint than that of step 0."""
        return sum(
            before.status == -signal.SIGKILL and bool(after.resumed_from)
            for one in self.results
            for before, after in pairwise(one.starts)
        )

    @property
    def strikes(self) -> int:
        return sum(one.strikes for one in self.results)

    @property
    def exit_code(self) -> int:
        """Exit status: 0 exact; 1 a resume is not exact, or fails; 3 two undisturbed programs differ."""
        return 3 if self.nondeterminism is not None else int(not self.exact)

    @property
    def first_divergence(self) -> Difference | None:
        """Difference of two undisturbed programs if they differ, else the earliest of all results."""
        divergences = [one.divergence for one in self.results if one.divergence is not None]
        runs = [run.removeprefix("/") for run in self.runs]
        return self.nondeterminism or first_difference(divergences, runs)

    def header(self) -> str:
        on = f"{self.ranks} ranks, " if self.ranks > 1 else ""
        on += f"{len(self.runs)} runs, " if len(self.runs) > 1 else ""
        steps = f"{self.steps} {self.counts}" + " (left there by the drill)" * (self.cut is not None)
        title = f"{' '.join([self.script, *self.args])}: {on}{steps}, {self.seconds:.1f} s undisturbed"
        legend = f"{ONCE} done  {AGAIN} again  {STRUCK} struck"
        columns = f"\n\n{'hazard':<{_HAZARD}} {'struck':<{_STRUCK}} {legend:<{WIDTH}} again"
        return f"{title}; drill seed {self.seed}" + columns * (self.nondeterminism is None)

    def verdict(self) -> str:
        if (difference := self.nondeterminism) is not None:
            runs = "two of three" if self.undisturbed > 2 else "two"
            return (
                f"{runs} undisturbed runs of this script differ, so its resume cannot be judged\n"
                f"first: {difference}: {difference.expected} in the first, {difference.actual} in the last\n"
                f"likely: {difference.note or UNSEEDED * (not self.seeded) + UNSTABLE}"
            )
        count = Counter(one.verdict for one in self.results)
        missed = f"; {count['not hit']} ended before they were struck" if count["not hit"] else ""
        lines = []
        if self.exact:
            on = f" on {self.ranks} ranks" if self.ranks > 1 else ""
            total = f"{count['exact']} of {count['exact']} killed runs"
            lines.append(f"exact: {total}{on} match the undisturbed run{missed}")
        if losses := sum(one.lost > 0 for one in self.results):
            began = f"{losses} of {count['exact']} resumes began before the newest complete save"
            lines.append(f"lost work: {began}; look at what they load")
        if count["failed"]:
            result = next(one for one in self.results if one.verdict == "failed")
            lines.append(f"{count['failed']} failed to resume; the first, after {result.hazard!r}:")
            lines.append(textwrap.indent(result.message, "    "))
        if count["differs"] and (first := self.first_divergence):
            lines.append(f"{count['differs']} of {count['differs'] + count['exact']} resumes differ{missed}")
            lines.append(f"first: {first}: {first.expected} undisturbed, {first.actual} here")
            lines.append(f"likely: {cause(first)}")
            lines += [f"not chance: {self.undisturbed} undisturbed runs are equal"] * (self.undisturbed > 2)
        lines = lines or [f"nothing was struck{missed}"]
        if strikes := self.strikes:
            part = 100 * len(self.steps_again) / max(1, self.steps)
            struck = plural(strikes, "strike")
            lines.append(f"covered: {struck}, {part:.0f} % of the {self.counts} executed again")
        if count["no time"]:
            lines.append(f"not covered: {count['no time']} strikes, as the budget was used up")
        hazards = {one.hazard for one in self.results if one.verdict != "no time"}
        if never := [kind for kind in self.kinds if kind not in hazards]:
            more = "a larger --budget" if count["no time"] else "more --strikes"
            lines.append(f"not covered: no strike of the kinds {', '.join(never)}; give {more}")
        lines += [NOT_RESUMED] * (self.exact and not self.kills_resumed)
        lines += [ON_RANKS] * (self.exact and self.ranks > 1)
        if self.cut is not None:
            lines.append(
                f"left at step {self.cut}: later steps, the tail of that epoch and the lines after the loop "
                "are not covered"
            )
        lines += [GIVEN_SEED] * (not self.seeded)
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = "".join(f"{one.line}\n" for one in self.results)
        return f"{self.header()}\n{rows}\n{self.verdict()}"

    def as_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("exact", "exit_code", "kills_resumed", "strikes")}
        return {
            **vars(self),
            **counts,
            "seconds": round(self.seconds, 3),
            "steps_again": len(self.steps_again),
            "nondeterminism": _as_json(self.nondeterminism),
            "results": [{**asdict(one), "divergence": _as_json(one.divergence)} for one in self.results],
        }


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {**difference._asdict(), "where": difference.where, "cause": cause(difference)}


def struck_at(start: ProgramStart) -> str:
    """Describe the place of a strike."""
    strike = start.strike or Strike()
    records = [record for record in start.of_rank(strike.rank) if record.at != "before"]
    name = strike.last[1].removeprefix("checkpoint." if strike.target else "")  # there is less space
    operation = f", {name}" if name and not name.startswith("witness.") else ""
    return f"{strike.target} at step {records[-1].step if records else 0}{operation}".lstrip()


def bars(total: int, starts: Iterable[tuple[Sequence[int], bool]], width: int = WIDTH) -> str:
    """Draw columns of steps, of which each start did some (from 1), and was struck or not."""
    times, struck, reached = Counter[int](), set[int](), 1
    for numbers, is_struck in starts:
        times.update(numbers)
        reached = numbers[-1] if numbers else reached
        if is_struck:
            struck.add(min(width - 1, (reached - 1) * width // total))
    cells = []
    for column in range(width):
        first = column * total // width
        steps = range(first + 1, max(first + 1, (column + 1) * total // width) + 1)
        most = max(times[step] for step in steps)
        cells.append(STRUCK if column in struck else (NEVER, ONCE, AGAIN)[min(most, 2)])
    return "".join(cells)


_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def append_summary(file: Path, result: DrillReport | str) -> None:
    """Append the report, or the reason why there is none, as Markdown: for the summary of a job in CI."""
    title = "failed" if isinstance(result, str) else "exact" if result.exact else "not exact"
    with file.open("a", encoding="utf-8") as page:
        page.write(f"### everstep drill: {title}\n\n```text\n{result}\n```\n")


def write_junit(file: Path, script: str, result: DrillReport | str) -> None:
    """Write a JUnit file: a case for the undisturbed runs, and one for each program that was struck.

    The reason why there is no report is an error of the first case.
    """
    cases = [("two undisturbed runs", 0.0, "error", str(result))]
    if isinstance(result, DrillReport):
        differ = "failure" if result.nondeterminism is not None else ""
        cases = [("two undisturbed runs", 0.0, differ, result.verdict())]
        outcomes = {"exact": "", "differs": "failure", "failed": "failure"}
        for one in result.results:
            seconds, text = sum(start.seconds for start in one.starts), f"{one.message}\n{one.line}".strip()
            cases.append((one.hazard, seconds, outcomes.get(one.verdict, "skipped"), text))
    count, names = Counter(outcome for _, _, outcome, _ in cases), Counter[str]()
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", name=f"everstep drill {_NOT_XML.sub('?', script)}")
    for name, total in (("tests", len(cases)), ("failures", count["failure"]), ("errors", count["error"])):
        suite.set(name, str(total))
    suite.set("skipped", str(count["skipped"]))
    for name, seconds, outcome, text in cases:
        names[name] += 1
        name = name if names[name] == 1 else f"{name} {names[name]}"
        case = ElementTree.SubElement(suite, "testcase", classname=script, name=name, time=f"{seconds:.3f}")
        if outcome:
            text = _NOT_XML.sub("?", text)
            ElementTree.SubElement(case, outcome, message=text.partition("\n")[0]).text = text
    ElementTree.indent(suites)
    ElementTree.ElementTree(suites).write(file, encoding="utf-8", xml_declaration=True)
