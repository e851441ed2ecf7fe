import argparse

import torch
from torch.nn.functional import cross_entropy


class Net(torch.nn.Module):  # two layers
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.last(torch.dropout(self.first(x), 0.2, self.training))


def train(model, loader, optimizer, epoch):
    model.train()
    total = 0.0
    for index, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
        if index % 4 == 3:
            print(f"epoch {epoch} batch {index}: {total:.6f}")


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    x, y = torch.randn(40, 8), torch.arange(40) % 3
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    best = 0.0
    seen = []

    # from 0
    for epoch in range(args.epochs):
        train(net, loader, optimizer, epoch)
        value = accuracy(net, x, y)
        seen.append(value)
        best = max(best, value)
        scheduler.step()
    print("best", best, seen)
    torch.save([net.state_dict(), best, seen], "end.pt")


if __name__ == "__main__":
    main()
