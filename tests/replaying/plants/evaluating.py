"""A Trainer's task with convolution and batch normalization, which is in eval mode in step 14 alone."""

import sys

import torch

import everstep

torch.manual_seed(7)
images, labels = torch.randn(64, 1, 6, 6), torch.randint(0, 4, (64,))


class Task(everstep.Task):
    def __init__(self):
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(64, 4),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.7)
        self.done = everstep.Slot(0)

    def state(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "schedule", "done")}

    def train_step(self, batch):
        image, label = batch
        # fault: self.model.train(self.done.value != 13)
        loss = torch.nn.functional.cross_entropy(self.model(image), label)
        self.model.train()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.done.value += 1
        return {"loss": loss}


data = everstep.data.arrays(images, labels, batch_size=8, shuffle=True)
saves = everstep.Checkpoints(everstep.Every(steps=5))
everstep.Trainer(Task(), {"train": data}, sys.argv[1], max_epoch=4, seed=3, services=[saves]).run_training()
