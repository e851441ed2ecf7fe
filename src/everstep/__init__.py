"""PyTorch training that survives `kill -9` and resumes bit for bit.

You write the loop, with a `TrainLoop`:

    with everstep.TrainLoop("runs/mine", {"model": model, "optimizer": optimizer}, max_epoch=9) as loop:
        for epoch in loop.iter_epochs():
            for step, batch in loop.iter_steps(train):
                loop.collect_metrics(loss=train_step(batch))
            with loop.evaluation():
                loop.collect_metrics(valid_loss=validate())

Or you write the step, in a `Task`, and a `Trainer` runs the loop:

    streams, services = {"train": train, "valid": valid}, [everstep.Evaluate("valid")]
    trainer = everstep.Trainer(task, streams, "runs/task", max_epoch=9, services=services)
    trainer.run_training()

Killed at any instant and started again, both end as if they had never been killed.  The names:

- run: `TrainLoop`, `Trainer` with a `Task`, `Supervisor` for a loop of any other shape, `Experiment` for
  a config file.  `recovering` calls your function again after a rollback.
- state: the objects that a run saves and restores.  `Slot` holds a number, `PerRank` what each rank has for
  itself.  `Checkpoints` says when to save and what to keep, `Best` keeps the best weights.  `InitFrom` starts
  with another run's weights; `load` and `export` bring saved weights into your objects and to other programs.
- data: lists, DataLoaders and other iterables, as they are; more in `everstep.data`.
- callback: a `Service` acts when it is due (`Every`, `At`, `Never`), as `Evaluate` and `EarlyStop`
  do; more in `everstep.services`.  Yours gets a `Boundary`, and returns an `Outcome` of metrics and actions
  (`Save`, `Stop`).
- record: all metrics and events of a run.  `query` searches many runs; `everstep.runs` shows and compares
  them, `everstep.record` reads one.

`everstep.torch` has tasks, models and optimizers for PyTorch; `everstep.testing` checks objects, services and
streams of your own; `everstep.errors` has what can be raised.  Importing everstep imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports
from everstep.unattended import tell_of_errors
from everstep.version import __version__ as __version__

if TYPE_CHECKING:
    from everstep import (
        compat as compat,
        data as data,
        drill as drill,
        errors as errors,
        experiment as experiment,
        record as record,
        runs as runs,
        schedule as schedule,
        services as services,
        supervisor as supervisor,
        testing as testing,
        torch as torch,
        trainer as trainer,
    )
    from everstep.contracts.services import (
        Boundary as Boundary,
        Outcome as Outcome,
        Save as Save,
        Service as Service,
        Stop as Stop,
    )
    from everstep.contracts.tasks import Task as Task
    from everstep.experiment.experiment import Experiment as Experiment
    from everstep.index.query import query as query
    from everstep.loop import TrainLoop as TrainLoop
    from everstep.schedule import At as At, Every as Every, Never as Never
    from everstep.services.best import Best as Best
    from everstep.services.checkpoints import Checkpoints as Checkpoints
    from everstep.services.evaluate import Evaluate as Evaluate
    from everstep.services.export import export as export
    from everstep.services.judges import EarlyStop as EarlyStop
    from everstep.state import PerRank as PerRank, Slot as Slot
    from everstep.supervisor import (
        InitFrom as InitFrom,
        Supervisor as Supervisor,
        load as load,
        recovering as recovering,
    )
    from everstep.trainer import Trainer as Trainer

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__, beside="everstep.services")

tell_of_errors()
