"""The idea of everstep in one file, in plain Python and torch.

A run that is killed at any instant and started again ends in exactly the run that was never killed: the same
weights to the last bit, the same samples in the same order, the same metric rows.  Try it:

    python docs/everstep_in_one_file.py runs/one-file      # kill -9 it, start it again, as often as you like

1. Durable files.  A file exists whole or not at all.
2. Position.  A batch is a function of numbers, so a position in the data is a number, too.
3. Journal.  Rows are appended, never rewritten.  A resume says from which row on the older rows are void.
4. Run.  A step counts when it is complete.  The state is saved and restored between two steps.
5. A program that uses all this.

The library everstep is this idea with all that a user needs around it: see the last comment.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# ------------------------------------------------------------------------------------- 1. durable files


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that exists whole or not at all, at any instant, even if the power fails."""
    temporary = path.with_name(f".{path.name}.unfinished")  # no reader looks for this name
    with open(temporary, "wb") as file:
        # A disk may lose a bit and report no error.  The digest finds that at the next start.
        file.write(hashlib.sha256(content).digest() + content)
        file.flush()
        # The bytes first, then the name: a file system may bring a rename to the disk before the bytes, and
        # a power cut between the two would leave a checkpoint full of zeros under its final name.
        os.fsync(file.fileno())
    # Here the checkpoint begins to exist.  A rename replaces the name in one instant.
    os.rename(temporary, path)
    # Without this a power cut can take the name away again, after the older checkpoint was deleted.
    sync_folder(path.parent)


def read_whole(path: Path) -> bytes | None:
    """Content of a file from `write_whole`; None if a byte of it has changed."""
    stored = path.read_bytes()
    digest, content = stored[:32], stored[32:]
    return content if hashlib.sha256(content).digest() == digest else None


# ------------------------------------------------------------------------------------------ 2. position


def batches(seed: int, epoch: int, samples: int, size: int) -> list[Tensor]:
    """Indices of each batch of an epoch, in a new order for each epoch.

    The order is a function of (seed, epoch), so nobody needs to save it: a resume computes it again, and
    the number of finished batches says where to continue.  The generator is the function's own.  If the
    order came from torch's global generator, a dropout layer more would change it.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return list(torch.randperm(samples, generator=generator).split(size))


# ------------------------------------------------------------------------------------------- 3. journal


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of the run, each once, whatever was executed twice."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl")):
        # A kill can tear the last line.  A torn line has no line break, so split() leaves it at the end.
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            if "resumes_after" in row:
                del rows[row["resumes_after"] :]
            else:
                rows.append(row)
    return rows


class Journal:
    """Metric rows.  Each start of the program appends to a file of its own.

    A file that a killed process has written is never opened for writing again, so a fault of this start
    cannot damage the rows of an older one.

    Attributes:
        count: number of rows of the run up to now, those of earlier starts included.
    """

    def __init__(self, folder: Path, resumes_after: int) -> None:
        earlier = read_rows(folder)
        # The steps after the checkpoint are executed again.  Their rows say what must come out.
        self.expected = iter(earlier[resumes_after:])
        self.count = resumes_after
        self.file = open(folder / f"{len(list(folder.iterdir())):06}.jsonl", "x")  # noqa: SIM115
        self._append(json.dumps({"resumes_after": resumes_after}))
        sync_folder(folder)

    def log(self, row: dict[str, Any]) -> None:
        """Append a row.  Exit if an earlier start found another one here: the state lacks something."""
        line = json.dumps(row)  # JSON keeps each bit of a float
        before = json.dumps(next(self.expected, row))  # as text: a NaN is not equal to itself
        if before != line:
            raise SystemExit(f"this resume is not exact: the row was {before}, now it is {line}")
        self._append(line)
        self.count += 1

    def _append(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()  # to the kernel: the row survives SIGKILL.  Only a power cut needs fsync.

    def sync(self) -> None:
        """Bring all rows to the disk."""
        os.fsync(self.file.fileno())


# ----------------------------------------------------------------------------------------------- 4. run


class Run:
    """A training run in a folder: its position, its journal, and the objects that its steps change.

    Args:
        folder: made if it does not exist.  If it has checkpoints, the run resumes.
        objects: everything that a step reads and changes, each with state_dict() and load_state_dict().
            What is forgotten here is not restored; `Journal.log` finds that at the next resume.
        save_every: steps between two checkpoints.  A kill costs at most that many steps of computing.

    Attributes:
        epoch: number of finished epochs.
        batch: number of finished batches in the epoch that runs.
        step: number of finished steps.
        resumed: whether this start found a checkpoint.
    """

    def __init__(self, folder: Path, objects: dict[str, Any], save_every: int) -> None:
        self.objects, self.save_every = objects, save_every
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        (folder / "journal").mkdir(exist_ok=True)
        self.epoch = self.batch = self.step = 0
        self.saved = self._newest()
        self.resumed = self.saved is not None
        if self.saved is not None:
            self.epoch, self.batch, self.step = self.saved["position"]
        self.journal = Journal(folder / "journal", self.saved["rows"] if self.saved else 0)

    def epochs(self, count: int) -> Iterator[int]:
        """The number of each epoch that is still to run, up to `count`."""
        while self.epoch < count:
            if self.batch == 0:
                # The lines between this yield and the first batch have not run in the saved state, so they
                # must find everything as it was.  In the middle of an epoch they have: see `steps`.
                self._restore()
                if self.epoch == 0:
                    # A checkpoint before the first step.  Without it, a run whose weights are not seeded
                    # and that is killed before its first regular save would start from other weights.
                    self._save()
            yield self.epoch
            # The tail of the epoch has run: the program's evaluation, its schedule.  Nothing is saved inside
            # the tail, so a resume runs all of it or nothing of it.
            self.epoch, self.batch = self.epoch + 1, 0
            self._save()
        self._restore()  # a finished run is started once more: it shows its last state

    def steps(self, of_epoch: list[Tensor]) -> Iterator[Tensor]:
        """The batches of an epoch that are still to run.

        A step is complete when the program asks for the next batch, and counts then, not before: a step
        that is killed half-way has not happened.
        """
        # As late as possible.  The lines before this one may build a model, draw numbers or open a loader;
        # the checkpoint has seen all that they did the first time, so what they do this time is undone here.
        self._restore()
        for batch in of_epoch[self.batch :]:
            yield batch
            self.batch, self.step = self.batch + 1, self.step + 1
            # Not after the last batch.  A resume there would enter the tail without the names that the loop
            # assigns (`loss`), and the end of the epoch saves soon.
            if self.step % self.save_every == 0 and self.batch < len(of_epoch):
                self._save()

    def log(self, **row: Any) -> None:
        """Append a row to the journal."""
        self.journal.log({"epoch": self.epoch, "batch": self.batch, **row})

    def _save(self) -> None:
        """Commit a checkpoint of this instant, between two steps."""
        state = {
            "position": (self.epoch, self.batch, self.step),
            "rows": self.journal.count,
            "objects": {name: each.state_dict() for name, each in self.objects.items()},
            # Dropout and augmentation draw from these.  A program that draws from NumPy's generator, or on a
            # GPU, needs those here, too: the state is everything that a step reads.
            "random": {"python": random.getstate(), "torch": torch.get_rng_state()},
        }
        content = io.BytesIO()
        torch.save(state, content)
        # The rows before the checkpoint that counts them.  In the other order, a power cut between the two
        # would leave a run that resumes after rows that are nowhere.
        self.journal.sync()
        # The names sort as the run goes: (1, 0), after the tail of epoch 0, follows (0, last batch).
        write_whole(self.checkpoints / f"{self.epoch:06}-{self.batch:08}.pt", content.getvalue())
        # The older ones last of all, when the new one is safe.  Two stay, in case that a byte goes bad.
        for path in sorted(self.checkpoints.glob("*.pt"))[:-2]:
            path.unlink()

    def _newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole.  Exit if all are damaged: a new start would destroy them."""
        paths = sorted(self.checkpoints.glob("*.pt"), reverse=True)
        for path in paths:
            content = read_whole(path)
            if content is not None:
                # weights_only: a checkpoint from a stranger must not run code.
                return dict(torch.load(io.BytesIO(content), weights_only=True))
            print(f"{path} is damaged; looking for the checkpoint before it")
        if paths:
            raise SystemExit(f"all {len(paths)} checkpoints of this run are damaged")
        return None

    def _restore(self) -> None:
        """Put everything back as it was in the checkpoint, once."""
        if self.saved is None:
            return
        for name, each in self.objects.items():
            each.load_state_dict(self.saved["objects"][name])
        # The generators last: to load a state could draw numbers.
        random.setstate(self.saved["random"]["python"])
        torch.set_rng_state(self.saved["random"]["torch"])
        self.saved = None


