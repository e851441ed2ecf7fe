"""Documents that a query returns: a list of dictionaries, which shows itself in a notebook."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from everstep.display.cells import flat
from everstep.errors import ConfigError

if TYPE_CHECKING:
    import pandas
    import polars

    from everstep.display.html import Chart

_MOST_CHARTS, _MOST_COLUMNS = 6, 20
"""Most charts below a table, and most of its columns."""
_LARGEST = 1 << 63
"""The integers that a column of a frame holds are less than this number, on both sides of 0."""


class Documents(list[dict[str, Any]]):
    """List of dictionaries that becomes a table: in a notebook, in pandas, in polars.

    Args:
        rows: the documents.
        columns: the fields that a table shows, and the first columns of a frame.
        metric: the metric whose values the documents have, where they do not name it.
    """

    def __init__(
        self, rows: Iterable[dict[str, Any]] = (), columns: Sequence[str] = (), metric: str | None = None
    ) -> None:
        super().__init__(rows)
        self.columns = tuple(dict.fromkeys(columns))
        self.metric = metric

    @overload
    def __getitem__(self, at: SupportsIndex) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, at: slice) -> Documents: ...

    def __getitem__(self, at: SupportsIndex | slice) -> dict[str, Any] | Documents:
        if isinstance(at, slice):
            return Documents(super().__getitem__(at), self.columns, self.metric)
        return super().__getitem__(at)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a frame with a row per document, and a column per value.

        A value inside a dictionary has the column that queries name: "config.optimizer.lr".  Lists stay
        lists; a value that a document lacks is missing.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas needs pandas, which is not installed: pip install pandas") from None
        return pandas.DataFrame(self._table())

    def to_polars(self) -> polars.DataFrame:
        """Return a frame as `to_pandas` does; lists, and columns with several kinds of values, as JSON.

        Raises:
            ConfigError: polars is not installed.
        """
        try:
            import polars
        except ImportError:
            raise ConfigError("to_polars needs polars, which is not installed: pip install polars") from None
        return polars.DataFrame({name: _of_one_kind(values) for name, values in self._table().items()})

    def _table(self) -> dict[str, list[Any]]:
        """Return column -> a value per document, None where a document lacks the field."""
        rows = [dict(flat(row)) for row in self]
        found = dict.fromkeys(name for row in rows for name in row)
        first = [name for name in self.columns if name in found or not rows]
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys((*first, *found))}

    def _repr_html_(self) -> str:
        from everstep.display.html import charts, table

        if not self:
            return "<p>no documents</p>"
        rows = [dict(flat(row)) for row in self]
        there = dict.fromkeys(name for row in rows for name in row)
        columns = [name for name in self.columns if name in there] or list(there)
        left_out = columns[_MOST_COLUMNS:]
        more = f"<p>... and {len(left_out)} more columns</p>" if left_out else ""
        return charts(_charts(self, self.metric)) + table(rows, columns[:_MOST_COLUMNS]) + more


def _of_one_kind(values: list[Any]) -> list[Any]:
    """Return a column's values as one kind: integers, floats, truths or strings; else each as JSON."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and kinds <= {bool, float, str}:
        return values
    if kinds == {int} and all(-_LARGEST <= value < _LARGEST for value in values if value is not None):
        return values
    return [value if value is None else json.dumps(value, ensure_ascii=False) for value in values]


def _charts(rows: Sequence[Mapping[str, Any]], metric: str | None) -> list[Chart]:
    """Draw the values of metrics over the steps: a chart for each metric, a line for each run.

    Args:
        metric: the metric of rows that do not name theirs; None: they may be of several, and are not drawn.
    """
    from everstep.display.html import Chart, Line

    lines: dict[str, dict[str, Line]] = defaultdict(dict)
    for row in rows:
        if not isinstance(row.get("value"), int | float) or not isinstance(row.get("step"), int):
            return []
        named = row.get("name", metric)
        if named is None:
            return []
        title = "/".join(map(str, (row["phase"], named) if "phase" in row else (named,)))
        run = str(row.get("run", title))
        line = lines[title].setdefault(run, Line(run, [], []))
        line.x.append(row["step"])
        line.y.append(row["value"])
    return [Chart(title, list(each.values())) for title, each in lines.items()][:_MOST_CHARTS]
