"""The shape of a checkpoint's tree, and trees whose checksums are right and which are not a run's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import everstep
from everstep.checkpoint import FORMAT, read_checkpoint
from everstep.errors import CheckpointError, EverstepError, RestoreError
from everstep.schedule import Every
from everstep.state import Encoded, decode
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


SHAPE = {
    9: {
        "gradients": [],
        "progress": [
            *("batch_in_epoch", "call_start", "calls", "epoch", "epoch_loop", "epoch_start", "iterating"),
            *("phase", "seed", "step", "stop", "stream", "updates"),
        ],
        "progress/stop": ["by", "code", "failed", "kind", "limits", "reason"],
        "rng": ["lines0", "rank0"],
        "rng/lines0/enter": ["global", "state"],
        "services": ["best loss", "metrics"],
        "services/best loss": ["state", "version"],
        "services/metrics": ["state", "version"],
        "services/metrics/state": ["epoch", "readers", "seqs"],
        "services/metrics/state/epoch": ["nonfinite", "values", "windows"],
        "streams": ["train"],
        "streams/train": [
            *("data", "generators", "given", "last", "ledger", "left", "opened", "pass"),
            *("per_step", "position", "touched", "varies"),
        ],
        "user": ["momentum", "w"],
        "wall": ["seconds", "segment"],
    }
}
"""What each branch has.  Where this test fails, put the new shape under FORMAT + 1, and raise it."""


def test_the_tree_has_the_shape_of_its_format(tmp_path: Path) -> None:
    Tiny(tmp_path, max_epoch=2, services=[everstep.Best("loss")]).train()
    saved = read_checkpoint(max((tmp_path / "checkpoints").iterdir()))
    tree = decode(Encoded(saved.structure, saved.arrays))
    assert sorted(tree) == sorted({path.split("/")[0] for path in SHAPE[FORMAT]})
    for path, names in SHAPE[FORMAT].items():
        branch: Any = tree
        for part in path.split("/"):
            branch = branch[part]
        assert sorted(branch) == names, path
    best = max((tmp_path / "best" / "loss").iterdir())
    with pytest.raises(RestoreError, match=r"holds only user: best weights.*init_from="):
        Tiny(tmp_path / "b", resume=best, max_epoch=1).train()
    started = Tiny(tmp_path / "b", init_from=best, max_epoch=1)
    with started.loop:
        assert started.w.any()


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
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
    ],
)
def test_a_part_that_is_missing_or_of_another_type_is_named_with_the_checkpoint(
    run_dir: Path, place: str, value: Any, part: str
) -> None:
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
