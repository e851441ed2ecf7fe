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
from everstep.contracts.data import Cursor, Stream
from everstep.data import arrays, checked, loader, prefetch
from everstep.data.arrays import Arrays
from everstep.proof.audit import Audit, audit
from everstep.record import Journal, journal_format
from everstep.record.journal_format import EVENT, HEADER_SIZE, METRICS, Frame
from tiny_runs import Boom, Tiny, boom_at

SAMPLES = torch.arange(22, dtype=torch.float64)


def told(found: Audit) -> list[tuple[str, str, str]]:
    """The findings: passes, verdict, and what was found."""
    return [(each.passes, each.verdict, each.found) for each in found.passes]


class Run:
    """A run over any data; each `start` may be cut short."""

    def __init__(self, folder: Path, make: Callable[[], Any], **arguments: Any) -> None:
        self.folder, self.make = folder, make
        self.arguments = {"max_epoch": 3, "seed": 5, **arguments}

    def start(self, boom: int = 0, *, leave: int = 0, **arguments: Any) -> Run:
        """One start: it fails in step `boom`, and leaves the pass by `break` in step `leave`."""
        w, data = np.zeros(1), self.make()
        saves = [everstep.services.Console(sink=lambda line: None), everstep.Checkpoints(Every(steps=3))]
        given = {"services": saves, **self.arguments, **arguments}
        with contextlib.suppress(Boom), everstep.TrainLoop(self.folder, {"w": w}, **given) as loop:
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
    last = Tiny(tmp_path, max_epoch=3).train()
    found = audit(tmp_path)
    assert told(found) == [("passes 1 to 3", "proven", "each sample of 8 exactly once, in 4 batches")]
    assert found.verdict == "proven" and found.finished and found.starts == 5 and not found.problems
    assert len(last.seen) == 4


class OwnCursor(Cursor):
    """Batches of a stream of one's own, without `sample_numbers`."""

    def __init__(self, at: int) -> None:
        self.done = at

    def __next__(self) -> Any:
        if self.done == 5:
            raise StopIteration
        self.done += 1
        return SAMPLES[self.done : self.done + 4]

    def position(self) -> Any:
        return self.done


