"""Weights of other programs: loaded by `InitFrom` and `everstep.load`; damaged or made to harm, refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed

import everstep
from everstep import InitFrom
from everstep.errors import CheckpointError, ConfigError, NoCheckpointError, RestoreError
from everstep.formats.foreign import read_pickle
from tiny_runs import flip


def net(seed: int = 0, out: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, out), torch.nn.BatchNorm1d(out))
    model[0].bias.data = model[0].bias.data.to(torch.bfloat16)
    return model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(a, b) and a.dtype == b.dtype for (name, a), (again, b) in pairs)


def as_safetensors(model: torch.nn.Module, path: Path) -> Path:
    safetensors.torch.save_file(model.state_dict(), path / "weights.safetensors")
    return path / "weights.safetensors"


def as_shards(model: torch.nn.Module, path: Path) -> Path:
    """A folder as Hugging Face's libraries write it, with two shards."""
    state, weight_map = model.state_dict(), {}
    for number, part in enumerate(("0.", "1."), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        shard = {name: tensor for name, tensor in state.items() if name.startswith(part)}
        safetensors.torch.save_file(shard, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def as_folder(model: torch.nn.Module, path: Path) -> Path:
    safetensors.torch.save_file(model.state_dict(), path / "model.safetensors")
    return path


def as_torch(model: torch.nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "weights.pt")
    return path / "weights.pt"


def as_old_torch(model: torch.nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "weights.pt", _use_new_zipfile_serialization=False)
    return path / "weights.pt"


def as_distributed(model: torch.nn.Module, path: Path) -> Path:
    return distributed_folder(model.state_dict(), path)


def distributed_folder(state: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        distributed.save(state, checkpoint_id=path, no_dist=True)
    return path


FLAT: dict[str, Callable[[torch.nn.Module, Path], Path]] = {
    "safetensors": as_safetensors,
    "shards": as_shards,
    "folder": as_folder,
    "torch.save": as_torch,
    "torch.save, as before 1.6": as_old_torch,
    "torch.distributed.checkpoint": as_distributed,
}
"""Writers of a model's state_dict alone."""


Writer = Callable[[torch.nn.Module, Path], Path]


@pytest.fixture(params=FLAT.values(), ids=FLAT)
def write(request: pytest.FixtureRequest) -> Writer:
    """A writer of a model's state_dict."""
    writer: Writer = request.param
    return writer


@pytest.mark.campaign("long", gate=2)
def test_a_run_starts_from_them(tmp_path: Path, write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    given, model = write(net(1), tmp_path), net(2)
    optimizer = torch.optim.Adam(model.parameters())
    with everstep.Supervisor(tmp_path / "run", {"model": model, "optimizer": optimizer}, init_from=given):
        assert same(model, net(1))
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert str(given) in capsys.readouterr().out


@pytest.mark.campaign("long", gate=2)
def test_what_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path: Path, write: Writer) -> None:
    given, model = write(net(1), tmp_path), net(2, out=5)
    model.append(torch.nn.Linear(5, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RestoreError) as raised:
        everstep.load(given, {"model": model})
    assert raised.value.missing == ("model/2.weight", "model/2.bias")
    assert "model/0.weight (3, 4) F32 -> (5, 4) F32" in raised.value.reshaped
    assert "model/0.bias (3,) BF16 -> (5,) BF16" in raised.value.reshaped
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    chosen = InitFrom(given, on_missing="skip", on_reshaped="skip")
    everstep.load(chosen, {"model": model})
    assert torch.equal(model.state_dict()["1.num_batches_tracked"], torch.tensor(0))


@pytest.mark.campaign("long", gate=2)
def test_a_part_under_other_names(tmp_path: Path, write: Writer) -> None:
    holder = torch.nn.Module()
    holder.backbone = net(2)
    given = write(net(1), tmp_path)
    with pytest.raises(RestoreError, match=r"choose with .*rename=.*\n.*net/backbone\.0\.weight"):
        everstep.load(given, {"net": holder})
    start = InitFrom(given, rename={"^net/": "net/backbone."}, exclude="running_mean")
    holder.backbone[1].running_mean += 1
    everstep.load(start, {"net": holder})
    assert torch.equal(holder.backbone[0].weight, net(1)[0].weight)
    assert torch.equal(holder.backbone[1].running_mean, torch.ones(3))


@pytest.mark.parametrize("kind", ["torch.save", "torch.distributed.checkpoint"])
def test_values_with_names_of_their_own(tmp_path: Path, kind: str) -> None:
    model = net(1)
    optimizer = torch.optim.Adam(model.parameters())
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scale": torch.ones(2),
        "epoch": 3,
    }
    if kind == "torch.save":
        given = tmp_path / "all.pt"
        torch.save(tree, given)
    else:
        given = distributed_folder(tree, tmp_path / "all")
    again, scale = net(2), torch.zeros(2)
    with (
        pytest.warns(RuntimeWarning, match="pickles, and are not read: ") if given.is_dir() else nullcontext()
    ):
        everstep.load(given, {"model": again, "scale": scale})
    assert same(again, model) and scale.tolist() == [1, 1] and type(scale) is torch.Tensor
    others = torch.optim.Adam(again.parameters())
    with pytest.raises(RestoreError) as raised:
        everstep.load(given, {"model": again, "optimizer": others})
    assert raised.value.missing == ("optimizer",)
    with pytest.raises(ConfigError, match=r"entry='model'\).* has names of its own"):
        everstep.load(InitFrom(given, entry="model"), {"model": again})


def test_a_run_leaves_its_optimizer_and_what_the_file_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net(1)
    state = {"model": model.state_dict(), "optimizer": torch.optim.Adam(model.parameters()).state_dict()}
    torch.save({**state, "epoch": 3}, tmp_path / "all.pt")
    again = net(2)
    entries = {"model": again, "optimizer": torch.optim.SGD(again.parameters(), lr=0.1)}
    with (
        pytest.raises(RestoreError) as raised,
        everstep.Supervisor(tmp_path / "a", entries, init_from=tmp_path / "all.pt"),
    ):
        pass
    assert raised.value.unexpected == ("epoch",)
    start = InitFrom(tmp_path / "all.pt", exclude="^epoch$")
    with everstep.Supervisor(tmp_path / "b", entries, init_from=start):
        assert same(again, model)
    assert "optimizers are only taken from everstep's checkpoints" in capsys.readouterr().out


def test_the_entry_is_named_where_several_could_be_meant(tmp_path: Path) -> None:
    given, entries = as_safetensors(net(1), tmp_path), {"model": net(2), "teacher": net(3)}
    with pytest.raises(ConfigError, match=r"2 entries .*\(model, teacher\).*entry='model'"):
        everstep.Supervisor(tmp_path / "a", entries, init_from=given).__enter__()
    with pytest.raises(ConfigError, match="did you mean 'teacher'"):
        everstep.Supervisor(tmp_path / "b", entries, init_from=InitFrom(given, entry="techer")).__enter__()
    with everstep.Supervisor(tmp_path / "c", entries, init_from=InitFrom(given, entry="teacher")):
        assert same(entries["teacher"], net(1)) and same(entries["model"], net(2))


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    """As Hugging Face's libraries store them: a safetensors file has no two names for one tensor."""

    def tied(seed: int) -> torch.nn.ModuleDict:
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict(
            {"head": torch.nn.Linear(4, 9, bias=False), "words": torch.nn.Embedding(9, 4)}
        )
        model["head"].weight = model["words"].weight
        return model

    safetensors.torch.save_file({"words.weight": tied(1)["words"].weight}, tmp_path / "model.safetensors")
    model = tied(2)
    everstep.load(tmp_path, {"model": model})
    assert torch.equal(model["head"].weight, tied(1)["words"].weight)
    loose = tied(2)
    loose["head"].weight = torch.nn.Parameter(loose["head"].weight.detach().clone())
    with pytest.raises(RestoreError) as raised:
        everstep.load(tmp_path, {"model": loose})
    assert raised.value.missing == ("model/head.weight",)


@pytest.mark.campaign("long")
def test_arrays_of_numpy_need_no_torch(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "w.safetensors")
    script = """
import json, sys
import numpy as np
import everstep
weights = {"w": np.zeros((2, 3))}
live = weights["w"]
everstep.load(sys.argv[1], {"weights": weights})
print(json.dumps([live.tolist(), "torch" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "w.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [[[0, 1, 2], [3, 4, 5]], False]


SHARDED = """
import sys
import safetensors.torch, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import everstep
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
weights = safetensors.torch.load_file(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
try:
    everstep.load(sys.argv[1], {"model": model})
except everstep.errors.RestoreError as error:
    print(*error.missing)
everstep.load(everstep.InitFrom(sys.argv[1], on_missing="skip"), {"model": model})
for name, whole in weights.items():
    live = model.state_dict()[name]
    print(name, torch.equal(live.to_local(), whole.chunk(4)[1]), tuple(live.to_local().shape))
dist.destroy_process_group()
"""


@pytest.mark.campaign("long")
def test_a_sharded_model_takes_its_part(tmp_path: Path) -> None:
    """By torch's fake process group: one process that is rank 1 of 4, and communicates with nobody."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("1.")}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "model.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "model/1.weight model/1.bias",
        "0.bias True (2,)",
        "0.weight True (2, 4)",
        "2.bias True (1,)",
        "2.weight True (1, 8)",
    ]


INDEX = "model.safetensors.index.json"


def refused(given: Path, message: str, error: type[Exception] = CheckpointError) -> None:
    """Loading is an error with the message, and changes nothing."""
    model = net(2)
    with pytest.raises(error, match=message):
        everstep.load(given, {"model": model})
    assert same(model, net(2))


@pytest.mark.parametrize("name", FLAT)
def test_a_file_that_was_cut_off(tmp_path: Path, name: str) -> None:
    given = FLAT[name](net(1), tmp_path)
    for path in [given] if given.is_file() else sorted(given.iterdir()):
        raw = path.read_bytes()
        for length in (0, 4, 9, len(raw) // 3, len(raw) - 1):
            path.write_bytes(raw[:length])
            refused(given, str(path.name).replace(".", r"\."))
        path.write_bytes(raw)
    everstep.load(given, {"model": net(2)})


def test_a_file_that_was_saved_without_checksums_is_loaded(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        given = as_torch(net(1), tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    model = net(2)
    everstep.load(given, {"model": model})
    assert same(model, net(1))


def test_links_are_followed_to_files_as_caches_have_them(tmp_path: Path) -> None:
    """Hugging Face's cache has links to its blobs; what they lead to is read as any file is."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for path in as_shards(net(1), blobs).iterdir():
        (snapshot / path.name).symlink_to(path)
    model = net(2)
    everstep.load(snapshot, {"model": model})
    assert same(model, net(1))
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    (snapshot / "model-00002-of-00002.safetensors").symlink_to("/etc/passwd")
    refused(snapshot, "is neither a safetensors file nor a file of torch.save")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    refused(tmp_path, "neither a checkpoint", NoCheckpointError)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 50_000])
def test_an_absurd_header_takes_no_memory(tmp_path: Path, length: int) -> None:
    given = as_safetensors(net(1), tmp_path)
    with open(given, "r+b") as file:
        file.write(length.to_bytes(8, "little"))
    if length == 100_000_001:
        os.truncate(given, 10**11)  # a hole, which takes no space
    refused(given, "its header would have")  # which imports what it needs
    with few_bytes(10**7):
        refused(given, "its header would have")


@contextmanager
def few_bytes(most: int) -> Iterator[None]:
    """The block takes no more memory at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("raw", [
    b"",
    b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # bytes that are not there
    b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f",  # a bytearray of 2**63 bytes
    b"\x80\x04\x8b\xff\xff\xff\x7f",  # an integer with 2**31 bytes
    b"\x80\x04h\x07.",
    b"\x80\x04]N}K\x01K\x02su.",
    b"cos\nsystem\n(S'true'\ntR.",
])  # fmt: skip
def test_a_pickle_that_is_none_takes_no_memory(raw: bytes) -> None:
    with few_bytes(10**6), pytest.raises(ValueError):
        read_pickle(raw)


# ---- files that are refused: each row makes one in a folder, and has words of the error
Bad = Callable[[Path], Path]


def header(change: Callable[[dict[str, Any]], object]) -> Bad:
    """A safetensors file with a changed header; the change may return the new text of it."""

    def make(folder: Path) -> Path:
        path = as_safetensors(net(1), folder)
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8:end])
        changed = change(entries)
        text = (changed if isinstance(changed, str) else json.dumps(entries)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
        return path

    return make


def twice(entries: dict[str, Any]) -> str:
    """The last one would count, and the other be lost."""
    return f'{json.dumps(entries)[:-1]}, "0.weight": {json.dumps(entries["0.weight"])}}}'


def fractions(entries: dict[str, Any]) -> None:
    for each in entries.values():
        each["data_offsets"][0] *= 1.0


def index(text: str = "", file: Any = None) -> Bad:
    """Shards with another text as their index, or where the index leads to another file."""

    def make(folder: Path) -> Path:
        given = folder / "weights"
        given.mkdir()
        as_shards(net(1), given)
        as_safetensors(net(3), folder).rename(folder / "secret.safetensors")
        if file is not None:
            entries = json.loads((given / INDEX).read_text())
            entries["weight_map"]["1.weight"] = file
        (given / INDEX).write_text(text if file is None else json.dumps(entries))
        return given

    return make


def second_shard(change: Callable[[Path], object]) -> Bad:
    def make(folder: Path) -> Path:
        shard = as_shards(net(1), folder) / "model-00002-of-00002.safetensors"
        shard.unlink()
        change(shard)
        return folder

    return make


def flipped(write: Writer) -> Bad:
    """A bit of the last array is turned: those before it are read, and loaded, before."""

    def make(folder: Path) -> Path:
        model = net(1)
        model[1].running_var += torch.arange(3.0) * 1.1
        given = write(model, folder)
        (path,) = [given] if given.is_file() else given.glob("*.distcp")
        flip(path, path.read_bytes().index(model[1].running_var.numpy().tobytes()))
        return given

    return make


def compressed(folder: Path) -> Path:
    packed = folder / "packed.pt"
    with ZipFile(as_torch(net(1), folder)) as source, ZipFile(packed, "w", ZIP_DEFLATED) as target:
        for each in source.infolist():
            target.writestr(each.filename, source.read(each))
    return packed


def notes(folder: Path) -> Path:
    (folder / "notes.txt").write_text("hello, this is a file of notes")
    return folder / "notes.txt"


def value(make: Callable[[Path], Any], **options: Any) -> Bad:
    """What torch.save writes of a value."""

    def saved(folder: Path) -> Path:
        torch.save(make(folder), folder / "value.pt", **options)
        return folder / "value.pt"

    return saved


class Evil:
    """Object whose unpickling makes a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ran"

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def itself(folder: Path) -> Any:
    found: dict[str, Any] = {"w": torch.ones(2)}
    found["itself"] = found
    return found


def doubled(folder: Path) -> Any:
    found: Any = [1]
    for _ in range(60):
        found = [found, found]
    return {"w": found}


def metadata(change: Callable[[Any], object]) -> Bad:
    """A folder of torch.distributed.checkpoint with changed metadata, of torch's own classes."""

    def make(folder: Path) -> Path:
        given = as_distributed(net(1), folder)
        about = pickle.loads((given / ".metadata").read_bytes())
        change(about)
        (given / ".metadata").write_bytes(pickle.dumps(about))
        return given

    return make


def pickled(make: Callable[[Path], Any], protocol: int | None = None) -> Bad:
    """A folder whose metadata is a pickle of something else."""

    def saved(folder: Path) -> Path:
        given = as_distributed(net(1), folder)
        (given / ".metadata").write_bytes(pickle.dumps(make(folder), protocol))
        return given

    return saved


def place_of(about: Any, name: str) -> Any:
    return next(place for index, place in about.storage_data.items() if index.fqn == name)


def place(**facts: Any) -> Bad:
    return metadata(lambda about: set_facts(place_of(about, "0.weight"), facts))


def chunk(**facts: Any) -> Bad:
    return metadata(lambda about: set_facts(about.state_dict_metadata["0.weight"].chunks[0], facts))


def set_facts(of: Any, facts: dict[str, Any]) -> None:
    for name, fact in facts.items():
        object.__setattr__(of, name, fact)


def another_tensors_chunk(about: Any) -> None:
    other = place_of(about, "0.bias")
    set_facts(place_of(about, "0.weight"), {"offset": other.offset, "length": other.length})


DAMAGED = r"is damaged: the checksum of '\w+/data/\d' in it does not fit"
NOT_THERE = r"model-00002-of-00002\.safetensors (is missing|cannot be read)"
NOT_NAMED = "without names; save a dictionary"
ONE_NAME = "not a name in its folder"
NO_INDEX = f"{INDEX} is not an index"
NO_METADATA = "is not the metadata of a checkpoint"
BAD: list[tuple[Bad, str]] = [
    (notes, "is neither a safetensors file nor a file of torch.save"),
    (flipped(as_torch), rf"weights\.pt.* {DAMAGED}"),
    (flipped(as_distributed), rf"\.distcp.* {DAMAGED}"),
    (compressed, "is an archive with compressed files"),
    (header(lambda e: e["0.weight"].update(shape=[3, 5])), "does not fit 48 bytes"),
    (header(lambda e: e["0.weight"].update(shape=[-3, -4])), "other numbers than sizes"),
    (header(lambda e: e["0.weight"].update(shape=None)), "cannot be understood"),
    (header(lambda e: e["0.weight"].update(dtype="F1")), "'F1' is not a known element type"),
    (header(lambda e: e["0.bias"].update(data_offsets=[0.0, 12])), "begins at byte 0.0"),
    (header(lambda e: e["0.weight"].update(data_offsets=[0, 48])), "begins at byte"),
    (header(lambda e: e["0.weight"].update(data_offsets=[10**15, 10**15 + 48])), "(begins|end) at byte"),
    (header(fractions), "begins"),
    (header(lambda e: e.pop("0.weight")), "(begins|end) at byte"),
    (header(twice), "the name '0.weight' comes twice"),
    (second_shard(os.mkfifo), NOT_THERE),
    (second_shard(Path.mkdir), NOT_THERE),
    (second_shard(Path), NOT_THERE),
    *((index(text), NO_INDEX) for text in ("", "[]", "{}", '{"weight_map": 7}', '{"weight_map": [1]}')),
    (index("[" * 100_000), NO_INDEX),
    (index(file="../secret.safetensors"), f"{ONE_NAME} and is not followed"),
    (index(file="sub/x.safetensors"), ONE_NAME),
    (index(file=".."), f"{ONE_NAME}|cannot be read"),
    (index(file=7), ONE_NAME),
    (index(file="none.safetensors"), "is missing"),
    (index(file="model-00001-of-00002.safetensors"), r"-00002.safetensors lacks 1.weight: the shards and"),
    (value(lambda _: net(1)), r"Sequential.*save model\.state_dict\(\) alone"),
    (value(lambda _: {"w": torch.ones(1).expand(1 << 40)}), "larger than the file"),
    (value(itself), "contains itself"),
    (value(doubled), "too often"),
    (value(lambda _: {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}), "nested tensor"),
    (value(lambda _: [torch.ones(2)]), NOT_NAMED),
    (value(lambda _: 7), NOT_NAMED),
    (value(lambda _: {1: 2}), NOT_NAMED),
    (value(Evil), r"objects that only code can make \(posix\.mkdir\), and nothing of a file may run"),
    (value(Evil, _use_new_zipfile_serialization=False), r"posix\.mkdir"),
    (place(relative_path="../x"), f"{ONE_NAME} and is not followed"),
    (place(relative_path="none.distcp"), r"none\.distcp is missing"),
    (place(offset=10**12), "and '0.weight' should end at"),
    (place(offset=-1), "is damaged|not the metadata"),
    (place(transform_descriptors=["zstd"]), "in an encoding of another program"),
    (chunk(sizes=torch.Size([2, 4])), "the chunks of '0.weight' are not the whole"),
    (chunk(offsets=torch.Size([1, 0])), "KeyError"),
    (metadata(lambda about: about.state_dict_metadata["0.weight"].chunks.clear()), "are not the whole"),
    (
        metadata(lambda about: about.state_dict_metadata["0.weight"].chunks.extend([1])),
        "in place of metadata",
    ),
    (metadata(lambda about: setattr(about, "state_dict_metadata", 7)), NO_METADATA),
    (metadata(another_tensors_chunk), r"has BF16 \(3,\) for the chunk \(0, 0\) of '0\.weight'"),
    (pickled(Evil), NO_METADATA),
    (pickled(lambda folder: {"state_dict_metadata": Evil(folder)}), NO_METADATA),
    (pickled(lambda folder: (1, Evil(folder)), protocol=0), NO_METADATA),
]


@pytest.mark.parametrize(("make", "message"), BAD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_bad_file_is_refused_and_nothing_of_it_runs(tmp_path: Path, make: Bad, message: str) -> None:
    refused(make(tmp_path), message)
    assert not (tmp_path / "ran").exists()
