"""`TrainLoop`: epochs, steps, metrics, timers and lines for a loop that you write."""

from everstep.loop.train_loop import TrainLoop

__all__ = ["TrainLoop"]
