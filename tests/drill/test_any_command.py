"""The drill of programs that have never heard of everstep."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from everstep.backends.torch.observer import Observer, _holders, buffers_of, digest, state_of
from everstep.drill.any_command import Reference, Start, _CommandCampaign, drill_command
from everstep.drill.processes import last_lines
from everstep.drill.program import read_lines
from everstep.drill.report import DrillReport, KillResult

LOOP = Path(__file__).with_name("plain_loop.py")

WRONG = {
    "buffers": ("weights", "buffers"),
    "nothing": None,
    "optimizer": ("optimizer", "moments"),
    "schedule": ("optimizer", "settings"),
    "random": ("samples", "samples"),
    "anew": ("journal", "the place"),
    "quits": ("journal", "updates"),
}
"""What the loop does wrong -> component and name of the first difference."""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def drilled(wrong: str, **options: float) -> DrillReport:
    return drill_command([sys.executable, str(LOOP), wrong], **options)


def struck(wrong: str, name: str, folder: Path, point: str = "") -> KillResult:
    """Strike one place; from the inside: through the door others come before it."""
    command = [sys.executable, str(LOOP), wrong]
    report = DrillReport("train", [], 0, runs=[], steps=0, seconds=0.0)
    campaign = _CommandCampaign(report, folder, 600.0, keep=False)
    campaign.begin(command, command)
    strikes, _ = campaign.reference.strikes(12, Random(0), power_cut=True)
    return campaign.strike(name, point or dict(strikes)[name])


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("wrong", WRONG)
def test_it_names_what_a_resume_forgets(wrong: str) -> None:
    report = drilled(wrong, strikes=1, seed=5)
    (result,) = report.results
    first = result.divergence
    assert report.steps == 16 and report.nondeterminism is None
    assert (first and (first.component, first.name)) == WRONG[wrong], report
    assert report.exit_code == (wrong != "nothing")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("wrong", "point", "told"),
    [
        ("nothing", "update:2", "✓ exact; begun anew, nothing was saved yet"),
        ("fails", "update:2", "✗ failed; OSError: torn"),
        ("nothing", "file:4", "✓ exact"),
        (
            "copies",
            "file:5",
            "✓ exact; lost work: resumed after update 4, although a save of update 8 was complete",
        ),
        (
            "passes over",
            "update:9",
            "✓ exact; lost work: resumed after update 4, although a save of update 8 was complete",
        ),
    ],
)
def test_the_table_says_what_a_resume_began_from_and_how_it_failed(
    wrong: str, point: str, told: str, tmp_path: Path
) -> None:
    assert struck(wrong, "kill", tmp_path / "drill", f"kill:{point}:0").line.endswith(told)


def traced(updates: int, files: Callable[[int], Sequence[tuple[str, str]]], ranks: int = 1) -> Reference:
    """Return an undisturbed start of which each rank changes files (kind, path) after an update."""
    lines: list[dict[str, object]] = []
    for update, rank in product(range(1, updates + 1), range(ranks)):
        lines += [{"at": "update", "rank": rank, "number": 0, "random": {}}]
        lines += [{"at": "file", "rank": rank, "kind": kind, "path": path} for kind, path in files(update)]
    return Reference(Start("", 0, 1.0, lines, Path("log")))


def test_files_are_struck_on_each_rank_that_writes_them() -> None:
    strikes, _ = traced(4, lambda update: [("save", "last.pt")] * (update == 2), 2).strikes(12, Random(0))
    files = [(name, strike) for name, strike in strikes if ":file:" in strike]
    assert files == [
        ("torn save", "tear:file:1:0"),
        ("before save", "kill:file:1:0"),
        ("SIGTERM save", "SIGTERM:file:1:0"),
        ("torn save @1", "tear:file:1:1"),
        ("before save @1", "kill:file:1:1"),
        ("SIGTERM save @1", "SIGTERM:file:1:1"),
    ]


def test_a_short_budget_strikes_each_kind_once_and_the_middle_of_a_save_first() -> None:
    reference = traced(30, lambda update: [("save", "ckpt.pt")] * (update % 5 == 0))
    strikes, kinds = reference.strikes(12, Random(0))
    assert [name for name, _ in strikes[:5]] == [
        "torn save",
        "update",
        "before save",
        "SIGTERM save",
        "SIGTERM",
    ]
    assert len(strikes) == 12 and len({*strikes}) == 12 and {*kinds} == {name for name, _ in strikes}


def test_of_more_kinds_than_strikes_none_is_struck_twice_and_all_are_named() -> None:
    saved = [("open", "a.json"), ("save", "a.tmp"), ("rename", "a.pt"), ("remove", "old.pt")]
    reference = traced(8, lambda update: saved * (update % 4 == 0), ranks=2)
    strikes, kinds = reference.strikes(12, Random(0))
    assert len({name for name, _ in strikes}) == 12 and len(kinds) == 16
    assert {"update", "SIGTERM", "torn save", "torn save @1"} <= {name for name, _ in strikes}
    assert reference.strikes(1, Random(0))[1] == kinds


def test_a_drill_names_the_kinds_that_it_has_not_struck() -> None:
    results = [KillResult("update", "exact", strikes=1), KillResult("torn save", "no time")]
    report = DrillReport(
        "train", [], 0, runs=[], steps=4, seconds=1.0, results=results, kinds=["update", "torn save"]
    )
    assert "no strike of the kinds torn save; give a larger --budget" in report.verdict()
    report.results.pop()
    assert "no strike of the kinds torn save; give more --strikes" in report.verdict()
    report.kinds.pop()
    assert "no strike of the kinds" not in report.verdict()


def test_a_save_by_a_handler_inside_a_save_is_seen_and_the_file_that_was_struck_is_named(
    tmp_path: Path,
) -> None:
    observer = Observer(str(tmp_path / "trace"), "SIGTERM:file:1:0", str(tmp_path))
    observer.optimizers.append(object())
    was = signal.signal(signal.SIGTERM, lambda number, frame: observer.file("save", tmp_path / "other.pt"))
    try:
        observer.file("save", tmp_path / "ckpt.pt")
    finally:
        signal.signal(signal.SIGTERM, was)
    lines = read_lines(tmp_path / "trace")
    assert [line["at"] for line in lines] == ["file", "strike", "file"]
    update = {"at": "update", "rank": 0, "number": 0, "random": {}}
    struck = Start("SIGTERM:file:1:0", 0, 1.0, [update, *lines], tmp_path / "log")
    assert Reference(struck).file_words(struck) == ", save ckpt.pt"


def struck_files(reference: Reference, count: int) -> list[tuple[str, str]]:
    paths = [line["path"] for line in reference.start.lines if line["at"] == "file"]
    strikes, _ = reference.strikes(count, Random(0))
    assert len(strikes) == count
    return [(name, paths[int(strike.split(":")[2]) - 1]) for name, strike in strikes if ":file:" in strike]


def test_files_of_saves_are_struck_before_logs() -> None:
    saved, log = [("open", "state.json"), ("save", "a.tmp"), ("rename", "a.pt")], ("open", "log.csv")
    reference = traced(8, lambda update: [log, *saved * (update in (3, 8)), log])
    assert struck_files(reference, 13) == [
        ("torn save", "a.tmp"),
        ("before save", "a.tmp"),
        ("SIGTERM save", "a.tmp"),
        ("before rename", "a.pt"),
        ("torn open", "state.json"),
        ("before open", "state.json"),
        ("torn open", "log.csv"),
        ("before open", "log.csv"),
        ("torn open", "log.csv"),
    ]


def test_of_the_files_of_a_save_those_with_tensors_are_struck_first() -> None:
    """As of MMEngine, which writes logs and checkpoints at the ends of epochs, all by open()."""
    saved = [("open", "all.log"), ("open", "scalars.json"), ("open", "epoch.pth")]
    reference = traced(8, lambda update: saved * (update % 4 == 0))
    files = [("torn open", "epoch.pth"), ("before open", "epoch.pth"), ("torn open", "all.log")]
    assert struck_files(reference, 6)[:3] == files


def test_one_strike_of_twelve_is_left_for_logs() -> None:
    saved = [*(("open", f"{n}.json") for n in range(9)), ("save", "a.pt")]
    reference = traced(8, lambda update: [("open", "log.csv"), *saved * (update in (3, 8))])
    for count, logs in ((6, 0), (12, 1), (24, 2)):
        assert [path for _, path in struck_files(reference, count)].count("log.csv") == logs, count


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_power_cut_strikes_renames_only_where_it_is_asked_for(power_cut: bool) -> None:
    saved = [("save", "a.tmp"), ("rename", "a.pt")]
    strikes, _ = traced(4, lambda update: saved * (update == 2)).strikes(12, Random(0), power_cut)
    assert (("power cut rename", "tear:file:2:0") in strikes) == power_cut


def test_a_power_cut_empties_nothing_behind_a_link_or_outside_the_run(tmp_path: Path) -> None:
    precious, out = tmp_path / "precious", tmp_path / "out"
    for folder in (precious, out / "new", out / "kept"):
        folder.mkdir(parents=True)
        (folder / "data").write_text("whole")
    for name, target in {"far": precious, "near": out / "kept", "dangling": tmp_path / "nowhere"}.items():
        (out / name).symlink_to(target)
    (out / "new" / "linked").symlink_to(precious / "data")
    (out / "new" / "nowhere").symlink_to(tmp_path / "nowhere")
    observer = Observer(str(tmp_path / "trace"), "", str(out))
    for source in (*(out / name for name in ("far", "near", "dangling", "new")), precious):
        observer._rename_unsynced(str(source), str(tmp_path / f"{source.name}-renamed"))
    emptied = [
        (tmp_path / name / "data").read_text() for name in ("precious-renamed", "out/kept", "new-renamed")
    ]
    assert emptied == ["whole", "whole", ""]


def test_a_renamed_file_keeps_what_was_synced_and_nothing_else(tmp_path: Path) -> None:
    # from the inside: from the outside it is the test after this one, of eight processes
    observer = Observer(str(tmp_path / "trace"), "", str(tmp_path))
    sync, folder = observer.syncing(os.fsync), tmp_path / "new"
    folder.mkdir()
    for name in ("synced", "never", "later"):
        with open(folder / name, "w") as file:
            file.write("weights")
            file.flush()
            if name != "never":
                sync(file)
            if name == "later":
                file.write(", moments")
    observer._rename_unsynced(str(folder), str(tmp_path / "done"))
    assert {each.name: each.read_text() for each in (tmp_path / "done").iterdir()} == {
        "synced": "weights",
        "never": "",
        "later": "",
    }
    observer._rename_unsynced(str(tmp_path / "done" / "synced"), str(tmp_path / "one"))
    assert (tmp_path / "one").read_text() == "weights"


@pytest.mark.campaign("long")
@pytest.mark.parametrize(("wrong", "verdict"), [("nothing", "failed"), ("synced", "exact")])
def test_a_save_that_is_renamed_before_it_is_synced_does_not_survive_a_power_cut(
    wrong: str, verdict: str, tmp_path: Path
) -> None:
    assert struck(wrong, "power cut rename", tmp_path / "drill").verdict == verdict


def test_on_ranks_it_says_what_the_drill_of_any_command_leaves_out() -> None:
    exact = KillResult("update", "exact", strikes=1)
    report = DrillReport(
        "train", [], 0, runs=[], steps=4, seconds=1.0, ranks=2, results=[exact], counts="updates"
    )
    assert "of any command more --strikes" in report.verdict()
    assert "a stop that finds the ranks at different steps" in report.verdict()
    assert "meet" not in report.verdict() and "Checkpoints" not in report.verdict()


def test_a_spawned_process_is_told_its_rank_after_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    observer = Observer(str(tmp_path / "trace"), "", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    observer.before_update(optimizer, (), {})
    observer.after_update(optimizer, (), {})
    lines = read_lines(tmp_path / "trace")
    assert [(line["at"], line["rank"]) for line in lines] == [("enter", 1), ("update", 1)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_by_which_a_checkpoint_is_loaded_is_no_update(
    kind: type[torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    model, observer = torch.nn.Linear(1, 1), Observer(str(tmp_path / "trace"), "", str(tmp_path))
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(observer.before_update)
    optimizer.register_step_post_hook(observer.after_update)
    get_optimizer_state_dict(model, optimizer)
    assert not read_lines(tmp_path / "trace")
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert [line["at"] for line in read_lines(tmp_path / "trace")] == ["enter", "update"]


def test_an_optimizer_of_keras_has_weights_moments_and_a_rate() -> None:
    weight, moment, rate = (SimpleNamespace(value=torch.full((2,), n)) for n in (1.0, 2.0, 3.0))
    optimizer = SimpleNamespace(
        _trainable_variables=[weight],
        variables=[rate, moment],
        _learning_rate=rate,
        learning_rate=torch.tensor(3.0),
    )
    before = state_of(optimizer)
    rate.value += 1
    assert state_of(optimizer) == before
    moment.value += 1
    assert state_of(optimizer)["weights"] == before["weights"]
    assert state_of(optimizer)["moments"] != before["moments"]


def test_looking_for_modules_asks_no_proxy_for_its_class() -> None:
    asked = []

    class Proxy:
        @property
        def __class__(self) -> type:
            asked.append(self)
            return torch.nn.Module

    proxy, model = Proxy(), torch.nn.BatchNorm1d(2)
    assert buffers_of([*model.parameters()]) == [(0, digest([model._buffers]))]
    assert not asked, proxy


def test_running_means_of_keras_lie_beside_the_weights_as_parameters() -> None:
    weight, mean = (torch.nn.Parameter(torch.ones(2), requires_grad=trained) for trained in (True, False))
    layer = torch.nn.ParameterDict({"gamma": weight, "moving_mean": mean})
    before = digest(buffers_of([weight]))
    mean.data += 1
    assert len(layer) == 2 and digest(buffers_of([weight])) != before


def test_modules_that_share_a_weight_are_the_same_wherever_the_collector_has_them() -> None:
    weight, found = torch.nn.Parameter(torch.ones(2)), []
    for order in ((1, 2), (2, 1)):
        modules = [torch.nn.Module() for _ in order]
        for module, mean in zip(modules, order, strict=True):
            module.weight = weight
            module.register_buffer("mean", torch.tensor(mean))
        _holders.clear()
        found.append(buffers_of([weight]))
        del modules, module
        _holders.clear()
        gc.collect()
    assert found[0] == found[1] and len({*found[0]}) == 2


def test_buffers_that_two_modules_have_exchanged_are_others() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    means: list[torch.Tensor] = [layer.running_mean for layer in model]
    means[0] += 1
    before = buffers_of([*model.parameters()])
    means[0] -= 1
    means[1] += 1
    assert buffers_of([*model.parameters()]) != before


def line(at: str, n: object, *draws: str) -> dict[str, object]:
    state = dict.fromkeys(("weights", "moments", "settings", "buffers"), str(n))
    return {"at": at, "rank": 0, "number": 0, "random": {"torch": str(n)}, "draws": [*draws], **state}


EVERY = [line("enter", 0), *(line("update", n) for n in range(1, 11))]
STRIKE = {"at": "strike", "point": "update", "rank": 0}


def judged(struck: Start, resumed: list[dict[str, object]], whole: list[dict[str, object]]) -> DrillReport:
    """Judge a kill from the inside: the same from the outside takes four processes or more."""
    report = DrillReport("train", [], 0, runs=[], steps=10, seconds=1.0)
    campaign = _CommandCampaign(report, Path(), 60.0, keep=False)
    campaign.reference = Reference(Start("", 0, 1.0, whole, Path("log")))
    report.results = [campaign._judge("kill", [struck, Start("", 0, 1.0, resumed, Path("log"))])]
    return report


def test_a_difference_before_the_kill_is_no_fault_of_a_resume() -> None:
    struck = [line("enter", 0), line("update", 1), {**line("update", 2), "buffers": "other"}, STRIKE]
    first = (
        judged(Start("kill:update:2:0", -9, 1.0, struck, Path("log")), EVERY[2:], EVERY).results[0].divergence
    )
    assert first is not None and (first.component, first.step) == ("weights", 2)
    assert first.note.startswith(
        "the start differed before it was killed, so no resume is the cause: the clock"
    )


def test_a_program_that_leaves_with_status_0_at_a_signal_is_taken_for_finished() -> None:
    struck = Start("SIGTERM:update:2:0", 0, 1.0, [*EVERY[:3], STRIKE], Path("log"))
    first = judged(struck, EVERY, EVERY).results[0].divergence
    assert first is not None and (first.name, first.expected, first.actual) == ("updates", "10", "2")


def test_a_start_that_does_not_end_after_its_strike_is_named() -> None:
    for seconds, told in ((60.0, "after update 2, hung"), (59.0, "after update 2")):
        struck = Start("SIGTERM:update:2:-1", 124, seconds, [*EVERY[:3], STRIKE], Path("log"))
        assert judged(struck, EVERY, EVERY).results[0].struck == told


LOST = "lost work: resumed after update 4, although a save of update 8 was complete"
OLDER = "resumed after update 4; tensors had been saved up to update 8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("whole 8, rename ck-#.ckpt 8, whole 9, KILL rename last.ckpt 9", LOST),
        ("open #.pt, whole #.pt, KILL save last.pt, whole last.pt", LOST),
        ("save #.pt, whole #.pt, KILL remove old.pt", LOST),
        ("save #.pt, whole #.pt", LOST),
        ("save model.pt, save optimizer.pt", OLDER),
        ("save #/model.pt, part 0, save #/optimizer.pt, part 1, open #/done", LOST),
        ("save #/model.pt, part 0, KILL save #/optimizer.pt, part 1", ""),
        ("save #/model.pt, part 0, save #/rest.pt", OLDER),
        ("save #/model.pt, part 0, beside #/optimizer.pt, part 1", OLDER),
        ("KILL save #.pt, whole #.pt", ""),
        ("save new, whole new, KILL rename last.pt new", ""),
        ("save new/a.pt, whole new/a.pt, KILL rename ck-# new", ""),
        ("save #.pt, whole #.pt, KILL open done", ""),
        ("open busy, save #.pt, whole #.pt, KILL remove busy", ""),
        ("save model.pt, KILL save optimizer.pt", ""),
    ],
)
@pytest.mark.parametrize("place", [4, 8])
def test_a_resume_from_an_older_save_is_exact_and_says_whether_the_newest_was_complete(
    changes: str, message: str, place: int
) -> None:
    def save(update: int, killed: bool = False) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for change in changes.replace("#", str(update)).split(", "):
            kind, path, *of = change.removeprefix("KILL ").split()
            facts: dict[str, object] = {"kind": kind, "path": int(path) if path.isdigit() else path}
            facts |= {"size": int(of[0])} if of and of[0].isdigit() else {"source": of[0]} if of else {}
            facts |= {"beside": True} if kind == "beside" else {}
            if kind in ("whole", "part"):
                del facts["kind"]
                tensors = [0, 1] if kind == "whole" else [int(path)]
                facts |= {"keys": ["model"], "tensors": tensors, "of": 2}
            at = kind if kind in ("whole", "part") else "file"
            found.append({"at": at, "rank": 0, **facts})
            if killed and change.startswith("KILL"):
                return [*found, {**STRIKE, "point": "file"}]
        return found

    lines = [*EVERY[:5], *save(4), *EVERY[5:9], *save(8, killed=True)]
    struck = Start("kill", -9, 1.0, lines + [EVERY[9], STRIKE] * ("KILL" not in changes), Path("log"))
    whole = [*EVERY[:5], *save(4), *EVERY[5:9], *save(8), *EVERY[9:]]
    report = judged(struck, [line("enter", place), *EVERY[place + 1 :]], whole)
    (result,) = report.results
    message = message if place == 4 else ""
    assert (result.verdict, result.message, result.lost) == ("exact", message, 4 * (message == LOST))
    assert ("lost work: 1 of 1 resumes" in report.verdict()) == (message == LOST)


@pytest.mark.parametrize(
    ("states", "saved", "whole"),
    [
        ("ab ab", "0 1", True),
        ("ab cd", "0 1", False),
        ("ab cd", "01 01", True),
        ("ab ab", "01 ", True),
        ("ab cd", "01 ", False),
    ],
)
def test_ranks_of_the_same_state_may_share_a_save_and_others_save_their_own(
    states: str, saved: str, whole: bool
) -> None:
    lines: list[dict[str, object]] = []
    for rank, (state, tensors) in enumerate(zip(states.split(), saved.split(" "), strict=True)):
        update = line("update", 1) | dict(zip(("weights", "moments"), state, strict=True))
        file = {"at": "file", "kind": "open", "path": f"{rank}.distcp"}
        parts = [{"at": "part", "path": "", "tensors": [int(n)], "of": 2} for n in tensors]
        lines += [each | {"rank": rank} for each in (update, file, *parts)]
    reference = Reference(Start("", 0, 1.0, lines, Path("log")))
    files = [(0, "open", ".distcp"), (1, "open", ".distcp")]
    assert reference.save_at(reference.files, 1) == files * whole


def test_a_save_is_known_by_the_tensors_in_it_whatever_its_name() -> None:
    """As stable-baselines3 saves: a ZIP file with weights and moments."""
    parts = [{"at": "part", "rank": 0, "path": "", "tensors": [n], "of": 2} for n in (0, 1)]
    save = [{"at": "file", "rank": 0, "kind": "open", "path": "model.zip"}, *parts]
    whole = [*EVERY[:5], *save, *EVERY[5:]]
    struck = Start("kill", -9, 1.0, [*EVERY[:5], *save, EVERY[5], STRIKE], Path("log"))
    first = judged(struck, EVERY, whole).results[0].divergence
    assert first is not None and first.name == "the place"


@pytest.mark.parametrize(
    ("strike", "rank", "told"),
    [
        ("kill:update:1:1", 1, " @1, rank 0 saves"),
        ("SIGTERM:update:1:-1", 0, ""),
        ("kill:file:1:0", 0, ", save a.pt"),
    ],
)
def test_a_strike_at_one_of_several_ranks_names_it_and_who_was_saving(
    strike: str, rank: int, told: str
) -> None:
    lines = traced(1, lambda update: [], 2).start.lines
    lines += [{"at": "file", "rank": 0, "kind": "save", "path": "a.pt"}]
    lines += [{"at": "strike", "rank": rank, "point": strike.split(":")[1]}]
    struck = Start(strike, 1, 1.0, lines, Path("log"))
    assert Reference(struck).file_words(struck) == told


def test_a_signal_may_strike_every_rank(tmp_path: Path) -> None:
    was = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for rank in (0, 1):
            observer = Observer(str(tmp_path / "trace"), "SIGTERM:update:2:-1", str(tmp_path))
            observer.rank = rank
            observer.reach("update")
            observer.reach("update")
    finally:
        signal.signal(signal.SIGTERM, was)
    assert [(line["rank"], line["n"]) for line in read_lines(tmp_path / "trace")] == [(0, 2), (1, 2)]


TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]: FileNotFoundError: rank_1.pt
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Connection closed by peer
W1129 15:39:09.153000 28620 torch/distributed/elastic/multiprocessing/api.py:1028] closing signal SIGTERM
E1129 15:39:09.185000 28620 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 28654)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 28655)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
ACCELERATE = """\
Traceback (most recent call last):
ValueError: this program fails
Traceback (most recent call last):
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python3', 'fails.py']' returned non-zero exit status 1.
"""


@pytest.mark.parametrize(
    ("output", "last"),
    [
        (TORCHRUN, "[rank1]: FileNotFoundError: rank_1.pt"),
        (TORCHRUN.replace("[rank", "["), "[0]: RuntimeError: Connection closed by peer"),
        (TORCHRUN.replace("1 (pid: 28655)", "-9 (pid: 28655)  (SIGKILL)"), "/elastic/errors.html"),
        (ACCELERATE, "ValueError: this program fails"),
        (ACCELERATE.replace("subprocess.Called", "subprocess.Process"), "status 1."),
    ],
)
def test_the_last_lines_are_those_of_the_program_and_not_of_its_launcher(
    output: str, last: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(output)
    assert last_lines(tmp_path / "log").splitlines()[-1].endswith(last)


def test_of_an_error_of_several_lines_the_table_has_the_first() -> None:
    told = "  File\n_pickle.UnpicklingError: Weights only load failed.\n\nCheck the page to learn more."
    assert KillResult("update", "failed", message=told).line.endswith("Error: Weights only load failed.")
    assert KillResult("update", "failed", message="status 1\nno rank").line.endswith("; no rank")


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize(
    ("wrong", "cause"), [("unseeded", "not seeded, or it read"), ("chance", "the clock, a generator")]
)
def test_of_two_undisturbed_starts_that_differ_it_names_no_cause_of_a_resume(wrong: str, cause: str) -> None:
    verdict = drilled(wrong, strikes=1).verdict()
    assert "so its resume cannot be judged" in verdict
    assert cause in verdict and "not saved" not in verdict


def test_the_observer_knows_a_file_with_all_weights_and_moments(tmp_path: Path) -> None:
    model, observer = torch.nn.Linear(1, 1), Observer(str(tmp_path / "trace"), "", str(tmp_path))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    observer.optimizers.append(optimizer)
    save, buffer = observer.saving(torch.save), io.BytesIO()
    save(model.state_dict(), tmp_path / "weights.pt")
    save({"weights": model.state_dict()}, f=tmp_path / "weights.pt")
    state = {"weights": model.state_dict(), "optimizer": [optimizer.state_dict()]}
    save(state, tmp_path / "all.pt")
    save(state, buffer)
    with open(tmp_path / "opened.pt", "wb") as file:
        save(state, file)
    save([*model.parameters()][1], tmp_path / "bias.pt")
    save({"epoch": 1}, tmp_path / "rest.pt")
    lines = read_lines(tmp_path / "trace")
    paths = [line["path"] for line in lines if line["at"] == "whole"]
    assert paths == [str(tmp_path / "all.pt"), len(buffer.getvalue()), str(tmp_path / "opened.pt")]
    parts = [(line["tensors"], line["of"]) for line in lines if line["at"] == "part"]
    assert parts == [([0, 1], 8), ([0, 1], 8), ([1], 8)]
    saver = threading.Thread(target=save, args=(state, tmp_path / "beside.pt"))
    saver.start()
    saver.join()
    assert [line.get("beside") for line in read_lines(tmp_path / "trace")[-2:]] == [True, True]


@pytest.mark.parametrize(
    ("drawn", "component"), [("c", "random state"), ("b c", "random state"), ("a", "samples")]
)
def test_a_batch_may_be_drawn_an_update_before_it_is_used(drawn: str, component: str, tmp_path: Path) -> None:
    updates = [line("update", 1, "a", "b"), line("update", 2, "c"), line("update", 3)]
    reference = Reference(Start("", 0, 1.0, [line("enter", 0), *updates], tmp_path / "log"))
    lines = [line("enter", 2), line("update", "other", *drawn.split())]
    resumed = Start("", 0, 1.0, lines, tmp_path / "log")
    difference = reference.first_difference(resumed, {0: 2})
    assert difference is not None and (difference.step, difference.component) == (3, component)


@pytest.mark.parametrize(("drawn", "component"), [("b", "random state"), ("x", "samples")])
def test_an_evaluation_before_the_save_leaves_the_samples_of_a_resume_alone(
    drawn: str, component: str
) -> None:
    """As MMEngine evaluates: its loader hands out batches while gradients are on."""
    updates = [line("update", 1, "a"), line("update", 2, "evaluated", "evaluated", "b")]
    reference = Reference(Start("", 0, 1.0, [line("enter", 0), *updates], Path("log")))
    resumed = Start("", 0, 1.0, [line("enter", 1), line("update", "other", drawn)], Path("log"))
    difference = reference.first_difference(resumed, {0: 1})
    assert difference is not None and (difference.step, difference.component) == (2, component)


@pytest.mark.campaign("long")
def test_a_loop_that_leaves_with_status_0_at_a_signal_differs() -> None:
    results = {one.hazard: one for one in drilled("leaves", strikes=4).results}
    assert results["update"].verdict == "exact"
    stop = results["SIGTERM"].divergence
    assert stop is not None and stop.name == "updates"


@pytest.mark.campaign("long")
def test_no_strike_is_begun_after_the_budget() -> None:
    report = drilled("nothing", strikes=2, budget=1e-9)
    assert [one.verdict for one in report.results] == ["no time", "no time"]
    assert "not covered: 2 strikes" in report.verdict() and not report.exact
