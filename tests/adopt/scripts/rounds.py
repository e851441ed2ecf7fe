"""Two loops that train in an epoch, a generator, and `zip`: only the epochs can be steps."""

import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
order = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
first, second = random_split(data, [24, 16], generator=torch.Generator().manual_seed(1))
loader = DataLoader(first, batch_size=8, shuffle=True, generator=order)
other = DataLoader(second, batch_size=4, shuffle=True)
net = torch.nn.Linear(6, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
best = None


def update(x, y):
    loss = (net(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    global best
    for epoch in range(1, 19):
        total = 0.0
        for (x, y), _ in zip(loader, other, strict=False):
            total += update(x, y)
        for x, y in other:
            total += update(x, y)
        best = total if best is None else min(best, total)
        if epoch == 16:
            break
    print(epoch, best)
    torch.save([net.state_dict(), epoch, best], "end.pt")


main()
