"""Loops on several ranks start, decide, go back, keep and mirror alike, all at the same step."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import lines_by_rank, outputs
from rank_loops import HEAD

from everstep.record import RunJournal

pytestmark = pytest.mark.campaign("long")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


def said_alike(program: str, size: int = 2) -> list[str]:
    """Run a program; return what each of its ranks has said, which must be the same."""
    printed = outputs(HEAD + program, size)
    said = lines_by_rank("".join(printed))
    assert all(said[rank] == said[0] for rank in range(size)), said
    return said[0]


def test_ranks_that_were_started_differently_are_told_what_differs(folder: Path) -> None:
    program = """
say(*ended("run", epochs=1))
say(*ended(f"run-{rank}"))
say(*ended("run", epochs=2 + rank))
say(*ended("run", seed=7 + rank))
say(*ended("run", config={"width": 3 + rank, "rank": rank}))
say(*ended("run", on_change=("error", "override")[rank]))
say(*ended("run", services=[everstep.EarlyStop("loss", threshold=-1.0)] if rank else []))
x = x + rank
say(*ended("samples"))
x, y = x[: 64 - 8 * rank], y[: 64 - 8 * rank]
say(*ended("data"))
say(*ended("retry", services=[services.Retry()]), (folder / "retry").exists())
"""
    said = lines_by_rank("".join(outputs(HEAD + program, 2)))
    for rank in range(2):
        whole, _folders, epochs, seed, config, change, guards, other, lengths, retry = said[rank]
        assert whole.startswith("ended 8 ") and "max_epoch: rank 0 has 2, rank 1 has 3" in epochs
        assert "seed: rank 0 has 7, rank 1 has 8" in seed
        assert "config.width: rank 0 has 3, rank 1 has 4" in config and "config.rank" not in config
        assert 'on_change: rank 0 has "error", rank 1 has "override"' in change
        assert guards.startswith("DisagreementError: ") and 'rank 1 has "EarlyStop"' in guards, guards
        assert "'train' are not the same on all ranks: arrays of rank 1 differs from the writer's" in other
        assert lengths.startswith(
            "DisagreementError: the data of stream 'train' differs between the processes"
        )
        assert retry.startswith("ConfigError: Retry tries again in one process") and retry.endswith(" False")
        assert "torchrun --max-restarts" in retry
    assert said[1][1].startswith("RunDirError: rank 1 finds no run") and "all of them see" in said[1][1]
    assert "rank 1 has failed: RunDirError: rank 1 finds no run" in said[0][1]
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-1].endswith("00000008")


def test_all_ranks_decide_alike_and_speak_once(folder: Path) -> None:
    program = """
class Local(everstep.Service):
    stage = everstep.services.Stage.DECIDE
    controller = True
    sets = ("optimizer.lr",)
    default_schedule = everstep.Every(steps=2)
    def __init__(self, action):
        super().__init__("local")
        self.action = action
    def run(self, boundary):
        return everstep.Outcome(actions=self.action() if boundary.step == 6 else ())

say(*ended("asked", lambda loop, step: step == 11 and loop.request_stop(f"asked for by rank {rank}")))
say(*ended("early", services=[everstep.EarlyStop("loss", threshold=9.0, every=everstep.Every(steps=3))]))
say(*ended("one", services=[Local(lambda: (everstep.Stop("by rank 1 alone"),) if rank else ())]))
say(*ended("both", services=[Local(lambda: (everstep.Stop(f"by rank {rank}"),))]))
say(*ended("values", services=[Local(lambda: (everstep.services.SetValue("optimizer.lr", 1.0 + rank),))]))
"""
    values = "what services set (decide by metrics"
    printed = outputs(HEAD + program, 2)
    said = lines_by_rank("".join(printed))
    assert said[0] == said[1]
    asked, early, one, both, unlike = said[0]
    assert asked == "ended 11 asked for by rank 0"
    assert early.startswith("ended 3 early stop: loss has reached 9.0")
    assert one == "ended 6 by rank 1 alone" and both == "ended 6 by rank 0"
    assert unlike.startswith("DisagreementError: ") and values in unlike and "optimizer.lr" in unlike
    own = [line for line in printed[1].splitlines() if line.strip() and not line.startswith("1: ")]
    assert own == [], "rank 1 printed"
    assert "asked for by rank 0" in (folder / "asked" / "logs" / "rank-00001.log").read_text()
    first, second = RunJournal(folder / "asked", None).events("rank times")
    assert (first.data["step"], second.data["step"]) == (8, 11)
    for times in first.data["ranks"]:
        assert 0 < times["step"] < 60 and times["peak_memory"] > 1e7
    assert len(second.data["ranks"]) == 2


def test_what_one_rank_alone_does_after_the_steps_is_named_by_all(folder: Path) -> None:
    said = said_alike("""
def alone(action):
    return lambda loop: action(loop) if rank == 0 else None

def evaluated(loop):
    with loop.evaluation():
        loop.collect_metrics(extra=1.0)

