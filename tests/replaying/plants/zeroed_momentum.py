"""SGD with momentum over a DataLoader of one's own; one momentum buffer is zeroed once, after step 18."""

import sys

import torch

import everstep

torch.manual_seed(5)
x = torch.randn(72, 6)
y = (x[:, :1] * x[:, 1:2]).tanh()
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
state = {"model": model, "optimizer": optimizer}
saves = everstep.Checkpoints(everstep.Every(steps=7))
with everstep.TrainLoop(sys.argv[1], state, max_epoch=4, seed=8, services=[saves]) as loop:
    for _epoch in loop.iter_epochs():
        for step, (bx, by) in loop.iter_steps(data):
            loss = (model(bx) - by).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # fault: if step == 18: optimizer.state[model[0].bias]["momentum_buffer"].zero_()
            loop.collect_metrics(loss=loss)
