"""A schedule decides on the learning rate, and is not in the state."""

from tiny import Model, data, loop


class Schedule:
    def __init__(self):
        self.updates, self.rate = 0, 0.05

    def step(self):
        self.updates += 1
        self.rate = 0.05 / (1 + 0.1 * self.updates)


model, train, schedule = Model(), data(), Schedule()
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y, schedule.rate))
            schedule.step()
