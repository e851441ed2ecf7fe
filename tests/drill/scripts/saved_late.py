"""A first checkpoint that comes late: most kills find that of step 0 alone."""

import numpy as np

import everstep

w, train = np.zeros(3), everstep.data.arrays(np.arange(80), batch_size=2)
# copy=False: the loop waits for the save, so a kill of a later step finds it, however busy the disk is
services = [everstep.Checkpoints(everstep.Every(steps=20), copy=False)]
with everstep.TrainLoop("runs/late", {"w": w}, seed=1, max_step=24, services=services) as loop:
    for _ in loop.iter_epochs():
        for _step, _batch in loop.iter_steps(train):
            w += np.random.standard_normal(3)
            loop.collect_metrics(loss=w.sum())
