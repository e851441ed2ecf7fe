"""Speed of the run, and shares of its time."""

from __future__ import annotations

from everstep import backends
from everstep.arguments import integer
from everstep.contracts.services import Boundary, Outcome, RunView, Service, Stage
from everstep.schedule import Every, Schedule


class Throughput(Service):
    """Record the speed since the last look, and the shares of the time, and print them in a line.

    Metrics: steps_per_second and, with `samples`, samples_per_second; and data_share (waiting for
    batches), step_share (the program's own lines), evaluation_share (`evaluation()` blocks) and
    services_share (all that runs at boundaries), which add up to 1.  At the end, one more line has the
    seconds of the whole start by the same parts.  Each look waits for the device first, so that all counted
    steps are done.

    Args:
        samples: number of samples in a step, 1 or more; None if the number is not known.
        every: when to look; default `Every(steps=100)`.
    """

    stage = Stage.REPORT
    isolate = False
    window = "none"
    default_schedule = Every(steps=100)

    def __init__(
        self, samples: int | None = None, *, every: Schedule | None = None, name: str | None = None
    ) -> None:
        super().__init__(name or "throughput", every)
        self.samples = integer("samples", samples, none="if it is not known")
        self._run: RunView
        """Set while the loop is open."""
        self._step = 0
        self._spent: dict[str, float] = {}

    def open(self, run: RunView) -> None:
        self._run, self._step, self._spent = run, run.step, run.spent()

    def run(self, boundary: Boundary) -> Outcome | None:
        for backend in backends.active():
            backend.synchronize()
        spent = self._run.spent()
        return self._since_last(self._run, boundary, spent)

    def finish(self, boundary: Boundary) -> Outcome | None:
        outcome = self.run(boundary)
        spent = self._run.spent()
        whole = sum(spent.values()) or 1.0
        parts = ", ".join(f"{name} {time:.4g} s ({time / whole:.0%})" for name, time in spent.items())
        self._run.println(f"time of this start: {parts}")
        return outcome

    def _since_last(self, run: RunView, boundary: Boundary, spent: dict[str, float]) -> Outcome | None:
        parts = {name: seconds - self._spent[name] for name, seconds in spent.items()}
        steps, total = boundary.step - self._step, sum(parts.values())
        if steps == 0 or total <= 0:
            return None
        self._step, self._spent = boundary.step, spent
        speeds = {"steps_per_second": steps / total}
        if self.samples is not None:
            speeds["samples_per_second"] = self.samples * steps / total
        shares = {name: seconds / total for name, seconds in parts.items()}
        run.println(
            ", ".join(f"{speed:.4g} {name.replace('_per_second', '/s')}" for name, speed in speeds.items())
            + ": "
            + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
            with_tag=True,
        )
        return Outcome(speeds | {f"{name}_share": share for name, share in shares.items()}, wall=True)
