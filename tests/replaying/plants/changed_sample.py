"""NumPy under a Supervisor, data from a file; the other file has one value of one sample another way."""

import sys

import numpy as np

import everstep

rng = np.random.default_rng(7)
x = rng.normal(size=(320, 5))
y = (x @ rng.normal(size=5) > 0).astype(float)
# fault: x[109, 2] = np.nextafter(x[109, 2], 9)
np.save(sys.argv[1] + ".npy", x)
x = np.load(sys.argv[1] + ".npy", mmap_mode="r")

data = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
state = {"w": np.zeros(5), "velocity": np.zeros(5)}
saves = everstep.Checkpoints(everstep.Every(steps=15))
with everstep.Supervisor(sys.argv[1], state, seed=4, max_step=60, services=[saves]) as sv:
    batches = sv.stream(data)
    while not sv.should_stop():
        bx, by = next(batches)
        bx = bx + 0.05 * np.random.standard_normal(bx.shape)
        chance = 1 / (1 + np.exp(-bx @ state["w"]))
        state["velocity"] *= 0.9
        state["velocity"] += (chance - by) @ bx / len(by)
        state["w"] -= 0.1 * state["velocity"]
        sv.advance(loss=float(((chance - by) ** 2).mean()))
