"""A metric is collected only in the first step of a process."""

from tiny import Model, data, loop

model, train, first = Model(), data(), True
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            if first:
                run.collect_metrics(norm=float(model.w @ model.w))
            first = False
            run.collect_metrics(loss=model.update(x, y))
