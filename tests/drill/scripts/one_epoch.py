"""One epoch: nothing follows its tail."""

from tiny import Model, data, loop

model, train = Model(), data()
with loop(model.state(), max_epoch=1) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
