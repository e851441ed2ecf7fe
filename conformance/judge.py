"""Resume conformance: any program that trains is killed, resumed and scored.

    python conformance/judge.py [options] -- PROGRAM ...

The program needs nothing of everstep.  It follows a protocol of three lines (see `witness`):

- `PROGRAM FOLDER` trains in FOLDER, or resumes what is there, and ends with status 0 when all is trained;
- it appends a line for each step to the file that EVERSTEP_CONFORMANCE names;
- at its end it appends a digest of each tensor.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forked import LONGEST
from score import score, table
from starts import Program
from strikes import Campaign, CannotBeJudged, Struck
from verdicts import EXACT

EXIT_EXACT, EXIT_NOT_EXACT, EXIT_CANNOT = 0, 1, 3

ABOUT = """\
PROGRAM FOLDER trains in FOLDER, or resumes what is there; it appends a line of JSON per step to the file that
EVERSTEP_CONFORMANCE names (see witness.py).  Exit status: 0 if all was exact, 1 if
not (also where a strike could not be made), 3 if the program cannot be judged."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge a program; return the exit status."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    at = given.index("--") if "--" in given else len(given)
    options, command = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser("judge.py", description=ABOUT)
    parser.usage = "%(prog)s [options] -- PROGRAM [ARGUMENT ...]"
    parser.add_argument(
        "--save-every", type=int, required=True, help="steps between two checkpoints of the program"
    )
    parser.add_argument("--epoch", type=int, required=True, help="steps of an epoch")
    parser.add_argument(
        "--kills", type=int, default=10, help="kills in mid-epoch; the other strikes follow it"
    )
    parser.add_argument("--seed", type=int, default=1, help="from which the strikes are drawn")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help='a kind of strike, or one strike, as "SIGTERM" or "SIGTERM:0"',
    )
    parser.add_argument("--name", default="", help="name in the table")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a start has hung")
    parser.add_argument(
        "--preload",
        default="",
        help="modules, as in torch,lightning: starts are forked from a process that has them",
    )
    parser.add_argument("--json", type=Path, help="file for the score")
    parser.add_argument(
        "--keep", type=Path, help="folder for runs, traces and logs; otherwise they are deleted"
    )
    chosen = parser.parse_args(options)
    if not command:
        parser.error("name the program after --, as in: -- python train.py")
    if min(chosen.save_every, chosen.epoch, chosen.kills) < 1:
        parser.error("--save-every, --epoch and --kills are at least 1")
    if chosen.preload and len(tempfile.gettempdir()) > LONGEST:
        parser.error(
            f"--preload needs a temporary folder with a path of at most {LONGEST} characters, for a socket; "
            f"it is {tempfile.gettempdir()}: set TMPDIR to a shorter one"
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # in the background of a shell; the program would inherit it, and never see its Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    place = chosen.keep or Path(tempfile.mkdtemp(prefix="conformance-"))
    place.mkdir(parents=True, exist_ok=True)
    program = Program(command, place, chosen.limit, [name for name in chosen.preload.split(",") if name])
    campaign = Campaign(program, chosen.save_every, chosen.epoch, chosen.seed)
    strikes: list[Struck] = []
    why_not = ""
    try:
        campaign.look_at_it_undisturbed()
        print(f"undisturbed: {len(campaign.undisturbed.steps)} steps, twice the same", flush=True)
        for each in campaign.strikes(chosen.kills, chosen.only):
            strikes.append(each)
            print(_line(each, chosen.seed), flush=True)
    except CannotBeJudged as error:
        why_not = str(error)
    finally:
        if chosen.keep is None:
            shutil.rmtree(place, ignore_errors=True)
    found = score(chosen.name or Path(command[-1]).stem, campaign, chosen.kills, strikes, why_not)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{table([found])}")
    if why_not:
        return EXIT_CANNOT
    return EXIT_EXACT if all(each.outcome == EXACT for each in strikes) else EXIT_NOT_EXACT


def _line(struck: Struck, seed: int) -> str:
    told = f"{struck.kind}: {struck.outcome}" + (f" (then {struck.then})" if struck.then else "")
    told += f"; {struck.plan}; resumed after {struck.resumed_after}, {struck.steps_again} steps again"
    if struck.difference:
        told += f"; differs in {struck.difference.what}"
        told += "" if struck.difference.step is None else f" at step {struck.difference.step}"
    if struck.used_too_often or struck.used_too_seldom:
        told += f"; samples used too often {struck.used_too_often}, too seldom {struck.used_too_seldom}"
    if struck.words:
        told += f"; {struck.words}"
    return (
        told if struck.outcome == EXACT else f'{told}  [--seed {seed} --only "{struck.kind}:{struck.index}"]'
    )


if __name__ == "__main__":
    sys.exit(main())
