"""Evaluates with dropout on, bare, in the tail: it draws random numbers, and is exact."""

import numpy as np
from tiny import Model, X, Y, data, loop

model, train = Model(), data()
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            x = x * (np.random.random(x.shape) < 0.8)
            run.collect_metrics(loss=model.update(x, y))
        kept = np.random.random(X.shape) < 0.8
        run.collect_metrics(valid_loss=float((((X * kept) @ model.w - Y) ** 2).mean()))
