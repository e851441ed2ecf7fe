"""Lines of chosen metrics, on a separate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from everstep.contracts.services import Boundary, RunView, Service, Stage
from everstep.errors import ConfigError
from everstep.metrics import MetricFormatter
from everstep.schedule import Every, Schedule


def chosen_metrics(service: str, metrics: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check names or patterns; return all of them, and those that are names.

    Raises:
        ConfigError: `metrics` is a string.
    """
    if isinstance(metrics, str):
        raise ConfigError(f"{service}(metrics={metrics!r}): give a list of names, [{metrics!r}]")
    return tuple(metrics), tuple(metric for metric in metrics if not set("*?[") & set(metric))


class LogVariables(Service):
    """Print a line with the metrics collected since the last line; at the end, with the remaining metrics.

    The service has a separate window: it takes nothing from `print_logs()`, nor from another `LogVariables`.

    Args:
        metrics: names or patterns.
        every: when to print; default `Every(epochs=1)`.
        formatter: format of the metrics.

    Raises:
        ConfigError: `metrics` is a string.
    """

    stage = Stage.REPORT
    isolate = False
    default_schedule = Every(epochs=1)

    def __init__(
        self,
        metrics: Sequence[str] = ("*",),
        *,
        every: Schedule | None = None,
        formatter: MetricFormatter | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "log variables", every)
        self.metrics, self.watches = chosen_metrics("LogVariables", metrics)
        self.formatter = formatter or MetricFormatter()
        self._run: RunView
        """Set while the loop is open."""

    def open(self, run: RunView) -> None:
        self._run = run

    def run(self, boundary: Boundary) -> None:
        readings = boundary.readings
        names = [n for n in readings.names() if any(fnmatchcase(n, p) for p in self.metrics)]
        stats = {name: found for name in names if (found := readings.stats(name)) is not None}
        readings.clear()
        if stats:
            texts = [self.formatter.format(name, stats[name], False) for name in self.formatter.sort(stats)]
            self._run.println("; ".join(texts), with_tag=True, shorten=True)

    def finish(self, boundary: Boundary) -> None:
        self.run(boundary)
