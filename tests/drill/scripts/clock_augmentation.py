"""The augmentation depends on the time."""

import time

from tiny import Model, data, loop

model = Model()
stream = data()


class Augmented(list):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (1 + 1e-3 * (time.time() % 1)), y


batches = Augmented(stream.open("train", 0, seed=1))
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(batches):
            run.collect_metrics(loss=model.update(x, y))
