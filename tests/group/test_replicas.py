"""Entries are compared among ranks by digests, and a difference is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from everstep.contracts.state import HostArray
from everstep.state import Encoded, encode
from everstep.supervisor.saving.rank_parts import difference, differing, digests, leaf_digests


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
