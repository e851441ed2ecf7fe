"""A thread decays the weights now and then, by a factor of its own."""

import random
import threading
import time

from tiny import Model, data, loop

model, train = Model(), data()
chance = random.SystemRandom()
over = threading.Event()


def decay():
    while not over.wait(0.0002):
        model.w *= chance.uniform(0.998, 0.999)


threading.Thread(target=decay, daemon=True).start()
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
            # No two runs decay by the same factors, and each step waits for a decay: the weights after the
            # first step differ, before any loss can, however busy the machine is.
            updated = model.w.copy()
            while (model.w == updated).all():
                time.sleep(0.0005)
over.set()
