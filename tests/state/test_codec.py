"""The codec: what comes back is equal, type by type and bit by bit."""

import json
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gate
from everstep.errors import StateError
from everstep.state import Buffers, Encoded, array_name, decode, digest, encode, leaves, stamp
from everstep.state.codec import stamp_of


def through_json(encoded: Encoded) -> Encoded:
    """As a checkpoint does it: the structure as strict JSON, the arrays as bytes of their own."""
    text = json.dumps(encoded.structure, allow_nan=False, ensure_ascii=False).encode()
    return Encoded(json.loads(text), encoded.arrays)


def round_trip(tree: Any) -> Any:
    return decode(through_json(encode(tree)))


def same(a: Any, b: Any) -> bool:
    """Equal in type, bits, order and memory order, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, dict):
        extra = a.default_factory is b.default_factory if isinstance(a, defaultdict) else True
        return extra and same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple, deque)):
        extra = a.maxlen == b.maxlen if isinstance(a, deque) else True
        return extra and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**130), max_value=2**130)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary(max_size=8)
)
keys = plain | st.lists(plain, max_size=2).map(tuple) | st.frozensets(plain, max_size=2)
dtypes = (
    hnp.scalar_dtypes()
    | hnp.unicode_string_dtypes(max_len=4)
    | hnp.byte_string_dtypes(max_len=4)
    | st.just(np.dtype([("a", "<f4"), ("b", ">i2", (2,))]))
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
strided = arrays.map(lambda a: a.T) | arrays.filter(lambda a: a.ndim > 0).map(lambda a: a[::-2])
trees = st.recursive(
    plain | arrays | strided | st.binary(max_size=4).map(bytearray) | st.sets(keys, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda v: deque(v, maxlen=5))
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda v: defaultdict(list, v))
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300 if gate.is_campaign else 60)
@given(trees)
def test_any_tree_comes_back_equal_type_by_type(tree: Any) -> None:
    restored = round_trip(tree)
    assert same(restored, tree)
    assert digest(encode(restored)) == digest(encode(tree))
    paths = [path for path, _ in leaves(encode(tree))]
    assert len(set(paths)) == len(paths)


@settings(deadline=None, max_examples=200 if gate.is_campaign else 40)
@given(arrays | strided)
def test_arrays_keep_bits_dtype_shape_and_memory_order(array: np.ndarray) -> None:
    restored = round_trip({"a": array})["a"]
    assert same(restored, array)
    assert restored.dtype.byteorder == array.dtype.byteorder
    assert np.empty_like(restored).strides == np.empty_like(array).strides
    assert restored.flags.writeable and not np.shares_memory(restored, array)


@pytest.mark.parametrize(
    "value",
    [
        -0.0, float("inf"), float("-inf"), float("nan"),
        struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0],
        struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
        5e-324, sys.float_info.max, 10**5000, -(2**63) - 1, 2**64, True, 1, 1.0,
        complex(-0.0, float("nan")), "\ud800 lone", "\ud83d\ude00", "nul\0", "",
        (), (1,), ((),), [], {}, set(), {(1, "a"), 2}, frozenset({1}), b"\xff\0", bytearray(b"x"),
        {0: 1, "0": 2, True: 3}, {"$array": "trap"}, {"$dict": []}, {"a/b": 1, "%": 2, "#": 3, "": 4},
        {None: 1, (1, 2): 2, 1.5: 3, "1.5": 4, b"k": 5, float("inf"): 6},
        OrderedDict([("b", 1), ("a", 2)]), OrderedDict([(3, 1)]), OrderedDict(), Counter({30: 1, 80: 2}),
        deque([1, 2], maxlen=3), deque(), defaultdict(int, {"a": 1}), defaultdict(None),
        np.float32(1.5), np.float64("nan"), np.int64(-1), np.bool_(True), np.complex64(1j), np.float16(2),
        np.datetime64("2026-11-21"), np.datetime64("NaT", "s"), np.timedelta64(5, "us"),
        np.str_("ü"), np.str_(""), np.bytes_(b"x\0"), np.uint64(2**64 - 1), {np.int64(3): 1},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_value(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"a": [value]}), {"a": [value]})


def test_what_a_state_dict_has_beside_its_items_comes_back() -> None:
    """tensordict has its batch size there: a replay memory of torchrl could not be filled after a resume."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    state._metadata["0"]["batch_size"] = torch.Size([2])  # type: ignore[attr-defined]
    restored = round_trip({"memory": [state]})["memory"][0]
    assert restored._metadata == state._metadata and restored._metadata["0"]["batch_size"].numel() == 2


TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # from torch 2.7 on
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)], ids=str)
def test_tensor_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 255)
    tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    restored = round_trip({"t": tensor})["t"]
    assert type(restored) is torch.Tensor
    assert (restored.dtype, restored.shape, bits(restored)) == (dtype, tensor.shape, bits(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6.0).view(2, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(10.0)[::3],
        torch.ones(1, 3).expand(4, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.stride()}",
)
def test_tensor_of_every_memory_order(tensor: torch.Tensor) -> None:
    restored = round_trip([tensor])[0]
    assert torch.equal(restored, tensor)
    assert restored.stride() == torch.empty_like(tensor).stride()


def test_torchs_values_parameters_and_sparse_tensors_come_back() -> None:
    values = [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda", 1),
    ]
    restored = round_trip(values)
    assert restored == values and list(map(type, restored)) == list(map(type, values))
    tensors = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
    ]
    restored = round_trip(tensors)
    assert list(map(type, restored)) == list(map(type, tensors)) and all(t.is_leaf for t in restored)
    assert [t.requires_grad for t in restored] == [True, False, True, False]
    indices = torch.tensor([[0, 0]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([[1.0], [2.0]]), (3, 1), check_invariants=True)
    restored = round_trip({"g": sparse})["g"]
    assert restored.is_sparse and not restored.is_coalesced()
    assert torch.equal(restored.to_dense(), sparse.to_dense())
    assert round_trip(sparse.coalesce()).is_coalesced()


def test_array_names_are_paths_and_unique() -> None:
    zero = np.zeros(1)
    tree = {"a": {0: zero, "0": zero, "b/c": zero}, "t": (zero, [zero]), "__metadata__": zero, "": zero}
    encoded = encode(tree)
    assert list(encoded.arrays) == ["a/0", "a/0~", "a/b%2Fc", "t/0", "t/1/0", "__metadata__~", "%"]
    assert array_name(("a", "b/c")) == "a/b%2Fc"
    assert array_name(("state", 3, "exp_avg")) == "state/3/exp_avg"


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


class Odd:
    pass


class Keeps:
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Odd(), "what can be saved: objects with state_dict"),
        (Point(1, 2), "plain tuple or a dict"),
        (Colour.RED, "subclass would come back as its base class"),
        (Keeps(), "pass the object itself in state="),
        (defaultdict(lambda: 3), "use a plain dict"),
        (np.array([None]), "Python objects"),
        (np.array(["a"], dtype=object), "use numbers, or a list"),
        (np.ma.array([1]), "np.asarray"),
        (np.longdouble(1), "convert it to float64"),
        (np.zeros(2, np.clongdouble), "convert it to float64"),
        (lambda: 1, "function"),
        ({torch.ones(1)}, "as a key or in a set"),
        (torch.empty(2, device="meta"), "meta tensor"),
        (torch.nn.parameter.UninitializedParameter(), "run one batch"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_what_cannot_be_saved_is_named_with_the_remedy(value: Any, says: str) -> None:
    with pytest.raises(StateError, match=r"state entry 'user/odd/1'.*" + says):
        encode({"user": {"odd": [0, value]}})


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_trees_that_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="contains itself"):
        encode({"a": loop})
    with pytest.raises(StateError, match="to_dense"):
        encode(torch.ones(2, 2).to_sparse_csr())
    with pytest.raises(StateError, match="newer version"):
        decode(Encoded({"a": {"$quantum": 1}}))
    for make in (np.arange, torch.arange):
        encoded = encode({"a": make(4)})
        encoded.arrays["a"].data = encoded.arrays["a"].data[:-1]
        with pytest.raises(StateError, match="damaged"):
            decode(encoded)


