"""State tree: the entries of the state, their encoding as JSON and arrays, and random state."""

from everstep.state.codec import Buffers, Encoded, array_name, array_paths, decode, digest, encode, leaves
from everstep.state.entries import Slot, dropped, make_entry
from everstep.state.random_state import capture, isolated, restore, seed_all

__all__ = [
    "Buffers",
    "Encoded",
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
    "restore",
    "seed_all",
]
