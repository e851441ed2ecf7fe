"""A service adds up what it sees, and has no state_dict."""

from tiny import Model, data, loop

import everstep


class Total(everstep.Service):
    def __init__(self):
        super().__init__("total", everstep.Every(steps=2))
        self.total = 0

    def run(self, boundary):
        self.total += boundary.step
        return everstep.Outcome(metrics={"total": self.total})


model, train = Model(), data()
with loop(model.state(), services=[Total()]) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
