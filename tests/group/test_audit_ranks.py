"""`everstep audit` of a run on several ranks, whose number changes: the batches are those of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ended, started

from everstep.proof.audit import audit

pytestmark = pytest.mark.campaign("long")

PROGRAM = """
import numpy, torch, torch.distributed as dist
import everstep
from everstep import Every

if size > 1:
    dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
x = numpy.random.default_rng(0).standard_normal((59, 5))
train = everstep.data.prefetch(everstep.data.arrays(x, batch_size=12, shuffle=True))
bare = torch.nn.Linear(5, 1).double()
model = everstep.torch.parallel(bare)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
stop = {stop}
given = dict(seed=7, max_epoch=4, uneven="{rule}", services=[everstep.Checkpoints(Every(steps=3))])
with everstep.TrainLoop("{run}", {{"model": model, "optimizer": optimizer}}, **given) as loop:
    for epoch in loop.iter_epochs():
        for step, (bx,) in loop.iter_steps(train):
            loss = model(torch.as_tensor(bx)).square().mean()
            optimizer.zero_grad()
            (loss * loop.batch_weight).backward()
            optimizer.step()
            loop.collect_metrics(loss=loss)
            if step == stop:
                loop.make_checkpoint()
            if step == stop + 2:
                os._exit(9)
"""


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("weight", "each sample of 59 exactly once, in 5 batches"),
        ("drop", ""),
    ],
)
def test_ranks_that_change_in_number_use_every_sample_once(tmp_path: Path, rule: str, words: str) -> None:
    run = tmp_path / "run"
    for size, stop in ((2, 3), (4, 7), (1, 11), (2, 0)):
        text = PROGRAM.format(run=run, rule=rule, stop=stop or 10**6)
        with started(text, size) as processes:
            ended(processes)
    found = audit(run)
    assert found.verdict == "proven" and found.problems == [], found
    assert found.finished and found.starts == 4
    if words:
        assert [(each.passes, each.found) for each in found.passes] == [("passes 1 to 4", words)]
    else:
        assert all("exactly once, in 5 batches" in each.found for each in found.passes)
        assert found.passes[-1].found.startswith("58 of 59 samples, each exactly once")
