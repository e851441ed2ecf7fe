"""The gate depends on nothing but the commit: what a parser can see of the rules in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import gate

TESTS = Path(__file__).parent

LUCK = {
    r"\btime\.sleep\(": "sleeps: wait for an event",
    r"\burandom\(|\bSystemRandom\(|\bdefault_rng\(\)|\brandom\.seed\(\)|\bRandom\(\)": "draws without a seed",
    r"\btimeout=(\d|[1-9]\d|1[01]\d)\b(?!\.\w)": "has a limit under 120 s",
    r"\b(wait|communicate|join)\((\d|[1-9]\d|1[01]\d)(\.\d+)?\)": "has a limit under 120 s",
    r"\bsettle=\d": "has a limit under 120 s: PATIENCE",
    r"\b(date\.today|datetime\.now|time\.(time|monotonic|process_time)|perf_counter)\(": "looks at a clock",
    r"\bkey=.*st_[acm]time": "takes the newest of two files, which may be of one tick of the clock",
    r"\bsched_yield\(": "spins: wait for an event",
    r"\bos\.killpg\((?!0,)": "signals a stored number: signal through the process object",
}
"""Pattern of a line -> what is wrong with it."""

CAMPAIGN_MODULES = {
    "drill/scripts/clock_augmentation.py",
    "drill/scripts/clock_in_state.py",
    "drill/scripts/slow.py",
    "drill/scripts/thread.py",
    "laws/law_support/campaign.py",
    "laws/law_support/campaign_pace.py",
    "recipes/struck.py",
}
"""What only tests of the campaign use."""

ALLOWED = {
    "adopt/test_adopt.py": 2,  # text of a script, which is only parsed
    "adopt/scripts/meters.py": 2,  # a duration, which is printed nowhere and is no state
    "conftest.py": 1,  # --until, which the campaign alone gives
    "experiment/test_experiment.py": 1,  # the time of a start in a name, minutes from the bound
    "group/processes.py": 1,  # the group of a torchrun that this process has not waited for yet
    "group/test_other_ranks.py": 4,  # a rank's death and pace, which the tests of the campaign alone give
    "supervisor/test_changed_options.py": 1,  # the time of a start, minutes from the bound
    "supervisor/test_kept_elsewhere.py": 1,  # what a service keeps; no verdict is of time
    "supervisor/test_program_variables.py": 3,  # what a program keeps in its variables; no verdict is of time
    "hostile/fuzz_child.py": 2,  # seconds of the processor for one input: twenty times what the slowest takes
}
"""File -> how many of its lines may do so, with the reason."""


def gate_source(path: Path) -> str:
    """The source of a file of tests, without the functions that only the campaign runs."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        marks = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
        if any(re.fullmatch(r"pytest\.mark\.campaign\('\w+'\)", mark) for mark in marks):
            first = min(each.lineno for each in node.decorator_list)
            lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)  # type: ignore[operator]
    return "\n".join(lines)


def is_campaign(path: Path) -> bool:
    """Whether the gate runs nothing of this file."""
    return gate.is_campaign_only(path) or str(path.relative_to(TESTS)) in CAMPAIGN_MODULES


def luck() -> Counter[str]:
    """How many lines of each file, as far as the gate runs it, depend on luck."""
    found, any_luck = Counter[str](), re.compile("|".join(LUCK))
    for path in TESTS.rglob("*.py"):
        if path.name != "test_gate.py" and any_luck.search(path.read_text()) and not is_campaign(path):
            count = sum(any_luck.search(line) is not None for line in gate_source(path).splitlines())
            found.update({str(path.relative_to(TESTS)): count} if count else {})
    return found


def test_nothing_depends_on_luck() -> None:
    assert luck() == ALLOWED, f"lines that are {list(LUCK.values())}"


def test_modules_of_the_campaign_are_there() -> None:
    assert [name for name in CAMPAIGN_MODULES if not (TESTS / name).is_file()] == []


def test_a_file_of_tests_marks_itself_once() -> None:
    """A second `pytestmark` takes the place of the first, and with it of the tier."""
    marks = {path.name: re.findall(r"^pytestmark\b", path.read_text(), re.M) for path in TESTS.rglob("*.py")}
    assert [name for name, found in marks.items() if len(found) > 1] == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """Two files of a name cannot be imported side by side: each runs alone, and not in the whole suite."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(("n", "of", "numbers"), [(1, 1, [0]), (2, 7, [0, 3]), (9, 3, [0, 1, 2]), (0, 4, [])])
def test_cases_of_the_gate_are_spread(n: int, of: int, numbers: list[int]) -> None:
    assert gate.spread(n, of) == numbers


def test_each_law_has_a_test_in_the_gate() -> None:
    missing = []
    for path in TESTS.glob("laws/test_law*.py"):
        if is_campaign(path) or not re.search(r"^def test_", gate_source(path), re.M):
            missing.append(path.name)
    assert missing == []
