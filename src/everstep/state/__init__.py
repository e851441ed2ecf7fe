"""State tree: the entries of the state, their encoding as JSON and arrays, and random state.

One tree of plain values is what is copied, hashed, compared and saved, whatever the objects are.
"""

from everstep.state.codec import Buffers, Encoded, array_name, array_paths, decode, encode, stamp, unstamp
from everstep.state.digests import content_digest, digest, leaves, note_digests
from everstep.state.entries import Merge, PerRank, Slot, keys_to_drop, make_entry, undeclared
from everstep.state.parts import children, merge, split, with_regions, within
from everstep.state.random_state import capture, isolated, portable, rekey, restore, seed_all
