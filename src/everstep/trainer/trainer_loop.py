"""The loop that a Trainer opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from everstep.checkpoint import read_manifest
from everstep.contracts.group import Group
from everstep.contracts.services import EvalStep, Moment, Stage
from everstep.contracts.tasks import Task
from everstep.errors import MetricError
from everstep.group import group_size
from everstep.loop import TrainLoop
from everstep.supervisor import Loaded
from everstep.supervisor.settings import LoopKind


class TrainerLoop(TrainLoop):
    """Loop that a Trainer opens, with the moments of evaluations."""

    _evaluated_names: frozenset[str] = frozenset()
    """Metrics that the program's own evaluations found."""

    @classmethod
    def kind(cls) -> LoopKind:
        return LoopKind(cls.__name__, frozenset(Moment), same_data=True)

    def belongs_to(self, task: Task) -> None:
        """Save the task's attributes with its state; not on several ranks, where each may have others."""
        self._engine.user.set_task(task, saved=group_size() == 1)

    @property
    def may_end(self) -> bool:
        """Whether there is a limit, or a service that may stop the run for another reason than a failure."""
        limited = self.max_step is not None or self.max_epoch is not None
        services = self._engine.board
        return limited or any(s.controller and s.stage is not Stage.GUARD and not s.sets for s in services)

    @property
    def group(self) -> Group:
        """The processes that train together."""
        return self._engine.ranks.group

    def poll_evaluation(self) -> None:
        """Leave the run between two batches of an evaluation, if it is to be interrupted."""
        if self._engine.spent.at_boundary:
            self._engine.boundaries.poll_evaluation()
        else:
            self._epochs.poll()

    def look_at(self, step: EvalStep) -> None:
        """Show a batch of an evaluation to the observers."""
        self._engine.board.announce(Moment.AFTER_EVAL_STEP, step)

    def collect_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Collect the metrics that the program's own evaluation found."""
        # best values and early stops would mix both
        clash = metrics.keys() & (self._engine.collector.collected_names() - self._evaluated_names)
        if clash and not self._epochs.before_resume_point:
            raise MetricError(
                f"{min(clash)!r} is a metric of an evaluation and of the program; give one another name"
            )
        self._engine.watched.evaluated(metrics.keys() - self._evaluated_names)
        self._evaluated_names |= metrics.keys()
        self.collect_metrics(metrics)

    def evaluated(self, metrics: Mapping[str, float], seconds: float) -> None:
        """Announce what a service's evaluation found; its boundary continues."""
        self._engine.watched.evaluated(metrics.keys())
        self._engine.note_evaluation(seconds)
        self._engine.board.fire(Moment.AFTER_EVALUATION, metrics)

    @property
    def is_continued(self) -> bool:
        """Whether a later loop on this run continues what this loop has begun."""
        return self._engine.opening.store.is_unchanged

    def loaded_weights(self) -> Loaded | None:
        """Find where the weights in the objects are saved, after a clean end; None if not in one place."""
        best, newest = self._engine.restored, self._engine.saver.last_commit
        if best is not None and any(each.part for each in self._engine.board.bests):
            return None  # a part came back: no checkpoint has what the objects have now
        if best is not None and best.path is not None:
            digest = str(read_manifest(Path(best.path))["digest"])
            return Loaded(best.path, best.step, best.epoch, digest, self.seed)
        last = self._engine.recovered.checkpoint if newest is None else str(newest.name)
        if last is None:
            return None
        path, ending = self._engine.opening.run_dir.checkpoints / last, self.ending
        return Loaded(str(path), ending.step, ending.epoch, ending.digest or "", self.seed)
