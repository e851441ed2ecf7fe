"""What is a rank's own in a run's state, and what all ranks must have in common.

What the ranks have in common is every rank's, whatever their number.  Each rank digests its common part, and
the writer compares; only where a part differs do all ranks digest each of its leaves, so that the error names
the first leaf that differs.

With another number of ranks, or of parts of the data, what each rank has alone becomes:

- entries declared by `PerRank` are merged by the program's function, or refused;
- random state: ranks that read the first part of the data have that of the first rank that read the part, all
  others have generators keyed by (seed, data rank, step), as at the start of a run;
- the places of streams are given to the streams (`Stream.of_other_ranks`), which know what they mean;
- the gradients of an open window of accumulation are refused, unless the backend says that they are equal on
  any number of ranks; then they belong to the rest;
- the rest has to be equal on all saved ranks.

All of this follows from the checkpoint, the rank and the number of ranks alone.  So a start that is killed
before its first save, and made again, continues in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast
from urllib.parse import unquote

import numpy as np
import xxhash

from everstep.checkpoint import Checkpoint, read_own_trees
from everstep.contracts.group import DataRanks, Group
from everstep.contracts.state import HostArray
from everstep.display.cells import plural
from everstep.errors import RestoreError, StateError
from everstep.state import (
    Encoded,
    Slot,
    capture,
    decode,
    encode,
    isolated,
    leaves,
    merge,
    portable,
    rekey,
    split,
)
from everstep.state.parts import Path, children
from everstep.supervisor.saving.state_tree import random_parts, reading, saved_data
from everstep.supervisor.saving.user_state import UserState


def own_paths(rank: int, user: Iterable[Path], streams: Iterable[Path]) -> frozenset[Path]:
    """Return the paths of what is a rank's own in its tree, given those of the state and the streams."""
    random = (("rng", name) for name in random_parts(rank))
    return frozenset({*random, *user, *streams, ("wall", "streams")})


def for_rank(checkpoint: Checkpoint, group: Group, user: UserState) -> Checkpoint:
    """Return a checkpoint with the state tree of one rank, whatever number of ranks wrote the checkpoint."""
    if undeclared := _own_entries(checkpoint.own, checkpoint.common) - user.per_rank:
        raise RestoreError(
            f"{checkpoint.path}: state entries that were each rank's own are not declared so in state=: "
            f"{', '.join(map(repr, sorted(undeclared)))}; declare them, as in "
            f"state={{{min(undeclared)!r}: everstep.PerRank(...)}}, or start in another directory"
        )
    common, own = checkpoint.common, checkpoint.own
    if saved_data(checkpoint).of != group.data.of:
        common, own = _OtherRanks(checkpoint, group, user).trees()
    tree = merge(_on_current_devices(common) if group.rank else common, own)
    return replace(checkpoint, structure=tree.structure, arrays=tree.arrays)


def ranks_message(saved: DataRanks, now: DataRanks, *, exact: bool) -> str:
    """Say what another number of ranks means; `exact`: steps have the same bits on any number of ranks."""
    keyed = "; ranks from 1 on draw random numbers keyed by (seed, rank, step)" if now.size > 1 else ""
    bits = (
        f"gradients stay equal to those of {_ranks(saved)} bit for bit, by everstep.torch.VirtualShards"
        if exact
        else f"from here on results are not bit-identical to those of {_ranks(saved)}, as they would be with "
        "everstep.torch.VirtualShards"
    )
    return (
        f"the checkpoint is of {_ranks(saved)}, and this start has {_ranks(now)}: samples, values and "
        f"counters continue; {bits}{keyed}"
    )


