"""A random number is drawn when it is first asked for, and kept in a variable."""

import numpy as np
from tiny import Model, data, loop

model, train, shift = Model(), data(), None
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            if shift is None:
                shift = np.random.normal(0, 0.1, 3)
            run.collect_metrics(loss=model.update(x + shift, y))
