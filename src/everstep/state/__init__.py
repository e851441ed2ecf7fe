"""State tree: the entries of the state, their encoding as JSON and arrays, and random state."""

from everstep.state.codec import Buffers, Encoded, array_name, array_paths, decode, digest, encode, leaves
from everstep.state.entries import PerRank, Slot, dropped, make_entry, undeclared
from everstep.state.parts import merge, split
from everstep.state.random_state import capture, isolated, rekey, restore, seed_all

__all__ = [
    "Buffers",
    "Encoded",
    "PerRank",
    "Slot",
    "array_name",
    "array_paths",
    "capture",
    "decode",
    "digest",
    "dropped",
    "encode",
    "isolated",
    "leaves",
    "make_entry",
    "merge",
    "rekey",
    "restore",
    "seed_all",
    "split",
    "undeclared",
]
