import time

import averages
import torch
from averages import Average

torch.manual_seed(3)


class Line:
    def __init__(self, meters):
        self.meters = meters

    def show(self, i):
        print(i, *(str(each) for each in self.meters))


def train(loader, net, optimizer):
    duration, losses = Average("time"), Average("loss")
    meters = {"low": Average("low"), "high": Average("high")}
    line = Line([losses])
    start = time.time()
    for i, x in enumerate(loader):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(x))
        meters["low" if loss.item() < losses.avg else "high"].update(loss.item())
        duration.update(time.time() - start)
        line.show(i)
    return losses.avg, [each.avg for each in meters.values()]


def main():
    loader = torch.utils.data.DataLoader(torch.randn(40, 6), batch_size=8, shuffle=True)
    net = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD([{"params": net.parameters(), "lr": 0.1}], lr=0.1)
    stop = averages.Patience(patience=3)
    seen = []
    for epoch in range(9):
        value, parts = train(loader, net, optimizer)
        seen.append((value, parts))
        if stop(float(epoch)):
            print("enough")
            break
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    print(epoch, stop.best, seen)
    torch.save([net.state_dict(), epoch, vars(stop), seen], "end.pt")


main()
