"""A thread decays the weights now and then."""

import threading
import time

from tiny import Model, data, loop

model, train = Model(), data()
over = threading.Event()


def decay():
    while not over.wait(0.002):
        model.w *= 0.999


threading.Thread(target=decay, daemon=True).start()
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
            time.sleep(0.004)
over.set()
