"""Write docs/reliability.md, .json and .svg; `make torture` does so at the end of each sitting.

    python tools/reliability.py

writes the page and the picture again from docs/reliability.json.  Prose of the page stands outside its marks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from reliability_picture import draw
from torture_store import KINDS, line

ROOT = Path(__file__).parent.parent
WORDS = {
    "kills": "SIGKILL, from outside at any moment or at a chosen place",
    "crash points": "killed, or refused by the disk, at one operation of a save, a start, a rollback",
    "power-cut states": "states of the disk that a power cut may leave",
    "damages": "files flipped, cut, swapped, gone",
    "fuzz inputs": "hostile files read",
    "signals": "SIGTERM, SIGINT, SIGHUP, SIGUSR1",
    "refused operations": "the disk full at one operation",
    "crashes in process": "exceptions in any step, tail or boundary",
    "losses that are no numbers": "NaN in a step: none is committed, and each policy does what it says",
    "workers killed": "SIGKILL of a loader's worker: the run ends with words, and its next start is exact",
    "index outages": "the database of the index gone, or locked",
    "planted faults named": "scripts with a fault, which the drill has named",
}
CLASSES = {"phase": "where", "door": "door", "how": "how", "file": "file", "program": "program"}
"""Classes that have a table each; there are others in docs/reliability.json."""


def write(summary: dict[str, Any], docs: Path) -> None:
    """Write the three files into a folder that has the page."""
    parts = [f'"{name}": {_value(name, value)}' for name, value in summary.items()]
    (docs / "reliability.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
    (docs / "reliability.svg").write_text(draw(summary["runs"]))
    page = docs / "reliability.md"
    page.write_text(filled(page.read_text(), summary, (docs / "proof.md").read_text()))


def _value(name: str, value: Any) -> str:
    """JSON of a few lines: a list of runs or tests has one for each."""
    if name == "runs":
        return "[\n" + ",\n".join(json.dumps(run) for run in value) + "\n]"
    if name in ("tests", "counts"):
        rows = (f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
        return "{\n" + ",\n".join(rows) + "\n}"
    return json.dumps(value)


def filled(page: str, summary: dict[str, Any], proof: str) -> str:
    """Return the page with what stands between its marks made anew."""
    made = {
        "counts": counts(summary),
        "tests": tests(summary),
        "peers": peers(summary, proof),
        "proofs": proofs(),
        "repeat": repeat(summary),
    }
    for name, text in made.items():
        begin, end = f"<!-- {name}: made by make torture -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"docs/reliability.md needs the lines {begin!r} and {end!r} once")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def counts(summary: dict[str, Any]) -> str:
    """Return when and where, the closing line, and a table of each kind by its classes."""
    where, sittings = summary["machine"], summary["sittings"]
    days = " to ".join(dict.fromkeys((summary["days"] or ["no day"])[:: len(summary["days"]) - 1 or 1]))
    minutes = round(summary["seconds"] / 60)
    spent = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    said = (
        f"Commit `{summary['commit'][:12]}`, seed {summary['seed']}; {days}, in {sittings} "
        f"sitting{'s' * (sittings != 1)} of {spent} in all; {where['cores']} cores, {where['memory']}, "
        f"{where['system']}, {where['versions']}. {summary['passed']:,} of "
        f"{summary['cases']:,} cases have passed.\n\n**{line(summary)}**"
    )
    rows = [
        f"| {kind} | {found['n']:,} | {WORDS.get(kind, '')} |"
        for kind, found in summary["counts"].items()
        if found["n"] or kind in KINDS
    ]
    tables = [_table(("kind", "survived", "what"), rows)]
    for kind, found in summary["counts"].items():
        for name, title in CLASSES.items():
            if classes := found["of"].get(name):
                ordered = sorted(classes.items(), key=lambda item: (-item[1], item[0]))
                tables.append(
                    _table((f"{kind}, {title}", "survived"), [f"| {key} | {n:,} |" for key, n in ordered])
                )
    runs = summary["runs"]
    chains = [sum(counted for _, _, counted in run["kills"]) for run in runs]
    long = sum(n >= 3 for n in chains)
    tables.append(
        f"Of {len(runs):,} runs {long:,} were killed three times or more before they ended, one of them "
        f"{max(chains, default=0)} times."
    )
    return "\n\n".join([said, *tables])


def _table(head: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def tests(summary: dict[str, Any]) -> str:
    """Return a row for each test of the campaign."""
    rows = []
    for name, row in summary["tests"].items():
        counted = ", ".join(f"{n:,} {kind}" for kind, n in row["counts"].items())
        rows.append(
            f"| `{name.removeprefix('tests/')}` | {row['passed']:,} of {row['cases']:,} | {counted} |"
        )
    return _table(("test, in tests/", "cases passed", "counted"), rows)


def peers(summary: dict[str, Any], proof: str) -> str:
    """Return the table of docs/proof.md with the campaign's own row."""
    found = re.search(r"(?m)^\| killed in the middle of an epoch .*\n(?:\|.*\n)+", proof)
    if found is None:
        raise SystemExit("docs/proof.md has no table 'killed in the middle of an epoch'")
    rows = [row for row in found[0].splitlines() if "everstep" not in row]
    kills = summary["counts"]["kills"]["of"]
    body, programs = kills.get("phase", {}).get("body", 0), len(kills.get("program", {}))
    failed = f"{len(summary['failed'])} cases failed" if summary["failed"] else "no case failed"
    return "\n".join(
        [*rows, f"| **everstep**, this campaign | {programs} | **{body:,} kills exact, {failed}** |"]
    )


def proofs() -> str:
    """Return the kinds of proof that `make test` has every day."""
    sys.path.append(str(ROOT / "tests"))
    from tiers import PROOFS

    rows = [f"| {kind} | `{test}` |" for kind, test in PROOFS.items()]
    return _table(("kind of proof", "the test that stands for it in `make test`"), rows)


def repeat(summary: dict[str, Any]) -> str:
    """Return the command for one case."""
    example = next((row["example"] for name, row in summary["tests"].items() if "torture" in name), "NODE ID")
    command = f'EVERSTEP_SEED={summary["seed"]} .venv/bin/python -m pytest -m "" "{example}"'
    return f"```console\n$ {command}\n```"


if __name__ == "__main__":
    write(json.loads((ROOT / "docs" / "reliability.json").read_text()), ROOT / "docs")
