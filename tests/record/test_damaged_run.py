"""Every file of a run, damaged in every way: a resume ends exact, or names the file.

A run with everything in it (tests/whole_run.py) is damaged and resumed.  Damage number n follows
from the campaign's seed and n alone.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

import everstep
import gate
from everstep import Every
from everstep.checkpoint import retire_others
from everstep.durable import remedy
from everstep.errors import CheckpointError, EverstepError, NoCheckpointError, RunLockedError
from everstep.proof.compare import compare_runs
from everstep.record import RunDir, RunLock
from everstep.testing import armed, nothing_left
from gate import share
from tiny_runs import Boom, Tiny, boom_at
from whole_run import files_of, kind_of, make, make_whole, train

PAGE = 4096
MANY = 24
"""Damages of each file in the campaign: more than 1,000 in all."""


def becomes_folder(path: Path) -> None:
    clear(path)
    path.mkdir()
    (path / "something").write_text("of somebody")


def becomes_file(path: Path) -> None:
    """At one instant: where a name is missing, a run that trains makes its own file again."""
    other = path.with_name(f"{path.name}.other")
    other.write_text("of somebody")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    other.replace(path)


def becomes_empty(path: Path) -> None:
    path.write_bytes(b"")


def is_noise(path: Path) -> None:
    path.write_bytes(Random(path.name).randbytes(max(path.stat().st_size, 64)))


def is_brackets(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def is_other_json(path: Path) -> None:
    path.write_text('{"pid": [1], "host": {"a": 1e999}, "started": "noon", "versions": 3, "body": []}')


def becomes_pipe(path: Path) -> None:
    clear(path)
    os.mkfifo(path)


def becomes_socket(path: Path) -> None:
    clear(path)
    here = os.getcwd()
    os.chdir(path.parent)  # its name may be 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def leads_to_itself(path: Path) -> None:
    clear(path)
    path.symlink_to(path.name)


def is_gone(path: Path) -> None:
    """Remove it while its owner is at work, and may put a file into a folder meanwhile."""
    while True:
        try:
            return clear(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def clear(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


WHOLE_FILE: dict[str, Callable[[Path], None]] = {
    "missing": is_gone, "folder": becomes_folder, "empty": becomes_empty, "noise": is_noise,
    "brackets": is_brackets, "other JSON": is_other_json, "pipe": becomes_pipe, "socket": becomes_socket,
    "link to itself": leads_to_itself,
}  # fmt: skip
TO_A_FOLDER: list[Callable[[Path], None]] = [becomes_file, becomes_pipe, leads_to_itself, is_gone]
"""What may befall a file or a folder of a run."""


class Damage(NamedTuple):
    """Something that befalls a file of a run; by its number it is made again."""

    number: int
    place: Path  # the file, relative to the run
    how: str
    also: Path | None = None  # the other file of a swap

    def is_named(self, said: str) -> bool:
        """Whether a text names a file that was struck, or the checkpoint's folder in which it lies."""
        struck = [self.place, *([self.also] if self.also else [])]
        folders = [one.parent.name for one in struck if one.parts[0] in ("checkpoints", "best")]
        return any(name in said for name in [*(one.name for one in struck), *folders])


def flipped(raw: bytes, rng: Random, times: int = 1) -> bytes:
    """Bits."""
    changed = bytearray(raw or b"\0")
    for _ in range(times):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def page_of_zeros(raw: bytes, rng: Random) -> bytes:
    """As a file system may leave it after a power cut; of a small file, its end."""
    start = rng.randrange(0, max(len(raw), 1), PAGE) if len(raw) > PAGE else rng.randrange(max(len(raw), 1))
    return raw[:start] + bytes(len(raw[start : start + PAGE])) + raw[start + PAGE :]


def noisy(raw: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + rng.randbytes(min(100, len(raw) - at)) + raw[at + 100 :]


TO_BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flip": flipped,
    "many flips": lambda raw, rng: flipped(raw, rng, 8),
    "cut": lambda raw, rng: raw[: rng.randrange(len(raw))] if raw else b"",
    "zeroed page": page_of_zeros,
    "further bytes": lambda raw, rng: raw + rng.choice((bytes(100), rng.randbytes(100), raw[-200:])),
    "noise within": noisy,
}
HOW = (*TO_BYTES, "swap", *WHOLE_FILE, "flip", "cut", "zeroed page", "swap")


