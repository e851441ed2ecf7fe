"""Replay in this process: a program is left before a step, and all that the step would use stays at hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from everstep.arguments import checked_keywords, integer
from everstep.drill.processes import owned_folder
from everstep.errors import ReplayError, UsageError
from everstep.record import user_path
from everstep.replaying.execution import FOLDER, environment, plan_for
from everstep.replaying.run_copy import copy_run
from everstep.services.replayed import RAISE, ReplayedStep, ReplayLeft
from everstep.state import restore


@checked_keywords
def replay(
    run: str | os.PathLike[str], step: int, *, opened_as: str | os.PathLike[str] | None = None
) -> Replay:
    """Replay a run to just before a step, in this process: a context around a call of the run's program.

        with everstep.replay("runs/digits", 4711) as at:
            main()                   # opens runs/digits, as it always does
        at.batch, at.state["model"]  # the loop was left before step 4711

    Inside the block the program opens a copy of the run, from its nearest checkpoint before the step.  When
    the step is reached the loop is left, and so is the block.  Nothing is saved, reported or mirrored, and
    the run itself is only read.  After the block, the random state of this process is that before the step.

    Args:
        run: the run directory.
        step: the step, from 1.
        opened_as: path under which the program opens the run, if the run has moved since.

    Raises:
        ReplayError: the run has no checkpoint before the step and no given seed; at the block's end, the
            program did not come to the step.
    """
    path = None if opened_as is None else user_path(opened_as, "opened_as")
    return Replay(user_path(run, "run"), integer("step", step), path)


class Replay:
    """Context of `replay`.

    Attributes:
        step, epoch: numbers of the step and its epoch.
        batch: the batch that the step would be handed; None without data.
        state: the live objects of the state, by name.
        random: the random state, as `everstep.state.capture` returns it.
    """

    def __init__(self, run_dir: Path, step: int, opened_as: Path | None) -> None:
        self._run_dir, self.step, self._opened_as = run_dir, step, opened_as
        self._found: ReplayedStep | None = None
        self._before: dict[str, str | None] = {}

    @property
    def epoch(self) -> int:
        return self._at.epoch

    @property
    def batch(self) -> Any:
        return self._at.batch

    @property
    def state(self) -> Mapping[str, Any]:
        return self._at.state

    @property
    def random(self) -> Any:
        return self._at.random

    @property
    def _at(self) -> ReplayedStep:
        if self._found is None:
            raise UsageError(
                "what is at hand before the step is known after the block; ask behind the with statement"
            )
        return self._found

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(owned_folder(FOLDER))
            copy = copy_run(self._run_dir, folder, self.step - 1, self._opened_as)
            variables = environment(copy, plan_for(copy, self.step - 1, RAISE))
            self._held = stack.pop_all()
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._held.close()
        if isinstance(error, ReplayLeft):
            self._found = error.step
            restore(self._found.random)
            return True
        if error is None:
            raise ReplayError(
                f"the program in the block ended before step {self.step}; call the program that trains "
                f"{self._run_dir}, with its arguments"
            )
        return False
