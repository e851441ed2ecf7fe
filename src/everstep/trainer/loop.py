"""The loop that a Trainer opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint import read_manifest
from everstep.contracts.services import EvalStep, Moment, Stage
from everstep.errors import MetricError
from everstep.loop import TrainLoop
from everstep.services.best import Best
from everstep.supervisor import Loaded


class TrainerLoop(TrainLoop):
    """The loop that a Trainer opens: it has moments of evaluations, too."""

    _moments = frozenset(Moment)
    _goes_back_itself = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._found: set[str] = set()
        """Metrics that the program's own evaluations found."""
        self._evaluated: set[str] = set()
        """Those that came since it was last looked which are missed."""

    @property
    def may_end(self) -> bool:
        """Whether there is a limit, or a service that may stop the run for another reason than a failure."""
        limited = self.max_step is not None or self.max_epoch is not None
        return limited or any(s.controller and s.stage is not Stage.GUARD and not s.sets for s in self._board)

    def poll_evaluation(self) -> None:
        """Between two batches of an evaluation: where the run is to be interrupted, it is left at once."""
        if self._spent.at_boundary:
            self._poll_evaluation()
        else:
            self._poll()

    def look_at(self, step: EvalStep) -> None:
        """Show a batch of an evaluation to the observers."""
        self._announce(Moment.AFTER_EVAL_STEP, step)

    def collect_found(self, found: Mapping[str, float]) -> None:
        """Collect what an evaluation of the program's found."""
        if not self._replaying:
            self._require_new(found)
        self._evaluated |= found.keys() - self._found
        self._found.update(found)
        self.collect_metrics(found)

    def evaluated(self, found: Mapping[str, float], seconds: float) -> None:
        """A service has evaluated; the boundary at which it did goes on."""
        self._evaluated |= found.keys()
        self._note_evaluation(seconds)
        self._fire(Moment.AFTER_EVALUATION, found)

    def _boundary(self, moment: Moment, **how: Any) -> None:
        super()._boundary(moment, **how)
        if self._evaluated:
            self._watched.check_evaluated(self._last_values.keys(), self._evaluated)
            self._evaluated.clear()

    def _require_new(self, found: Mapping[str, float]) -> None:
        """A name of an evaluation's is nobody else's: best values and early stops would mix them."""
        if clash := found.keys() & (self._collector.given() - self._found):
            raise MetricError(
                f"{min(clash)!r} is what an evaluation found and a metric that the program collects itself; "
                "give one of them another name, or leave it to the evaluation"
            )

    @property
    def bests(self) -> list[Best]:
        """The services that track a best value, the default one included."""
        return self._board.all(Best)

    def left_with(self) -> Loaded | None:
        """After a clean end: where the weights that the objects have now are saved, if in one place."""
        best = self._restored
        if best is not None and any(each.part for each in self.bests):
            return None  # a part came back: no checkpoint has what the objects have now
        if best is not None and best.path is not None:
            digest = str(read_manifest(Path(best.path))["digest"])
            return Loaded(best.path, best.step, best.epoch, digest, self.seed)
        last = self._recovered.checkpoint if self._saver.last is None else str(self._saver.last.name)
        if last is None:
            return None
        path, ending = self._opening.run_dir.checkpoints / last, self.ending
        return Loaded(str(path), ending.step, ending.epoch, ending.digest or "", self.seed)
