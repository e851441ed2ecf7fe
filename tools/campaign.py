"""`make campaign`: what is random, timed, long or of this machine, for as many minutes as it is given.

    python tools/campaign.py [--minutes 90] [--seed N] [--only "tests/laws"] [PYTEST ARGUMENTS]

It reports, and keeps no commit out.  Files of tests come in an order that the seed draws, so that each short
campaign tries another part; what has not begun when the time is over is counted as not reached.  Each failure
is printed with what repeats it, and one line is added to docs/campaigns.md.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "campaigns.md"


def commit() -> str:
    """Return the short name of what is checked out, "+" for files that differ; "unversioned" without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unversioned"


class Counts:
    """A plugin of pytest: counts outcomes, and what tests have survived, as they say with `tally`."""

    def __init__(self) -> None:
        self.outcomes = Counter[str]()
        self.failed: dict[str, str] = {}
        self.survived = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, report.longreprtext.strip().splitlines()[-1])
        elif report.when == "call":
            self.outcomes[report.outcome] += 1
            for name, value in report.user_properties:
                if name == "tally" and isinstance(value, dict):
                    self.survived[value["kind"]] += value["n"]

    def line(self) -> str:
        struck = ", ".join(f"{n:,} {kind}" for kind, n in self.survived.most_common())
        outcomes = f"{self.outcomes['passed']:,} passed, {len(self.failed)} failed"
        return f"{outcomes}; survived, and exact: {struck or '-'}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make campaign")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--only", default="", help="files of tests, or an expression as of pytest -k")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the line about it is added")
    options, further = parser.parse_known_args()
    began, of, counts = time.time(), commit(), Counts()
    paths = options.only.split() if "/" in options.only else ["-k", options.only] * bool(options.only)
    seeds = [f"--seed={options.seed}", f"--hypothesis-seed={options.seed}"]
    until = f"--until={began + 60 * options.minutes}"
    status = pytest.main(["-q", "--campaign", *seeds, until, *further, *paths], plugins=[counts])
    if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        return int(status)
    minutes = round((time.time() - began) / 60)
    for test, message in counts.failed.items():
        print(f'FAILED {test}: {message}\n  make campaign SEED={options.seed} ONLY="{test}"  (commit {of})')
    line = f"| {time.strftime('%Y-%m-%d')} | {of} | {options.seed} | {minutes} | {counts.line()} |"
    with options.page.open("a") as page:
        print(line, file=page)
    print(line)
    return int(bool(counts.failed))


if __name__ == "__main__":
    sys.exit(main())
