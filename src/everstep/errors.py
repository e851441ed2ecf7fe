"""Every error of everstep, in one hierarchy.

Each message says three things: what happened, the offending value, and what to do.  Domain errors
that a caller would also expect as a built-in error are that built-in error too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class EverstepError(Exception):
    """The root of every error that everstep raises on purpose."""


class UsageError(EverstepError, RuntimeError):
    """A method was called at a moment, or in an order, in which it has no meaning."""


class ConfigError(EverstepError, ValueError):
    """An argument, a name or a combination of them cannot be right."""


class ChangedError(ConfigError):
    """A given value differs from the stored value, and that changes training.

    Attributes:
        differences: in words.
    """

    def __init__(self, differences: str, remedy: str) -> None:
        self.differences = differences
        super().__init__(differences + remedy)


class TrustError(EverstepError):
    """A run names code to import and call, and is not known to be this user's own."""


class RunDirError(EverstepError, OSError):
    """The run directory cannot be used (a file, read-only, full, without locks ...)."""


class RunLockedError(RunDirError):
    """Another live process, or another loop of this process, holds the run."""


class StateError(EverstepError, TypeError):
    """A state entry cannot be saved or restored."""


class RestoreError(EverstepError, ValueError):
    """A checkpoint does not fit the objects it should be restored into.

    Attributes:
        missing: names that the objects have and the checkpoint lacks.
        unexpected: names that the checkpoint has and the objects lack.
        reshaped: names whose shape or dtype differs, each with both sides.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        reshaped: Sequence[str] = (),
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.reshaped = tuple(reshaped)
        lists = [
            f"\n  {title} ({len(names)}): " + ", ".join(names)
            for title, names in (
                ("missing in the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
                ("reshaped", self.reshaped),
            )
            if names
        ]
        super().__init__(message + "".join(lists))


class CheckpointError(EverstepError):
    """A checkpoint could not be written, or none can be read."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """A checkpoint's bytes are not the bytes that were committed."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint was written by a format version that this everstep does not read."""


class ForeignCheckpointError(CheckpointError):
    """A checkpoint lies in one run and belongs to another."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint was asked for by name or step, and there is none."""


class JournalError(EverstepError, ValueError):
    """The run's journal is damaged where it must not be, or of another version."""


class RunIndexError(EverstepError, OSError):
    """The index over runs cannot be read or written; the journals, which are the truth, are unharmed."""


class NotResumableError(EverstepError):
    """The data in use cannot tell its position, so no checkpoint can be made inside its pass."""


class DataError(EverstepError, ValueError):
    """The data is not what the run was told or saw before (length, batch size, an end too early)."""


class MetricError(EverstepError, TypeError):
    """A metric's value is not one real number, or its name is taken."""


class BadStepError(EverstepError, ArithmeticError):
    """A step has spoilt the training; raised by guards, and undone where a `Recovery` is in the run.

    Attributes:
        step: its number; None: the step in which this was raised, or the last one.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class NonFiniteError(BadStepError):
    """A watched metric, a parameter or an optimizer moment is NaN or infinite."""


class LossBoundError(BadStepError):
    """A metric is above the bound that the program gave it."""


class HiLossError(LossBoundError):
    """The loss is above the `thres_loss` of `train_from_params`."""


class ProgressError(EverstepError, RuntimeError):
    """Steps are counted but nothing trains: no optimizer of the state has made an update."""


class DivergenceError(EverstepError, RuntimeError):
    """Steps that were executed again found something else than the first time, and that is to stop the run.

    Attributes:
        step: the first step that differs.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class ServiceError(EverstepError, RuntimeError):
    """At least one service failed; the first failure is the cause, all are listed."""


class DrillError(EverstepError, RuntimeError):
    """A script cannot be drilled: it fails undisturbed, has no run, or does not end in time."""


class Interrupted(SystemExit):
    """The run was interrupted (signal, time budget) and saved; starting it again goes on.

    A `SystemExit`, so that a script needs no handling: it ends with `code`.

    Attributes:
        code: the exit status: 128 + the signal's number, or 3 for a time budget.
        reason: what interrupted the run, in words.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} (exit code {self.code})"


class RolledBack(Interrupted):
    """The run goes back to a checkpoint, without the batches that spoilt it; starting it again does so.

    `everstep.recovering` does it in the same process, and so does a `Trainer`.

    Attributes:
        code: 3.
        reason: why, and which batches are quarantined, in words.
        run_dir: the run's directory.
        number: which rollback of the run this is, from 1.
    """

    def __init__(self, reason: str, run_dir: str, number: int) -> None:
        super().__init__(3, reason)
        self.run_dir, self.number = run_dir, number


class TriedAgain(RolledBack):
    """A listed error ended the run; a new start tries again from the newest checkpoint.

    Attributes:
        number: which try in a row this is, from 1.
    """


class GuardStop(SystemExit):
    """A service ended the run as failed: everything closed as written.

    Attributes:
        code: the exit status: 1 from a guard, 4 where a requirement is not met.
        reason: in words.
    """

    def __init__(self, reason: str, code: int = 1) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} (exit code {self.code})"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown `name`: the nearest known name and the list of all, as a phrase."""
    names = sorted(known)
    return f"{alike(name, names, cutoff=0.5)}known: {', '.join(names) if names else 'none'}"


def alike(name: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """The question whether the known name nearest to `name` was meant; "" if none is near.

    Args:
        cutoff: how much alike they must be, 0 to 1; by default, as "val_loss" and "valid_loss", not as
            "train_loss" and "valid_loss".
    """
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""
