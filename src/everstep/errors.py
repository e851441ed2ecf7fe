"""Errors of everstep, in one hierarchy.

Each message says what happened, the offending value, and what to do.  An error that a caller would also
expect as a built-in error inherits from that built-in error, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class EverstepError(Exception):
    """Base of every error that everstep raises on purpose."""


class UsageError(EverstepError, RuntimeError):
    """A method was called at the wrong time, or in the wrong order."""


class ConfigError(EverstepError, ValueError):
    """An argument, a name or a combination of them is wrong."""


class ChangedError(ConfigError):
    """A given value differs from the stored value, and that changes training; `differences` in words."""

    def __init__(self, differences: str, remedy: str) -> None:
        self.differences = differences
        super().__init__(differences + remedy)


class TrustError(EverstepError):
    """A run names code to import and call, and the run is not known to be this user's own."""


class RunDirError(EverstepError, OSError):
    """The run directory cannot be used (a file, read-only, full, without locks ...)."""


class RunLockedError(RunDirError):
    """Another live process, or another loop of this process, holds the run."""


class MirrorError(EverstepError, OSError):
    """The mirror of a run cannot be used, is of another run, or was trained apart from the run directory."""


class RankSaveError(RunDirError):
    """A save has failed on all ranks: on `ranks` a disk or memory failed, or they did not answer in time."""

    def __init__(self, number: int, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(number, message)
        self.ranks = tuple(ranks)


class StateError(EverstepError, TypeError):
    """A state entry cannot be saved or restored."""


OTHER_VALUES = " has other values"
"""End of a text in `RestoreError.reshaped` about a frozen array of the same shape and dtype."""


class RestoreError(EverstepError, ValueError):
    """A checkpoint does not fit the objects that it should restore.

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
        base = [text.removesuffix(OTHER_VALUES) for text in self.reshaped if text.endswith(OTHER_VALUES)]
        lists = [
            f"\n  {title} ({len(names)}): " + ", ".join(names)
            for title, names in (
                ("missing in the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
                ("reshaped", [text for text in self.reshaped if not text.endswith(OTHER_VALUES)]),
            )
            if names
        ]
        if base:
            some = ", ".join(base[:3]) + (", ..." if len(base) > 3 else "")
            lists.append(f"\n  another base than this run's: {len(base)} frozen arrays differ: {some}")
        super().__init__(message + "".join(lists))


class CheckpointError(EverstepError):
    """A checkpoint could not be written, or no checkpoint can be read."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """A checkpoint's bytes are not the bytes that were committed."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint was written by a format version that this everstep does not read."""


class ForeignCheckpointError(CheckpointError):
    """A checkpoint lies in one run and belongs to another."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint that was asked for does not exist."""


class JournalError(EverstepError, ValueError):
    """A run's journal is damaged where it must not be, or has another version."""


class RunIndexError(EverstepError, OSError):
    """The index over runs cannot be read or written; the journals, which are the truth, are unharmed."""


class NotResumableError(EverstepError):
    """The data in use cannot tell its position, so that no checkpoint can be made inside its pass."""


class DataError(EverstepError, ValueError):
    """The data differs from what the run was told or saw before (length, batch size, an early end)."""


class MetricError(EverstepError, TypeError):
    """A metric's value is not one real number, or another writer has the metric's name."""


class BadStepError(EverstepError, ArithmeticError):
    """A step has damaged the training; guards raise this error, and a `Recovery` undoes the step.

    Attributes:
        step: number of the step; None: the step in which this was raised, or the last step.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class NonFiniteError(BadStepError):
    """A watched metric, a parameter or an optimizer moment is NaN or infinite."""


class LossBoundError(BadStepError):
    """A metric is above the bound that the program gave."""


class HiLossError(LossBoundError):
    """The loss is above the `thres_loss` of `train_from_params`."""


class ProgressError(EverstepError, RuntimeError):
    """Steps are counted but nothing trains: no optimizer of the state has made an update."""


class DivergenceError(EverstepError, RuntimeError):
    """Steps that were executed again had other results than the first time, and the run stops, as was asked.

    Attributes:
        step: the first step that differs.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class ServiceError(EverstepError, RuntimeError):
    """At least one service failed; the first failure is the cause, and all failures are listed."""


class DrillError(EverstepError, RuntimeError):
    """A script cannot be drilled: the script fails undisturbed, opens no run, or does not end in time."""


class ReplayError(EverstepError, RuntimeError):
    """Steps of a run cannot be executed again: no checkpoint before them, no known program, several ranks."""


class GroupError(EverstepError, RuntimeError):
    """The processes that train together cannot go on together.

    Attributes:
        ranks: the ranks that are missing, have failed or differ; empty where none can be named.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class MissingRankError(GroupError, TimeoutError):
    """Some ranks did not come to an operation of the group within its time limit."""


class PeerFailedError(GroupError):
    """Another rank has reported that it cannot go on."""


class DisagreementError(GroupError):
    """Ranks that must have the same value, or be at the same operation, differ."""


class DivergedRanksError(DisagreementError):
    """`name` must be the same on all ranks and is not: a save that compared it was refused."""

    def __init__(self, message: str, *, name: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message, ranks=ranks)
        self.name = name


class StoreLostError(GroupError, ConnectionError):
    """The key-value store of the group cannot be reached: its process has ended, or the network is cut."""


class _Exit(SystemExit):
    """Exit of the process with the status `code`, for `reason`, unless the script handles it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} (exit code {self.code})"


