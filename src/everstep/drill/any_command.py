"""Drill of any training command: of a program that has never heard of everstep.

The observer (`everstep/backends/torch/observer.py`) writes down each update of the program's optimizers.  A
start that follows a kill has *resumed at update k* if its weights and its optimizer are, before its first
update, what the undisturbed program had after update k; from there on its updates are compared with the
undisturbed ones.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from everstep.arguments import integer, number
from everstep.drill.campaign import LAST_STARTS, Campaign, deadline_after
from everstep.drill.processes import owned_folder, owned_process
from everstep.drill.program import read_lines, too_long
from everstep.drill.report import UNSTABLE, DrillReport, KillResult, StartSummary
from everstep.errors import ConfigError, DrillError
from everstep.record import Difference

OUT = "{out}"
"""Stands in a command for the folder in which one chain of starts keeps what it writes."""
MOST_COPIED = 1 << 30
"""Bytes of a current directory that is copied for each chain of starts."""
SKIPPED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache")
TOO_LONG = 124
"""Status of a start that was ended because it took longer than its time."""

LOST = "the resume began anew although a save was complete before the kill; look at what it loads"
ANEW = "begun anew, nothing was saved yet"
OTHER_WEIGHTS = (
    "the second start began with other weights than the first: they are not seeded, or it read what the "
    f"first one wrote; then put {OUT} in place of the output folder"
)
EARLIER = f"the start differed before it was killed, so no resume is the cause: {UNSTABLE}"
ENDED = "the program ended with status 0 at another update: whoever started it takes it for finished"
UNKNOWN = (
    "the weights before the first update are those of no update of the undisturbed run: what is saved is not "
    "what was trained (another precision, averaged weights), or something changes the weights first"
)
CAUSES = {
    "samples": "the place in the data is not restored: the batches of the epoch that were done, or its "
    "order, which is drawn from random state",
    "random state": "a generator of random numbers is not restored",
    "moments": "the optimizer's moments are not restored",
    "settings": "the optimizer's settings are not restored: the schedule of its learning rate, say",
    "weights": "samples and random state are equal, so a value that is kept between updates is not saved: a "
    "counter in a variable, a schedule, an average made by hand (EMA)",
    "buffers": "buffers of the model are not restored: running means, say",
}
"""Part of an update -> likely cause where it differs first."""
COMPONENTS = {"moments": "optimizer", "settings": "optimizer", "buffers": "weights"}
"""Part of an update -> the component of a `Difference`, where it has another name."""


@dataclass(frozen=True)
class Start:
    """One start of the command: its exit status, and the lines of its observer."""

    strike: str
    status: int
    seconds: float
    lines: list[dict[str, Any]]
    log: Path

    def of_rank(self, rank: int, at: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["rank"] == rank and line["at"] == at]

    @property
    def updates(self) -> int:
        return len(self.of_rank(0, "update"))


@dataclass
class Chain:
    """A command in a folder of its own, with its starts."""

    command: Sequence[str]
    resume: Sequence[str]
    folder: Path
    timeout: float
    starts: list[Start] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.out, self.work = self.folder / "out", Path.cwd()
        if not any(OUT in part for part in self.command):
            self.work = self.folder / "work"
            shutil.copytree(Path.cwd(), self.work, symlinks=True, ignore=SKIPPED)
        site = self.folder / "site"
        site.mkdir()
        observer = Path(__file__).parents[1] / "backends" / "torch" / "observer.py"
        shutil.copyfile(observer, site / "sitecustomize.py")

    def start(self, strike: str = "") -> Start:
        """Start the command, and wait until it ends."""
        n = len(self.starts) + 1
        log, trace = self.folder / f"start-{n}.log", self.folder / f"start-{n}.jsonl"
        template = self.resume if self.starts else self.command
        env: dict[str, str] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.folder / "site"), os.getenv("PYTHONPATH")])),
            "EVERSTEP_OBSERVED": str(trace),
            "EVERSTEP_STRIKE": strike,
            "EVERSTEP_OBSERVED_FOLDERS": os.pathsep.join([str(self.work), str(self.out)]),
        }
        began = time.monotonic()
        command = [part.replace(OUT, str(self.out)) for part in template]
        with owned_process(command, env, log, "EVERSTEP_OBSERVED", self.work) as process:
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                status = TOO_LONG
        lines = read_lines(trace)
        struck = any(line["at"] == "strike" for line in lines)
        if struck and not strike.startswith("SIG"):
            status = -signal.SIGKILL  # a launcher turns a kill into a status of its own
        start = Start(strike if struck else "", status, time.monotonic() - began, lines, log)
        self.starts.append(start)
        return start


def drill_command(
    command: Sequence[str],
    *,
    resume: Sequence[str] = (),
    strikes: int = 12,
    seed: int = 0,
    timeout: float = 600.0,
    budget: float | None = None,
    power_cut: bool = False,
    keep: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DrillReport:
    """Kill a training command in updates, evaluations and saves; resume it, and compare its updates.

    The command runs as it is, in processes of its own.  Each chain of starts needs a place of its own for
    what it writes: `{out}` in the command stands for a new folder; without it, each chain runs in a copy of
    the current directory.  Other arguments are those of `everstep.drill.drill`.

    Args:
        command: the words of the command, such as ["python", "train.py", "--output", "{out}"].
        resume: the words of the command that goes on; empty: the same.
        strikes: number of strikes, 1 or more, spread over updates, evaluations and the files of saves.
        power_cut: also strike renames as a power cut may: data that the program has not synced is lost.
    """
    for words in (command, resume or command):
        if not words or (OUT not in words[0] and shutil.which(words[0]) is None):
            raise ConfigError(f"{' '.join(words[:1])!r} is no command; give one, such as python train.py")
    strikes, timeout = integer("strikes", strikes), number("timeout", timeout, of="seconds")
    deadline = deadline_after(budget)
    if not any(OUT in part for part in command):
        _require_small(Path.cwd())
    report = DrillReport(" ".join(command), [], seed, runs=[], steps=0, seconds=0.0, counts="updates")
    with owned_folder("everstep-drill-", None if keep is None else Path(keep)) as folder:
        campaign = _CommandCampaign(report, folder, timeout, keep is not None)
        campaign.begin(command, resume or command)
        aimed, report.kinds = campaign.reference.strikes(strikes, Random(seed), power_cut)
        return campaign.run(aimed, deadline, say)


def _require_small(folder: Path) -> None:
    size = 0
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in SKIPPED(parent, names)]
        size += sum(os.lstat(os.path.join(parent, file)).st_size for file in files)
        if size > MOST_COPIED:
            raise ConfigError(
                f"{folder} has more than {MOST_COPIED >> 30} GB, and each start would be in a copy of it; "
                f"put {OUT} into the command, where its output folder stands: --output {OUT}"
            )


class _CommandCampaign(Campaign):
    def begin(self, command: Sequence[str], resume: Sequence[str]) -> None:
        """Start the command twice undisturbed."""
        self.command, self.resume, report = command, resume, self.report
        first, second = self._run_undisturbed("undisturbed-1"), self._run_undisturbed("undisturbed-2")
        self.reference = reference = Reference(first)
        report.steps, report.ranks, report.seconds = reference.updates, len(reference.ranks), first.seconds
        reference.look_for_seeds(second)
        difference = reference.first_difference(second, dict.fromkeys(reference.ranks, 0))
        if difference is not None:  # nothing was resumed, so the causes of a resume are none here
            note = OTHER_WEIGHTS if difference.place == "enter" else ""
            report.nondeterminism = difference._replace(note=note)

    def _chain(self, name: str) -> Chain:
        return Chain(self.command, self.resume, self.folder / name, self.timeout)

    def _run_undisturbed(self, name: str) -> Start:
        """Start the command undisturbed, and refuse what cannot be drilled."""
        start, script = self._chain(name).start(), self.report.script
        if start.status == TOO_LONG:
            raise too_long(script, self.timeout)
        self.require_sound(start.status, start.log)
        if not start.updates:
            raise DrillError(
                f"{script} made no step of a torch optimizer; drill one that does, without `python -I` or -E"
            )
        return start

    def strike(self, name: str, aimed: str) -> KillResult:
        """Strike a start by a value of EVERSTEP_STRIKE, and start the command again until it ends."""
        chain = self._chain(f"{len(self.report.results) + 1:02d}-{aimed.replace(':', '-')}")
        if not chain.start(aimed).strike:
            result = KillResult(name, "not hit", struck="it ended before")
        else:
            for _ in range(LAST_STARTS):
                if chain.start().status in (0, TOO_LONG):
                    break
            result = self._judge(name, chain.starts)
        if not self.keep:
            shutil.rmtree(chain.folder, ignore_errors=True)
        return result

    def _judge(self, name: str, starts: list[Start]) -> KillResult:
        reference, first, last = self.reference, starts[0], starts[-1]
        resumed, differences = list[int | None](), list[Difference]()
        steps, summaries = list[list[int]](), list[StartSummary]()
        before_strike = itertools.takewhile(lambda line: line["at"] != "strike", first.lines)
        unharmed = sum(line["at"] == "update" and not line["rank"] for line in before_strike)
        for start in starts:
            places = {rank: reference.place_of(start, rank) if resumed else 0 for rank in reference.ranks}
            at, seconds = places[0], round(start.seconds, 3)
            resumed.append(at)
            steps.append([*range((at or 0) + 1, (at or 0) + start.updates + 1)])
            resumed_from, count = [at] if at else [], start.updates
            summaries.append(StartSummary(start.strike or None, start.status, seconds, resumed_from, count))
            if count and (difference := reference.first_difference(start, places)) is not None:
                is_earlier = start is first and difference.step <= unharmed
                differences.append(difference._replace(note=EARLIER) if is_earlier else difference)
        reached = [(at or 0) + start.updates for at, start in zip(resumed, starts, strict=True)]
        end = reached[-1] if last.updates else max(reached)
        for status, update in ((first.status, reached[0]), (last.status, end)):
            if status == 0 and update != reference.updates:
                counts = str(reference.updates), str(update)
                differences.append(Difference("journal", "updates", *counts, place="end", note=ENDED))
        files = _files_by_update(first.lines)
        # the last update after which tensors were saved, and another update was made
        saved_update = max((n for n in range(first.updates) if reference.saves(files, n)), default=0)
        if not differences and saved_update and starts[1].updates and not resumed[1]:
            values = f"a save after update {saved_update}", "the start"
            differences.append(Difference("journal", "the place", *values, place="enter", note=LOST))
        struck = f"after update {first.updates}{reference.file_words(first)}"
        struck += ", hung" * (first.seconds >= self.timeout)
        hits = [bool(start.strike) for start in starts]
        difference = next(iter(differences), None)
        result = self.result(name, summaries, steps, hits, last.log, difference, struck)
        if result.verdict != "exact" or not starts[1].updates or resumed[1] is None:
            return result
        at = resumed[1]
        if complete := reference.newest_complete(first, at):
            note = f"lost work: resumed after update {at}, although a save of update {complete} was complete"
            return replace(result, message=note, lost=complete - at)
        older = f"resumed after update {at}; tensors had been saved up to update {saved_update}"
        return replace(result, message=ANEW if not at else older if at < saved_update else "")


LEFT = ("settings", "weights", "moments", "buffers")
"""Parts of an update that have to be equal, from cause to effect."""


def _difference(part: str, old: Any, new: Any, update: int, place: str = "step", rank: int = 0) -> Difference:
    facts = COMPONENTS.get(part, part), part, str(old)[:40], str(new)[:40], update
    return Difference(*facts, place=place, rank=rank, note=CAUSES[part])


def _in_turns(strikes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Order (kind, point) so that each kind comes once before one comes twice."""
    turns: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return sorted(strikes, key=lambda strike: next(turns[strike[0]]))


