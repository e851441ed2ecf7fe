"""`Trainer`: a task's steps, run over named streams."""

from everstep.trainer.multi_run import MultiRun
from everstep.trainer.trainer import Trainer

__all__ = ["MultiRun", "Trainer"]
