"""Formats of statistics, progress and parameters: the log line and the summary tables."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from everstep.errors import ConfigError, nearest
from everstep.metrics.collector import is_wall
from everstep.metrics.statistics import Stats

Parameter: TypeAlias = tuple[str, tuple[int, ...], bool]
"""Name, shape, and whether the parameter is trained."""


def humanize_duration(seconds: float) -> str:
    """Format seconds as "1d 2h 3m 4.5s": four digits for the seconds, parts that are 0 left out."""
    if not math.isfinite(seconds):
        return str(seconds)
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds >= 60:
        seconds = round(seconds, 3)  # else 60.000000001 is 1m 1e-09s
    if float(f"{seconds % 60:.4g}") == 60.0:
        seconds = round(seconds)  # 1m 59.999s is 2m, not 1m 60s
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        whole, seconds = divmod(seconds, length)
        if whole:
            parts.append(f"{whole:.0f}{unit}")
    if seconds or not parts:
        parts.append(f"{seconds:.4g}s")
    return sign + " ".join(parts)


class MetricFormatter:
    """Format of metrics in a log line; a subclass overrides one of its two methods."""

    def format(self, name: str, stats: Stats, is_best: bool) -> str:
        """Format a metric, as in "valid loss: 0.2 (±0.01) (*)"; times are humanized, rates the last."""
        if re.search(r"(^|[_/ .])(lr|learning_rate)$", name):
            return f"{name.replace('_', ' ')}: {stats.last:.3g}"
        show = humanize_duration if is_wall(name) else "{:.6g}".format
        spread = f" (±{show(stats.std)})" if stats.count > 1 else ""
        return f"{name.replace('_', ' ')}: {show(stats.mean)}{spread}{' (*)' if is_best else ''}"

    def sort(self, names: Iterable[str]) -> list[str]:
        """Sort "loss" before other losses ("valid_loss"), then other metrics; times are last."""
        return sorted(names, key=lambda n: (is_wall(n), n != "loss", not n.endswith("loss"), n))


class TimesFirst(MetricFormatter):
    """Format of metrics with the times (`is_wall`) before the others, as in TFSnippet."""

    def sort(self, names: Iterable[str]) -> list[str]:
        """Times first, then alphabetical."""
        return sorted(names, key=lambda name: (not is_wall(name), name))


def checked_formatter(formatter: Any) -> MetricFormatter | None:
    """Return the argument `formatter` of a loop or a service, if it can be one."""
    if not isinstance(formatter, MetricFormatter | None):
        raise ConfigError(f"formatter={formatter!r}: give an everstep.metrics.MetricFormatter()")
    return formatter


def log_tag(epoch: int, max_epoch: int | None, step: int, max_step: int | None, eta: float | None) -> str:
    """Format the run's progress, as "[Epoch 2/10, Step 400/4000, ETA 1m 3.2s]", without None and epoch 0."""
    parts = [] if max_epoch == 1 or not epoch else [counter("Epoch", epoch, max_epoch)]
    parts.append(counter("Step", step, max_step))
    if eta is not None:
        parts.append(f"ETA {humanize_duration(eta)}")
    return f"[{', '.join(parts)}]"


def counter(word: str, value: int, limit: int | None) -> str:
    return f"{word} {value}" if limit is None else f"{word} {value}/{limit}"


def log_line(
    tag: str,
    stats: Mapping[str, Stats],
    best: Collection[str] = (),
    formatter: MetricFormatter | None = None,
    eta: float | None = None,
) -> str:
    formatter = formatter or MetricFormatter()
    items = [formatter.format(name, stats[name], name in best) for name in formatter.sort(stats)]
    if eta is not None:
        items.append(f"ETA {humanize_duration(eta)}")
    return " ".join(filter(None, (tag, "; ".join(items))))


def parameter_table(title: str, parameters: Sequence[Parameter], groups: Sequence[str] = ()) -> str:
    """Format the parameters with shape and size, in the order given; headings count trained parameters.

    `groups` are prefixes of names that end at a "." or "/" ("encoder", "model.head"), of which each has a
    table; the first that fits takes the parameter.  More than three frozen ones of a table are one line.
    """
    cells = {name: (name, str(tuple(shape)), f"{math.prod(shape):,}") for name, shape, _ in parameters}
    wide, wider, widest = (max(map(len, column)) for column in zip(*cells.values(), ("",) * 3, strict=True))

    def line(name: str, trainable: bool) -> str:
        name, shown, size = cells[name]
        return f"{name:<{wide}}  {shown:<{wider}}  {size:>{widest}}{'' if trainable else '  frozen'}"

    def count(rows: Iterable[Parameter], trained: bool = True) -> int:
        return sum(math.prod(shape) for _, shape, trainable in rows if trainable == trained)

    def heading(text: str, rows: Iterable[Parameter], rule: str) -> str:
        text = f"{text} ({count(rows):,} in total)"
        return f"{text}\n{rule * len(text)}"

    tables, left = [], list(parameters)
    for group in groups:
        if not any(_in_group(name, group) for name, *_ in parameters):
            depth = group.strip("./").count(".") + 1
            prefixes = {".".join(name.split(".")[:depth]) for name, *_ in parameters}
            raise ConfigError(f"group {group!r} names no parameter; {nearest(group, prefixes)}")
        tables.append((group, [each for each in left if _in_group(each[0], group)]))
        left = [each for each in left if not _in_group(each[0], group)]
    if left or not tables:
        tables.append(("Other Parameters" if groups else title, left))
    blocks = [heading(title, parameters, "=")] if groups else []
    for text, rows in tables:
        frozen = [name for name, _, trainable in rows if not trainable]
        lines = [line(name, trained) for name, _, trained in rows if trained or len(frozen) <= 3]
        if len(frozen) > 3:
            lines.append(f"and {len(frozen)} frozen: {', '.join(frozen[:3])}, ...")
        blocks.append("\n".join([heading(text, rows, "-"), *lines]))
    return "\n\n".join([*blocks, f"trainable: {count(parameters):,}; frozen: {count(parameters, False):,}"])


def _in_group(name: str, group: str) -> bool:
    rest = name.removeprefix(group)
    return rest != name and (not rest or rest[0] in "./" or group[-1] in "./")


def environment_table(facts: Mapping[str, str]) -> str:
    title, width = "Execution Environment", max(map(len, facts), default=0)
    lines = (f"{name:<{width}}  {value}" for name, value in facts.items())
    return "\n".join([title, "-" * len(title), *lines])
