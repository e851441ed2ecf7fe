"""The learning rate, a Python variable, is decayed at the head of each epoch."""

from tiny import Model, data, loop

model, train = Model(), data()
rate = 0.1
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        rate *= 0.7
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y, rate))
