"""A schedule, an average, a counter and a generator, all of them in the state; early stop and the best."""

import random

import numpy as np
from tiny import Model, X, Y, data, loop

import everstep

model, train = Model(), data()
average, notes, noise = model.w.copy(), {"rate": 0.05, "seen": 0}, np.random.default_rng(1)
state = {**model.state(), "average": average, "notes": notes, "noise": noise}
services = [everstep.EarlyStop("valid_loss", patience=2, min_delta=0.3), everstep.Best("valid_loss")]
with loop(state, services=services, max_epoch=9) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            x = x + noise.normal(0, 0.01, x.shape) + random.gauss(0, 0.01)
            notes["seen"] += len(x)
            run.collect_metrics(loss=model.update(x, y, notes["rate"]))
            average += 0.1 * (model.w - average)
        notes["rate"] *= 0.9
        with run.evaluation():
            run.collect_metrics(valid_loss=float(((X @ average - Y) ** 2).mean()))
