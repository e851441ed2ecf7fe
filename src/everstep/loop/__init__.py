"""`TrainLoop`: epochs, steps, metrics, timers and lines for a loop that you write.

All that is known about epochs is here; the engine counts steps and asks `Epochs` through `LoopDriver`.
The way of a batch through it: "Five ways through the code" in docs/design.md.
"""

from everstep.loop.train_loop import TrainLoop

__all__ = ["TrainLoop"]
