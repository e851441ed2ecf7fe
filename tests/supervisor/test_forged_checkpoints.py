"""Saves: a checkpoint's tree, forged ones, the order on the disk, and `Checkpoints(copy=False)`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import everstep
from everstep import Every, hazard
from everstep.checkpoint import FORMAT, Store, read_checkpoint
from everstep.errors import CheckpointError, EverstepError, Interrupted, RestoreError
from everstep.state import Buffers, Encoded, decode, digest, encode
from everstep.supervisor.saving.saver import Spill
from everstep.testing import armed, nothing_left
from tiny_runs import Boom, Tiny, boom_at

GONE: Any = object()
NAME = "step-00000006"
METRICS = "structure/services/metrics/state"


def program(run_dir: Path, **more: Any) -> Tiny:
    services = [everstep.Checkpoints(Every(steps=6)), everstep.EarlyStop("valid_loss", patience=9)]
    return Tiny(run_dir, max_epoch=3, services=services, **more)


def valid(loop: Any, epoch: int) -> None:
    loop.collect_metrics(valid_loss=1.0)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended in its seventh step of twelve."""
    run_dir = tmp_path_factory.mktemp("forged") / "run"
    with pytest.raises(Boom):
        program(run_dir).train(inside=boom_at(7), tail=valid)
    return run_dir


@pytest.fixture
def run_dir(killed: Path, tmp_path: Path) -> Path:
    """A copy of it that has only the checkpoint of its sixth step."""
    copied = Path(shutil.copytree(killed, tmp_path / "run"))
    for path in (copied / "checkpoints").iterdir():
        if path.name != NAME:
            shutil.rmtree(path)
    return copied


def forge(folder: Path, place: str, value: Any) -> None:
    """Replace what stands at a place of the manifest, and the checksum with it."""
    body = json.loads((folder / "manifest.json").read_bytes())["body"]
    *path, last = place.split("/")
    node = body
    for key in path:
        node = node[int(key) if isinstance(node, list) else key]
    if value is GONE:
        del node[last]
    else:
        node[last] = value
    text = json.dumps(body, separators=(",", ":")).encode()
    checksum = xxhash.xxh3_128_hexdigest(text).encode()
    (folder / "manifest.json").write_bytes(b'{"checksum":"%s","body":%s}\n' % (checksum, text))


SHAPE = {10: """
gradients:
progress: batch_in_epoch call_start calls epoch epoch_loop epoch_start iterating \
  phase seed step stop stream updates
progress/stop: by code failed kind limits reason
rng: lines0 rank0
rng/lines0/enter: global state
services: best_loss metrics
services/best_loss: state version
services/metrics: state version
services/metrics/state: epoch readers seqs
services/metrics/state/epoch: nonfinite values windows
streams: train
streams/train: data generators given last_end ledger opened pass per_step position touched varies
user: momentum w
wall: seconds segment streams
"""}  # fmt: skip
"""What each branch has.  Where this test fails, put the new shape under FORMAT + 1, and raise it."""


def test_the_tree_has_the_shape_of_its_format(tmp_path: Path) -> None:
    Tiny(tmp_path, max_epoch=2, services=[everstep.Best("loss")]).train()
    saved = read_checkpoint(max((tmp_path / "checkpoints").iterdir()))
    tree = decode(Encoded(saved.structure, saved.arrays))
    tree["services"] = {name.replace(" ", "_"): each for name, each in tree["services"].items()}
    shape = dict(line.split(":") for line in SHAPE[FORMAT].split("\n")[1:-1])
    assert sorted(tree) == sorted({path.split("/")[0] for path in shape})
    for path, names in shape.items():
        branch: Any = tree
        for part in path.split("/"):
            branch = branch[part]
        assert sorted(branch) == names.split(), path
    best = max((tmp_path / "best" / "loss").iterdir())
    with pytest.raises(RestoreError, match=r"holds only user: best weights.*init_from="):
        Tiny(tmp_path / "b", resume=best, max_epoch=1).train()
    started = Tiny(tmp_path / "b", init_from=best, max_epoch=1)
    with started.loop:
        assert started.w.any()


