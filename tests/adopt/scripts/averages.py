"""A module of a script's own."""


class Average:
    """Mean of the values so far."""

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.sum, self.count, self.avg = 0.0, 0, 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.avg:.6f}"


class Patience:
    def __init__(self, patience):
        self.patience, self.bad, self.best = patience, 0, None

    def __call__(self, value):
        is_better = self.best is None or value < self.best
        self.bad = 0 if is_better else self.bad + 1
        self.best = value if is_better else self.best
        return self.bad >= self.patience
