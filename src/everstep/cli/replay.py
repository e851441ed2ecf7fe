"""`everstep replay`: execute steps of a run again, in a copy: look at a step, or verify a stretch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep.cli.common_options import index_option, run_argument
from everstep.cli.exit_signals import leave_in_order
from everstep.cli.experiment_commands import trust_option
from everstep.cli.find_run import find
from everstep.cli.output import note, say

if TYPE_CHECKING:
    from everstep.replaying.recorded_program import RecordedProgram

CANNOT = 4
"""Exit status where steps cannot be executed again."""

HELP = """Execute steps of RUN again, exactly, in a copy of it; RUN itself is only read.

\b
  everstep replay digits --step 4711
  everstep replay digits --step 4711 --pdb
  everstep replay digits --step 4711 --call inspect_step:look
  everstep replay digits --verify 4000:5000
  everstep replay digits --step 4711 -- train.py --lr 0.1

--step N starts the program that the run has recorded, from the nearest checkpoint before step N, and stops
just before the step: at a prompt with the batch, the objects of the state, random state and the loop; with
--pdb in the debugger, at the first line of your own code in that step; or a function is called with all that.

--verify A:B executes these steps, and compares every value that was recorded of them: metrics, digests of
batches, the states in checkpoints.  A: goes on to the last step, : is all that can be executed again.

The program runs as it is; only its run directory is elsewhere.  Nothing is saved, and no service reports.
The program is left at once, so that no line behind its loop runs.

\b
Exit status:
  0  the prompt was left; every recorded value was found again
  1  a recorded value was not found again, or none is recorded; the function has failed
  2  wrong usage
  4  the steps cannot be executed again
"""


@click.command("replay", help=HELP)
@run_argument
@click.option("--step", type=click.IntRange(1), metavar="N", help="Stop just before this step.")
@click.option("--verify", "steps", metavar="A:B", help="Execute these steps, and compare.")
@click.option("--pdb", is_flag=True, help="Stop in the debugger.")
@click.option(
    "--call", metavar="MODULE:FUNCTION", help="Call a function with the step, in place of a prompt."
)
@click.option(
    "--opened-as",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Path under which the program opens the run, if the run has moved.",
)
@click.option("--keep", type=click.Path(path_type=Path), help="New folder to keep the copy in.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="File for the result of --verify, as JSON."
)
@trust_option
@index_option
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT [ARGUMENT...]]")
def command(
    run: str,
    step: int | None,
    steps: str | None,
    pdb: bool,
    call: str | None,
    opened_as: Path | None,
    keep: Path | None,
    json_file: Path | None,
    trust: bool,
    index: str | None,
    program: tuple[str, ...],
) -> None:
    from everstep.errors import ReplayError
    from everstep.replaying import execution, recorded_program, verify

    if (step is None) == (steps is None):
        raise click.UsageError("give one of --step N and --verify A:B")
    if step is None and (pdb or call):
        raise click.UsageError("--pdb and --call stop before a step; give --step N")
    if pdb and call:
        raise click.UsageError("give one of --pdb and --call")
    if call is not None and ":" not in call:
        raise click.UsageError(f"--call {call}: give MODULE:FUNCTION, such as inspect_step:look")
    leave_in_order()
    run_dir = find(run, index).path.absolute()
    asked = range(step, step + 1) if step is not None else verify.asked_steps(steps or ":", run_dir)
    try:
        found = recorded_program.program_of(run_dir, asked[-1], program, trust=trust)
        with execution.folder_for(keep) as folder:
            if step is not None:
                status = _look(
                    run_dir, step, found, folder, opened_as, "debugger" if pdb else call or "shell"
                )
            else:
                status = _verify(run_dir, asked, found, folder, opened_as, json_file)
    except ReplayError as error:
        say(f"everstep replay: {error}", err=True)
        sys.exit(CANNOT)
    sys.exit(status)


def _look(
    run_dir: Path, step: int, program: RecordedProgram, folder: Path, opened_as: Path | None, then: str
) -> int:
    from everstep.replaying import execution, run_copy

    run_copy.require_step(run_dir, step)
    copy = run_copy.copy_run(run_dir, folder, step - 1, opened_as)
    note([*copy.notes, *program.notes])
    say(f"replaying {run_dir} from {copy.origin} to just before step {step}", err=True)
    executed = execution.execute(program, copy, execution.plan_for(copy, step - 1, then), interactive=True)
    note(executed.warnings)
    return executed.status


def _verify(
    run_dir: Path,
    steps: range,
    program: RecordedProgram,
    folder: Path,
    opened_as: Path | None,
    json_file: Path | None,
) -> int:
    from everstep.replaying.verify import verify

    result = verify(run_dir, steps, program, folder, opened_as)
    note(result.notes)
    say(str(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    return int(not result.verified)
