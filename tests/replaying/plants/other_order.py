"""A DataLoader with a sampler of one's own; in one batch, that of step 15, two samples change places."""

import sys

import torch

import everstep

torch.manual_seed(6)
x = torch.randn(60, 5)
y = x.cumsum(1)[:, -1:]


class Batches(torch.utils.data.Sampler):
    """Batches in an order that follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 10

    def __iter__(self):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(self.epoch)).view(10, 6).tolist()
        # fault: if self.epoch == 1: order[4][2], order[4][3] = order[4][3], order[4][2]
        yield from order


model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.ReLU(), torch.nn.Linear(9, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003)
sampler = Batches()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_sampler=sampler)
state = {"model": model, "optimizer": optimizer}
saves = everstep.Checkpoints(everstep.Every(steps=6))
with everstep.TrainLoop(sys.argv[1], state, max_epoch=3, seed=8, services=[saves]) as loop:
    for epoch in loop.iter_epochs():
        sampler.set_epoch(epoch - 1)
        for _step, (bx, by) in loop.iter_steps(data):
            # noise on what the model sees, so that the place in the batch matters
            loss = (model(bx + 0.05 * torch.randn_like(bx)) - by).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.collect_metrics(loss=loss)