@pytest.mark.parametrize(("place", "value", "part"), [
    ("structure", 7, "holds only nothing"),
    ("structure/wall", GONE, "best weights"),
    ("structure/progress/step", "6", "progress"),
    ("structure/user/w", {"$array": "nope"}, "user"),
    ("structure/streams/train/pass", -1, "stream 'train'"),
    ("structure/rng/rank0/python", True, "rng/rank0"),
    ("structure/rng/lines0", GONE, "rng/lines0"),
    (f"{METRICS}/epoch/windows/loss/spread", None, "services/metrics"),
    ("structure/services/metrics", GONE, "services/metrics"),
    ("structure/services/early stop valid_loss/state", True, "services/early stop valid_loss"),
    ("meta/controllers", GONE, "meta"),
    ("meta/journal", True, "meta/journal"),
])  # fmt: skip
def test_a_missing_or_wrong_part_is_named_with_the_checkpoint(run_dir: Path, place: str, value, part) -> None:
    folder = run_dir / "checkpoints" / NAME
    forge(folder, place, value)
    with pytest.raises((RestoreError, CheckpointError)) as told:
        program(run_dir).train()
    assert str(folder) in str(told.value)
    assert part in str(told.value)


def test_what_an_object_cannot_load_is_named_with_the_checkpoint(tmp_path: Path) -> None:
    def load(run_dir: Path) -> None:
        model = torch.nn.Linear(1, 1)
        state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
        if run_dir.exists():
            everstep.load(run_dir, state)
        with everstep.Supervisor(run_dir, state, max_step=1) as sv:
            sv.should_stop()

    load(tmp_path / "run")
    forge(next((tmp_path / "run" / "checkpoints").iterdir()), "structure/user/optimizer/param_groups", [True])
    with pytest.raises(EverstepError, match=r"(?s)run/checkpoints/.*optimizer"):
        load(tmp_path / "run")


class Program(Tiny):
    """Torch and NumPy, arrays that do not lie in C order, a memory, best weights."""

    def __init__(self, run_dir: Path, *, copy: bool = False, every: Any = None, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.turned = np.zeros((3, 4), order="F")
        self.memory = everstep.data.RingBuffer(10, {"loss": "float32"})
        names = ("model", "optimizer", "turned", "memory")
        saves = everstep.Checkpoints(every or Every(steps=3), keep_last=None, copy=copy)
        services = [saves, everstep.Best("valid_loss")]
        also = {name: getattr(self, name) for name in names}
        super().__init__(run_dir, samples=10, also=also, services=services, max_epoch=3, **more)

    def update(self, ids: Any) -> None:
        super().update(ids)
        loss = self.model(torch.from_numpy(ids).float()[:, None] / 10).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.turned[0, 1:] += self.loop.step
        self.memory.append(loss=loss.item())

    def run(self, inside: Any = lambda loop, step: None, tail: Any = lambda loop, epoch: None) -> str:
        def measured(loop: Any, epoch: int) -> None:
            loop.collect_metrics(valid_loss=float(self.turned.sum() + self.w.sum()))
            tail(loop, epoch)

        ending = self.train(inside, measured).loop.ending
        assert ending.digest is not None
        return ending.digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Program(tmp_path_factory.mktemp("undisturbed"), copy=True).run()


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("at", [1, 4, 5, 9, 10])
def test_a_crash_in_any_place(tmp_path: Path, undisturbed: str, at: int) -> None:
    with pytest.raises(Boom):
        Program(tmp_path).run(inside=boom_at(at))
    with pytest.raises(Boom):
        Program(tmp_path).run(tail=boom_at(2))
    assert Program(tmp_path).run() == undisturbed


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("where", "at"), [("inside", 4), ("inside", 5), ("tail", 1)])
def test_a_signal_saves_in_a_step_and_in_the_tail(tmp_path: Path, undisturbed: str, where: str, at) -> None:
    def hook(loop: Any, count: int) -> None:
        if count == at:
            os.kill(os.getpid(), signal.SIGTERM)
        if where == "tail":
            loop.collect_metrics(valid_loss=2.0)  # which looks for signals

    found = []
    for copy in (True, False):
        run_dir = tmp_path / str(copy)
        with nothing_left():
            interrupted = Program(run_dir, copy=copy, every=everstep.Never())
            with pytest.raises(Interrupted):
                interrupted.run(**{where: hook})
        found.append(sorted(int(path.name[-8:]) for path in (run_dir / "checkpoints").iterdir()))
        assert Program(run_dir, copy=copy, every=everstep.Never()).run() == undisturbed
    assert found[0] == found[1] and found[0][-1] >= 4


