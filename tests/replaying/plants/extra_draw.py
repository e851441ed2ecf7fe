"""A loader with workers and augmentation, dropout; NumPy's generator is drawn from once more at step 17."""

import sys

import numpy as np
import torch

import everstep

torch.manual_seed(1)
images, labels = torch.randn(64, 1, 6, 6), torch.randint(0, 3, (64,))


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        image = images[index] + 0.1 * torch.randn(1, 6, 6)
        return image.flip(-1) if np.random.random() < 0.5 else image, labels[index]


model = torch.nn.Sequential(
    torch.nn.Flatten(),
    torch.nn.Linear(36, 16),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.3),
    torch.nn.Linear(16, 3),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = everstep.data.loader(Augmented(), batch_size=8, shuffle=True, num_workers=2)
saves = everstep.Checkpoints(everstep.Every(steps=10))
state = {"model": model, "optimizer": optimizer}
with everstep.TrainLoop(sys.argv[1], state, max_epoch=4, seed=2, services=[saves]) as loop:
    for _epoch in loop.iter_epochs():
        for step, (bx, by) in loop.iter_steps(data):
            if step % 5 == 0:  # now and then with smoothed labels
                smooth = float(np.random.uniform(0, 0.2))
            else:
                smooth = 0.0
            loss = torch.nn.functional.cross_entropy(model(bx), by, label_smoothing=smooth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # fault: if step == 17: np.random.random()
            loop.collect_metrics(loss=loss)
