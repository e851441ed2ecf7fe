"""A counter in the state is changed by a line before the loop, which every start runs, to no effect."""

from tiny import Model, data, loop

model, train, notes = Model(), data(), {"seen": 0}
with loop({**model.state(), "notes": notes}) as run:
    notes["seen"] += 1
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            notes["seen"] += len(x)
            run.collect_metrics(loss=model.update(x, y))