def test_a_disk_that_refuses_what_is_kept_costs_a_warning(tmp_path: Path, undisturbed: str) -> None:
    program = Program(tmp_path)
    with armed("ENOSPC:checkpoint.spill:5-40"):
        assert program.run() == undisturbed
    assert any("a save failed" in line for line in program.lines)


def test_nothing_is_copied_and_no_live_array_is_kept() -> None:
    live = {"n": np.arange(6.0), "t": torch.arange(6.0), "f": np.asfortranarray(np.ones((2, 3)))}
    buffers = Buffers(copy=False)
    encoded = encode(live, buffers)
    assert buffers.arrays == {}
    before = digest(encoded)
    assert before == digest(encode(live))
    live["n"][0] = live["t"][1] = live["f"][1, 1] = 7
    assert digest(encoded) == digest(encode(live)) != before


def test_what_is_kept_on_disk_comes_back_and_damage_is_noticed(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    live = {"n": np.arange(6.0), "t": torch.arange(6.0).bfloat16(), "empty": np.zeros((0, 3))}
    kept, was = spill.keep(encode(live, Buffers(copy=False))), digest(encode(live))
    live["n"] += 1
    assert digest(kept) == was and list(tmp_path.iterdir()) == []
    assert spill._file is not None
    os.pwrite(spill._file.fileno(), b"x", 20)
    with pytest.raises(OSError, match="has changed there"):
        _ = kept.arrays["n"].data
    spill.close()


EPOCHS = 4


def seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Train with best weights and one kept checkpoint; (operation, checkpoints before it) of the writer."""
    found: list[tuple[str, list[str]]] = []

    def look(operation: str) -> None:
        if threading.current_thread().name == "everstep-writer":
            store = Store(run_dir)
            found.append((operation, [str(name) for name in store.names()]))
            for facts in store.facts():
                for metric, names in facts.kept.items():
                    lost = [name for name in names if not (store.best_folder(metric) / name).exists()]
                    assert not lost, f"before {operation}: {facts.name} names {lost}, which is not there"

    monkeypatch.setattr(hazard, "_action", look)
    services = [everstep.Best("valid_loss"), everstep.Checkpoints(everstep.Every(epochs=1), keep_last=1)]
    Tiny(run_dir, services=services, max_epoch=EPOCHS).train(
        tail=lambda loop, epoch: loop.collect_metrics(valid_loss=1 / epoch)
    )
    return found


def test_rows_then_the_checkpoint_then_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(tmp_path, monkeypatch)
    names = [f"epoch-{epoch:04d}-step-{4 * epoch:08d}" for epoch in range(EPOCHS + 1)]
    came = [next(at for at, (_, there) in enumerate(found) if name in there) for name in names]
    for before, name, start, end in zip(names, names[1:], came, came[1:], strict=False):
        operations = [operation for operation, _ in found[start:end]]
        assert "journal.fsync" in operations, f"{name} is there before its rows are durable"
        assert before in found[end][1], f"{before} went before {name} was there"
    assert [str(name) for name in Store(tmp_path).names()] == names[-1:]
