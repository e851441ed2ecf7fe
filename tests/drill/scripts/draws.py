"""A line that draws or not, by a value that is not in the state; the argument says which."""

import random
import sys

import numpy as np
import torch
from tiny import Model, data, loop


def helper(count):
    return random.sample(range(100), count)  # here: helper


kind, seen = sys.argv[2], 0
model, train = Model(), data()
if kind == "traced":
    sys.settrace(lambda frame, event, argument: None)
with loop(model.state()) as run:
    for epoch in run.iter_epochs():
        if kind == "head" and epoch > 1 and seen == 0:
            np.random.random()  # here: head
        for _step, (x, y) in run.iter_steps(train):
            seen += 1
            noise = torch.nn.functional.dropout(torch.ones(3)).numpy()
            if kind == "dropout" and seen % 7 == 0:
                noise = torch.nn.functional.dropout(torch.ones(3)).numpy()  # here: dropout
            if kind == "helper" and seen == 7:
                noise = noise + sum(helper(3))
            if kind == "count":
                random.sample(range(100), 1 + seen % 3)  # here: count
            if kind == "traced" and seen == 7:
                random.random()
            run.collect_metrics(loss=model.update(x, y) + 0 * noise.sum())
        if kind == "tail" and seen > 12:
            np.random.random(2)  # here: tail