class _OtherRanks:
    """A checkpoint as a rank of another number of ranks reads it."""

    def __init__(self, checkpoint: Checkpoint, group: Group, user: UserState) -> None:
        self._checkpoint, self._group, self._user = checkpoint, group, user
        self._data = saved_data(checkpoint)
        self._saved = _ranks(self._data)
        self._changed = f"{checkpoint.path} is of {self._saved}, and this start has {_ranks(group.data)}"

    @cached_property
    def _parts(self) -> list[Encoded]:
        """The own trees of all saved ranks; those of one process are empty, as it has all in common."""
        return [_on_current_devices(own) for own in read_own_trees(self._checkpoint.path)]

    def trees(self) -> tuple[Encoded, Encoded]:
        """Return the common tree, and this rank's own."""
        common, own = self._checkpoint.common, self._equal_rest()
        entries = sorted(self._user.per_rank & {*_user(common), *_user(self._parts[0])})
        for tree in (self._random(), self._streams(), *map(self._merge_entry, entries)):
            branches = children(tree.structure) or {}
            paths = [(name, part) for name, branch in branches.items() for part in children(branch) or ()]
            common = split(common, paths)[0]
            own = merge(own, tree)
        return common, own

    def _equal_rest(self) -> Encoded:
        window = any(
            name.startswith("gradients/")
            for tree in (self._checkpoint.common, *self._parts)
            for name in tree.arrays
        )
        if window and not self._user.exact_on_any_ranks():
            raise RestoreError(
                f"{self._changed}: the checkpoint is inside a window of accumulated gradients, which are "
                f"sums over the parts of {self._saved}; start with {self._saved}, or resume from a "
                "checkpoint between two windows, as resume=NAME"
            )
        entries = _own_entries(self._parts[0], self._checkpoint.common)
        apart = [("rng",), ("streams",), ("wall", "streams"), *(("user", name) for name in entries)]
        rests = [split(part, apart)[0] for part in self._parts]
        first, *others = (dict(leaves(rest)) for rest in rests)
        for other in others:
            for path in sorted({*first, *other}):
                if bytes(first.get(path, b"")) != bytes(other.get(path, b"")):
                    raise RestoreError(
                        f"{self._changed}: {path!r} is not the same on all saved ranks, so it cannot be "
                        f"given to other ranks; start with {self._saved}, or in another directory"
                    )
        return rests[0]

    def _random(self) -> Encoded:
        """Return the random state of this rank; nothing is drawn or changed here."""
        first = self._data.first[0]
        (now, again), (its_now, its_again) = random_parts(self._group.rank), random_parts(first)
        saved = self._decode_saved("rng", first)
        state, lines = saved[its_now], saved[its_again]
        if self._group.rank != first:
            state = portable(state)
            lines = {at: {**marked, "global": portable(marked["global"])} for at, marked in lines.items()}
        if self._group.data_rank:
            with isolated():
                self._rekey(self._group.data_rank)
                state = capture()
            # lines that run again before the resume point: as that rank entered, then keyed, too
            lines = {
                at: marked if at == "enter" else {**marked, "global": state} for at, marked in lines.items()
            }
        return encode({"rng": {now: state, again: lines}})

    def _rekey(self, rank: int) -> None:
        """Seed the global generators from the place in the run and a number: the same at each start."""
        progress = self._decode_saved("progress", 0)
        rekey(progress["seed"], rank, progress["step"])

    def _streams(self) -> Encoded:
        """Return the streams as rank 0 had them, each with what those of all parts of the data had."""
        branches = [self._decode_saved("streams", each) for each in self._data.first]
        words = [self._decode_saved("wall", each).get("streams", {}) for each in self._data.first]
        streams = {}
        for name, first in branches[0].items():
            of_ranks = [
                _place(branch[name], word.get(name, {})) for branch, word in zip(branches, words, strict=True)
            ]
            # a stream that nobody has bound since an earlier change is handed on with what it has
            streams[name] = {"of_ranks": of_ranks, **first}
        # data that splits itself has other contents on another number of ranks
        first_words = {name: {**word, "contents": None} for name, word in words[0].items()}
        return encode({"streams": streams, "wall": {"streams": first_words}})

    def _merge_entry(self, name: str) -> Encoded:
        function, rank = self._user.merges.get(name), self._group.rank
        if function is None:
            raise RestoreError(
                f"{self._changed}: the state entry {name!r} is each rank's own, and cannot be divided among "
                f"other ranks without a function; give state={{{name!r}: everstep.PerRank(..., "
                f"merge=function)}}, start with {self._saved}, or in another directory with init_from= and "
                "exclude=, which takes the other entries"
            )
        trees = [self._saved_entry(name, each) for each in range(self._checkpoint.ranks)]
        in_slot = isinstance(self._user.objects[name], Slot)
        states = [tree["value"] if in_slot else tree for tree in trees]
        kinds = sorted({type(state).__name__ for state in states})
        what = f"{self._changed}: merge of the state entry {name!r}"
        try:
            with isolated():  # what it draws is the same at each start
                self._rekey(1 + rank)  # 0 leaves the generators as they are
                merged = function(states, rank, self._group.size)
            tree = {**trees[0], "value": merged} if in_slot else merged
            encoded = encode({"user": {name: tree}})
            misfits = [text for texts in self._user.entries[name].check(tree) for text in texts]
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RestoreError(
                f"{what} has failed on rank {rank} ({why}); fix it, or start with {self._saved}"
            ) from error
        if misfits or type(merged).__name__ not in kinds:
            why = ", ".join(misfits) or f"a {type(merged).__name__} for a {' or '.join(kinds)}"
            raise RestoreError(
                f"{what} has returned {merged!r:.100} on rank {rank}, which does not fit the entry ({why}); "
                "return a state of the form that the saved states have"
            )
        return encoded

    def _saved_entry(self, name: str, rank: int) -> Any:
        """Decode one entry of the user as a rank has saved it; the others may be gigabytes."""
        trees = (self._parts[rank], self._checkpoint.common)
        node, arrays = next((_user(tree)[name], tree.arrays) for tree in trees if name in _user(tree))
        with reading(self._checkpoint.path, f"user/{name} of rank {rank}"):
            return decode(Encoded(node, arrays))

    def _decode_saved(self, branch: str, rank: int) -> Any:
        branch_tree = Encoded({branch: {}})
        for tree in (self._checkpoint.common, self._parts[rank]):
            node = (children(tree.structure) or {}).get(branch)
            if node is not None:
                branch_tree = merge(branch_tree, Encoded({branch: node}, tree.arrays))
        with reading(self._checkpoint.path, f"{branch} of rank {rank}"):
            return decode(branch_tree)[branch]


