"""A program that fails when it is started again."""

from tiny import Model, data, loop

model, train = Model(), data()
with loop(model.state()) as run:
    if run.resumed:
        raise RuntimeError("there is no way back")
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
