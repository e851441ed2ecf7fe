"""`everstep audit`: what the ledger of a run proves over crashes, and what damage is named."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep import Every
from everstep.cli.looking import audit_command as command
from everstep.data import arrays, checked, loader, prefetch
from everstep.data.arrays import Arrays
from everstep.proof.audit import Audit, audit
from everstep.record import Journal, journal_format
from everstep.record.journal_format import EVENT, HEADER_SIZE, METRICS, Frame
from tiny_runs import Boom, Tiny, boom_at, quiet, supervised

SAMPLES = torch.arange(22, dtype=torch.float64)
WHOLE = "each sample of 22 exactly once, in 6 batches"


def shuffled(batch_size: int = 4) -> Any:
    return arrays(SAMPLES, batch_size=batch_size, shuffle=True)


def findings(result: Audit) -> list[tuple[str, str, str]]:
    return [(each.passes, each.verdict, each.found) for each in result.passes]


class Run:
    """A run over any data; each `start` may be cut short."""

    def __init__(self, folder: Path, make: Callable[[], Any], **arguments: Any) -> None:
        self.folder, self.make = folder, make
        self.arguments = {"max_epoch": 3, "seed": 5, **arguments}

    def start(self, boom: int = 0, *, leave: int = 0, **arguments: Any) -> Run:
        """One start: it fails in step `boom`, and leaves the pass by `break` in step `leave`."""
        w, data = np.zeros(1), self.make()
        saves = [everstep.services.Console(sink=lambda line: None), everstep.Checkpoints(Every(steps=3))]
        options = {"services": saves, **self.arguments, **arguments}
        with contextlib.suppress(Boom), everstep.TrainLoop(self.folder, {"w": w}, **options) as loop:
            for _ in loop.iter_epochs():
                for step, batch in loop.iter_steps(data):
                    part = batch[0] if isinstance(batch, list | tuple) else batch
                    w[0] = w[0] * 0.5 + float(part.sum()) * step
                    loop.collect_metrics(w=float(w[0]))
                    if step == boom:
                        raise Boom
                    if step == leave:
                        break
        return self

    def audit(self) -> Audit:
        return audit(self.folder)


def test_over_crashes_every_sample_is_used_once(tmp_path: Path) -> None:
    for boom in (2, 5, 6, 11):
        with contextlib.suppress(Boom):
            Tiny(tmp_path, max_epoch=3).train(inside=boom_at(boom))
    Tiny(tmp_path, max_epoch=3).train()
    result = audit(tmp_path)
    assert findings(result) == [("passes 1 to 3", "proven", "each sample of 8 exactly once, in 4 batches")]
    assert result.verdict == "proven" and result.finished and result.starts == 5 and not result.problems


LOST = "20 of 22 samples, each exactly once, in 5 batches"
DROPPED, PASSED = f"{LOST}, 2 left out by drop_last", f"{LOST}; left out: batch 6 (by everstep.data.checked)"


def untold(batches: int, kind: str) -> str:
    why = f"data of kind {kind!r} does not tell the numbers of its samples"
    return f"{batches} batches, each once, by one chain of their digests; {why}"


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "in order": (lambda: arrays(SAMPLES, batch_size=4), WHOLE),
    "drop_last": (lambda: arrays(SAMPLES, batch_size=4, shuffle=True, drop_last=True), DROPPED),
    "workers": (lambda: loader(TensorDataset(SAMPLES), 4, shuffle=True, num_workers=2), WHOLE),
    "prefetched": (lambda: prefetch(shuffled()), WHOLE),
    "left out": (lambda: checked(shuffled(), fixed_batch_size=4, wrong_size="ignore"), PASSED),
    "DataLoader": (lambda: DataLoader(TensorDataset(SAMPLES), 4, shuffle=True), untold(6, "dataloader")),
    "list": (lambda: list(SAMPLES.reshape(11, 2)), untold(11, "sequence")),
}


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_data_is_proven_or_said_to_be_not(tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    result = Run(tmp_path, make).start(5).start(8).start(9).start().audit()
    verdict = "not provable" if "does not tell" in words else "proven"
    assert findings(result) == [("passes 1 to 3", verdict, words)]
    assert result.verdict == verdict and result.problems == []


def test_passes_over_other_data_between_two_flushes(tmp_path: Path) -> None:
    """Each pass is compared with the data that it read, not with that of the event which tells it."""
    w = np.zeros(1)
    services = [everstep.services.Console(sink=lambda line: None)]
    with everstep.TrainLoop(tmp_path, {"w": w}, services=services, seed=5, max_epoch=2) as loop:
        for _ in loop.iter_epochs():
            for size in (4, 8, 2):
                for _, (part,) in loop.iter_steps(shuffled(size)):
                    w += float(part.sum())
    result = audit(tmp_path)
    found = [f"each sample of 22 exactly once, in {batches} batches" for batches in (6, 3, 11) * 2]
    assert [each.found for each in result.passes] == found and result.verdict == "proven"


@pytest.mark.campaign("long")
def test_a_pass_that_is_left_and_one_that_is_not_over(tmp_path: Path) -> None:
    run = Run(tmp_path, shuffled, max_epoch=None, max_step=10)
    result = run.start(2, leave=4).start(7, leave=4).start(leave=4).audit()
    left = "left early: 16 of 22 samples, each once, in 4 of 6 batches"
    assert [each[1:] for each in findings(result)] == [("proven", left), ("proven", WHOLE)]
    more = Run(tmp_path, shuffled, max_epoch=None, max_step=13).start(leave=4).audit()
    assert findings(more)[-1][2] == "left early: 12 of 22 samples, each once, in 3 of 6 batches"


@pytest.mark.campaign("long")
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_supervisor(tmp_path: Path, accumulate: int) -> None:
    for boom in (3, 6, 7, 0):
        w, saves = np.zeros(1), everstep.Checkpoints(Every(steps=2))
        with contextlib.suppress(Boom), quiet(tmp_path, {"w": w}, services=[saves], seed=3, max_step=8) as sv:
            batches = sv.stream(shuffled())
            while not sv.should_stop():
                for _ in range(accumulate):
                    w += float(next(batches)[0].sum())
                if sv.step == boom:
                    raise Boom
                sv.advance(w=float(w[0]))
    result = audit(tmp_path)
    assert result.verdict == "proven" and result.problems == []
    whole, rest = divmod(8 * accumulate, 6)
    assert findings(result)[0][::2] == ("pass 1" if whole == 1 else f"passes 1 to {whole}", WHOLE)
    assert findings(result)[1][2].endswith(f"each once, in {rest} of 6 batches")


@pytest.mark.campaign("long")
def test_other_data_by_choice_is_said(tmp_path: Path) -> None:
    Run(tmp_path, lambda: arrays(SAMPLES, batch_size=4)).start(5)
    result = Run(tmp_path, lambda: arrays(SAMPLES, batch_size=2)).start(on_change="override").audit()
    assert [each[1:] for each in findings(result)] == [
        ("proven", "left for other data, as a person chose: 12 of 22 samples, each once, in 3 of 6 batches"),
        ("proven", "each sample of 22 exactly once, in 11 batches"),
    ]


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(("shift", "words"), [(1, "missing"), (-1, "used twice")])
def test_a_resume_at_a_wrong_batch_is_named(tmp_path: Path, monkeypatch: Any, shift: int, words: str) -> None:
    """As when a stream goes to another place than its position says."""
    run = Run(tmp_path, shuffled).start(4)
    whole = Arrays.open

    def elsewhere(self: Any, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Any:
        place = None if position is None else {"batches": position["batches"] + shift}
        return whole(self, purpose, pass_index, place, seed=seed)

    monkeypatch.setattr(Arrays, "open", elsewhere)
    result = run.start(on_divergence="warn").audit()
    order = np.concatenate([Arrays.sample_ids(run.make(), "train", 0, n, seed=5) for n in range(6)])
    passes, verdict, found = findings(result)[0]
    assert (result.verdict, passes, verdict) == ("wrong", "pass 1", "wrong")
    assert f"the first: sample {int(order[12 if shift > 0 else 8])}" in found and words in found


# ------------------------------------------------------------------------------------------- damage
Frames = list[tuple[int, bytes]]
"""(kind, payload) of the frames of a journal file."""


def rewritten(path: Path, edit: Callable[[Frames, list[int]], object]) -> None:
    """Edit the frames of a journal file, given the places of events with a ledger; checksums are right."""
    data = path.read_bytes()
    scanned = [f for f in journal_format.scan(data, HEADER_SIZE) if isinstance(f, Frame)]
    frames = [(f.kind, bytes(f.payload)) for f in scanned]
    edit(frames, [n for n, (kind, text) in enumerate(frames) if kind == EVENT and b'"ledger":{' in text])
    data = data[:HEADER_SIZE]
    for kind, payload in frames:
        data += journal_format.pack_frame(kind, len(data), payload)
    path.write_bytes(data)


def replaced(frames: Frames, at: int, old: bytes, new: bytes) -> None:
    kind, payload = frames[at]
    assert old in payload
    frames[at] = kind, payload.replace(old, new)


EDITS: dict[str, Callable[[Frames, list[int]], object]] = {
    "no event": lambda frames, at: frames.pop(at[1]),
    "no batch": lambda frames, at: replaced(frames, at[1], b'"entries":"0 3 5 ', b'"entries":"0 3 4 '),
    "other order": lambda frames, at: replaced(frames, at[0], b'"seed":5', b'"seed":6'),
}
"""The second one says one batch less, and its chain stays."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two starts; no test changes it."""
    folder = tmp_path_factory.mktemp("sound") / "run"
    assert Run(folder, shuffled).start(14).start().audit().verdict == "proven"
    return folder


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("edit", ["removed", "doubled", "swapped"])
def test_a_row_that_is_not_in_its_place_is_named(run: Path, edit: str) -> None:
    path = run / "journal" / "segment-0001.evj"
    data = path.read_bytes()
    frames = [f for f in journal_format.scan(data, HEADER_SIZE) if isinstance(f, Frame)]
    at = next(at for at, frame in enumerate(frames) if frame.kind == METRICS)
    one, other = (data[frame.start : frame.end] for frame in frames[at : at + 2])
    between = {"removed": other, "doubled": one + one + other, "swapped": other + one}[edit]
    path.write_bytes(data[: frames[at].start] + between + data[frames[at + 1].end :])
    result = audit(run)
    assert result.verdict == "wrong"
    assert any(problem.startswith("segment-0001.evj: the frame at ") for problem in result.problems)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_ledger_is_named(run: Path, name: str) -> None:
    rewritten(run / "journal" / "segment-0001.evj", EDITS[name])
    result = audit(run)
    assert result.verdict == "wrong" and "wrong" in [each.verdict for each in result.passes]