def _place(branch: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    place = {name: branch[name] for name in ("position", "last_end", "generators", "opened")}
    return place | {n: {**place[n], **words[n]} for n in ("position", "last_end") if words.get(n)}


def _own_entries(own: Encoded, common: Encoded) -> set[str]:
    """Names of the user's entries that are a rank's own as a whole; of others a rank may have some keys."""
    return set(_user(own)) - set(_user(common))


def _user(tree: Encoded) -> Mapping[str, Any]:
    return children((children(tree.structure) or {}).get("user")) or {}


def _on_current_devices(tree: Encoded) -> Encoded:
    """Leave out the numbers of devices: all ranks would load onto one rank's, and not each onto its own."""

    def placed(array: HostArray) -> HostArray:
        device = array.extra.get("device")
        if device is None:
            return array
        return array.with_extra({**array.extra, "device": device.partition(":")[0]})

    return Encoded(tree.structure, {name: placed(array) for name, array in tree.arrays.items()})


def _ranks(data: DataRanks) -> str:
    ranks = plural(len(data.of), "rank")
    return f"{ranks} with {plural(data.size, 'part')} of each batch" if data.shared else ranks


COMPARED = ("progress", "user", "streams")
"""Branches that are the same on all ranks.  Services: not all ranks run all of them."""
_BY_NAME = ("user", "streams")
"""Branches of which each entry is a part of its own."""
_NOTHING = Encoded({})


def digests(common: Encoded, own: Encoded = _NOTHING, together: Sequence[int] = ()) -> dict[str, str]:
    """Digest each part that all ranks, or some of them, must have in common: xxh3_64, 16 hex digits.

    The parts are "progress", "user/NAME", "streams/NAME"; of what ranks 0 and 2 alone have in common,
    "user/NAME#0,2", "rng#0,2".  `together` are the ranks that read the same part of the data as this one.
    """
    totals: dict[str, Any] = {}
    for part, path, data in _compared(common, own, together):
        total = totals.setdefault(part, xxhash.xxh3_64())
        total.update(f"{len(path)} {len(data)} {path}".encode())
        total.update(data)
    return {part: total.hexdigest() for part, total in totals.items()}


def leaf_digests(
    common: Encoded, part: str, own: Encoded = _NOTHING, together: Sequence[int] = ()
) -> dict[str, str]:
    """Digest each leaf of a part, by its path; a path that ends with "#" has the form of what is there."""
    compared = _compared(common, own, together)
    return {path: xxhash.xxh3_64_hexdigest(data) for name, path, data in compared if name == part}


def differing(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Find the first name whose digest is not the same on all ranks; None if there is no such name."""
    first = ranks[0]
    names = dict.fromkeys(name for digests in ranks for name in digests)
    return next((name for name in names if any(r.get(name) != first.get(name) for r in ranks)), None)


def difference(part: str, ranks: Sequence[Mapping[str, str]]) -> StateError:
    """Make the error for a part that differs, given its `leaf_digests` by rank."""
    branch_and_name, _, holders = part.partition("#")
    holding = list(map(int, holders.split(","))) if holders else list(range(len(ranks)))
    path = differing([dict(sorted(ranks[rank].items())) for rank in holding]) or part
    first = ranks[holding[0]].get(path)
    others = ", ".join(str(rank) for rank in holding if ranks[rank].get(path) != first)
    where = f"{unquote(path.partition('#')[0])!r} of rank {others}"
    whose = f"rank {holding[0]}" if holding[0] else "the writer"
    branch, _, name = branch_and_name.partition("/")
    what, remedy = _REMEDIES.get(branch, _REMEDIES["progress"])
    name = unquote(name)
    return StateError(
        f"{what.format(name)} is not the same on all ranks: {where} is not that of {whose}; "
        f"{remedy.format(name)}"
    )


_REMEDIES = {
    "user": (
        "state entry {0!r}",
        "declare what is each rank's own, as in state={{{0!r}: everstep.PerRank(...)}}; wrap a model that is "
        "trained, model = everstep.torch.parallel(model); what else changes must change equally on all ranks",
    ),
    "streams": ("stream {0!r}", "give all ranks the same data, and generators in equal states"),
    "progress": ("the place in the run", "run the same loop on all ranks, under the same conditions"),
    "rng": (
        "the random state of ranks that compute with the same samples (data_ranks=)",
        "let them draw equally many random numbers in each step: dropout of what these ranks divide needs "
        "parts of equal size, or a torch.Generator of its own",
    ),
}


def _compared(common: Encoded, own: Encoded, together: Sequence[int]) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, path, bytes) of what must be equal; the boxes that some ranks hold alike are apart."""
    structure: Any = common.structure
    compared = {branch: structure[branch] for branch in COMPARED if branch in structure}
    arrays = {name: _without_place(array) for name, array in common.arrays.items()}
    for path, data in leaves(Encoded(compared, arrays)):
        branch, _, rest = path.rstrip("#").partition("/")
        name = rest.partition("/")[0]
        yield f"{branch}/{name}" if branch in _BY_NAME and name else branch, path, data
    for name, array in sorted(common.arrays.items()):
        branch, _, rest = name.partition("/")
        if branch in _BY_NAME and array.region is not None and len(array.region.holders) > 1:
            holders = ",".join(map(str, array.region.holders))
            yield f"{branch}/{rest.partition('/')[0]}#{holders}", f"{name}#{holders}", array.data
    if len(together) > 1:
        holders, tree = ",".join(map(str, together)), cast(Any, own.structure)["rng"]
        key = next(name for name in tree if name.startswith("rank"))
        # a rank that sees all devices draws on its own alone: on the others the ranks' states differ
        state = portable(decode(Encoded(tree[key], own.arrays)))
        for path, data in leaves(encode({"rng": state})):
            yield f"rng#{holders}", f"{path}#{holders}", data


def _without_place(array: HostArray) -> HostArray:
    """Leave out what is each rank's own: the device, and of a large array the box that the rank holds."""
    extra = {key: fact for key, fact in array.extra.items() if key != "device"}
    if array.region is None:
        return array if len(extra) == len(array.extra) else array.with_extra(extra)
    return HostArray(array.dtype, array.region.whole, np.empty(0, np.uint8), array.backend, extra)
