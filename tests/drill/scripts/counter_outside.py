"""The loss is weighted by a counter in a Python variable."""

from tiny import Model, data, loop

model, train = Model(), data()
seen = 0
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            seen += len(x)
            run.collect_metrics(loss=model.update(x, y, weight=1 / (1 + seen)))