# ------------------------------------------------------------------------------------------- 5. program


def main(folder: Path, epochs: int = 6, save_every: int = 5) -> None:
    """Train a small classifier on made-up data, with all that usually breaks a resume.

    There is dropout, Adam with its moments, a schedule, shuffled data, and augmentation from the global
    generators of Python and of torch.
    """
    random.seed(7)  # so that you can compare the digests of two runs; to resume needs no seed
    torch.manual_seed(7)
    torch.set_num_threads(1)  # another number of threads adds numbers in another order: other bits
    made_up = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 16, generator=made_up)
    labels = (inputs @ torch.randn(16, 4, generator=made_up)).argmax(1)

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    run = Run(folder, {"model": model, "optimizer": optimizer, "schedule": schedule}, save_every)
    print(f"{'resuming' if run.resumed else 'starting'} at epoch {run.epoch}, batch {run.batch}")
    for epoch in run.epochs(epochs):
        model.train()
        for indices in run.steps(batches(seed=7, epoch=epoch, samples=320, size=32)):
            x = inputs[indices] * random.uniform(0.8, 1.2) + 0.1 * torch.randn(len(indices), 16)
            loss = cross_entropy(model(x), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss.item(), samples=indices.tolist())
        model.eval()
        with torch.no_grad():
            accuracy = (model(inputs[320:]).argmax(1) == labels[320:]).float().mean().item()
        schedule.step()
        run.log(accuracy=accuracy)
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    weights = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
    print(f"digest of the weights: {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/one-file"))

# What everstep adds: a thread that writes, so that a save costs the training a copy in memory; Ctrl-C and
# SIGTERM that save first; a lock against a second process; loaders of torch and of others, with workers; a
# full disk, NaN, rollback; evaluation, best weights, early stop; `everstep drill`, which finds what your
# script has forgotten in its state.
