"""`everstep plot`"""

from __future__ import annotations

import math
import shutil
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import click

from everstep.cli.common_options import complete_run, index_option
from everstep.cli.find_run import find_all
from everstep.display.cells import in_line
from everstep.display.html import round_numbers
from everstep.errors import ConfigError

_MARKERS = "●+xo*#"
_COLORS = ("blue", "orange", "green", "red", "magenta", "cyan")


class Line(NamedTuple):
    title: str
    steps: list[int]
    values: list[float]


@click.command("plot")
@click.argument(
    "runs_and_metric", nargs=-1, required=True, metavar="RUN... METRIC", shell_complete=complete_run
)
@click.option(
    "--phase", help="Phase of the metric (head, step, tail, epoch, eval/STREAM), if it has several."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A .png or .svg file to write; default: draw in the terminal.",
)
@index_option
def command(runs_and_metric: tuple[str, ...], phase: str | None, out: Path | None, index: str | None) -> None:
    """Plot a METRIC of one or more RUNs over the steps, in the terminal or to a file."""
    *runs, metric = runs_and_metric
    if not runs:
        raise click.UsageError("give at least one RUN, and the METRIC after it")
    if out is not None and out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out {str(out)!r}: give a file that ends in .png or .svg")
    from everstep.index.run_queries import metric_rows

    lines = []
    for found in find_all(runs, index):
        with found.database.read() as connection:
            rows = metric_rows(connection, found.id, metric, phase)
        rows = [row for row in rows if row.phase == rows[0].phase and math.isfinite(row.value)]
        title = str(found.facts["name"])
        lines.append(Line(title, [row.step for row in rows], [row.value for row in rows]))
    if not any(line.steps for line in lines):
        raise ConfigError(
            f"{metric!r} has no finite value; choose another metric: everstep show RUN lists them"
        )
    if out is None:
        wide, high = shutil.get_terminal_size((100, 30))
        # without colours where the output is not a terminal
        click.echo(drawn(lines, metric, min(wide, 160), max(10, min(high - 2 - len(lines), 30))))
    else:
        _write(lines, metric, out)
        click.echo(str(out))


def drawn(lines: list[Line], metric: str, columns: int, rows: int) -> str:
    """Draw the values over the steps as characters, with a line for each run below."""
    import plotext

    plotext.clear_figure()
    plotext.plotsize(columns, rows)
    plotext.theme("clear")
    plotext.title(metric)
    plotext.xlabel("step")
    legend = []  # below: plotext would draw it over the values
    for line, marker, color in zip(lines, cycle(_MARKERS), cycle(_COLORS), strict=False):
        if line.steps:
            chosen = "braille" if len(lines) == 1 else marker
            plotext.plot(line.steps, line.values, marker=chosen, color=color)
        told = in_line(line.title) + ("" if line.steps else ": no value")
        legend.append(f"{plotext.colorize(marker, color)} {told}")
    steps = [step for line in lines for step in line.steps]
    if steps:
        ticks = [round(tick) for tick in round_numbers(min(steps), max(steps)) if tick == round(tick)]
        plotext.xticks(ticks, list(map(str, ticks)))
    return "\n".join([plotext.build().rstrip("\n"), *legend])


def _write(lines: list[Line], metric: str, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for line in lines:
        axes.plot(line.steps, line.values, label=line.title, marker="." if len(line.steps) < 50 else "")
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)
