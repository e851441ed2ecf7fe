"""Order of samples in batches, and the random key of each sample, as pure functions.

Everything here depends on (seed, purpose, pass, position) and on nothing else: not on workers, not
on prefetching, not on where a resume starts, not on the versions of Python or NumPy.  Positions are places
in the pass of all ranks together, so that the number of ranks decides who reads a sample, and no more.

- A *pass key* is xxh3 of the JSON string `["everstep", USE, SEED, PURPOSE, PASS]`.
- A *sample key* is xxh3 of the position (8 bytes, little endian), seeded with the pass key.
- A *permutation* is the stable argsort of raw 64-bit Philox output under a 128-bit pass key.  NumPy
  promises raw bit streams for ever; it may change `Generator.permutation`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from everstep.arguments import integer
from everstep.contracts.data import WHOLE, Share
from everstep.errors import DataError

Indices: TypeAlias = NDArray[np.int64]


def _text(use: str, seed: int, purpose: str, pass_index: int) -> bytes:
    return json.dumps(["everstep", use, seed, purpose, pass_index]).encode("ascii")


def pass_key(use: str, seed: int, purpose: str, pass_index: int) -> int:
    return xxhash.xxh3_64_intdigest(_text(use, seed, purpose, pass_index))


def key_at(key: int, position: int) -> int:
    return xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed=key)


def permutation(length: int, seed: int, purpose: str, pass_index: int) -> Indices:
    """Return the order of one shuffled pass: int64, shape (length,), each of 0 .. length-1 once."""
    key = xxhash.xxh3_128_intdigest(_text("order", seed, purpose, pass_index))
    return np.argsort(np.random.Philox(key=key).random_raw(length), kind="stable")


@dataclass(frozen=True)
class Sampling:
    """Choice and grouping of samples.

    Attributes:
        kind: kind of the stream, for its description.
        length: number of samples.
        batch_size: samples in a batch; the last batch may be smaller.
        seed: seed of the order and the keys; None takes the run's seed.
        keyed: the samples themselves depend on the seed (augmentation), even unshuffled.
        share: the part of each batch that this rank is handed.
    """

    kind: str
    length: int
    batch_size: int
    shuffle: bool
    seed: int | None
    drop_last: bool
    keyed: bool = False
    share: Share = WHOLE

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", integer("batch_size", self.batch_size))
        object.__setattr__(self, "seed", integer("seed", self.seed, None, none="for the run's seed"))
        if self.length == 0:
            raise DataError("the data holds 0 samples; give it at least one")
        if self.share.size > 1:
            self._require_parts()

    def _require_parts(self) -> None:
        whole, rest = self._counts()
        for count in [self.batch_size] * (whole > 0) + [rest] * (rest > 0):
            self.share.require(count, self.kind)
        if (whole or rest) and not self.batches:
            raise DataError(
                f"{self.kind}: no batch is left of {self.length} samples in batches of {self.batch_size} "
                f"among {self.share.size} ranks; give more samples and a batch size of {self.share.size} or "
                "more"
            )

    @property
    def batches(self) -> int:
        whole, rest = self._counts()
        return whole * (not self.share.leaves_out(self.batch_size)) + (
            rest > 0 and not self.share.leaves_out(rest)
        )

    def _counts(self) -> tuple[int, int]:
        """Return the number of full batches, and the samples of the last batch if it is smaller, else 0."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole, 0 if self.drop_last else rest

    @property
    def own_samples(self) -> int:
        """Number of samples that this rank is handed in a pass, padding included."""
        whole, rest = self._counts()
        sizes = ([self.batch_size] * whole + [rest])[: self.batches]
        return sum(len(self.share.of(size)[0]) for size in sizes)

    def weight(self, batch: int) -> float:
        return self.share.of(min(self.batch_size, self.length - batch * self.batch_size))[1]

    def describe(self, seed: int) -> dict[str, Any]:
        """Describe what decides the samples of each batch in a run of this seed."""
        seeded = self.shuffle or self.keyed
        return {
            "kind": self.kind,
            "length": self.length,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seed": self._seed(seed) if seeded else None,
        }

    def plan(self, purpose: str, pass_index: int, seed: int) -> Plan:
        return Plan(self, purpose, pass_index, self._seed(seed))

    def _seed(self, run_seed: int) -> int:
        return run_seed if self.seed is None else self.seed


class Plan:
    """Batches of one pass, by index, and this rank's part of each."""

    def __init__(self, sampling: Sampling, purpose: str, pass_index: int, seed: int) -> None:
        self.purpose, self.pass_index, self.seed = purpose, pass_index, seed
        self.batch_size, self.share = int(sampling.batch_size), sampling.share
        self._sampling = sampling
        self.order = (
            permutation(sampling.length, self.seed, purpose, pass_index)
            if sampling.shuffle
            else np.arange(sampling.length, dtype=np.int64)
        )

    def __len__(self) -> int:
        return self._sampling.batches

    def indices(self, batch: int) -> Indices:
        """Return the samples of a batch, of all ranks: int64, shape (batch size,), the last maybe shorter."""
        start = batch * self.batch_size
        return self.order[start : start + self.batch_size]

    def part(self, batch: int) -> slice:
        """Return the places in `order` of this rank's part of a batch."""
        start = batch * self.batch_size
        count = min(self.batch_size, len(self.order) - start)
        own, _ = self.share.of(count)
        return slice(start + own.start, start + own.stop)

    def used(self, batch: int) -> Indices:
        """Return the samples of a batch that some rank is handed: all, unless the rule is "drop"."""
        samples = self.indices(batch)
        dropped = len(samples) % self.share.size if self.share.uneven == "drop" else 0
        return samples[: len(samples) - dropped]

    def weight(self, batch: int) -> float:
        return self._sampling.weight(batch)
