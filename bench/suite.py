"""Run all benchmarks one after another, each in processes of its own, and write docs/benchmarks.*.

    make bench                                  ours, half an hour
    make bench PEERS=1                          other libraries beside them, an hour
    make bench ARGS="--only steps data"         these alone; the page keeps what it has of the others
    make bench ARGS="--page"                    the page and the pictures alone, from docs/benchmarks.json

Each part says when and where it was measured, and how busy the machine was: a load above 1.5 on an idle desk
means that somebody else was measured, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks_page import write

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"


class Part(NamedTuple):
    """A program of this folder.

    Attributes:
        file: its name, without the ending.
        arguments: always given.
        peers: given when other libraries are measured, too; "PYTHON" becomes their interpreter.
    """

    file: str
    arguments: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


PARTS = [
    Part("steps", peers=("--peers", "PYTHON")),
    Part("checkpoint"),
    Part("metrics", peers=("--peers", "PYTHON")),
    Part("start", peers=("--peers", "PYTHON")),
    Part("growth"),
    Part("data"),
    Part("trail"),
    Part("ledger"),
    Part("index"),
    Part("page", ("--index-alone",), ("--rivals", "tensorboard")),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[part.file for part in PARTS], help="these parts alone")
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has bench/requirements.txt")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    stored = DOCS / "benchmarks.json"
    found: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    here = where()
    for part in [] if options.page else PARTS:
        if options.only is None or part.file in options.only:
            print(f"== {part.file}", flush=True)
            found[part.file] = {**measured(part, options.peers), "where": here}
            stored.write_text(compact(found))  # a later part may fail
    write({part.file: found[part.file] for part in PARTS if part.file in found}, DOCS)


def measured(part: Part, peers: str | None) -> Any:
    """The tables of a part, and the load before and after."""
    more = [peers if each == "PYTHON" else each for each in part.peers] if peers else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tables.json"
        command = [sys.executable, str(HERE / f"{part.file}.py"), "--json", str(file), *part.arguments]
        subprocess.run([*command, *(each for each in more if each)], check=True)
        return json.loads(file.read_text())


def where() -> dict[str, str]:
    """Day, commit, machine, versions."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    return {
        "day": date.today().isoformat(),
        "commit": commit or "unknown",
        "machine": f"{os.cpu_count()} cores, {processor()}, {platform.system()}",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, NumPy {version('numpy')}",
    }


def processor() -> str:
    """The processor's name as Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def compact(found: dict[str, Any]) -> str:
    """JSON with each list of numbers on one line."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\[[-+\d.,\se]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


if __name__ == "__main__":
    main()
