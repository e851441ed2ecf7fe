"""The run has no seed, and the weights are drawn before the loop from a generator that is not seeded."""

import numpy as np
from tiny import Model, data, loop

model, train = Model(), data()
model.w += np.random.normal(0, 0.1, 3)
with loop(model.state(), seed=None) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
