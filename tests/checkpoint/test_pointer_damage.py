"""The file `checkpoint`: each flipped bit and each torn end heals; what a person writes there wins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_samples import at, commit, damage, store_in

import everstep
from everstep.checkpoint import CheckpointName, Store
from everstep.checkpoint.pointer import PointerKind, read
from everstep.errors import NoCheckpointError
from everstep.testing import nothing_left
from tiny_runs import Boom, Tiny, boom_at

NAMES = (at(24), at(25), at(26, 3), at(12345670, 4), at(12345678, 4))
"""The newest has neighbours at one bit; its number is not filled with zeros."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pointers") / "run"
    for name in NAMES:
        commit(store_in(folder), name)
    return folder


def found_with(run: Path, raw: bytes) -> tuple[CheckpointName, str]:
    """Which checkpoint a start goes on from, and what it says of that; the file is whole afterwards."""
    (run / "checkpoint").write_bytes(raw)
    store = store_in(run, segment=2)
    found, notes = store.find(True)
    assert found is not None
    return found.name, " ".join(notes)


@pytest.fixture(params=[NAMES[-1], at(25)], ids=str)
def whole(run: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, CheckpointName, bytes]:
    """A run whose newest checkpoint is that one, and the file as it was written."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for name in NAMES:
        if name > request.param:
            shutil.rmtree(folder / "checkpoints" / str(name))
    (folder / "checkpoint").unlink()
    commit(store_in(folder), request.param)
    return folder, request.param, (folder / "checkpoint").read_bytes()


@pytest.mark.campaign("long", gate=1)
def test_every_flipped_bit_heals_and_is_said(whole: tuple[Path, CheckpointName, bytes]) -> None:
    run, newest, raw = whole
    names = {str(name) for name in Store(run, 0, print).names()}
    edits = 0
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        name, said = found_with(run, bytes(flipped))
        line = bytes(flipped).split(b"\n")[0].decode("utf-8", "replace").strip()
        if line in names - {str(newest)}:  # no one can tell that from an edit
            edits += 1
            assert str(name) == line and f"was edited: resuming from {line}" in said
            continue
        assert name == newest, bit
        mended = (run / "checkpoint").read_bytes()
        assert (mended == raw and "was damaged" in said) or mended.strip() == bytes(flipped).strip(), bit
    assert edits >= 1


def test_every_torn_end_heals(whole: tuple[Path, CheckpointName, bytes]) -> None:
    run, newest, raw = whole
    for length in range(len(raw)):
        assert found_with(run, raw[:length])[0] == newest, length
        assert found_with(run, raw[:length].ljust(len(raw), b"\0"))[0] == newest, length


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xfe\x00", bytes(range(256)), b"\x89PNG\r\n", b"\n\n\n", b"\0" * 5000, b"A\x08" * 9000],
)
def test_other_bytes_heal(whole: tuple[Path, CheckpointName, bytes], raw: bytes) -> None:
    run, newest, own = whole
    name, said = found_with(run, raw)
    assert name == newest and "was damaged" in said and (run / "checkpoint").read_bytes() == own


def test_letters_of_the_same_numbers_heal(whole: tuple[Path, CheckpointName, bytes]) -> None:
    run, newest, raw = whole
    for letters in (b"sXYZ", b"Step", b"pets", b"stp"):
        name, said = found_with(run, raw.replace(b"step", letters))
        assert name == newest and "was damaged" in said


def edits_of(name: str, checksum: bytes) -> list[bytes]:
    line = name.encode()
    return [
        line,
        line + b"\n",
        line + b"\n" + checksum + b"\n",
        line + b"\r\n" + checksum + b"\r\n",
        b"\xef\xbb\xbf" + line + b"\n" + checksum + b"\n",
        b"  " + line + b" \n" + checksum + b"\n",
        b"checkpoints/" + line + b"\n" + checksum + b"\n",
        b"checkpoints/" + line + b"/\n",
        line + b"\nbecause of the spike at step 30\n" + checksum + b"\n",
    ]


def test_a_persons_edit_wins(whole: tuple[Path, CheckpointName, bytes]) -> None:
    run, newest, raw = whole
    for name in (at(24), at(25)):
        for edit in edits_of(str(name), raw.split()[1]):
            found, said = found_with(run, edit)
            assert found == name, edit
            assert name == newest or "was edited: resuming from" in said


@pytest.mark.parametrize(
    "typo", ["step-00000077", "step-77", "latest", "step-25", "epoch-0003", "/other/step-00000001"]
)
def test_a_persons_slip_is_an_error(whole: tuple[Path, CheckpointName, bytes], typo: str) -> None:
    run, _, raw = whole
    for edit in (typo.encode() + b"\n", typo.encode() + b"\n" + raw.split()[1] + b"\n"):
        with pytest.raises(
            NoCheckpointError, match=r"was edited to name .*: name another one in its first line"
        ):
            found_with(run, edit)


def test_damaged_while_training_it_is_written_anew(tmp_path: Path) -> None:
    said: list[str] = []
    store = store_in(tmp_path, said=said)
    commit(store, at(10))
    for step in (20, 30):
        raw = bytearray((tmp_path / "checkpoint").read_bytes())
        raw[-5 if step == 20 else 2] ^= 4
        (tmp_path / "checkpoint").write_bytes(raw)
        commit(store, at(step))
        assert read(tmp_path / "checkpoint", [str(at(step))])[:2] == (PointerKind.OURS, str(at(step)))
    assert len(said) == 2 and "was damaged" in said[0] and f"it now names {at(20)}" in said[0]


def test_also_where_a_kill_has_left_the_only_checkpoint_aside(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    commit(store, at(10))
    raw = bytearray((tmp_path / "checkpoint").read_bytes())
    raw[1] ^= 16
    (tmp_path / "superseded").mkdir()
    store.path(at(10)).rename(tmp_path / "superseded" / f"{at(10)}.segment-1")
    assert found_with(tmp_path, bytes(raw))[0] == at(10)


def test_the_newest_whole_one_is_taken_where_the_one_it_named_is_damaged_too(tmp_path: Path) -> None:
    for step in (10, 20):
        commit(store_in(tmp_path), at(step))
    damage(tmp_path / "checkpoints" / str(at(20)) / "arrays.safetensors")
    raw = (tmp_path / "checkpoint").read_bytes()
    name, said = found_with(tmp_path, b"sdep" + raw[4:])
    assert name == at(10) and "passed over" in said


def test_an_unattended_job_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        Tiny(tmp_path, max_epoch=2, services=[everstep.Checkpoints(everstep.Every(steps=1))]).train(
            inside=boom_at(6)
        )
    raw = (tmp_path / "checkpoint").read_bytes()
    (tmp_path / "checkpoint").write_bytes(raw.replace(b"step", b"sdep"))
    with nothing_left():
        again = Tiny(tmp_path, max_epoch=2).train()
    assert again.loop.ending.resumed_from == raw.split()[0].decode()
    assert any(
        "checkpoint was damaged ('sdep-00000005'); it now names step-00000005 again" in line
        for line in again.lines
    )
