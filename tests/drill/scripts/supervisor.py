"""A loop of its own, over two streams, in the hands of a Supervisor."""

import sys

import numpy as np
from tiny import Model, X, Y, data

import everstep

model = Model()
run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/supervised"
checkpoints = everstep.Checkpoints(everstep.Every(steps=4))
with everstep.Supervisor(run_dir, model.state(), seed=3, max_step=30, services=[checkpoints]) as sv:
    train = sv.stream(data())
    extra = sv.stream(everstep.data.arrays(X, Y, batch_size=5, shuffle=True), "extra")
    while not sv.should_stop():
        x, y = next(train)
        if sv.step % 3 == 0:
            x, y = next(extra)
        sv.advance(loss=model.update(x + np.random.normal(0, 0.1, x.shape), y))
