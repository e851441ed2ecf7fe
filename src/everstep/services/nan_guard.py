"""Guard against NaN and infinities in a committed state."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from everstep.contracts.services import Boundary, Outcome, Service, Stage, Stop
from everstep.errors import ConfigError, NonFiniteError
from everstep.schedule import Instant


class NaNGuard(Service):
    """Watch losses, parameters and optimizer moments for NaN and infinities.

    The guard costs nothing per step.  Metrics are checked when they are read, at the latest before every
    save, and are named with the exact step.  Parameters and moments are checked in the background, on the
    very bytes that would be committed.

    Args:
        policy: "raise" a `NonFiniteError`, or "stop": the loop ends as written, exit status 1.
            In both cases the state is not saved and the last good checkpoint stays.
        metrics: names or patterns of the metrics that must be finite.  Default: losses, and the norm of the
            gradients; if your own gradient scaler lets the norm overflow, name the other metrics.
        parameters: whether parameters and optimizer moments must be finite.
    """

    stage = Stage.GUARD
    controller = True
    isolate = False
    window = "unsaved"

    def __init__(
        self,
        policy: Literal["raise", "stop"] = "raise",
        *,
        metrics: Sequence[str] = ("*loss", "*grad_norm"),
        parameters: bool = True,
    ) -> None:
        super().__init__("nan_guard")
        if policy not in ("raise", "stop"):
            raise ConfigError(f'NaNGuard(policy={policy!r}): give "raise" or "stop"')
        if isinstance(metrics, str):
            raise ConfigError(f"NaNGuard(metrics={metrics!r}): give a list of names, [{metrics!r}]")
        self.policy, self.metrics, self.parameters = policy, tuple(metrics), parameters

    def due(self, when: Instant) -> bool:
        return True

    def run(self, boundary: Boundary) -> Outcome | None:
        readings = boundary.readings
        guarded = [n for n in readings.names() if any(fnmatchcase(n, p) for p in self.metrics)]
        found = [(*bad, name) for name in guarded if (bad := readings.nonfinite(name)) is not None]
        readings.clear()
        if not found:
            return None
        step, value, name = min(found)
        return self.tripped(
            f"metric {name!r} is {value} at step {step}; nothing after the last checkpoint is saved. "
            "Lower the learning rate or look at that step's batch; the run resumes from the last good "
            "checkpoint",
            step,
        )

    def tripped(self, message: str, step: int | None) -> Outcome:
        """Act on a finding at a step by the policy."""
        if self.policy == "raise":
            raise NonFiniteError(message, step=step)
        return Outcome(actions=(Stop(message, failed=True, step=step),))