def damage_number(number: int, files: list[Path]) -> Damage:
    """The damages go round over the files, and for each file over the ways."""
    place, how = files[number % len(files)], HOW[number // len(files) % len(HOW)]
    rng = _rng(number)
    others = [one for one in files if one != place]
    alike = [one for one in others if kind_of(one) == kind_of(place)] or others
    return Damage(number, place, how, rng.choice(rng.choice((alike, others))) if how == "swap" else None)


def _rng(number: int) -> Random:
    return Random(f"{gate.seed}/damage/{number}")


def strike(run: Path, damage: Damage) -> bool:
    """Do it; whether the file is another one now."""
    path, rng = run / damage.place, _rng(damage.number)
    rng.random()
    before = path.read_bytes()
    if damage.also is not None:
        other = (run / damage.also).read_bytes()
        (run / damage.also).write_bytes(before)
        path.write_bytes(other)
        return other != before
    if damage.how in TO_BYTES:
        path.write_bytes(TO_BYTES[damage.how](before, rng))
    else:
        WHOLE_FILE[damage.how](path)
    return not path.is_file() or path.read_bytes() != before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole(tmp_path_factory.mktemp("whole") / "runs" / "run")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run."""
    run = tmp_path_factory.mktemp("twin") / "run"
    train(make(run))
    return run


REMEDY = (
    "move it away", "restore it", "restore them", "put the folder or file itself", "bring it back",
    "checkpoint back", "delete the file", "change its permissions",
)  # fmt: skip


_UNREAD = "cannot be compared: "


def outcome(damage: Damage, run: Path, twin: Path) -> str:
    """Start the damaged run: "exact", "said" (an exact run, but what it has lost is told) or "refused".

    Raises:
        AssertionError: it ended in another way.
    """
    said: list[str] = []
    program, refusal = make(run, say=said.append), ""
    try:
        with nothing_left():
            train(program)
    except EverstepError as error:
        refusal = str(error)
    if refusal:
        assert str(run) in refusal and any(words in refusal for words in REMEDY), refusal
        assert damage.is_named(refusal), refusal
        return "refused"
    text = "\n".join(said)
    try:
        found = compare_runs(run, twin)
    except (CheckpointError, OSError) as error:
        found, text = [], f"{text}\n{_UNREAD}{error}"
    if "service 'export' failed" in text:
        found = [one for one in found if not one.path.startswith("leaf/services/export/")]
    lost = [one for one in found if one.path.startswith("row/") and one.expected == "absent"]
    assert found == lost, f"{found[:5]}; it said: {text}"
    has_lost = bool(lost) or _UNREAD in text
    assert not has_lost or damage.is_named(text.partition(_UNREAD)[0]), f"lost unsaid: {lost[:3]}; {text}"
    return "said" if has_lost else "exact"


class Befallen:
    """The run, its twin, and the place of damaged copies, as `runs/run`: no index knows them."""

    def __init__(self, whole: Path, twin: Path, folder: Path) -> None:
        self.files = files_of(whole)
        self._whole, self._twin, self.run = whole, twin, folder / "runs" / "run"

    def wrong_with(self, damage: Damage, strike: Callable[[Path], bool]) -> str | None:
        """What is wrong with the end of a copy that was struck, or ""; None if nothing was struck."""
        shutil.rmtree(self.run.parent, ignore_errors=True)
        shutil.copytree(self._whole, self.run)
        if not strike(self.run):
            return None
        try:
            outcome(damage, self.run, self._twin)
        except Exception as error:
            return f"{damage}: {type(error).__name__}: {error}"
        return ""

    def all_end_well(self, numbers: list[int]) -> Counter[tuple[str, str]]:
        """Count the damages by file and way, and require that each ended well."""
        wrong, counts = [], Counter[tuple[str, str]]()
        for damage in (damage_number(number, self.files) for number in numbers):
            what = self.wrong_with(damage, lambda run, damage=damage: strike(run, damage))  # type: ignore[misc]
            wrong += [what] if what else []
            if what == "":
                counts[kind_of(damage.place), damage.how] += 1
        assert not wrong, "\n".join([f"seed {gate.seed}: {len(wrong)} of {len(numbers)}", *wrong])
        return counts


@pytest.fixture(scope="module")
def befallen(whole: Path, twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Befallen:
    return Befallen(whole, twin, tmp_path_factory.mktemp("befallen"))


def count(tally: Any, found: Counter[tuple[str, str]]) -> None:
    for (file, how), n in found.items():
        tally("damages", n, file=file, how=how)


@pytest.mark.campaign("long", gate="share")
def test_some_files_in_every_way(befallen: Befallen, tally_sample: Any) -> None:
    files = len(befallen.files)
    numbers = [way * files + (7 * way + 13 * turn) % files for turn in range(3) for way in range(len(HOW))]
    count(tally_sample, befallen.all_end_well(share(numbers, 3)))


@pytest.mark.campaign("long")
@pytest.mark.parametrize("way", range(MANY))
def test_every_file_in_every_way(befallen: Befallen, way: int, tally: Any) -> None:
    files = len(befallen.files)
    count(tally, befallen.all_end_well(list(range(way * files, (way + 1) * files))))


@pytest.mark.campaign("long", gate="share")
def test_whatever_stands_in_the_place_of_a_folder(befallen: Befallen, whole: Path) -> None:
    folders = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_dir()]
    wrong = [
        befallen.wrong_with(Damage(0, folder, how.__name__), lambda run: how(run / folder) is None)  # noqa: B023
        for folder, how in share([(folder, how) for folder in folders for how in TO_A_FOLDER], 6)
    ]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_every_parent_that_is_made_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def watched(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    RunDir.open(tmp_path / "a" / "b" / "run")
    assert synced >= {str(tmp_path / name) for name in ("", "a", "a/b", "a/b/run")}
    synced.clear()
    (tmp_path / "made").mkdir()
    RunDir.open(tmp_path / "made")
    assert str(tmp_path) in synced


NOTES = [
    b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"started": "noon"}', b'{"started": NaN}',
    b'{"started": 1e300, "pid": {}}', b'{"pid": ' + b"9" * 300 + b"}", b'{"started": [1], "host": ["a"]}',
]  # fmt: skip


def test_a_damaged_note_of_the_lock_is_left_out(tmp_path: Path) -> None:
    for note in NOTES:
        (tmp_path / "lock.json").write_bytes(note)
        lock = RunLock(tmp_path)
        told = lock.acquire()
        assert told is not None and told.startswith("took over the run from process ") and len(told) < 300
        assert json.loads((tmp_path / "lock.json").read_bytes())["pid"] == os.getpid()
        lock.release()


WORDS = {
    "ENOSPC": "free space", "EDQUOT": "raise the quota", "EROFS": "remount it", "ESTALE": "mount it again",
    "EACCES": "change its permissions", "EIO": "move the run to another disk", "EFBIG": "ulimit -f",
    "ENAMETOOLONG": "choose shorter names", "EMFILE": "ulimit -n",
}  # fmt: skip


def test_each_error_of_the_disk_has_its_own_remedy() -> None:
    texts = {name: remedy(OSError(getattr(errno, name), "...")) for name in WORDS}
    for name, text in texts.items():
        assert [each for each, words in WORDS.items() if words in text and each != "ENOSPC"] in ([name], [])
        assert WORDS[name] in text


def test_a_journal_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    program = Tiny(tmp_path, max_epoch=1)
    with armed("EIO:journal.write:1-"), pytest.raises(CheckpointError) as last:
        program.train()
    assert "free" not in str(last.value) and "move the run to another disk" in str(last.value)
    assert not any("ree space" in line for line in program.lines)


def test_a_pipe_with_the_name_of_best_weights_holds_nobody_up(tmp_path: Path) -> None:
    """Old best weights go while the run trains; what has become none of them stays."""
    pipe = tmp_path / "best" / "valid_loss" / "epoch-0000-step-00000001"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    retire_others(pipe.parent, (), top=tmp_path)  # or it waits for somebody to write into the pipe
    assert pipe.is_fifo()


def while_training(run: Path, harm: Callable[[Path], object]) -> Tiny:
    """A run to which this is done at its sixth step of twelve."""
    program = Tiny(run, max_epoch=3, services=[everstep.Checkpoints(Every(steps=1))])
    program.train(inside=lambda loop, step: harm(run) if step == 6 else None)
    return program


@pytest.mark.parametrize("place", ["journal", "journal/segment-0001.evj"])
@pytest.mark.parametrize("take", [is_gone, lambda path: path.rename(path.with_name("away"))])
def test_a_journal_that_is_removed_while_the_run_trains_is_written_again(
    tmp_path: Path, place: str, take: Callable[[Path], object]
) -> None:
    whole = while_training(tmp_path / "whole", lambda run: None)
    program = while_training(tmp_path / "run", lambda run: take(run / place))
    assert program.result() == whole.result()
    assert any("written again, and nothing is lost" in each for each in program.loop.ending.warnings)


def test_what_has_the_name_of_the_journal_is_said_and_stays(tmp_path: Path) -> None:
    place = tmp_path / "journal" / "segment-0001.evj"
    with pytest.raises(CheckpointError, match="something else has the name: move it away and start again"):
        while_training(tmp_path, lambda run: becomes_file(place))
    assert place.read_text() == "of somebody"


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_unless_it_is_told_to(tmp_path: Path) -> None:
    whole = Tiny(tmp_path, max_epoch=1).train()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(
        NoCheckpointError, match=r"newest in the journal .* epoch-0001-.* or give resume=False"
    ):
        Tiny(tmp_path, max_epoch=1).train()
    assert Tiny(tmp_path, max_epoch=1, resume=False).train().result() == whole.result()


def test_a_run_that_starts_over_and_fails_before_its_first_save_begins_anew(tmp_path: Path) -> None:
    """Its first save has moved the checkpoints away: nobody has taken them, however often it fails there."""
    whole = Tiny(tmp_path, max_epoch=1).train()
    for resume in (False, True):
        with armed("ENOSPC:checkpoint.write:2"), pytest.raises(CheckpointError, match="trial save"):
            Tiny(tmp_path, max_epoch=1, resume=resume).train()
        assert not [*(tmp_path / "checkpoints").iterdir()]
    assert Tiny(tmp_path, max_epoch=1).train().result() == whole.result()


def test_steps_behind_a_checkpoint_that_is_damaged_are_compared(tmp_path: Path) -> None:
    services = [everstep.Checkpoints(Every(steps=3))]
    with pytest.raises(Boom):
        Tiny(tmp_path, max_epoch=3, services=services).train(inside=boom_at(9))
    newest = max(path for path in (tmp_path / "checkpoints").iterdir() if "step-00000006" in path.name)
    is_noise(newest / "manifest.json")
    again = Tiny(tmp_path, max_epoch=3, services=[everstep.Checkpoints(Every(steps=3))]).train()
    assert any(line.startswith("resume verified: 5 steps executed again") for line in again.lines), (
        again.lines
    )


def test_a_lock_that_is_removed_while_the_run_trains_is_made_again(tmp_path: Path) -> None:
    lock, before = tmp_path / "run" / "lock", 0

    def harm(run: Path) -> None:
        nonlocal before
        before = lock.stat().st_ino
        is_gone(lock)

    program = while_training(tmp_path / "run", harm)
    assert lock.stat().st_ino != before  # the file that was removed was open until the new one was locked
    assert program.loop.ending.finished


def test_another_process_that_came_in_without_the_lock_ends_this_one(tmp_path: Path) -> None:
    """Two processes never write into one run: the one whose lock is gone sees that before its next save."""

    with pytest.raises(RunLockedError, match="another process has entered the run: this one saves no more"):
        while_training(tmp_path / "run", lambda run: becomes_file(run / "lock"))
    assert not list((tmp_path / "run" / "checkpoints").glob("*-00000007"))


@pytest.mark.campaign("long")
def test_the_file_of_a_lost_segment_may_be_brought_back(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    for epochs in (1, 2):
        Tiny(run, max_epoch=epochs).train()
    (run / "journal").rename(away)
    third = Tiny(run, max_epoch=3).train()
    assert any("restore the file" in line for line in third.lines)
    for path in away.glob("*.evj"):
        assert not (run / "journal" / path.name).exists()
        shutil.copy(path, run / "journal")
    assert third.result() == Tiny(tmp_path / "whole", max_epoch=3).train().result()