Files: TypeAlias = dict[tuple[int, int], list[dict[str, Any]]]
"""What happened to files: rank and number of updates done -> lines until the next update."""


def _files_by_update(lines: list[dict[str, Any]]) -> Files:
    files, updates = defaultdict[tuple[int, int], list[dict[str, Any]]](list), Counter[int]()
    for line in lines:
        updates[line["rank"]] += line["at"] == "update"
        if line["at"] in ("file", "whole", "part"):
            files[line["rank"], updates[line["rank"]]].append(line)
    return files


def _has_tensors(file: Mapping[str, Any]) -> bool:
    by_name = str(file["path"]).endswith((".ckpt", ".pt", ".pth", ".distcp"))
    return by_name or file["at"] == "whole" or file.get("kind") == "save"


class Reference:
    """The undisturbed start: its updates on each rank, and the points at which it can be struck."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.ranks = sorted({line["rank"] for line in start.lines if line["at"] == "update"})
        self.lines = {rank: start.of_rank(rank, "update") for rank in self.ranks}
        self.enters = {rank: start.of_rank(rank, "enter") for rank in self.ranks}
        self.updates = len(self.lines[0])
        self.seeded = set(self.lines[0][0]["random"])
        """Generators whose states are the same in each undisturbed start."""
        self.files = _files_by_update(start.lines)
        self.logs = set[str]()
        saves = {update for _, update in self.files if self.saves(self.files, update)}
        beside = [file for (_, n), files in self.files.items() if saves and n not in saves for file in files]
        self.logs |= {file["path"] for file in beside}
        """Files that also change where no tensors are saved."""

    def look_for_seeds(self, start: Start) -> None:
        """Leave out the generators that a second undisturbed start has in other states."""
        for old, new in zip(self.lines[0], start.of_rank(0, "update"), strict=False):
            self.seeded &= {name for name, state in old["random"].items() if state == new["random"].get(name)}

    def _states(self, rank: int, optimizer: int) -> dict[int, dict[str, Any]]:
        """Return the states of an optimizer: number of all updates done before its next one -> the state."""
        lines = self.lines[rank]
        indices = [n for n, line in enumerate(lines) if line["number"] == optimizer]
        entered = [line for line in self.enters[rank] if line["number"] == optimizer]
        states = [*entered, *(lines[n] for n in indices)]
        return dict(zip([*indices, len(lines)], states, strict=True)) if indices else {}

    def place_of(self, start: Start, rank: int) -> int | None:
        """Return after how many updates a start goes on; None if it has no state of the undisturbed run."""
        entered = start.of_rank(rank, "enter")
        if not entered:
            return 0
        states, new = self._states(rank, entered[0]["number"]), entered[0]
        complete = [n for n, old in states.items() if all(old[p] == new[p] for p in ("weights", "moments"))]
        weights_alone = [n for n, old in states.items() if old["weights"] == new["weights"]]
        return max(complete or weights_alone, default=None)

    def first_difference(self, start: Start, places: Mapping[int, int | None]) -> Difference | None:
        """Find the first update that left something else, and what differed first on the way there.

        Batches and random state that differ without any effect on the weights are no difference.
        """
        for rank, place in places.items():
            if place is None:
                unknown = "of some update", "of none"
                return Difference("weights", "all", *unknown, place="enter", rank=rank, note=UNKNOWN)
            for new in start.of_rank(rank, "enter")[:1]:
                old = self._states(rank, new["number"])[place]
                for part in ("weights", "moments"):
                    if old[part] != new[part]:
                        return _difference(part, old[part], new[part], place, "enter", rank)
            pairs = list(zip(self.lines[rank][place:], start.of_rank(rank, "update"), strict=False))
            for n, (old, new) in enumerate(pairs, 1):
                if any(old[part] != new[part] for part in LEFT):
                    return self._cause(pairs[:n], place, rank)
        return None

    def _cause(self, pairs: list[tuple[dict[str, Any], dict[str, Any]]], place: int, rank: int) -> Difference:
        """Name what differed first among updates of which the last left other weights or moments."""
        for n, (old, new) in enumerate(pairs, place + 1):
            draws = old["draws"], new["draws"]
            if n == place + 1:  # one may have drawn more: what a resume passes over, an evaluation's batches
                earlier = [each for line in self.lines[rank][:n] for each in line["draws"]]
                count = max(1, min(len(old["draws"]), len(new["draws"])))
                draws = earlier[-count:], new["draws"][-count:]
            parts = {("samples", "samples"): draws}
            for each in sorted(self.seeded):
                parts["random state", each] = old["random"].get(each), new["random"].get(each)
            parts |= {(part, part): (old[part], new[part]) for part in LEFT}
            for (part, name), (expected, actual) in parts.items():
                if expected != actual:
                    return _difference(part, expected, actual, n, rank=rank)._replace(name=name)
        raise AssertionError(pairs[-1])

    def strikes(
        self, count: int, draw: Random, power_cut: bool = False
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Choose points to strike: (name of the kind, value of EVERSTEP_STRIKE); and name all kinds.

        Up to a third strike between updates (one by SIGTERM, of all ranks), one in an evaluation; the others
        strike the files of saves: in the middle of each change, before it, and by SIGTERM.  Each of these
        kinds is struck once before one is struck twice, so that a short budget reaches as many as it can.
        Of a save, files with tensors come first.  Files that also change where no tensors are saved, as logs
        do, come last: they get a twelfth of the strikes, and what the others leave.
        """
        counts, evaluations = Counter[tuple[str, int]](), list[tuple[str, str]]()
        files = list[tuple[int, str, bool, str, str]]()
        for line in self.start.lines:
            at, rank = line["at"], line["rank"]
            counts[at, rank] += 1
            if at == "evaluation":
                evaluations.append((at, f"kill:{at}:{counts[at, rank]}:{rank}"))
            if at == "file":
                update, kind = counts["update", rank], line["kind"] + f" @{rank}" * (rank > 0)
                point = f"{at}:{counts[at, rank]}:{rank}"
                files.append((update, line["path"], not _has_tensors(line), kind, point))
        last = self.updates
        plan = [
            ("update", f"kill:update:{draw.randint(1, max(1, last - 1))}:{draw.choice(self.ranks)}")
            for _ in range(max(1, count // 3 - 1))
        ]
        plan += [("SIGTERM", f"SIGTERM:update:{draw.randint(1, max(1, last - 1))}:-1")]
        plan += [draw.choice(evaluations)] if evaluations else []
        files.sort(key=lambda file: (abs(file[0] - last / 2), file[2]))
        harms = [("torn", "tear", ("open", "save")), ("power cut", "tear", ("rename",) * power_cut)]
        harms += [("before", "kill", ("",)), ("SIGTERM", "SIGTERM", ("save",))]
        strikes: dict[bool, list[tuple[str, str]]] = {}
        for are_logs in (False, True):
            selection = [file for file in files if (file[1] in self.logs) == are_logs]
            points = [
                (f"{name} {kind}", f"{action}:{point}")
                for *_, kind, point in [file for file in selection if 0 < file[0] < last] or selection
                for name, action, kinds in harms
                if kind.startswith(kinds)
            ]
            strikes[are_logs] = _in_turns(points)
        kinds = list(dict.fromkeys(name for name, _ in [*plan, *strikes[False], *strikes[True]]))
        pairs = itertools.zip_longest(strikes[False], plan)
        mixed = [each for pair in pairs for each in pair if each is not None]
        first = _in_turns(mixed)[: count - len(strikes[True][: count // 12])]
        return [*first, *strikes[True]][:count], kinds

    def saves(self, files: Files, update: int) -> bool:
        return self.save_at(files, update) != [] or any(
            _has_tensors(line) for rank in self.ranks for line in files.get((rank, update), [])
        )

    def newest_complete(self, struck: Start, at: int) -> int:
        """Return the newest update of which a struck start had a complete save; 0 if none is newer than `at`.

        A save is complete as each rank makes the next update, if its files are those of the save after `at`,
        from which the resume began; or in the middle of the save, if the kill found it so, too.
        """
        files, pattern, count = _files_by_update(struck.lines), self.save_at(self.files, at), struck.updates
        last: dict[str, Any] = next((line for line in reversed(struck.lines) if line["rank"] == 0), {})
        if last.get("point") == "file" and (not at or pattern == self.save_at(self.files, count) != []):
            changes = sum(line["at"] == "file" for line in files[0, count])
            if at < count and self._is_complete(count, changes):
                return count
        newer = range(at + 1, min(len(struck.of_rank(rank, "update")) for rank in self.ranks))
        return max((n for n in newer if pattern == self.save_at(files, n) != []), default=0)

    def _is_complete(self, update: int, struck: int) -> bool:
        """Whether the save after an update is complete before its change number `struck` (from 1).

        It is if a file with the whole state has its last name, and the undisturbed start only goes on to
        make further files with a whole state of the same entries, and to remove older files.
        """
        complete, at_strike, ever = dict[Any, list[str]](), dict[Any, list[str]](), dict[Any, list[str]]()
        changes: list[dict[str, Any]] = []
        for line in self.files[0, update]:
            path = line["path"]
            if line["at"] == "whole":
                complete[path] = line["keys"]
            elif line["at"] == "file":
                changes.append(line)
                at_strike = {**complete} if len(changes) == struck else at_strike
                keys = complete.pop(line.get("source", path), complete.get(line.get("size")))
                complete.pop(path, None)
                complete |= {path: keys} if keys and line["kind"] == "rename" else {}
            ever |= complete
        paths = {line["path"] for line in changes if line["kind"] != "remove"}
        other_lines = [line for rank in self.ranks[1:] for line in self.files[rank, update] if "kind" in line]
        ahead = [line for line in [*changes[struck - 1 :], *other_lines] if line["path"] not in self.logs]
        copies = [ever.get(one["path"]) for one in ahead if one["kind"] != "remove" or one["path"] in paths]
        stay = [keys for path, keys in at_strike.items() if path in complete and isinstance(path, str)]
        return any(all(copy == keys for copy in copies) for keys in stay)

    def save_at(self, files: Files, update: int) -> list[tuple[int, str, str]]:
        """List the files of a whole save after an update: rank, kind, name without digits; [] if it is none.

        It is whole if the files of the ranks with the same weights and moments hold all of these together.
        What another thread saves is none: it may be unfinished at the next update.
        """
        lines = [line for rank in self.ranks for line in files.get((rank, update), [])]
        if not any("tensors" in line for line in lines) or any("beside" in line for line in lines):
            return []
        numbers_of, total = defaultdict[str, set[int]](set), 0
        for rank in self.ranks:
            state = {line["number"]: [line["weights"], line["moments"]] for line in self.lines[rank][:update]}
            numbers = numbers_of[str(state)]
            for line in files.get((rank, update), []):
                numbers |= {*line.get("tensors", ())}
                total = max(total, line.get("of", 0))
        if any(len(numbers) < total for numbers in numbers_of.values()):
            return []
        changes = [line for line in lines if "kind" in line and line["path"] not in self.logs]
        made = [(each["rank"], each["kind"], Path(each["path"]).name) for each in changes]
        return [(rank, kind, re.sub(r"\d+", "", name)) for rank, kind, name in made if kind != "remove"]

    def file_words(self, struck: Start) -> str:
        """Describe the file at which a start was struck; else the rank, if it was one of several."""
        index = next(n for n, line in enumerate(struck.lines) if line["at"] == "strike")
        strike, files = struck.lines[index], _files_by_update(struck.lines)
        if strike["point"] == "file":
            file = replace(struck, lines=struck.lines[:index]).of_rank(strike["rank"], "file")[-1]
            return f", {file['kind']} {Path(file['path']).name}"[:19]
        name = f" @{strike['rank']}" if len(self.ranks) > 1 and not struck.strike.endswith(":-1") else ""
        saving = [each for each in self.ranks if any(map(_has_tensors, files[each, struck.updates]))]
        saves = f", rank {saving[0]} saves" if name and saving else ""
        evaluation = ", in an evaluation" if strike["point"] == "evaluation" else ""
        return name + evaluation + saves
