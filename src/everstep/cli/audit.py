"""`everstep audit`"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from everstep.cli.common_options import index_option, json_option, run_argument
from everstep.cli.find_run import find
from everstep.cli.output import print_json, print_table, say
from everstep.display.cells import in_line

if TYPE_CHECKING:
    from everstep.proof.audit import Audit, Resume

_PASSES = ("stream", "passes", "verdict", "found")
_RESUMES = ("start", "from", "verification", "by", "data")


@click.command("audit")
@run_argument
@index_option
@json_option
def command(run: str, index: str | None, as_json: bool) -> None:
    """Prove that RUN used every sample once in each pass, over all crashes; or name the first that was not.

    Read are the ledger that each start keeps of the batches in its complete steps, and the newest
    checkpoint.  The order of the samples is computed again for everstep.data.arrays and
    everstep.data.loader; of other data an audit knows batches, and not samples.  The resumes are listed:
    which were verified, and by what.

    Exit status: 0 "proven" or "not provable", 1 "wrong".
    """
    from everstep.proof.audit import audit

    found = audit(find(run, index).path)
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if found.verdict == "wrong":
        sys.exit(1)


def _as_json(found: Audit) -> dict[str, Any]:
    passes = [finding._asdict() for finding in found.passes]
    return {**found._asdict(), "passes": passes, "resumes": [one._asdict() for one in found.resumes]}


def _print(found: Audit) -> None:
    state = "finished" if found.finished else "not finished"
    starts = f"{found.starts} start{'s' * (found.starts != 1)}"
    say(f"{in_line(found.run)}: {found.verdict} ({state}, step {found.step:,}, {starts})")
    for problem in found.problems:
        say(f"  wrong: {in_line(problem)}")
    for note in found.notes:
        say(f"  note: {in_line(note)}")
    if found.passes:
        say("\npasses")
        rows = [{**one._asdict(), "passes": one.passes} for one in found.passes]
        print_table(rows, _PASSES, indent="  ")
    if found.resumes:
        say("\nresumes")
        rows = [{**one._asdict(), "from": one.checkpoint, "by": _by(one)} for one in found.resumes]
        print_table(rows, _RESUMES, indent="  ")


def _by(resume: Resume) -> str:
    """Return what was compared; the badge beside it says the result."""
    told = re.sub("^resume (not )?verified: ", "", resume.by)
    return told if resume.stands else f"{told} (superseded)".strip()
