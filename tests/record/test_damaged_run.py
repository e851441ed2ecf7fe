"""Every file of a run, damaged in every way: a resume ends exact, or names the file.

A run with everything in it (tests/whole_run.py) is damaged and resumed.  Damage number n follows
from the campaign's seed and n alone.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from befalling import TO_A_FOLDER, WHOLE_FILE

import gate
from everstep.errors import CheckpointError, EverstepError
from everstep.proof.compare import compare_runs
from everstep.testing import nothing_left
from gate import share
from whole_run import files_of, kind_of, make, make_whole, train

PAGE = 4096
MANY = 24
"""Damages of each file in the campaign: more than 1,000 in all."""


class Damage(NamedTuple):
    """Something that befalls a file of a run.

    Attributes:
        number: by which it is made again.
        place: the file, relative to the run.
        how: name of the damage.
        also: the other file of a swap.
    """

    number: int
    place: Path
    how: str
    also: Path | None = None

    @property
    def struck(self) -> list[Path]:
        """All files that are not as they were."""
        return [self.place] + ([self.also] if self.also else [])


def flipped(raw: bytes, rng: Random) -> bytes:
    """One bit."""
    changed = bytearray(raw or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flipped_often(raw: bytes, rng: Random) -> bytes:
    """A burst of bits."""
    for _ in range(8):
        raw = flipped(raw, rng)
    return raw


def cut(raw: bytes, rng: Random) -> bytes:
    return raw[: rng.randrange(len(raw))] if raw else b""


def page_of_zeros(raw: bytes, rng: Random) -> bytes:
    """As a file system may leave it after a power cut; of a small file, its end."""
    start = rng.randrange(0, max(len(raw), 1), PAGE) if len(raw) > PAGE else rng.randrange(max(len(raw), 1))
    return raw[:start] + bytes(len(raw[start : start + PAGE])) + raw[start + PAGE :]


def longer(raw: bytes, rng: Random) -> bytes:
    """Further bytes at the end: zeros, noise, or its own once more."""
    return raw + rng.choice((bytes(100), rng.randbytes(100), raw[-200:]))


def noisy(raw: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + rng.randbytes(min(100, len(raw) - at)) + raw[at + 100 :]


TO_BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flip": flipped,
    "many flips": flipped_often,
    "cut": cut,
    "zeroed page": page_of_zeros,
    "further bytes": longer,
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


class Struck:
    """A damaged copy of the run.

    Args:
        whole: the run.
        folder: where the copy lies, as `runs/run`.
    """

    def __init__(self, whole: Path, folder: Path) -> None:
        self._whole, self.run = whole, folder / "runs" / "run"

    def renew(self) -> None:
        """Make the copy as the run is; no index knows it."""
        shutil.rmtree(self.run.parent, ignore_errors=True)
        shutil.copytree(self._whole, self.run)


def is_named(damage: Damage, said: str) -> bool:
    """Whether a text names a file that was struck, or the checkpoint's folder in which it lies."""
    names = [one.name for one in damage.struck]
    folders = [one.parent.name for one in damage.struck if one.parts[0] in ("checkpoints", "best")]
    return any(name in said for name in [*names, *folders])


REMEDY = (
    "move it away",
    "restore it",
    "restore them",
    "put the folder or file itself",
    "bring it back",
    "checkpoint back",
    "delete the file",
    "change its permissions",
)


def outcome(damage: Damage, struck: Struck, twin: Path) -> str:
    """Start the damaged run: "exact", "said" (an exact run, but what it has lost is told) or "refused".

    Raises:
        AssertionError: it ended in another way.
    """
    said: list[str] = []
    program, refusal = make(struck.run, say=said.append), ""
    try:
        with nothing_left():
            train(program)
    except EverstepError as error:
        refusal = str(error)
    if refusal:
        assert str(struck.run) in refusal and any(words in refusal for words in REMEDY), refusal
        return _told("refused", damage, refusal)
    text = "\n".join(said)
    try:
        found = compare_runs(struck.run, twin)
    except (CheckpointError, OSError) as error:
        return _told("said", damage, text, f"{error}; it said: ")
    if "service 'export' failed" in text:
        found = [one for one in found if not one.path.startswith("leaf/services/export/")]
    lost = [one for one in found if one.path.startswith("row/") and one.expected == "absent"]
    assert found == lost, f"{found[:5]}; it said: {text}"
    return _told("said", damage, text, f"rows are lost without a word: {lost[:3]}; ") if lost else "exact"


def _told(how: str, damage: Damage, text: str, else_: str = "") -> str:
    assert is_named(damage, text), f"{else_}{text}"
    return how


class Befallen:
    """The run and its twin."""

    def __init__(self, whole: Path, twin: Path, folder: Path) -> None:
        self.files = files_of(whole)
        self.struck, self._twin = Struck(whole, folder), twin

    def wrong_with(self, number: int) -> tuple[Damage, str, str]:
        """The damage, how the run ended, and what is wrong with that, or ""."""
        damage = damage_number(number, self.files)
        self.struck.renew()
        if not strike(self.struck.run, damage):
            return damage, "unchanged", ""
        try:
            return damage, outcome(damage, self.struck, self._twin), ""
        except Exception as error:
            return damage, "fault", f"{type(error).__name__}: {error}"

    def all_end_well(self, numbers: list[int]) -> Counter[tuple[str, str]]:
        """Count the damages by file and way, and require that each ended well."""
        wrong, counts = [], Counter[tuple[str, str]]()
        for number in numbers:
            damage, how, what = self.wrong_with(number)
            if what:
                struck = " and ".join(map(str, damage.struck))
                wrong.append(f"damage {number}, {damage.how} of {struck}: {how}: {what}")
            elif how != "unchanged":
                counts[kind_of(damage.place), damage.how] += 1
        repeat = f"seed {gate.seed}"
        assert not wrong, "\n".join([f"{repeat}: {len(wrong)} of {len(numbers)}", *wrong])
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
def test_whatever_stands_in_the_place_of_a_folder(whole: Path, twin: Path, tmp_path: Path) -> None:
    struck, wrong = Struck(whole, tmp_path), []
    folders = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_dir()]
    for folder, how in share([(folder, how) for folder in folders for how in TO_A_FOLDER], 6):
        struck.renew()
        how(struck.run / folder)
        damage = Damage(0, folder, how.__name__)
        try:
            outcome(damage, struck, twin)
        except Exception as error:
            wrong.append(f"{how.__name__} of {folder}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
