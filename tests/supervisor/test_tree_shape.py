"""The shape of the state tree belongs to the checkpoint's format: one changes with the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.checkpoint import FORMAT, read_checkpoint
from everstep.checkpoint.manifest import MANIFEST, packed
from everstep.errors import CheckpointVersionError, RestoreError
from everstep.state import Encoded, decode
from tiny_runs import Tiny

SHAPE = {
    8: {
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
            *("data", "generators", "given", "ledger", "left", "opened", "pass", "position", "touched"),
            "varies",
        ],
        "user": ["momentum", "w"],
        "wall": ["seconds", "segment"],
    }
}
"""What each branch has.  Where this test fails, put the new shape under FORMAT + 1, and raise it."""


def trained(run_dir: Path) -> Tiny:
    services = [everstep.Best("loss")]
    return Tiny(run_dir, max_epoch=2, services=services)


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").iterdir())


def test_the_tree_has_the_shape_of_its_format(tmp_path: Path) -> None:
    trained(tmp_path).train()
    saved = read_checkpoint(newest(tmp_path))
    tree = decode(Encoded(saved.structure, saved.arrays))
    assert sorted(tree) == sorted({path.split("/")[0] for path in SHAPE[FORMAT]})
    for path, names in SHAPE[FORMAT].items():
        branch: Any = tree
        for part in path.split("/"):
            branch = branch[part]
        assert sorted(branch) == names, path


def rewritten(path: Path, change: Any) -> None:
    """Change a manifest's body and give it the checksum of that."""
    body = json.loads((path / MANIFEST).read_bytes())["body"]
    change(body)
    (path / MANIFEST).write_bytes(packed(body))


def test_a_run_of_an_earlier_everstep_is_refused_with_one_clear_error(tmp_path: Path) -> None:
    trained(tmp_path).train()
    rewritten(newest(tmp_path), lambda body: body.update(format=1))
    with pytest.raises(CheckpointVersionError, match=r"format version 1, .* reads only 8: continue with the"):
        trained(tmp_path).train()


@pytest.mark.campaign("long", gate=2)
@pytest.mark.parametrize(
    ("branch", "part"),
    [
        ("rng", "lines0"),
        ("services", "metrics"),
        ("streams", None),
        ("streams/train", "generators"),
        ("progress", "calls"),
        ("wall", None),
    ],
)
def test_a_branch_that_is_missing_is_named(tmp_path: Path, branch: str, part: str | None) -> None:
    trained(tmp_path).train()

    def cut(body: Any) -> None:
        where = body["structure"]
        *above, last = f"{branch}/{part}".split("/") if part else [branch]
        for name in above:
            where = where[name]
        del where[last]

    rewritten(newest(tmp_path), cut)
    with pytest.raises(RestoreError, match="holds only") as refused:
        trained(tmp_path).train()
    assert refused.value.missing == (branch if part is None else f"{branch}/{part}",)


def test_best_weights_are_no_run_to_resume_but_weights_to_start_from(tmp_path: Path) -> None:
    trained(tmp_path / "a").train()
    best = max((tmp_path / "a" / "best" / "loss").iterdir())
    with pytest.raises(RestoreError, match=r"holds only user: best weights.*init_from="):
        Tiny(tmp_path / "b", resume=best, max_epoch=1).train()
    started = Tiny(tmp_path / "b", init_from=best, max_epoch=1)
    with started.loop:
        weights = started.w.copy()
    assert weights.any()