class Own(Stream):
    """A stream of one's own, which describes itself as everstep's streams do."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def open(self, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Cursor:
        return OwnCursor(position or 0)

    def describe(self, seed: int) -> dict[str, Any]:
        return {"kind": self._kind, "length": 22, "batch_size": 4, "shuffle": False, "seed": seed}


KINDS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "in order": (
        lambda: arrays(SAMPLES, batch_size=4),
        "proven",
        "each sample of 22 exactly once, in 6 batches",
    ),
    "drop_last": (
        lambda: arrays(SAMPLES, batch_size=4, shuffle=True, drop_last=True),
        "proven",
        "20 of 22 samples, each exactly once, in 5 batches, 2 left out by drop_last",
    ),
    "workers": (
        lambda: loader(TensorDataset(SAMPLES), 4, shuffle=True, num_workers=2),
        "proven",
        "each sample of 22 exactly once, in 6 batches",
    ),
    "prefetched": (
        lambda: prefetch(arrays(SAMPLES, batch_size=4, shuffle=True)),
        "proven",
        "each sample of 22 exactly once, in 6 batches",
    ),
    "left out": (
        lambda: checked(arrays(SAMPLES, batch_size=4, shuffle=True), fixed_batch_size=4, wrong_size="ignore"),
        "proven",
        "20 of 22 samples, each exactly once, in 5 batches; left out: batch 6 (by everstep.data.checked)",
    ),
    "DataLoader": (
        lambda: DataLoader(TensorDataset(SAMPLES), 4, shuffle=True),
        "not provable",
        "6 batches, each once, by one chain of their digests; data of kind 'dataloader' does not tell the "
        "numbers of its samples",
    ),
    "list": (
        lambda: list(SAMPLES.reshape(11, 2)),
        "not provable",
        "11 batches, each once, by one chain of their digests; data of kind 'sequence' does not tell the "
        "numbers of its samples",
    ),
    "of one's own, with the name of ours": (
        lambda: Own("arrays"),
        "not provable",
        "5 batches, each once, by one chain of their digests; data of kind 'arrays' does not tell the "
        "numbers of its samples",
    ),
}


@pytest.mark.campaign("long", gate=3)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_data_is_proven_or_said_to_be_not(tmp_path: Path, kind: str) -> None:
    make, verdict, words = KINDS[kind]
    found = Run(tmp_path, make).start(5).start(8).start(9).start().audit()
    assert told(found) == [("passes 1 to 3", verdict, words)]
    assert found.verdict == verdict and found.problems == []


def test_passes_over_other_data_between_two_flushes(tmp_path: Path) -> None:
    """Each pass is compared with the data that it read, not with that of the event which tells it."""
    w = np.zeros(1)
    services = [everstep.services.Console(sink=lambda line: None)]
    with everstep.TrainLoop(tmp_path, {"w": w}, services=services, seed=5, max_epoch=2) as loop:
        for _ in loop.iter_epochs():
            for size in (4, 8, 2):
                for _, (part,) in loop.iter_steps(arrays(SAMPLES, batch_size=size, shuffle=True)):
                    w += float(part.sum())
    found = audit(tmp_path)
    assert [each.found for each in found.passes] == [
        f"each sample of 22 exactly once, in {batches} batches" for batches in (6, 3, 11) * 2
    ]
    assert found.verdict == "proven"


@pytest.mark.campaign("long")
def test_a_pass_that_is_left_and_one_that_is_not_over(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda: arrays(SAMPLES, batch_size=4, shuffle=True), max_epoch=None, max_step=10)
    found = run.start(2, leave=4).start(7, leave=4).start(leave=4).audit()
    assert [each[1:] for each in told(found)] == [
        ("proven", "left early: 16 of 22 samples, each once, in 4 of 6 batches"),
        ("proven", "each sample of 22 exactly once, in 6 batches"),
    ]
    more = Run(tmp_path, run.make, max_epoch=None, max_step=13).start(leave=4).audit()
    assert told(more)[-1][2] == "left early: 12 of 22 samples, each once, in 3 of 6 batches"


@pytest.mark.campaign("long")
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_supervisor(tmp_path: Path, accumulate: int) -> None:
    def start(boom: int = 0) -> None:
        w = np.zeros(1)
        services = [everstep.services.Console(sink=lambda line: None), everstep.Checkpoints(Every(steps=2))]
        given = {"services": services, "seed": 3, "max_step": 8}
        with contextlib.suppress(Boom), everstep.Supervisor(tmp_path, {"w": w}, **given) as sv:
            batches = sv.stream(arrays(SAMPLES, batch_size=4, shuffle=True))
            while not sv.should_stop():
                for _ in range(accumulate):
                    w += float(next(batches)[0].sum())
                if sv.step == boom:
                    raise Boom
                sv.advance(w=float(w[0]))

    for boom in (3, 6, 7):
        start(boom)
    start()
    found = audit(tmp_path)
    assert found.verdict == "proven" and found.problems == []
    batches = 8 * accumulate
    whole, rest = divmod(batches, 6)
    assert told(found)[0][2] == "each sample of 22 exactly once, in 6 batches"
    assert told(found)[0][0] == ("pass 1" if whole == 1 else f"passes 1 to {whole}")
    assert told(found)[1][2].endswith(f"each once, in {rest} of 6 batches")


@pytest.mark.campaign("long")
def test_other_data_by_choice_is_said(tmp_path: Path) -> None:
    Run(tmp_path, lambda: arrays(SAMPLES, batch_size=4)).start(5)
    found = Run(tmp_path, lambda: arrays(SAMPLES, batch_size=2)).start(on_change="override").audit()
    assert [each[1:] for each in told(found)] == [
        ("proven", "left for other data, as a person chose: 12 of 22 samples, each once, in 3 of 6 batches"),
        ("proven", "each sample of 22 exactly once, in 11 batches"),
    ]


# ----------------------------------------------------------------------- faults planted in everstep


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (1, "batch 4 are missing (start 2 continues at batch 4 of pass 1); the first: sample"),
        (-1, "batch 3 were used twice"),
    ],
)
def test_a_resume_at_a_wrong_batch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int, words: str
) -> None:
    """As when a stream goes to another place than its position says."""
    run = Run(tmp_path, lambda: arrays(SAMPLES, batch_size=4, shuffle=True)).start(4)
    whole = Arrays.open

    def elsewhere(self: Any, purpose: str, pass_index: int, position: Any = None, *, seed: int) -> Any:
        place = None if position is None else {"batches": position["batches"] + shift}
        return whole(self, purpose, pass_index, place, seed=seed)

    monkeypatch.setattr(Arrays, "open", elsewhere)
    found = run.start(on_divergence="warn").audit()
    assert found.verdict == "wrong"
    first = told(found)[0]
    order = np.concatenate([Arrays.sample_ids(run.make(), "train", 0, n, seed=5) for n in range(6)])
    sample = int(order[12 if shift > 0 else 8])
    assert first[:2] == ("pass 1", "wrong")
    assert f"the first: sample {sample}" in first[2]
    assert ("missing" if shift > 0 else "used twice") in first[2]


# ------------------------------------------------------------------------------------------- damage

Frames = list[tuple[int, bytes]]
"""(kind, payload) of the frames of a journal file."""


def frames_of(path: Path) -> tuple[bytes, Frames]:
    """The header of a journal file, and its frames."""
    data = path.read_bytes()
    found = [f for f in journal_format.scan(data, HEADER_SIZE) if isinstance(f, Frame)]
    return data[:HEADER_SIZE], [(f.kind, bytes(f.payload)) for f in found]


def written(path: Path, header: bytes, frames: Frames) -> None:
    """Write a journal file anew, each frame with a right checksum, at its place."""
    data = header
    for kind, payload in frames:
        data += journal_format.pack_frame(kind, len(data), payload)
    path.write_bytes(data)


def ledger_at(frames: Frames) -> list[int]:
    return [at for at, (kind, payload) in enumerate(frames) if kind == EVENT and b'"ledger":{' in payload]


def edit(payload: bytes, old: str, new: str) -> bytes:
    assert old.encode() in payload
    return payload.replace(old.encode(), new.encode())


def _no_event(frames: Frames) -> None:
    del frames[ledger_at(frames)[1]]


def _no_batch(frames: Frames) -> None:
    """An entry that says one batch less, whose chain stays."""
    at = ledger_at(frames)[1]
    kind, payload = frames[at]
    frames[at] = kind, edit(payload, '"entries":"0 3 5 ', '"entries":"0 3 4 ')


def _other_order(frames: Frames) -> None:
    """The description says another seed."""
    at = ledger_at(frames)[0]
    kind, payload = frames[at]
    frames[at] = kind, edit(payload, '"seed":5', '"seed":6')


EDITS = {
    "no event": _no_event,
    "no batch": _no_batch,
    "other order": _other_order,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two starts; no test changes it."""
    folder = tmp_path_factory.mktemp("sound") / "run"
    run = Run(folder, lambda: arrays(SAMPLES, batch_size=4, shuffle=True))
    assert run.start(14).start().audit().verdict == "proven"
    return folder


