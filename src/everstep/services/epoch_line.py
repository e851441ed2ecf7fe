"""Log line at each epoch's end, with its evaluations, and a line for the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from everstep.contracts.services import Boundary, Moment, RunView, Service, Stage
from everstep.metrics import log_line, log_tag
from everstep.metrics.collector import all_stats
from everstep.metrics.statistics import Stats
from everstep.schedule import Instant
from everstep.services.best import Best


class EpochLine(Service):
    """Print the means of an epoch's steps and the results of its evaluations; at first, the baseline.

    `TrainLoop.print_logs` is called in the epoch's tail, before the services evaluate; this service runs
    after them.

    Attributes:
        bests: services whose new best values are marked ` (*)`.
    """

    stage = Stage.REPORT
    isolate = False
    moments = frozenset({Moment.BEFORE_EPOCH, Moment.AFTER_EPOCH})

    def __init__(self) -> None:
        super().__init__("epoch line")
        self.bests: Sequence[Best] = ()
        self.printed: Callable[[Mapping[str, Stats]], object] = lambda stats: None
        """Called with the statistics on the line."""
        self._run: RunView
        """Set while the loop is open."""

    def open(self, run: RunView) -> None:
        self._run = run

    def due(self, when: object) -> bool:
        return True

    def run(self, boundary: Boundary) -> None:
        if boundary.moment is Moment.BEFORE_EPOCH and boundary.step:
            return  # a baseline comes before step 1 only; a resumed epoch keeps its window
        readings, run = boundary.readings, self._run
        stats = all_stats(readings)
        when = Instant(boundary.step, boundary.epoch, True, run.clock())
        new = {best.metric for best in self.bests if best.is_on_line(readings, when)}
        readings.clear()
        if not stats:
            return
        tag = log_tag(run.epoch, run.max_epoch, run.step, run.max_step, None)
        run.println(log_line(tag, stats, new, eta=run.get_eta()), shorten=True)
        self.printed(stats)

    def finish(self, boundary: Boundary) -> None:
        self.run(boundary)
