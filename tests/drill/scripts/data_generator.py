"""The data draws its noise from a generator of the module, which no state holds."""

import numpy as np
from tiny import Model, X, Y, loop

noise = np.random.default_rng(0)


class Noisy:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return X[rows] + noise.normal(0, 0.1, (4, 3)), Y[rows]


class Batches(list):
    """A sequence of batches that augments what it hands out."""

    def __getitem__(self, index):
        return Noisy()[index]


model, batches = Model(), Batches(range(6))
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(batches):
            run.collect_metrics(loss=model.update(x, y))
