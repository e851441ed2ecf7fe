"""Ledger of a run, as the journal has it: which batches of each stream went into complete steps.

An event of kind "progress" has under "ledger" for each stream, by its name:

    entries  what was handed out since the event before, as text: entries, divided by ";"
    entry    PASS FIRST END CHAIN OVER [LEFT_OUT,...]
             batches FIRST to END - 1 of a pass, both from 0; CHAIN after them, 16 hex digits, or "-" where
             it is not known; OVER is 1 where the pass has ended, else 0; the batches among them that no
             step got (quarantined, or left out by `checked`)
    from     PASS PLACE CHAIN with which the start continues; in the first event of a start
    data     description of the data, in the first event of a start and after a change
    of       what the chains are of, "samples" or "digests"; with `data`.  Absent where they are not known
    share    [number of parts, rule] of each batch, on several ranks; with `data`

A chain begins with each pass: xxh3_64 of the JSON ["ledger", STREAM, PASS].  Each batch adds xxh3_64 of its
sample numbers (of all ranks, as int64, little-endian), seeded with the chain so far; where the data does not
tell them, of the batch's digest (8 bytes, little-endian); a batch that no step got adds the text "left out".
So a chain depends on the batches and their order alone, however many starts, events or ranks they came in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import xxhash

Chain: TypeAlias = int | None
"""Hash of the batches of a pass so far; None where it is not known."""

link: Callable[[Any, int], int] = xxhash.xxh3_64_intdigest
"""(buffer of a batch, chain before it) -> chain after it."""

LEFT_OUT = b"left out"
"""What a chain takes of a batch that no step got."""

_ENTRY = re.compile(r"(\d{1,18}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{16}|-) ([01])(?: (\d{1,18}(?:,\d{1,18})*))?")
_PLACE = re.compile(r"(\d{1,18}) (\d{1,18}) ([0-9a-f]{16}|-)")


class Place(NamedTuple):
    """Place in the data: the batches of a pass that are accounted for, and their chain."""

    pass_index: int
    batches: int
    chain: Chain

    def __str__(self) -> str:
        return f"{self.pass_index} {self.batches} {_text(self.chain)}"


class Entry(NamedTuple):
    """Batches of one pass, `first` to `end` - 1, and the chain after them; no step got those `left_out`."""

    pass_index: int
    first: int
    end: int
    chain: Chain
    over: bool = False
    left_out: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.pass_index} {self.first} {self.end} {_text(self.chain)} {self.over:d}"
        return f"{text} {','.join(map(str, self.left_out))}" if self.left_out else text


def _text(chain: Chain) -> str:
    return "-" if chain is None else f"{chain:016x}"


def _chain(text: str) -> Chain:
    return None if text == "-" else int(text, 16)


def first_link(stream: str, pass_index: int) -> int:
    """Return the chain with which a pass begins."""
    return link(json.dumps(["ledger", stream, pass_index]).encode(), 0)


def unpack(text: object) -> Iterator[Entry]:
    """Yield the entries in a text; ValueError: it is no such text."""
    if not isinstance(text, str):
        raise ValueError(f"the entries are {text!r:.60}")
    for part in text.split(";") if text else ():
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise ValueError(f"an entry is {part!r:.60}")
        left_out = tuple(map(int, match[6].split(","))) if match[6] else ()
        yield Entry(int(match[1]), int(match[2]), int(match[3]), _chain(match[4]), match[5] == "1", left_out)


def unpack_place(text: object) -> Place:
    """Undo `str` of a place; ValueError: it is no such text."""
    match = _PLACE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"the place is {text!r:.60}")
    return Place(int(match[1]), int(match[2]), _chain(match[3]))