def edited(sound: Path, run: Path, name: str) -> Audit:
    """The audit of a copy of a run whose first start was edited, with checksums and places made anew."""
    shutil.copytree(sound, run)
    path = run / "journal" / "segment-0001.evj"
    header, frames = frames_of(path)
    EDITS[name](frames)
    written(path, header, frames)
    return audit(run)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("edit", ["removed", "doubled", "swapped"])
def test_a_row_that_is_not_in_its_place_is_named(sound: Path, tmp_path: Path, edit: str) -> None:
    shutil.copytree(sound, run := tmp_path / "run")
    path = run / "journal" / "segment-0001.evj"
    data = path.read_bytes()
    frames = [f for f in journal_format.scan(data, HEADER_SIZE) if isinstance(f, Frame)]
    at = next(at for at, frame in enumerate(frames) if frame.kind == METRICS)
    one, other = (data[frame.start : frame.end] for frame in frames[at : at + 2])
    between = {"removed": other, "doubled": one + one + other, "swapped": other + one}[edit]
    path.write_bytes(data[: frames[at].start] + between + data[frames[at + 1].end :])
    found = audit(run)
    assert found.verdict == "wrong"
    assert any(problem.startswith("segment-0001.evj: the frame at ") for problem in found.problems)


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_ledger_is_named(sound: Path, tmp_path: Path, name: str) -> None:
    found = edited(sound, tmp_path / "run", name)
    assert found.verdict == "wrong" and "wrong" in [each.verdict for each in found.passes]


