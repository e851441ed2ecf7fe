"""Two models and two optimizers; the weight decay of the second changes at step 21."""

import sys

import torch

import everstep

torch.manual_seed(4)
points = torch.nn.functional.normalize(torch.randn(80, 2))
maker = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.LeakyReLU(), torch.nn.Linear(8, 2))
critic = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.LeakyReLU(), torch.nn.Linear(8, 1))
making = torch.optim.AdamW(maker.parameters(), lr=0.005, weight_decay=0.01)
judging = torch.optim.AdamW(critic.parameters(), lr=0.005, weight_decay=0.01)
data = everstep.data.arrays(points, batch_size=8, shuffle=True)
state = {"maker": maker, "critic": critic, "making": making, "judging": judging}
saves = everstep.Checkpoints(everstep.Every(epochs=1))
judged = torch.nn.functional.binary_cross_entropy_with_logits
with everstep.TrainLoop(sys.argv[1], state, max_epoch=4, seed=6, services=[saves]) as loop:
    for _epoch in loop.iter_epochs():
        for step, (real,) in loop.iter_steps(data):
            # fault: if step == 21: judging.param_groups[0]["weight_decay"] = 0.02
            made = maker(torch.randn(len(real), 3))
            yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            critic_loss = judged(critic(real), yes) + judged(critic(made.detach()), no)
            judging.zero_grad()
            critic_loss.backward()
            judging.step()
            maker_loss = judged(critic(made), yes)
            making.zero_grad()
            maker_loss.backward()
            making.step()
            loop.collect_metrics(critic=critic_loss, maker=maker_loss)
