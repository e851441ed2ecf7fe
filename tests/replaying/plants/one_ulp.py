"""NumPy in float32, epochs; behind epoch 3 one weight is moved by one unit in the last place."""

import sys

import numpy as np

import everstep

rng = np.random.default_rng(9)
x = rng.normal(size=(48, 6)).astype(np.float32)
y = (x**2).sum(1)
state = {"w": np.full(6, 0.5, np.float32), "bias": np.zeros(1, np.float32)}
data = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
saves = everstep.Checkpoints(everstep.Every(steps=4))
with everstep.TrainLoop(sys.argv[1], state, max_epoch=6, seed=1, services=[saves]) as loop:
    for epoch in loop.iter_epochs():
        for _step, (bx, by) in loop.iter_steps(data):
            keep = (np.random.random(bx.shape) < 0.8).astype(np.float32)
            error = (bx * keep) ** 2 @ state["w"] + state["bias"] - by
            state["w"] -= np.float32(0.002) * (error @ (bx * keep) ** 2)
            state["bias"] -= np.float32(0.002) * error.sum()
            loop.collect_metrics(loss=float(np.square(error).mean()))
        # fault: if epoch == 3: state["w"][4] = np.nextafter(state["w"][4], np.float32(9))
        loop.collect_metrics(valid=float(np.abs(x**2 @ state["w"] - y).mean()))
