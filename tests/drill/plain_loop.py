"""A loop by hand that has never heard of everstep: its argument is what its resume does wrong."""

import os
import signal
import sys

import torch

WRONG = sys.argv[1]
if WRONG == "leaves":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())

if WRONG != "unseeded":
    torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(64, 5)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
layers = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
epoch = 0
if os.path.exists("begun") and WRONG == "fails":
    raise OSError("torn")
open("begun", "w").close()
if os.path.exists("last.pt") and WRONG == "quits":
    sys.exit()
if os.path.exists("last.pt") and WRONG != "anew":
    saved = torch.load("last.pt")
    if WRONG == "passes over" and saved["epoch"] > 1:
        saved = torch.load(f"{saved['epoch'] - 1}/rest.pt")
    if WRONG == "passes over":
        saved |= {name: torch.load(f"{saved['epoch']}/{name}.pt") for name in ("model", "optimizer")}
    for name, part in parts.items():
        if name != WRONG:
            part.load_state_dict(saved[name])
    if WRONG == "buffers":
        model[1].reset_running_stats()
    if WRONG != "random":
        torch.set_rng_state(saved["random"])
    epoch = saved["epoch"]
while epoch < 4:
    model.train()
    for bx, by in torch.utils.data.DataLoader(data, 16, shuffle=True):
        optimizer.zero_grad()
        if WRONG == "chance":
            by = by * os.getpid()
        (model(bx) - by).square().mean().backward()
        optimizer.step()
    schedule.step()
    model.eval()
    with torch.no_grad():
        losses = [(model(bx) - by).square().mean() for bx, by in torch.utils.data.DataLoader(data, 32)]
    epoch += 1
    state = {name: part.state_dict() for name, part in parts.items()}
    target = "last.pt" if WRONG == "in place" else "new.pt"
    if WRONG == "passes over":
        os.makedirs(str(epoch), exist_ok=True)
        for name in ("model", "optimizer"):
            torch.save(state.pop(name), f"{epoch}/{name}.pt")
        torch.save({**state, "random": torch.get_rng_state(), "epoch": epoch}, f"{epoch}/rest.pt")
    for each in [f"{epoch}.pt", target] if WRONG == "copies" else [target]:
        torch.save({**state, "random": torch.get_rng_state(), "epoch": epoch}, each)
    if WRONG == "synced":
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(target, "last.pt")
