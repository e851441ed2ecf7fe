"""Another number of ranks at a resume: the same samples, the same values, and from there on an exact run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from processes import outputs

from everstep.cli.looking import show_command as show
from everstep.cli.runs import runs_command as runs
from everstep.cli.runs import sync_command as sync
from everstep.proof.audit import audit
from everstep.proof.compare import compare_runs
from everstep.record import RunJournal

long = pytest.mark.campaign("long")

PROGRAM = '''
import json
import numpy, torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import everstep
from everstep import Every

numbers = numpy.random.default_rng(0)
LENGTH = 59
x, y = numbers.standard_normal((LENGTH, 5)), numbers.standard_normal((LENGTH, 1))
samples = TensorDataset(torch.arange(LENGTH), torch.as_tensor(x), torch.as_tensor(y))

def of_arrays():
    return everstep.data.arrays(numpy.arange(LENGTH), x, y, batch_size=12, shuffle=True)

def of_loader():
    return everstep.data.loader(samples, batch_size=12, shuffle=True)

def of_torch(kind=DataLoader, **given):
    sampler = DistributedSampler(samples, num_replicas=size, rank=rank, seed=3)
    return kind(samples, batch_size=12 // size, sampler=sampler, **given)

def of_torchdata():
    from torchdata.stateful_dataloader import StatefulDataLoader
    return of_torch(StatefulDataLoader)

def with_workers():
    return of_torch(num_workers=1, generator=torch.Generator().manual_seed(rank))

def checked():
    return everstep.data.prefetch(everstep.data.checked(of_arrays()))

def of_few():
    return everstep.data.arrays(numpy.arange(LENGTH), x, y, batch_size=12 if size == 2 else 9)

class OfItself:
    """Data that hands out this rank's part of each batch, at its word."""
    num_replicas, rank = size, rank

    def __init__(self):
        self.drawn = 0

    def __len__(self):
        return 5

    def __iter__(self):
        for first in range(self.drawn * 12, LENGTH, 12):
            self.drawn += 1
            ids = numpy.arange(first, min(first + 12, LENGTH))[rank::size]
            yield ids, x[ids], y[ids]
        self.drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]

class OfState(OfItself):
    """Such data, with a state of its own after each pass."""

    def state_dict(self):
        return {"drawn": self.drawn, "rank": rank}

everywhere = {}

def of_itself(kind=OfItself):
    return everywhere.setdefault(kind, kind())

def of_state():
    return of_itself(OfState)

