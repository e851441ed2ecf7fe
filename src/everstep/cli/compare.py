"""`everstep compare`"""

from __future__ import annotations

from typing import Any

import click

from everstep.cli.common_options import complete_run, index_option, json_option
from everstep.cli.find_run import find_all
from everstep.cli.output import print_json, print_table, say
from everstep.display.cells import cell
from everstep.index.run_facts import FACTS

_WIDEST = 48
"""Most characters in a cell of the table; --json cuts nothing."""


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, shell_complete=complete_run)
@click.option("--all", "show_all", is_flag=True, help="Show facts that are equal, too.")
@index_option
@json_option
def command(runs: tuple[str, ...], show_all: bool, index: str | None, as_json: bool) -> None:
    """Compare RUNS: the facts that differ, and the last and best value of each metric.

    Facts include the config of the newest start (config.optimizer.lr), and two facts from the newest
    checkpoint: the options of optimizers and schedulers (optimizer.lr), and its digest.  Runs with equal
    digests have equal states, to the bit.  Long values are cut in the table; --json prints them whole.  The
    best value is known if the name of the metric says which direction is better (..._loss, ..._acc,
    ..._accuracy).
    """
    if len(runs) < 2:
        raise click.UsageError("give two runs or more")
    from everstep.views.compare_runs import compare

    compared = compare(runs, find_all(runs, index))
    titles = compared.runs
    facts = compared.facts if show_all else compared.differing()
    if as_json:
        print_json({"runs": titles, "facts": facts, "metrics": compared.metrics})
        return
    for heading, values in (("facts", facts), ("metrics", compared.metrics)):
        say(f"{heading}{' that differ' if heading == 'facts' and not show_all else ''}")
        rows = [{"": name, **{t: _shown(name, v[t]) for t in titles}} for name, v in values.items()]
        print_table(rows, ("", *titles), indent="  ")
        say()
    if (verdict := compared.verdict()) is not None:
        say(verdict)


def _shown(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and name not in FACTS):
        return value
    text = cell(name, value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