def test_the_command_tells_it_to_people_and_programs(sound: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(sound)])
    assert done.exit_code == 0 and ": proven (finished, step 18, 2 starts)" in done.output
    assert "passes 1 to 3  proven   each sample of 22 exactly once, in 6 batches" in done.output
    found = json.loads(CliRunner().invoke(command, [str(sound), "--json"]).output)
    assert found["verdict"] == "proven" and found["passes"][0]["last"] == 3
    assert edited(sound, tmp_path / "run", "no batch").verdict == "wrong"
    done = CliRunner().invoke(command, [str(tmp_path / "run")])
    assert done.exit_code == 1 and "the chain differs in " in done.output


@pytest.mark.campaign("long")
def test_a_lost_end_is_named_by_the_checkpoint_that_needs_it(sound: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    path = run / "journal" / "segment-0002.evj"
    header, frames = frames_of(path)
    written(path, header, frames[: ledger_at(frames)[-1]])
    found = audit(run)
    (problem,) = found.problems
    assert found.verdict == "wrong" and "were recorded before the checkpoint" in problem


HOSTILE = {
    "no entries": {"entries": 7},
    "an endless number": {"entries": "0 0 " + "9" * 5000 + " - 0"},
    "backwards": {"entries": "0 5 1 - 0"},
    "a huge pass": {
        "entries": "0 0 99999999999999999 00000000000000aa 1",
        "from": "0 0 00000000000000aa",
        "data": {"kind": "arrays", "length": 1 << 60, "batch_size": 1, "shuffle": True, "seed": 1},
    },
    "odd types": {"entries": "0 0 1 - 1", "data": {"kind": ["arrays"], "length": {}, "batch_size": "x"}},
    "an odd share": {"entries": "", "data": {}, "share": [0, "all"]},
    "left out elsewhere": {"entries": "0 0 2 - 1 5"},
    "chains of nothing": {"entries": "0 0 1 - 1", "data": {}, "of": "numbers"},
    "nothing": None,
    "a pass far away": {"entries": "99999999999999999 0 1 - 1", "from": "0 0 -"},
}


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_ledger_is_wrong_or_not_provable_at_once(sound: Path, tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    journal = Journal.open(run, 3, None, {})
    journal.event("progress", {"step": 1, "epoch": 1, "ledger": {"train": HOSTILE[what], "b\x1b[2J": {}}})
    journal.close()
    found = audit(run)
    assert found.verdict in ("wrong", "not provable")
    assert len(str(found)) < 10_000


def test_a_run_without_data_has_no_ledger(tmp_path: Path) -> None:
    services = [everstep.services.Console(sink=lambda line: None)]
    with everstep.Supervisor(tmp_path, {"w": np.zeros(1)}, services=services, seed=1, max_step=2) as sv:
        while not sv.should_stop():
            sv.advance()
    found = audit(tmp_path)
    assert found.verdict == "not provable" and found.passes == []
    assert found.notes[-1] == "no ledger: no step has drawn a batch from a stream of the run"
