"""A careful loop by hand: python by_hand.py FOLDER

After PyTorch's tutorial "Saving and Loading Models" (Saving & Loading a General Checkpoint for Inference
and/or Resuming Training), and its note "Reproducibility", with what a careful author adds: a file that is
written beside its place, fsynced and renamed; two files kept, and the older one used if the newer cannot be
read; the order of an epoch from a generator of its own; random state restored after `iter(loader)`, which
draws from it.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import task
import torch
from torch.nn.functional import cross_entropy


def save(folder: Path, step: int, state: dict) -> None:
    temporary = folder / "unfinished"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / f"{step:06}.pt")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    for path in sorted(folder.glob("*.pt"))[:-2]:
        path.unlink()


def newest(folder: Path) -> dict | None:
    paths = sorted(folder.glob("*.pt"), reverse=True)
    for path in paths:
        try:
            return torch.load(path, weights_only=False)
        except Exception as error:
            print(f"{path} cannot be read: {error}")
    if paths:
        sys.exit(f"none of {len(paths)} checkpoints can be read")
    return None


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    task.seed()
    witness = task.witness()
    samples, model = task.Samples(), task.network()
    optimizer, schedule = task.optimizer_and_schedule(model)
    step = 0
    found = newest(folder)
    if found:
        step = found["step"]
        for name, each in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            each.load_state_dict(found[name])
    model.train()
    while step < task.STEPS:
        epoch, done = divmod(step, task.EPOCH)
        order = torch.randperm(task.SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        loader = torch.utils.data.DataLoader(samples, task.BATCH, sampler=order[done * task.BATCH :])
        batches = iter(loader)
        if found:
            random.setstate(found["random"][0])
            np.random.set_state(found["random"][1])
            torch.set_rng_state(found["random"][2])
            found = None
        for x, y, numbers in batches:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            witness.step(step, numbers, loss.item())
            if step % task.SAVE_EVERY == 0:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"schedule": schedule.state_dict()}
                state["random"] = random.getstate(), np.random.get_state(), torch.get_rng_state()
                save(folder, step, state)
    witness.end(weights=model.state_dict(), optimizer=task.moments(optimizer))


main(Path(sys.argv[1]))
