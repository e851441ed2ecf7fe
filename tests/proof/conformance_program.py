"""A training in 60 steps of NumPy, exact or with a planted fault: conformance_program.py FAULT FOLDER"""

from __future__ import annotations

import hashlib
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "conformance"))
from witness import Witness

SAMPLES, BATCH, EPOCH, STEPS, SAVE_EVERY, SIZE = 40, 4, 10, 60, 6, 600
fault, folder = sys.argv[1], Path(sys.argv[2])
witness = Witness(numpy=np.__version__)
unsigned = fault == "loads what is torn"
pause = threading.Event().wait


def save(state: dict[str, Any]) -> None:
    content = pickle.dumps(state)
    path = folder / f"{state['step']:04}.state"
    if unsigned:
        content = state.pop("weights").tobytes()
        (folder / "rest").write_bytes(pickle.dumps(state))
    else:
        content = hashlib.sha256(content).digest() + content
    if fault == "writes in place":
        with open(path, "wb", buffering=0) as file:
            for part in (content[:100], content[100:]):
                file.write(part)
                pause(0.02)
        return
    temporary = folder / "unfinished"
    temporary.write_bytes(content)
    pause(0.004)  # so that kills fall into the save
    temporary.rename(path)
    for old in sorted(folder.glob("*.state"))[: -1 if fault in ("keeps one", "loads what is torn") else -2]:
        old.unlink()


def newest() -> dict[str, Any] | None:
    paths = [] if fault == "starts over" else sorted(folder.glob("*.state"), reverse=True)
    for path in paths:
        content = path.read_bytes()
        if unsigned:
            state = pickle.loads((folder / "rest").read_bytes())
            return state | {"weights": np.frombuffer(content.ljust(8 * SIZE, b"\0"))}
        if fault == "writes in place":
            return pickle.loads(content[32:])
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return pickle.loads(content[32:])
        if fault == "keeps one":
            sys.exit(f"the checkpoint {path} is damaged")
    return None


def leave(number: int, frame: object) -> None:
    sys.exit(0)


if fault == "leaves at SIGTERM":
    signal.signal(signal.SIGTERM, leave)
np.random.seed(1)
data = np.random.default_rng(2).normal(size=(SAMPLES, SIZE))
weights, step = np.zeros(SIZE), 0
found = newest()
if found:
    step, weights = found["step"], found["weights"].copy()
    if fault != "loses random state":
        np.random.set_state(found["random"])
again = 0  # steps of the epoch that a resume repeats
if found and fault == "repeats samples":
    again = step % EPOCH
while step < STEPS:
    place = step - again
    order = np.random.default_rng(place // EPOCH).permutation(SAMPLES)
    numbers = order[place % EPOCH * BATCH : (place % EPOCH + 1) * BATCH]
    if fault == "chance":
        np.random.seed(None)
    noise = np.random.normal(size=SIZE)
    gradient = (data[numbers] + 0.1 * noise).mean(0)
    weights = weights - 0.01 * (weights + gradient)
    step += 1
    if found and fault == "skips steps" and step == STEPS - 1:
        break
    witness.step(step, numbers, float(gradient @ gradient))
    pause(0.002)
    if step % SAVE_EVERY == 0 and fault != "saves nothing":
        state = {"step": step, "weights": weights, "random": np.random.get_state()}
        save(state | {"ballast": bytes(200_000 if fault == "has large files" else 0)})
witness.end(weights={"w": weights})
