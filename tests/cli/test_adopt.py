"""`everstep adopt`: a plain script is put under a loop, its text is kept, and its resume is exact."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from cli_runs import here

import warm

EPOCHS = """
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
        if len(seen) == 3: break
    print("best", best, seen)
    torch.save([net.state_dict(), best, seen], "end.pt")


if __name__ == "__main__":
    main()
"""

DIFF = """\
+import everstep
-def train(model, loader, optimizer, epoch):
+def train(model, loader, optimizer, epoch, *, loop, carried):
-    total = 0.0
-    for index, (x, y) in enumerate(loader):
+    carried["total"] = 0.0
+    for step, (x, y) in loop.iter_steps(loader):
+        index = loop.batch_index
+        loop.collect_metrics(loss=loss)
-        total += loss.item()
+        carried["total"] += loss.item()
-            print(f"epoch {epoch} batch {index}: {total:.6f}")
+            print(f"epoch {epoch} batch {index}: {carried['total']:.6f}")
-    for epoch in range(args.epochs):
-        train(net, loader, optimizer, epoch)
-        value = accuracy(net, x, y)
-        seen.append(value)
-        best = max(best, value)
-        scheduler.step()
-        if len(seen) == 3: break
-    print("best", best, seen)
-    torch.save([net.state_dict(), best, seen], "end.pt")
+    carried = {"best": best, "seen": seen}
+    with everstep.TrainLoop(
+        "runs/train",
+        {"net": net, "optimizer": optimizer, "scheduler": scheduler, "carried": carried},
+        max_epoch=args.epochs,
+        seed=args.seed,
+        config=vars(args),
+    ) as loop:
+        for epoch in loop.iter_epochs():
+            epoch -= 1  # iter_epochs() counts from 1
+            train(net, loader, optimizer, epoch, loop=loop, carried=carried)
+            with loop.evaluation():
+                value = accuracy(net, x, y)
+            carried["seen"].append(value)
+            carried["best"] = max(carried["best"], value)
+            scheduler.step()
+            if len(carried["seen"]) == 3:
+                loop.request_stop("break in line 58")
+                continue
+    print("best", carried["best"], carried["seen"])
+    torch.save([net.state_dict(), carried["best"], carried["seen"]], "end.pt")
"""

ROUNDS = """
import torch

torch.manual_seed(3)
open("executed", "w").close()
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rate, scale = 0.1, 1.0


def shrink():
    return scale * rate


for number in range(2, 30):
    loss = net(torch.randn(6, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.param_groups[0]["lr"] = shrink()
    optimizer.step()
    scale *= 0.95
    if number == 20:
        break
    if number % 2:
        continue
    torch.rand(1)
torch.save([net.state_dict(), number, scale], "end.pt")
"""


def adopted(folder: Path, text: str, *options: str) -> str:
    """What the command prints on a script."""
    (folder / "train.py").write_text(text)
    code, printed, errors = here("adopt", "train.py", *options, cwd=folder)
    assert code == 0, errors
    return printed


def test_the_diff_keeps_what_the_program_means(tmp_path: Path) -> None:
    printed = adopted(tmp_path, EPOCHS)
    assert (tmp_path / "train.py").read_text() == EPOCHS
    diff, _, words = printed.partition("What you must look at by hand:\n")
    changed = [line for line in diff.splitlines()[2:] if line.startswith(("+", "-"))]
    assert changed == DIFF.splitlines()
    assert "     # from 0" in diff.splitlines()
    assert words.startswith("  line 60: torch.save(...) stays")


@pytest.mark.parametrize("text", [EPOCHS, ROUNDS])
def test_an_adopted_script_that_is_killed_ends_like_the_undisturbed_one(tmp_path: Path, text: str) -> None:
    adopted(tmp_path, text, "--write")
    assert not (tmp_path / "executed").exists()
    made = (tmp_path / "train.py").read_text()
    made = made.replace("optimizer.step()", "optimizer.step(); everstep.hazard.reach('test.step')")
    (tmp_path / "train.py").write_text(made.replace("import everstep", "import everstep, everstep.hazard"))
    starts = {"calm": [""], "killed": ["SIGTERM:test.step:7", "kill:test.step:5", "", ""]}
    for name, hazards in starts.items():
        (tmp_path / name).mkdir()
        for hazard in hazards:
            done = warm.run(
                [sys.executable, str(tmp_path / "train.py")],
                cwd=tmp_path / name,
                env=os.environ | ({"EVERSTEP_HAZARD": hazard} if hazard else {}),
                capture_output=True,
                text=True,
            )
            expected = {"S": 128 + signal.SIGTERM, "k": -signal.SIGKILL, "": 0}[hazard[:1]]
            assert done.returncode == expected, done.stderr
    calm, killed = (torch.load(tmp_path / name / "end.pt") for name in starts)
    assert calm[1:] == killed[1:]
    assert all(torch.equal(value, killed[0][key]) for key, value in calm[0].items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)\n", "no loop calls backward()"),
        ("import everstep\neverstep.seed\n", "uses everstep already"),
        ("for a in b:\n    a.backward()\nfor c in d:\n    c.backward()\n", "the loops in lines 1, 3"),
        ("for a in b:\n    for c in a:\n        c.backward()\n", "line 1: the loop over b"),
        ("for a in b:\n    a.backward()\n", "line 1: the model that this loop trains was not found"),
        ("for a in b\n", "expected ':'"),
    ],
)
def test_a_script_that_is_not_adopted_stays_as_it_is(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "train.py").write_text(text)
    code, _, errors = here("adopt", "train.py", "--write", cwd=tmp_path)
    assert code == 1 and "train.py is not adopted" in errors and words in errors
    assert (tmp_path / "train.py").read_text() == text


def test_what_is_not_restored_is_named_with_its_line(tmp_path: Path) -> None:
    text = ROUNDS.replace("torch.manual_seed(3)\n", "").replace("torch.rand(1)", "next(batches)")
    printed = adopted(tmp_path, text, "-o", "new.py")
    assert "line 1: nothing is seeded" in printed
    assert "line 25: the place in this data is not saved" in printed
    assert "sv.stream(None)" in (tmp_path / "new.py").read_text()
    assert (tmp_path / "train.py").read_text() == text
