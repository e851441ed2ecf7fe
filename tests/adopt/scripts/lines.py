"""All in the module: batches by slices, values that steps and epochs hand on, an f-string over two lines."""

import torch

torch.manual_seed(0)
data = torch.randn(60, 4)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scale = 1.0
history = {"loss": []}
best = None
for epoch in range(1, 4):
    running = 0
    for start in range(0, 60, 10):
        if start == 50 and epoch == 2:
            break
        loss = net(data[start : start + 10]).square().mean() * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if start == 30:
            continue
        scale *= 0.99  # each step trains with another scale
        running += loss.item()
        history["loss"].append(loss.item())
    if best is None or running < best:
        best = running
        text = f"""best
{best}"""
    print(f"{epoch} {running:.3f}", text, loss.item())
torch.save([net.state_dict(), best, scale, history["loss"]], "end.pt")
