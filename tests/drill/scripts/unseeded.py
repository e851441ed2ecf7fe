"""The run has no seed, and draws from NumPy's global generator."""

import numpy as np
from tiny import Model, data, loop

model, train = Model(), data()
with loop(model.state(), seed=None) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x + np.random.normal(0, 0.1, x.shape), y))
