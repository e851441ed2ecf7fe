"""Attention with dropout, gradients clipped; from step 23 on at another norm."""

import sys

import torch

import everstep

torch.manual_seed(3)
words = torch.randint(0, 11, (120, 7))


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(11, 8)
        self.attend = torch.nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.out = torch.nn.Linear(8, 11)

    def forward(self, text):
        seen = self.words(text)
        return self.out(seen + self.attend(seen, seen, seen, need_weights=False)[0])


model = Small()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
data = everstep.data.arrays(words, batch_size=12, shuffle=True)
state = {"model": model, "optimizer": optimizer, "schedule": schedule}
saves = everstep.Checkpoints(everstep.Every(steps=8))
with everstep.TrainLoop(sys.argv[1], state, max_epoch=4, seed=5, services=[saves]) as loop:
    for _epoch in loop.iter_epochs():
        for step, (text,) in loop.iter_steps(data):
            loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            limit = 0.3
            # fault: limit = 0.25 if step >= 23 else 0.3
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            schedule.step()
            loop.collect_metrics(loss=loss)
