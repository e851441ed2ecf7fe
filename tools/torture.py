"""`make torture`: a sitting of the campaign of this commit, and one line about all sittings so far.

    python tools/torture.py [--budget 20m] [PYTEST ARGUMENTS]

Cases that have passed are stored in .torture/COMMIT.jsonl and do not run again; one that failed does.
Ctrl-C and --budget end a sitting, and the next one goes on.  A campaign has one seed: EVERSTEP_SEED, else a
drawn one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reliability
from torture_store import Store, line, machine, summed

PAGE = ("docs/reliability.md", "docs/reliability.json", "docs/reliability.svg")
"""What a campaign writes; a commit that changes these alone is the commit before it."""
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90s, 20m or 2h")
    return int(found[1]) * UNITS[found[2]]


def git(*arguments: str) -> str:
    others = [f":!{path}" for path in PAGE]
    done = subprocess.run(["git", *arguments, "--", ".", *others], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit() -> str:
    """Return the commit that is checked out.

    Raises:
        SystemExit: files differ from it.
    """
    if changed := git("status", "--porcelain"):
        raise SystemExit(
            f"make torture counts for one commit, and these files are not in it:\n{changed}\n"
            "commit them first; to try one test: pytest -m torture FILE"
        )
    return git("log", "-1", "--format=%H")


def cases() -> list[str]:
    """Return the names of all cases of the campaign."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-m",
        "torture",
        "-p",
        "torture_sitting",
    ]
    paths = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        command, env={**os.environ, **paths}, stdout=subprocess.PIPE, text=True, check=False
    )
    found = [name for name in done.stdout.partition("\n\n")[0].splitlines() if "::" in name]
    if done.returncode or not found:
        raise SystemExit(f"{done.stdout}\nthe cases of the campaign could not be listed")
    return found


def opened(store: Store, of: str) -> int:
    """Make the store of a commit if there is none; return the campaign's seed.

    Raises:
        SystemExit: EVERSTEP_SEED is another one.
    """
    wanted = os.environ.get("EVERSTEP_SEED")
    if not store.path.exists():
        seed = int(wanted or int.from_bytes(os.urandom(4)))
        store.begin({"commit": of, "seed": seed, "machine": machine(), "cases": cases()})
    found: int = store.read()[0]["seed"]
    if wanted and int(wanted) != found:
        raise SystemExit(
            f"the campaign of this commit has the seed {found}, not {wanted}: go on without SEED, or remove "
            f"{store.path} to begin another one"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make torture")
    parser.add_argument("--budget", type=seconds, default=float("inf"), help="as in 90s, 20m, 2h")
    options, further = parser.parse_known_args()
    began = time.time()
    of = commit()
    store = Store(Path(".torture") / f"{of[:12]}.jsonl")
    seed = opened(store, of)
    os.environ["EVERSTEP_SEED"] = str(seed)
    status = pytest.main(
        [
            *("-q", "-m", "torture", "-p", "torture_sitting", "--sitting", str(store.path)),
            *("--until", str(began + options.budget), *further),
        ]
    )
    summary = summed(store)
    reliability.write(summary, Path("docs"))
    print(f"commit {of[:12]}, seed {seed}: {store.path}")
    print(line(summary))
    if summary["failed"]:
        return 1
    everything = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # no tests: all are stored
    return 0 if status in everything else int(status)


if __name__ == "__main__":
    sys.exit(main())
