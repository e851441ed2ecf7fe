"""Lines of the record: all metrics of a step, a tail or an epoch together, as tables and JSON have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from everstep.record import Event, Item

Line: TypeAlias = dict[str, Any]
"""Metrics of one step, tail, epoch ...: "step", "epoch" and "phase", then name -> value."""

KEYS = ("step", "epoch", "phase")
ORDER = {"head": 0, "step": 1, "tail": 2, "epoch": 4}
OTHER = 3


def lines(items: Iterable[Item]) -> Iterator[Line]:
    """Yield the lines of a journal's items, which must hold every row of the steps that they end with.

    Rows come by metric, so the rows of an epoch are held back until the epoch ends, or a checkpoint is
    announced: by then the rows of all completed steps have been written.
    """
    open_lines: dict[tuple[int, int, str, int], Line] = {}
    epoch = 0
    for item in items:
        if isinstance(item, Event):
            if item.kind == "checkpoint":
                yield from _in_order(open_lines)
            continue
        block = item.block
        if block.epoch != epoch:
            yield from _in_order(open_lines)
        epoch, phase, column = block.epoch, block.phase, column_name(block.name)
        rank = ORDER.get(phase, OTHER)
        for step, seq, value in zip(block.steps, block.seqs, block.values, strict=True):
            key = (step, rank, phase, seq)
            line = open_lines.get(key)
            if line is None:
                line = open_lines[key] = {"step": step, "epoch": epoch, "phase": phase}
            line[column] = value
    yield from _in_order(open_lines)


def _in_order(open_lines: dict[tuple[int, int, str, int], Line]) -> Iterator[Line]:
    """Yield and remove the lines in the order of the run, whenever the journal was written."""
    for key in sorted(open_lines):
        line = open_lines.pop(key)
        names = sorted(line.keys() - set(KEYS))
        yield {name: line[name] for name in (*KEYS, *names)}


def column_name(name: str) -> str:
    return f"metric/{name}" if name in KEYS else name