say(*ended("stop", tail=alone(lambda loop: loop.request_stop())))
say(*ended("save", tail=alone(lambda loop: loop.make_checkpoint())))
say(*ended("limit", tail=alone(lambda loop: setattr(loop, "max_epoch", 2))))
say(*ended("metrics", tail=alone(lambda loop: loop.collect_metrics(extra=1.0))))
say(*ended("evaluation", tail=alone(evaluated)))
""")
    *asked, metrics, evaluation = said
    different = "DisagreementError: at the boundary after epoch 1, what the programs have asked for"
    told = ('"stop": ["request"', 'rank 0: {"save": true}', 'rank 0: {"max_epoch": 2}')
    for line, words in zip(asked, told, strict=True):
        assert line.startswith(different) and words in line and "; rank 1: {" in line, line
    places = "rank 0 at 'the metrics extra', rank 1 at 'the boundary after epoch 1'"
    assert places in metrics and places in evaluation


def test_a_quiet_step_makes_no_request_and_a_boundary_few() -> None:
    """Counted are all requests of both connections, and the collectives beside those of hand-written DDP."""
    said = said_alike("""
from everstep.backends.torch.parallel import TorchStore
requests, collectives = [], []
for name in ("set", "set_all", "has", "get", "set_once", "delete", "block"):
    def counted(self, *given, call=getattr(TorchStore, name), name=name):
        requests.append(name)
        return call(self, *given)
    setattr(TorchStore, name, counted)
for name in ("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_object"):
    def counted(*given, call=getattr(dist, name), name=name, **more):
        collectives.append(name)
        return call(*given, **more)
    setattr(dist, name, counted)

seen = []
def inside(loop, step):
    if step < 7:
        dist.monitored_barrier()
        time.sleep(0.2)
        seen.append((len(requests), len(collectives)))
quiet = everstep.Checkpoints(every=everstep.Every(epochs=1))
trained("run", inside, epochs=1, services=[quiet])
made = [(now[0] - then[0], now[1] - then[1]) for then, now in zip(seen, seen[1:])]
say("quiet", *min(made))  # the save of step 0 may still end in some of these steps

from everstep.group import StoreGroup
from everstep.supervisor.boundaries import Boundaries
operations, walks = [], {}
def gathered(self, value, what, *given, call=StoreGroup.gather):
    operations.append(what)
    return call(self, value, what, *given)
StoreGroup.gather = gathered
def walked(self, *given, call=Boundaries.run, **more):
    operations.clear()
    call(self, *given, **more)
    walks[self._engine.step] = list(operations)
Boundaries.run = walked
early = everstep.EarlyStop("loss", patience=9, every=everstep.Every(steps=3))
trained("looked", epochs=1, services=[quiet, early])
say(walks[3])
""")
    facts, metrics, actions = "the boundary after step 3", "the metrics of the last steps", "the actions"
    assert said == ["quiet 0 0", str([facts, metrics, f"{actions} of the services"])]


# ---------------------------------------------------------------------------------------------- going back
def test_a_step_that_fails_on_one_rank_alone_is_not_undone_and_ends_all(folder: Path) -> None:
    """All go back together: test_trainer_ranks."""
    program = """
def bad(loop, step):
    if step == 5 and rank == 1:
        raise everstep.errors.BadStepError("a loss of rank 1")

def main():
    trained("run", bad, services=[everstep.services.Recovery()])

everstep.recovering(main)
"""
    printed = outputs(HEAD + program, 2, status=1)
    assert "BadStepError: a loss of rank 1" in printed[1] and "step 5 is not undone" in printed[1]
    assert "a consequence of rank 1: BadStepError: a loss of rank 1" in printed[0]


# ------------------------------------------------------------------------------------ what is kept on disk
FULL = """
def run(name, spec=None):
    everstep.hazard.arm(spec)
    saves = everstep.Checkpoints(everstep.Every(steps=3), copy=False)
    loop = trained(name, services=[saves])
    everstep.hazard.arm(None)
    return loop.ending
expected = run("straight").digest
for refusing in (1, 0):
    found = run(f"refused-{refusing}", "ENOSPC:checkpoint.spill:1-99" if rank == refusing else None)
    say(refusing, found.digest == expected, found.failed_saves, found.warnings[0])
"""


def test_a_disk_that_refuses_what_one_rank_keeps_costs_a_warning_on_all() -> None:
    first, second = [
        [line.partition(": ")[2] for line in said.splitlines() if ": a save failed" in line or "True" in line]
        for said in outputs(HEAD + FULL, 2)
    ]
    assert len(second) == 2 and all(line in first for line in second), (first, second)
    for refusing, line in zip((1, 0), second, strict=True):
        assert line.startswith(f"{refusing} True ") and f"rank {refusing}: No space left" in line


# ------------------------------------------------------------------------------------------------ a mirror
MIRRORED = """
def of_each_rank(name, epochs, mirror=None):
    saves = everstep.Checkpoints(everstep.Every(steps=3), mirror=mirror)
    loop = trained(name, epochs=epochs, services=[saves])
    say(loop.ending.digest, loop.resumed, len(list((folder / name / "checkpoints").glob("*/rank-00001.*"))))

of_each_rank("plain", 2)
of_each_rank("first", 1, folder / "mirror")
of_each_rank("second", 2, folder / "mirror")
"""


def test_an_empty_machine_goes_on_exactly() -> None:
    for rank, printed in enumerate(outputs(HEAD + MIRRORED, 2)):
        plain, first, second = (line.split() for line in lines_by_rank(printed)[rank])
        assert second[0] == plain[0] != first[0]
        assert (first[1], second[1]) == ("False", "True") and int(second[2]) == int(plain[2]) > 1
