"""The files of a checkpoint: what others can read of them, what comes back, on which disks; leftovers go."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from checkpoint_samples import arrays_of, at, commit, host, resumed, same, seed_of, store_in

from everstep import hazard
from everstep.checkpoint import CheckpointName, Draft, Store, forecast, is_finite, trial_write
from everstep.checkpoint.array_file import ITEM_BYTES
from everstep.checkpoint.format import ARRAYS, FORMAT, MANIFEST, pack_manifest
from everstep.contracts.state import HostArray
from everstep.errors import CheckpointError, CheckpointVersionError, ConfigError, NonFiniteError, RunDirError
from everstep.state import Encoded


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_in(tmp_path)


def put(store: Store, arrays: dict[str, HostArray], step: int = 1, **more: Any) -> Path:
    return store.commit(Draft(at(step), Encoded(None, arrays), "d", **more)).path


# ------------------------------------------------------------------------------------------ names
def test_names_are_parsed_printed_and_ordered_by_step_then_kind() -> None:
    for text in ("step-00000120", "epoch-0003-step-00000120", "step-123456789", "epoch-0000-step-00000000"):
        assert str(CheckpointName.parse(text)) == text
    wrong = ("", "step-120", "step-000000120", "epoch-3-step-00000120", "step-0000012٣")
    for text in (*wrong, ".tmp-step-00000120-7"):
        with pytest.raises(ConfigError, match="is not a checkpoint's name; give one such as"):
            CheckpointName.parse(text)
    ordered = [at(0, 0), at(9), at(10), at(10, 1), at(11)]
    assert sorted(reversed(ordered)) == ordered


# ------------------------------------------------------------------------------------------ files
def test_everything_comes_back_in_writable_arrays_of_its_own(store: Store) -> None:
    meta = {"metrics": {"loss": 0.5}, "π": [1, None]}
    said = {"phase": "epoch", "epoch": 3, "partial": True, "meta": meta}
    commit(store, at(20, 3), **said)
    found = store.read(at(20, 3))
    assert same(found.arrays, arrays_of(20))
    assert found.structure == {"seed": 20} and found.digest == "digest 20"
    assert {key: getattr(found, key) for key in said} == said
    assert found.step == 20 and found.segment == 1 and found.path == store.path(at(20, 3))
    for array in found.arrays.values():
        assert array.data.flags.writeable and array.data.flags.owndata and array.data.dtype == np.uint8


def test_the_safetensors_library_reads_the_arrays(store: Store) -> None:
    values = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(5, dtype=np.uint8),
        "empty": np.zeros((0, 3)), "scalar": np.int64(7), "complex": np.array([1 + 2j], np.complex64),
        "flags": np.array([True, False, True]), 'odd "name"/π': np.float64(0.1),
    }  # fmt: skip
    path = put(store, {name: host(value) for name, value in values.items()})
    loaded = safetensors.numpy.load_file(path / ARRAYS)
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value, strict=True)


def test_every_dtype_is_one_of_the_library_and_aligned(store: Store) -> None:
    arrays = {
        f"{name}/{dtype}": HostArray(dtype, (3,), np.full(3 * ITEM_BYTES[dtype], 1, np.uint8), "x")
        for dtype, name in itertools.product(ITEM_BYTES, "ab")
    }
    raw = (put(store, arrays) / ARRAYS).read_bytes()
    read = dict(safetensors.deserialize(raw))
    assert {name: d["dtype"] for name, d in read.items()} == {name: a.dtype for name, a in arrays.items()}
    assert all(d["shape"] == [3] for d in read.values())
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % ITEM_BYTES[arrays[name].dtype] == 0


def test_an_element_type_that_safetensors_lacks_is_written_as_bytes(store: Store) -> None:
    value = np.array([1 + 1j, 2, 3])
    array = HostArray("U8", (3,), value.view(np.uint8), "numpy", {"dtype": "complex128"})
    path = put(store, {"z": array})
    assert same(store.read(at(1)).arrays, {"z": array})
    assert safetensors.numpy.load_file(path / ARRAYS)["z"].view(np.complex128).tolist() == value.tolist()


def test_equal_arrays_are_written_once_from_4_kib_on(store: Store) -> None:
    tied, small = np.arange(512.0), np.arange(511.0)
    values = {
        "head": tied, "embed": tied, "small": small, "other small": small,
        "as integers": tied.view(np.int64), "as a matrix": tied.reshape(2, 256), "next": tied + 1,
    }  # fmt: skip
    arrays = {name: host(value) for name, value in values.items()}
    path = put(store, arrays)
    loaded = safetensors.numpy.load_file(path / ARRAYS)
    assert values.keys() - loaded.keys() == {"head"}
    described = json.loads((path / MANIFEST).read_bytes())["body"]["arrays"]
    piece = {"file": ARRAYS, "key": "embed", "offset": [0], "shape": [512]}
    assert [name for name in described if "pieces" in described[name]] == ["head"]
    assert described["head"]["pieces"] == [piece]
    digests = {name: xxhash.xxh3_128_hexdigest(value.tobytes()) for name, value in values.items()}
    assert {name: facts["xxh3_128"] for name, facts in described.items()} == digests
    found = store.read(at(1)).arrays
    assert same(found, arrays)
    found["head"].data[:] = 0
    assert same({"embed": found["embed"]}, {"embed": arrays["embed"]})


def test_the_manifest_can_be_verified_without_everstep(store: Store) -> None:
    raw = (commit(store, at(1)).path / MANIFEST).read_bytes()
    manifest = json.loads(raw)
    assert manifest["checksum"] == xxhash.xxh3_128_hexdigest(raw[raw.index(b'"body":') + 7 : -2])
    file = manifest["body"]["files"][ARRAYS]
    arrays = (store.path(at(1)) / ARRAYS).read_bytes()
    assert file == {"bytes": len(arrays), "xxh3_128": xxhash.xxh3_128_hexdigest(arrays)}


def test_what_cannot_be_written_is_refused_and_leaves_nothing(store: Store) -> None:
    for dtype, size in (("F32", 11), ("F33", 12)):
        with pytest.raises(CheckpointError, match=r"'w' cannot be written: dtype 'F3.' and shape"):
            put(store, {"w": HostArray(dtype, (3,), np.zeros(size, np.uint8), "x")})
    with pytest.raises(CheckpointError, match="JSON cannot hold"):
        put(store, {}, meta={"loss": float("nan")})
    assert store.names() == [] and not list(store.run_dir.rglob(".tmp-*"))


@pytest.mark.parametrize(("version", "remedy"), [
    (FORMAT + 1, r"install everstep 7\.1 or newer, or resume from an older"),
    (FORMAT - 1, r"continue with the everstep that wrote it \(7\.1\), or begin"),
    (None, r"install everstep 7\.1"),
])  # fmt: skip
def test_another_format_names_both_versions_and_is_no_damage(store: Store, version: Any, remedy: str) -> None:
    commit(store, at(10))
    body = json.loads((commit(store, at(20)).path / MANIFEST).read_bytes())["body"]
    other = {**body, "format": version, "versions": {"everstep": "7.1"}}
    (store.path(at(20)) / MANIFEST).write_bytes(pack_manifest(other))
    said = rf"step-00000020 has format version {version}.*reads only {FORMAT}: {remedy}"
    with pytest.raises(CheckpointVersionError, match=said):
        store.find(True)


# ------------------------------------------------------------------------------------------ finite
BITS = {
    "BF16": ([0x7F7F, 0xFF7F, 0x0001], [0x7F80, 0xFF80, 0x7FC0, 0xFFFF]),
    "F8_E5M2": ([0x7B, 0xFB, 0x03], [0x7C, 0xFC, 0x7D, 0xFF]),
    "F8_E4M3": ([0x7E, 0xFE, 0x78], [0x7F, 0xFF]),
    "F8_E8M0": ([0x00, 0xFE, 0x7F], [0xFF]),
    "F8_E4M3FNUZ": ([0x7F, 0xFF, 0x00], [0x80]),
    "F8_E5M2FNUZ": ([0x7F, 0xFF, 0x00], [0x80]),
}
"""Small floats: bits that are is_finite, and that are not."""


def test_which_arrays_are_finite() -> None:
    for name, dtype in {"F64": np.float64, "F32": np.float32, "F16": np.float16, "C64": np.complex64}.items():
        values = np.zeros(300_001, dtype)
        values[:3] = [1.5, -0.0, np.finfo(values.dtype).max]
        array = HostArray(name, values.shape, values.view(np.uint8), "numpy")
        assert is_finite(array)
        for bad in (np.nan, np.inf, -np.inf):
            values[-1] = bad
            assert not is_finite(array), (name, bad)
    for dtype, (good, wrong) in BITS.items():
        bits = np.uint16 if dtype == "BF16" else np.uint8
        for each in (good, *([*good, one] for one in wrong)):
            array = HostArray(dtype, (len(each),), np.array(each, bits).view(np.uint8), "x")
            assert is_finite(array) == (each is good), (dtype, each)
    full = np.full(8, 255, np.uint8)
    assert is_finite(host(np.array([-1, 2**62])))
    assert is_finite(HostArray("U8", (4,), full[:4], "numpy", {"dtype": "V4"}))
    assert is_finite(HostArray("U8", (4,), full[:4], "torch", {"dtype": "torch.something"}))
    assert not is_finite(HostArray("U8", (2,), full, "torch", {"dtype": "torch.complex32"}))
    for part in (complex(0, np.inf), complex(np.nan, 0)):
        value = np.array([1, part]).view(np.uint8)
        assert not is_finite(HostArray("U8", (2,), value, "numpy", {"dtype": "complex128"}))


def test_only_guarded_arrays_must_be_finite(store: Store) -> None:
    bad = host(np.array([1, np.nan], np.float32))
    put(store, {"mask": bad, "w": host(np.ones(2))}, guarded=frozenset({"w"}))
    with pytest.raises(NonFiniteError, match="after step 2, NaN or infinity in v, w: not saved"):
        put(store, {"mask": bad, "v": bad, "w": bad}, step=2, guarded=frozenset({"v", "w", "gone"}))
    assert store.names() == [at(1)]
    with pytest.raises(NonFiniteError, match=r"after step 0, NaN or infinity in v: .*; no step has run"):
        put(store, {"v": bad}, step=0, guarded=frozenset({"v"}))


def test_too_little_space_names_path_needed_and_free(tmp_path: Path) -> None:
    forecast(tmp_path, 1000)
    said = r"need 1,000,000,000,000,000,000 bytes, [\d,]+ are free .* free space"
    with pytest.raises(RunDirError, match=said) as e:
        forecast(tmp_path, 10**18)
    assert str(tmp_path) in str(e.value)


REMEDIES = {
    "EDQUOT": "quota", "EROFS": "read-only: remount it", "EACCES": "change its permissions",
    "EIO": "choose another directory", "ENOSPC": "the disk is full: free space",
}  # fmt: skip


def test_a_bad_disk_is_found_before_training(tmp_path: Path) -> None:
    points = ("open", "fsync", "unlink", "fsync_folder")
    for error, point in [*((each, "write") for each in REMEDIES), *(("ENOSPC", each) for each in points)]:
        hazard.arm(f"{error}:checkpoint.{point}:1")
        with pytest.raises(RunDirError, match=REMEDIES[error]):
            trial_write(tmp_path)
        assert list(tmp_path.iterdir()) == []
    hazard.arm(None)
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="a file has the name of a folder: move it away"):
        trial_write(tmp_path / "file")
    with pytest.raises(RunDirError, match="deleted, moved or unmounted: bring it back"):
        trial_write(tmp_path / "missing")


def test_a_directory_without_permission(read_only_dir: Path) -> None:
    with pytest.raises(RunDirError, match="permissions"):
        trial_write(read_only_dir)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    commit(store := store_in(tmp_path), at(10))
    with subprocess.Popen(["true"]) as ended:
        pass
    dead, living, stays = str(ended.pid), str(os.getppid()), set()
    pids_of = {"checkpoints": (dead, str(os.getpid()), living, "x"), "best/loss": (dead, living)}
    for folder, pids in pids_of.items():
        for pid in pids:
            left = tmp_path / folder / f".tmp-{at(20)}-{pid}"
            left.mkdir(parents=True)
            (left / "arrays.safetensors").touch()
            stays |= {left} if pid == living else set()
    for name in ("checkpoint", "lock.json", "run.json"):
        (tmp_path / f".tmp-{name}-{dead}").touch()
    store.clean()
    assert set(tmp_path.rglob(".tmp-*")) == stays and seed_of(resumed(tmp_path)) == 10
