"""Retries after errors that go away by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.arguments import integer, number
from everstep.contracts.services import Boundary, Service, Stage
from everstep.errors import ConfigError


class Retry(Service):
    """Try again, in the same process, after a listed error: reading data, a step, a save.

        Retry(errors=[ConnectionError, TimeoutError], times=5, backoff=2.0)

    After an error in a step, its data or an evaluation, the loop is left through `TriedAgain`, exit status 3,
    and the run resumes from its newest checkpoint, random state included, as after a kill.  A `Trainer` and
    `everstep.recovering` resume by themselves; any other program is started again.  So the run ends in the
    same bits as a run without a failure.  A save is tried again where it failed, behind the training.

    A try counts until the run has passed the furthest step that failed.  After the last try the error
    stands, and says how many tries there were.  Each try is a decision in the journal.  A signal ends the
    wait and the run; the next start resumes it.

    A `Trainer` over a generator or another iterator, which can be read only once, is not tried again.

    Args:
        errors: classes of errors that go away by themselves.
        times: limit of tries in a row, 1 or more.
        backoff: seconds before the first try, 0 or more; doubled before each further try.

    Raises:
        ConfigError: an item of `errors` is not an exception class, or a number is out of its range.
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
                    f"Retry(errors={errors!r}): {each!r} is not a class of exceptions; give classes"
                )
        self.times = integer("times", times)
        self.backoff = number("backoff", backoff, of="seconds", zero=True)

    def takes(self, error: BaseException) -> bool:
        """Whether an error is listed."""
        return isinstance(error, self.errors)

    def seconds(self, attempt: int) -> float:
        """Compute the wait before a try, in seconds; tries count from 1."""
        return float(self.backoff * 2 ** (attempt - 1))

    def run(self, boundary: Boundary) -> None:
        """Do nothing at a boundary."""
