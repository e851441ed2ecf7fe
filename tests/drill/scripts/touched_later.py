"""The rate is a Python variable; and the data writes into the weights, before the 21st batch of a process."""

from tiny import Model, X, Y, loop

model = Model()


class Batches(list):
    served = 0

    def __getitem__(self, index):
        self.served += 1
        if self.served == 21:
            model.w *= 0.5
        rows = slice(4 * index, 4 * index + 4)
        return X[rows], Y[rows]


batches, rate = Batches(range(6)), 0.1
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        rate *= 0.7
        for _step, (x, y) in run.iter_steps(batches):
            run.collect_metrics(loss=model.update(x, y, rate))
