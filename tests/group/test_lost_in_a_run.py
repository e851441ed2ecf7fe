"""A run on two ranks, of which one is lost: the other leaves, though its main thread does not come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import started

from everstep.record import failures

pytestmark = pytest.mark.campaign("timed")

PROGRAM = """
import torch, everstep
from everstep.torch import parallel
torch.manual_seed(0)
model = parallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = everstep.data.arrays(torch.arange(16.0)[:, None], batch_size=4)
with everstep.TrainLoop("{run}", {{"model": model, "optimizer": optimizer}}, max_epoch=1) as loop:
    for epoch in loop.iter_epochs():
        for step, (x,) in loop.iter_steps(data):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 3:
                if rank == 0:
                    time.sleep(600)
                {ends}
"""

ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "rank 1: its process is gone without a word",
    'raise ValueError("a bad sample")': "rank 1: ValueError: a bad sample",
}


@pytest.mark.parametrize("ends", ENDS)
def test_the_other_rank_leaves_with_the_first_cause(tmp_path: Path, ends: str) -> None:
    with started(PROGRAM.format(run=tmp_path / "run", ends=ends), 2) as processes:
        said = [process.communicate(timeout=60)[0] for process in processes]
    assert processes[0].returncode == 1, said
    pages = {page.rank: page for page in failures(tmp_path / "run")}
    assert 0 in pages, said
    assert (pages[0].kind, pages[0].step) == ("lost", 2)
    assert pages[0].cause is not None and pages[0].cause.startswith(ENDS[ends])
    assert [page.what for rank, page in pages.items() if rank == 1] == (
        ["ValueError: a bad sample"] if "ValueError" in ends else []
    )
