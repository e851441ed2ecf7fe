"""An entry of the state is overwritten with a counter in a Python variable."""

from tiny import Model, data, loop

model, train, notes = Model(), data(), {"seen": 0}
seen = 0
with loop({**model.state(), "notes": notes}) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            seen += len(x)
            notes["seen"] = seen
            run.collect_metrics(loss=model.update(x, y))
