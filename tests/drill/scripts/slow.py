"""Epochs of five minutes each, saved at their end alone; with "fault", the rate is a Python variable."""

import sys
import time

import numpy as np
from tiny import Model

import everstep

x = np.random.default_rng(5).normal(size=(6000, 3))
train = everstep.data.arrays(x, x.sum(1), batch_size=2, shuffle=True)
model, rate = Model(), 0.01
with everstep.TrainLoop("runs/slow", model.state(), seed=1, max_epoch=100) as run:
    for _ in run.iter_epochs():
        for _step, (bx, by) in run.iter_steps(train):
            time.sleep(0.1)
            rate *= 0.99 if "fault" in sys.argv else 1.0
            run.collect_metrics(loss=model.update(bx, by, rate))
