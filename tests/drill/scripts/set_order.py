"""The samples come in the order of a set of texts, another in each process."""

from tiny import Model, X, Y, loop

names = {f"sample-{number}" for number in range(24)}
order = [int(name.rpartition("-")[2]) for name in names]
batches = [(X[order[i : i + 4]], Y[order[i : i + 4]]) for i in range(0, 24, 4)]
model = Model()
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(batches):
            run.collect_metrics(loss=model.update(x, y))