class Interrupted(_Exit):
    """The run was interrupted (signal, time budget) and saved; the next start resumes it.

    This error is a `SystemExit`: a script that does not handle it ends with `code`.

    Attributes:
        code: the exit status: 128 + the signal's number, or 3 for a time budget.
        reason: the interruption in words.
    """


class RolledBack(Interrupted):
    """The next start goes back to a checkpoint and leaves out the batches of the failed steps.

    `everstep.recovering` makes that start in the same process, and so does a `Trainer`.

    Attributes:
        code: 3.
        reason: the reason and the quarantined batches, in words.
        run_dir: the run's directory.
        number: ordinal of this rollback in the run, from 1.
    """

    def __init__(self, reason: str, run_dir: str, number: int) -> None:
        super().__init__(3, reason)
        self.run_dir, self.number = run_dir, number


class TriedAgain(RolledBack):
    """A listed error ended the run; a start tries again from the newest checkpoint, the `number`-th time."""


class GuardStop(_Exit):
    """A service ended the run as failed; everything was closed in order.

    Attributes:
        code: the exit status: 1 from a guard, 4 if a requirement is not met.
        reason: the reason in words.
    """


DISTRIBUTIONS = {
    "torch": "torch",
    "cli": "click sqlalchemy",
    "postgres": "click sqlalchemy 'psycopg[binary]'",
    "experiment": "click sqlalchemy pydantic ruamel.yaml",
    "ui": "click sqlalchemy starlette uvicorn orjson",
    "mirror": "fsspec s3fs",
    "tensorboard": "tensorboard pillow",
    "wandb": "'wandb>=0.31'",
    "mlflow": "'mlflow-skinny>=3.13' sqlalchemy alembic",
    "trackio": "'trackio>=0.43'",
}
"""Extra of everstep -> the distributions that it brings, as in pyproject.toml."""


def to_install(extra: str) -> str:
    """Return the command that installs what an extra brings: everstep itself is on no package index.

    Args:
        extra: its name in `DISTRIBUTIONS`.
    """
    return f"pip install {DISTRIBUTIONS[extra]}"


def some(names: Sequence[str], most: int = 3) -> str:
    """List the first `most` of `names`, and the number of the others, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: str, known: Iterable[str], most: int | None = None) -> str:
    """Make a hint for an unknown name, as a phrase: the nearest known name, and all or the `most` nearest."""
    names = sorted(known)
    nearby = names[:_MOST_NAMES] if most is None else _close(name, names, most, cutoff=0.0)
    more = f" and {len(names) - len(nearby)} more" if len(names) > len(nearby) else ""
    text = ", ".join(each[:_LONGEST_NAME] for each in nearby) if names else "none"
    return f"{alike(name, names, cutoff=0.5)}known: {text}{more}"


_MOST_NAMES = 200
"""Most names in a message."""
_LONGEST_NAME = 200
"""Most characters of a name in a message, and of names that are compared."""
_MOST_COMPARED = 2000
"""Most names that are compared with a wrong one: each takes 20 microseconds or more."""


def alike(name: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """Ask whether the known name nearest to `name` was meant, as a phrase; "" if none is near."""
    close = _close(name, known, 1, cutoff)
    return f"did you mean {close[0]!r}? " if close else ""


def _close(name: str, known: Iterable[str], most: int, cutoff: float) -> list[str]:
    """Return the known names nearest to `name`, the nearest first."""
    import difflib  # late: an error of a name is rare

    names = [each for each in sorted(known) if len(each) <= _LONGEST_NAME]
    if len(names) > _MOST_COMPARED:  # those of nearly the same length, and then the first
        names = sorted(names, key=lambda each: abs(len(each) - len(name)))[:_MOST_COMPARED]
    return difflib.get_close_matches(name[:_LONGEST_NAME], names, n=most, cutoff=cutoff)
