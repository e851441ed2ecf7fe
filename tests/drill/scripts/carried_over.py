"""The tail leaves a variable that only the first step of the next epoch reads."""

from tiny import Model, data, loop

model, train = Model(), data()
carried = 0.0
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for step, (x, y) in run.iter_steps(train):
            if step % 6 == 1:
                model.w += carried
            run.collect_metrics(loss=model.update(x, y))
        carried = 0.1
