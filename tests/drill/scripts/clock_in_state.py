"""The state keeps seconds by the clock: no two runs measure the same."""

import time

from tiny import Model, data, loop

model, train, kept = Model(), data(), {"best": 1e9, "times": []}
with loop({**model.state(), "kept": kept}, seed=None) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            began = time.time()
            loss = model.update(x, y)
            kept["best"] = min(kept["best"], loss)
            kept["times"].append(time.time() - began)
            run.collect_metrics(loss=loss)