def shared_out(states, rank, size):
    # what was counted stays in sum; the drawn numbers are those of the ranks that are left
    counted = sum(state["samples"] for state in states)
    drawn = states[rank % len(states)]["drawn"]
    return {"samples": counted // size + (rank < counted % size), "drawn": drawn}

def train(run, make, dies=None, dropout=0.0, max_epoch=4, merge=shared_out, window=1, slow=0, pace=None, **m):
    """`dies`: the step in which the last rank kills itself, once this checkpoint (or None) is there."""
    torch.manual_seed(0)
    torch.set_num_threads(m.get("threads", 1))
    layers = [torch.nn.Linear(5, 24), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(24, 1)]
    if dropout:  # with what only an exact resume brings back
        layers.insert(1, torch.nn.BatchNorm1d(24))
    bare = torch.nn.Sequential(*layers).double()
    model = everstep.torch.parallel(bare, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    seen = {"samples": 0, "drawn": 0}
    state = {"model": model, "optimizer": optimizer, "seen": everstep.PerRank(seen, merge=merge)}
    saves = everstep.Checkpoints(Every(steps=4) | Every(epochs=1))
    stopper = everstep.EarlyStop("valid_loss", patience=50)
    given = dict(seed=7, max_epoch=max_epoch, uneven="weight", services=[saves, stopper])
    with everstep.TrainLoop(run, state, **given) as loop:
        open(f"{run}.{os.getpid()}", "w").close()
        say("seen", json.dumps([loop.step, seen]))
        for epoch in loop.iter_epochs():
            for step, (ids, bx, by) in loop.iter_steps(make()):
                if dies and step == dies[0] and rank == size - 1:
                    until = time.monotonic() + 30
                    saved = lambda: not dies[1] or dies[1] in os.listdir(run + "/checkpoints")
                    while not saved() and time.monotonic() < until:
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                say("ids", json.dumps([step, torch.as_tensor(ids).tolist()]))
                bx, by = torch.as_tensor(bx), torch.as_tensor(by)
                loss = torch.nn.functional.mse_loss(model(bx), by)
                if step % window == 1 % window:
                    optimizer.zero_grad()
                (loss * loop.batch_weight).backward()
                if step % window == 0:
                    optimizer.step()
                seen["samples"] += len(ids)
                seen["drawn"] += int(torch.randint(1000, ()))
                loop.collect_metrics(loss=loss)
                time.sleep(slow)
                if pace:
                    pace(step)
            with loop.evaluation(), torch.no_grad():
                bare.eval()
                loss = torch.nn.functional.mse_loss(bare(torch.as_tensor(x)), torch.as_tensor(y))
                loop.collect_metrics(valid_loss=loss)
                bare.train()
    say("ended", json.dumps([seen, loop.ending.digest, loop.ending.one_fingerprint]))
'''

KINDS = ["of_arrays", "of_loader", "of_torch", "of_torchdata", "with_workers", "checked"]


def trained(run: Path, size: int, make: str = "of_arrays", *, fails: bool = False, **given: Any) -> list[str]:
    """Train until the end, an error, or the death of the last rank; return what each rank said."""
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    program = f"{PROGRAM}\ntrain({str(run)!r}, {make}{arguments})"
    return outputs(program, size, int(fails), dies=bool(given.get("dies")))


def told(said: Sequence[str], word: str) -> list[list[Any]]:
    """What each rank said with this word."""
    lines = ([line for line in text.splitlines() if f": {word} " in line] for text in said)
    return [[json.loads(line.split(word, 1)[1]) for line in mine] for mine in lines]


def samples(said: Sequence[str]) -> dict[int, list[int]]:
    """The samples of each step, of all ranks together."""
    found: dict[int, list[int]] = {}
    for ids in told(said, "ids"):
        for step, mine in ids:
            found.setdefault(step, []).extend(mine)
    return {step: sorted(ids) for step, ids in found.items()}


def losses(run: Path) -> dict[tuple[str, int], float]:
    rows = RunJournal(run).rows()
    return {(row.name, row.step): row.value for row in rows if row.phase in ("step", "tail")}


AT_AN_END, INSIDE = "epoch-0001-step-00000005", "step-00000008"


@long
@pytest.mark.parametrize("make", KINDS)
def test_four_two_one_three(make: str, tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    expected = samples(trained(straight, 1, make))
    assert [len(ids) for ids in expected.values()] == [12, 12, 12, 12, 11] * 4
    found: dict[int, list[int]] = {}
    plan = ((4, (7, AT_AN_END), 0, 0), (2, (10, INSIDE), 5, 59), (1, (15, "step-00000012"), 8, 95))
    for size, dies, resumed, counted in (*plan, (3, None, 12, 142)):
        said = trained(run, size, make, dies=dies)
        starts = [start for (start,) in told(said, "seen")]
        assert {step for step, _ in starts} == {resumed}
        assert sum(seen["samples"] for _, seen in starts) == counted, "what each rank counted is merged"
        again = samples(said)
        if dies:
            again.pop(dies[0], None)  # the last rank had gone
        for step, ids in again.items():
            assert found.setdefault(step, ids) == ids, f"step {step} of {size} ranks"
    assert found == expected
    assert make != "of_arrays" or (audit(run).verdict, audit(run).problems) == ("proven", [])
    assert losses(run).keys() == losses(straight).keys()
    for place, loss in losses(straight).items():
        assert losses(run)[place] == pytest.approx(loss, abs=1e-10), place


CHANGES = [(4, 2), (1, 2), (2, 1), (2, 3)]


@long
@pytest.mark.parametrize(("before", "now"), CHANGES)
@pytest.mark.parametrize("make", ["of_arrays", "with_workers"])
def test_kills_around_the_change_make_no_difference(make: str, before: int, now: int, tmp_path: Path) -> None:
    """Dropout, a counter of random numbers and workers' seeds are each rank's own, and keyed anew."""
    a, b = tmp_path / "a", tmp_path / "b"
    trained(a, before, make, dies=(10, INSIDE), dropout=0.2)
    trained(b, before, make, dies=(4, "epoch-0000-step-00000000"), dropout=0.2)
    trained(b, before, make, dies=(9, INSIDE), dropout=0.2)
    said = trained(a, now, make, dropout=0.2)
    # before the first save of the new ranks, and after two
    trained(b, now, make, dies=(9, INSIDE), dropout=0.2)
    trained(b, now, make, dies=(14, "step-00000012"), dropout=0.2)
    again = trained(b, now, make, dropout=0.2)
    assert compare_runs(a, b) == [] and told(said, "ended") == told(again, "ended")
    ((_, _, one_fingerprint),) = told(said, "ended")[0]
    assert one_fingerprint is False


@long
def test_the_change_is_recorded_said_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    trained(run, 2, dies=(7, AT_AN_END))
    said = trained(run, 3, dies=(8, AT_AN_END))[0]
    change = "the checkpoint is of 2 ranks, and this start has 3 ranks"
    assert said.count(change) == 1 and "not bit-identical" in said
    again = trained(run, 3, max_epoch=2)[0]
    assert again.count(change) == 1, "said at each start that continues from such a checkpoint"
    assert "resume verified: 2 steps executed again" in again, "compared with those of 3 ranks"
    journal = RunJournal(run)
    starts = [event.data["facts"] for event in journal.events("segment", valid=False)]
    assert [(facts["ranks"], facts.get("ranks_before")) for facts in starts] == [(2, None), (3, 2), (3, 2)]
    decided = [e.data for e in journal.events("decision", valid=False) if e.data["what"] == "chosen"]
    assert [(each["why"], each["step"]) for each in decided] == [("another number of ranks", 5)]
    shown = CliRunner().invoke(show, [str(run)]).output
    assert "2 -> 3" in shown and "more than one kind of machine, number or layout of ranks" in shown
    monkeypatch.setenv("EVERSTEP_INDEX", str(tmp_path / "everstep.db"))
    CliRunner().invoke(sync, [str(run)])
    (listed,) = json.loads(CliRunner().invoke(runs, ["--json"]).output)
    assert listed["ranks"] == 3
    finished = trained(run, 2, max_epoch=2)[0]
    assert "this run is finished" in finished and "of 3 ranks, and" not in finished


def test_another_number_of_ranks_is_said_on_another_machine_too(tmp_path: Path) -> None:
    trained(tmp_path, 2, max_epoch=1)
    said = trained(tmp_path, 1, max_epoch=2, threads=2)[0]
    assert "torch.threads: stored 1, given 2" in said and "of 2 ranks, and this start has 1 rank" in said
    decided = [e.data for e in RunJournal(tmp_path).events("decision") if e.data["what"] == "chosen"]
    assert [each["why"] for each in decided] == ["another number of ranks"]


REFUSED = {
    "no function": ("of_arrays", {"merge": None}, "'seen' is each rank's own", "start with 2 ranks"),
    "a window": ("of_arrays", {"window": 3}, "window of accumulated gradients", "start with 2 ranks"),
    "other batches": ("of_few", {}, "batch_size was 12 at the checkpoint and is 9 now", "checkpoint's data"),
    "a place": ("of_itself", {}, "ranks was 2 at the checkpoint and is 3 now", "checkpoint's data"),
    "a state": ("of_state", {}, "'state' was another on each rank", "start with 2"),
}


@long
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_given_to_other_ranks_is_refused_by_all(what: str, tmp_path: Path) -> None:
    make, given, *expected = REFUSED[what]
    dies = (7, AT_AN_END) if what == "a state" else (10, INSIDE)
    trained(tmp_path / "run", 2, make, dies=dies, **given)
    for text in trained(tmp_path / "run", 3, make, fails=True, **given):
        assert all(words in text for words in expected), text
    trained(tmp_path / "run", 2, make, **given)  # nothing is lost: as many ranks as before continue
