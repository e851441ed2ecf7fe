"""Two runs, the second one from the weights of the first."""

from tiny import Model, data, loop

for name in ("runs/first", "runs/second"):
    model, train = Model(), data()
    init_from = "runs/first" if name == "runs/second" else None
    with loop(model.state(), name, max_epoch=3, init_from=init_from) as run:
        for _ in run.iter_epochs():
            for _step, (x, y) in run.iter_steps(train):
                run.collect_metrics(loss=model.update(x, y))
            run.print_logs()
