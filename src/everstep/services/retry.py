"""Errors that pass by themselves: what failed is tried again."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.contracts.services import Boundary, Service, Stage
from everstep.errors import ConfigError
from everstep.keywords import number, whole


class Retry(Service):
    """Tries again, in the same process, what a listed error has ended: reading data, a step, a save.

        Retry(errors=[ConnectionError, TimeoutError], times=5, backoff=2.0)

    A step, its data or an evaluation: the loop is left through `TriedAgain`, exit status 3, and the run goes
    on from its newest checkpoint, random state included, as after a kill; a `Trainer` and
    `everstep.recovering` do so by themselves, anything else by starting the program again.  So the run ends
    in the bits of one in which nothing failed.  A save is tried again where it failed, behind the training.

    A try counts until the run has come past the furthest step that failed.  After the last one the error
    stands, and says how often it was tried.  Each try is a decision in the journal.  A signal ends the wait,
    and the run, which the next start goes on with.

    Not tried again: what a `Trainer` reads from a generator or another iterator, which can be read only once.

    Args:
        errors: classes of errors that pass by themselves.
        times: how often in a row something is tried again, 1 or more.
        backoff: seconds before the first try, 0 or more; twice as many before each further one.

    Raises:
        ConfigError: one of the errors is no class of exceptions, or a number is out of its range.
    """

    stage = Stage.GUARD
    moments = frozenset()
    isolate = False
    window = "none"

    def __init__(
        self,
        errors: type[Exception] | Sequence[type[Exception]] = (ConnectionError, TimeoutError),
        *,
        times: int = 3,
        backoff: float = 1.0,
    ) -> None:
        super().__init__("retry")
        self.errors = (errors,) if isinstance(errors, type) else tuple(errors)
        for each in self.errors:
            if not (isinstance(each, type) and issubclass(each, Exception)):
                raise ConfigError(
                    f"Retry(errors={errors!r}): {each!r} is no class of exceptions; give classes"
                )
        self.times = whole("times", times)
        self.backoff = number("backoff", backoff, of="seconds", zero=True)

    def takes(self, error: BaseException) -> bool:
        """Whether an error is a listed one."""
        return isinstance(error, self.errors)

    def seconds(self, attempt: int) -> float:
        """How long to wait before a try, counted from 1."""
        return float(self.backoff * 2 ** (attempt - 1))

    def run(self, boundary: Boundary) -> None:
        """Nothing at a boundary."""