def test_the_command_tells_it_to_people_and_programs(sound: Path, run: Path) -> None:
    done = CliRunner().invoke(command, [str(sound)])
    assert done.exit_code == 0 and ": proven (finished, step 18, 2 starts)" in done.output
    assert f"passes 1 to 3  proven   {WHOLE}" in done.output
    report = json.loads(CliRunner().invoke(command, [str(sound), "--json"]).output)
    assert report["verdict"] == "proven" and report["passes"][0]["last"] == 3
    rewritten(run / "journal" / "segment-0001.evj", EDITS["no batch"])
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 1 and "the chain differs in " in done.output


@pytest.mark.campaign("long")
def test_a_lost_end_is_named_by_the_checkpoint_that_needs_it(run: Path) -> None:
    def cut(frames: Frames, at: list[int]) -> None:
        del frames[at[-1] :]

    rewritten(run / "journal" / "segment-0002.evj", cut)
    result = audit(run)
    (problem,) = result.problems
    assert result.verdict == "wrong" and "were recorded before the checkpoint" in problem


HUGE: Any = {"entries": "0 0 99999999999999999 00000000000000aa 1", "from": "0 0 00000000000000aa"}
HUGE |= {"data": {"kind": "arrays", "length": 1 << 60, "batch_size": 1, "shuffle": True, "seed": 1}}
HOSTILE = {
    "no entries": {"entries": 7},
    "an endless number": {"entries": "0 0 " + "9" * 5000 + " - 0"},
    "backwards": {"entries": "0 5 1 - 0"},
    "a huge pass": HUGE,
    "odd types": {"entries": "0 0 1 - 1", "data": {"kind": ["arrays"], "length": {}, "batch_size": "x"}},
    "an odd share": {"entries": "", "data": {}, "share": [0, "all"]},
    "left out elsewhere": {"entries": "0 0 2 - 1 5"},
    "chains of nothing": {"entries": "0 0 1 - 1", "data": {}, "of": "numbers"},
    "nothing": None,
    "a pass far away": {"entries": "99999999999999999 0 1 - 1", "from": "0 0 -"},
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_ledger_is_wrong_or_not_provable_at_once(run: Path, what: str) -> None:
    journal = Journal.open(run, 3, None, {})
    journal.event("progress", {"step": 1, "epoch": 1, "ledger": {"train": HOSTILE[what], "b\x1b[2J": {}}})
    journal.close()
    result = audit(run)
    assert result.verdict in ("wrong", "not provable") and len(str(result)) < 10_000


def test_a_run_without_data_has_no_ledger(tmp_path: Path) -> None:
    supervised(quiet(tmp_path, {"w": np.zeros(1)}, seed=1, max_step=2))
    result = audit(tmp_path)
    assert result.verdict == "not provable" and result.passes == []
    assert result.notes[-1] == "no ledger: no step has drawn a batch from a stream of the run"