@pytest.mark.parametrize("make", [np.full, torch.full])
def test_kept_buffers_are_filled_again_and_given_up_when_they_no_longer_fit(make: Any) -> None:
    buffers = Buffers()
    first = encode({"w": make((4,), 1.0), "gone": make((1,), 1.0)}, buffers)
    memory = first.arrays["w"].data.ctypes.data
    second = encode({"w": make((4,), 2.0)}, buffers)
    assert second.arrays["w"].data.ctypes.data == memory
    assert decode(second)["w"].tolist() == [2.0] * 4
    assert set(buffers.arrays) == {"w"}
    for other in (make((2, 2), 3.0), make((4,), 3)):
        third = encode({"w": other}, buffers)
        assert decode(third)["w"].tolist() == other.tolist()
        assert decode(third)["w"].dtype == other.dtype
    other = torch.ones(4) if make is np.full else np.ones(4, np.float32)
    assert type(decode(encode({"w": other}, buffers))["w"]) is type(other)


def test_a_stamp_is_of_its_array_and_not_of_the_next_one_at_its_address() -> None:
    """From inside: whether a run meets an address again is the allocator's choice, so it has many chances."""
    first = [np.zeros(1) for _ in range(100)]
    addresses = set(map(id, first))
    for each in first:
        stamp(each)
    del first, each
    others = [other for other in [np.zeros(1) for _ in range(10_000)] if id(other) in addresses]
    assert others
    assert not any(map(stamp_of, others))


def test_a_snapshot_does_not_follow_what_happens_later() -> None:
    w, t = np.zeros(2), torch.zeros(2)
    encoded = encode({"w": w, "t": t})
    w += 1
    t += 1
    restored = decode(encoded)
    assert restored["w"].tolist() == restored["t"].tolist() == [0, 0]
    restored["w"] += 5
    restored["t"] += 5
    assert decode(encoded)["w"].tolist() == decode(encoded)["t"].tolist() == [0, 0]


def leaf_bytes(tree: Any) -> dict[str, bytes]:
    return {path: bytes(data) for path, data in leaves(encode(tree))}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), ("1", 1), (None, "null"), ([], ()), ([1], (1,)), ({}, []),
        (b"", ""), (deque(), deque(maxlen=1)), (np.zeros(1), torch.zeros(1, dtype=torch.float64)),
        ({0: 1}, {"0": 1}), ([1], {"0": 1}), (set(), frozenset()), ({}, OrderedDict()),
        (1.0, np.float64(1)), (np.float32(1), np.float64(1)),
        (np.zeros((1, 2)), np.zeros((2, 1))), (torch.zeros(1), torch.nn.Parameter(torch.zeros(1))),
        (torch.zeros(1, dtype=torch.int32), torch.zeros(1)), ({"a": None}, {}), ({"a": {}}, {"a": {"b": {}}}),
        (torch.float16, "float16"), (np.zeros(1), [0.0]), ({"a/b": 1}, {"a": {"b": 1}}),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_trees_that_differ_have_different_leaves(a: Any, b: Any) -> None:
    assert leaf_bytes({"x": a}) != leaf_bytes({"x": b})
    assert digest(encode({"x": a})) != digest(encode({"x": b}))


def test_every_flipped_bit_of_an_array_changes_the_digest() -> None:
    encoded = encode({"w": np.arange(3, dtype=np.float32), "t": torch.arange(3)})
    clean = digest(encoded)
    for host in encoded.arrays.values():
        for byte in range(host.data.size):
            host.data[byte] ^= 1
            assert digest(encoded) != clean
            host.data[byte] ^= 1
    assert digest(encoded) == clean


def test_leaves_are_sorted_and_independent_of_insertion_order() -> None:
    one = encode({"b": {"y": 1, "x": [2, (np.ones(1),)]}, "a": Counter({3: 1}), "p": {1: 2, 0: 3}})
    two = encode({"a": Counter({3: 1}), "p": {0: 3, 1: 2}, "b": {"x": [2, (np.ones(1),)], "y": 1}})
    paths = [path for path, _ in leaves(one)]
    assert paths == sorted(paths) and len(set(paths)) == len(paths)
    assert digest(one) == digest(two)
    assert dict(leaves(one))["b/y"] == b"1"


def test_the_digest_skips_the_clock_and_nothing_else() -> None:
    one = encode({"wall": {"t": 1.0}, "user": {"wall": 1}})
    assert digest(one) == digest(encode({"wall": {"t": 2.0}, "user": {"wall": 1}}))
    assert digest(one) == digest(encode({"wall": [], "user": {"wall": 1}}))
    assert digest(one) != digest(encode({"wall": {"t": 1.0}, "user": {"wall": 2}}))
    assert digest(one, skip=()) != digest(encode({"wall": {"t": 2.0}, "user": {"wall": 1}}), skip=())
