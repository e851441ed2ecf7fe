"""`Trainer`: a task's steps, run over named streams."""

from everstep.trainer.trainer import Trainer

__all__ = ["Trainer"]
