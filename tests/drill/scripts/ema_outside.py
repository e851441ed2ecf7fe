"""An average of the weights is evaluated, and is not in the state."""

from tiny import Model, X, Y, data, loop

model, train = Model(), data()
average = model.w.copy()
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
            average += 0.1 * (model.w - average)
        with run.evaluation():
            run.collect_metrics(valid_loss=float(((X @ average - Y) ** 2).mean()))
