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
    r"\b(date\.today|datetime\.now|time\.time|time\.monotonic|perf_counter)\(": "looks at a clock",
    r"\bsched_yield\(": "spins: wait for an event",
    r"\bos\.killpg\((?!0,)": "signals a stored number: signal through the process object",
}

"""Pattern of a line -> what is wrong with it."""

CAMPAIGN_MODULES = {
    "drill/scripts/clock_augmentation.py",
    "drill/scripts/slow.py",
    "drill/scripts/thread.py",
    "laws/law_support/campaign.py",
    "laws/law_support/campaign_pace.py",
    "strace_record.py",
    "struck_program.py",
}
"""What only tests of the campaign use."""

LEFT: dict[str, int] = {
    "conftest.py": 1,  # --until, which the campaign alone gives
    "checkpoint/test_checkpoint_writer.py": 2,
    "checkpoint/test_thousand_files.py": 2,
    "cli/test_labels.py": 1,
    "cli/test_run.py": 6,
    "cli/test_watch_command.py": 7,
    "cost_program.py": 2,
    "data/test_prefetch.py": 1,
    "data/test_workers.py": 3,
    "experiment/test_experiment.py": 3,
    "formats/test_foreign_weights.py": 1,
    "group/processes.py": 7,
    "group/rank_loops.py": 1,
    "group/rank_saves.py": 2,
    "group/sharded_loops.py": 1,
    "group/test_bad_starts.py": 2,
    "group/test_decisions.py": 4,
    "group/test_first_cause.py": 1,
    "group/test_group.py": 1,
    "group/test_other_ranks.py": 3,
    "group/test_parallel.py": 3,
    "group/test_rank_commit.py": 7,
    "group/test_torchrun.py": 2,
    "group/test_virtual_shards.py": 5,
    "index/test_hostile_index.py": 1,
    "index/test_index_malformed.py": 1,
    "index/test_index_steps.py": 1,
    "index/test_index_training.py": 1,
    "mirror/mirror_program.py": 1,
    "mirror/s3_server.py": 3,
    "mirror/test_folder_mirror.py": 3,
    "proof/conformance_program.py": 3,
    "record/test_journal_writing.py": 2,
    "record/test_run_lock.py": 2,
    "record/test_verified_resume.py": 1,
    "services/test_all_together.py": 1,
    "services/test_notify.py": 6,
    "services/test_progress_bar.py": 1,
    "services/test_retry.py": 2,
    "services/test_system.py": 3,
    "services/test_wait.py": 4,
    "state/test_entries.py": 1,
    "supervisor/test_bad_input.py": 1,
    "supervisor/test_cadence.py": 1,
    "supervisor/test_hangs.py": 5,
    "supervisor/test_no_progress.py": 1,
    "supervisor/test_supervisor_use.py": 2,
    "supervisor/test_trial.py": 2,
    "testing/test_check_backend.py": 1,
    "trainer/test_modes.py": 1,
    "trainer/test_watch.py": 5,
    "trainer/watch_program.py": 1,
    "ui/page_server.py": 6,
    "ui/test_access.py": 1,
    "whole_run.py": 1,
}
"""File -> how many of its lines are still to be mended; none may be added."""


def gate_source(path: Path) -> str:
    """The source of a file of tests, without the functions that only the campaign runs."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef) and any(_campaign_only(each) for each in node.decorator_list):
            first = min(each.lineno for each in node.decorator_list)
            lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)  # type: ignore[operator]
    return "\n".join(lines)


def _campaign_only(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("pytest.mark.campaign(") and "gate=" not in ast.unparse(
        decorator
    )


def is_campaign(path: Path) -> bool:
    """Whether the gate runs nothing of this file."""
    marked = re.search(r"^pytestmark = \[?pytest\.mark\.campaign", path.read_text(), re.M)
    return marked is not None or str(path.relative_to(TESTS)) in CAMPAIGN_MODULES


def luck() -> Counter[str]:
    """How many lines of each file, as far as the gate runs it, depend on luck."""
    found, any_luck = Counter[str](), re.compile("|".join(LUCK))
    for path in TESTS.rglob("*.py"):
        if path.name != "test_gate.py" and any_luck.search(path.read_text()) and not is_campaign(path):
            count = sum(any_luck.search(line) is not None for line in gate_source(path).splitlines())
            found.update({str(path.relative_to(TESTS)): count} if count else {})
    return found


def test_nothing_depends_on_luck() -> None:
    found = luck()
    wrong = {file: n for file, n in found.items() if n > LEFT.get(file, 0)}
    assert not wrong, f"more lines than are left of {list(LUCK.values())}"
    mended = {file: n for file, n in LEFT.items() if found[file] < n}
    assert not mended, "lower the numbers in LEFT"


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
