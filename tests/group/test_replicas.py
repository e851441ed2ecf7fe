"""Entries are compared among ranks by digests, and a difference is named, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import outputs

from everstep.contracts.state import HostArray
from everstep.state import Encoded, encode
from everstep.supervisor.saving.replicas import difference, differing, digests, leaf_digests

PROGRAM = """
from pathlib import Path
import numpy as np, torch
import everstep
from everstep.checkpoint import format, read_checkpoint
from everstep.state import Encoded, capture, encode, decode, rekey, seed_all, split
from everstep.supervisor.saving.rank_parts import for_rank, own_paths
from everstep.supervisor.saving.replicas import difference, differing, digests, leaf_digests
from everstep.supervisor.saving.user_state import UserState

folder = Path("FOLDER")
torch.distributed.init_process_group("gloo")
group = find_group()
seed_all(5)
nn = torch.nn
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
memory, counter = {"seen": []}, everstep.Slot(0)
rekey(5, rank)
def step():
    x = torch.randn(6, 3)
    wrapped(x).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    memory["seen"].append(x.sum().item())

state = {"model": model, "optimizer": optimizer, "memory": everstep.PerRank(memory), "counter": counter}
user = UserState(state)
group.agree(user.described(), "the state")
def tree():
    return encode({"progress": {"seed": 5, "step": 3}, **user.save(),
        "rng": {f"rank{rank}": capture(), f"lines{rank}": {}}})
def compare():
    common, own = split(tree(), own_paths(rank, user.rank_paths(), []))
    part = differing(group.gather(digests(common), "digests"))
    if part is None:
        return common, own
    raise difference(part, group.gather(leaf_digests(common, part), "leaves"))

for backend in everstep.backends.active():
    # all ranks have the buffers of rank 0
    backend.prepare_ranks({"model": model, "wrapped": wrapped}, group.data)
step(); step()
model[1].running_mean += rank
try:
    compare()
except Exception as error:
    say(error)
step()
common, own = compare()  # weights, buffers and moments are equal, memories are each rank's own
say("equal")
counter.value = rank
try:
    compare()
except Exception as error:
    say(error)
counter.value = 0

# back to the copy: the next steps find the same, with each rank's own memory and generators
step(); step()
expected = [memory["seen"][:], [p.tolist() for p in model.parameters()]]
record = format.write_own(folder, rank, own, common)
records = group.gather(record, "parts")
if group.writer:
    file = format.write_common(folder, common)
    facts = {"epoch": 1, "phase": "step", "partial": False, "segment": 1, "meta": None, "digest": ""}
    format.write_manifest(folder, {"name": folder.name, "step": 3, **facts}, common, file, records)
group.barrier("the manifest")
found = for_rank(read_checkpoint(folder, rank), group, user)
saved = decode(Encoded(found.structure, found.arrays))
user.load(saved, 3)
everstep.state.restore(saved["rng"][f"rank{rank}"])
assert len(memory["seen"]) == 3
step(); step()
assert [memory["seen"], [p.tolist() for p in model.parameters()]] == expected
seen = group.gather(memory["seen"], "memories")
assert len(set(map(tuple, seen))) == size
say("back")
group.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.campaign("long")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_ddp_compare_their_state_and_come_back(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    for rank, text in enumerate(outputs(PROGRAM.replace("FOLDER", str(folder)), size)):
        said = [line.partition(": ")[2] for line in text.splitlines() if line.startswith(f"{rank}: ")]
        assert said[1] == "equal" and said[-1] == "back", text
        others = ", ".join(map(str, range(1, size)))
        assert (
            "'model' is not the same on all ranks: 'user/model/1.running_mean' of rank " + others in said[0]
        )
        assert (
            f"'counter' is not the same on all ranks: 'user/counter/value' of rank {others} is not" in said[2]
        )
        assert "state={'counter': everstep.PerRank(...)}" in said[2]


def common(**user: Any) -> Encoded:
    return encode({"progress": {"step": 1}, "user": user, "services": {"a": 1}, "wall": {}})


def test_each_entry_has_a_digest_and_what_ranks_need_not_share_has_none() -> None:
    found = digests(common(w=np.zeros(2), note={"a": [1, 2.0]}))
    assert list(found) == ["progress", "user/note", "user/w"]
    assert all(len(each) == 16 for each in found.values())


@pytest.mark.parametrize(
    ("other", "path"),
    [
        ({"w": np.array([0.0, -0.0])}, "user/w"),
        ({"w": np.zeros(2, np.float32)}, "user/w"),
        ({"w": np.zeros((1, 2))}, "user/w"),
        ({"w": [0.0, 0.0]}, "user/w"),
        ({"w": np.zeros(2), "more": []}, "user/more"),
        ({}, "user/w"),
    ],
)
def test_any_difference_is_found_and_named(other: dict[str, Any], path: str) -> None:
    ranks = [common(w=np.zeros(2)), common(w=np.zeros(2)), common(**other)]
    part = differing([digests(each) for each in ranks])
    assert part == path
    message = str(difference(part, [leaf_digests(each, part) for each in ranks]))
    assert f"{path!r} of rank 2 is not that of the writer" in message


def test_the_device_of_an_array_is_each_ranks_own() -> None:
    def on(device: str) -> Encoded:
        array = HostArray("F32", (1,), np.zeros(4, np.uint8), "torch", {"device": device, "parameter": True})
        return Encoded({"user": {"w": {"$array": "user/w"}}}, {"user/w": array})

    assert digests(on("cuda:0")) == digests(on("cuda:1"))
    assert on("cuda:1").arrays["user/w"].extra["device"] == "cuda:1"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("streams/train", "stream 'train' is not the same .* give all ranks the same data"),
        ("progress", "the place in the run is not the same .* the same loop"),
        ("user/a%2Fb", r"state entry 'a/b'.*'user/a/b/x' of rank 1 .*'a/b': everstep\.PerRank"),
    ],
)
def test_the_message_names_the_part_and_the_remedy(part: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        raise difference(part, [{f"{part}/x": "0"}, {f"{part}/x": "1"}])
