"""`everstep compare`"""

from __future__ import annotations

from typing import Any

import click

from everstep.cli.checkpoint_tables import best_values, digest_of, options_of
from everstep.cli.common_options import complete_run, index_option, json_option
from everstep.cli.find_run import Found, find_all
from everstep.cli.output import cell, print_json, print_table, say
from everstep.index.run_queries import FACTS, starts, summaries
from everstep.record.trust import MARK

_NOT_COMPARED = {"pid", "name", "created", "heartbeat", MARK}
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
    found = find_all(runs, index)
    titles = _titles(runs, found)
    facts = _side_by_side(titles, [_facts(run) for run in found])
    digests, seeds = (set(facts[name].values()) for name in ("digest", "seed"))
    if not show_all:
        facts = {name: values for name, values in facts.items() if len(set(map(str, values.values()))) > 1}
    metrics = _side_by_side(titles, [_metrics(run) for run in found])
    if as_json:
        print_json({"runs": titles, "facts": facts, "metrics": metrics})
        return
    for heading, values in (("facts", facts), ("metrics", metrics)):
        say(f"{heading}{' that differ' if heading == 'facts' and not show_all else ''}")
        rows = [{"": name, **{t: _shown(name, v[t]) for t in titles}} for name, v in values.items()]
        print_table(rows, ("", *titles), indent="  ")
        say()
    if (digest := digests.pop()) is not None and not digests:
        say(f"the newest checkpoints are equal to the bit: digest {digest}")
    elif digests and len(seeds) > 1:
        say("the runs have different seeds: give both the same seed= to compare them to the bit")


def _titles(given: tuple[str, ...], found: list[Found]) -> list[str]:
    """Return the names of the runs, or the given strings where names are equal, as of copies of a run."""
    names = [str(run.facts["name"]) for run in found]
    return names if len(set(names)) == len(names) else list(given)


def _facts(run: Found) -> dict[str, Any]:
    with run.database.read() as connection:
        begun = starts(connection, run.id)
    told = {name: run.facts[name] for name in FACTS if name not in _NOT_COMPARED}
    told["starts"] = len(begun)
    told["digest"] = None if run.is_gone else digest_of(run.path)
    options = {} if run.is_gone else options_of(run.path)
    for name, value in _flat({**(begun[-1]["facts"] if begun else {}), **options}).items():
        if name not in _NOT_COMPARED:
            told.setdefault(name, value)
    return told


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {"git": {"commit": 1}} into {"git.commit": 1}, and lists of mappings likewise."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            value = {str(at): part for at, part in enumerate(value)}
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _metrics(run: Found) -> dict[str, Any]:
    """Return "PHASE/NAME last" and "PHASE/NAME best" -> value."""
    told: dict[str, Any] = {}
    with run.database.read() as connection:
        best = best_values(connection, run.id)
        for one in summaries(connection, run.id):
            told[f"{one.phase}/{one.name} last"] = one.last
            if (one.phase, one.name) in best:
                told[f"{one.phase}/{one.name} best"] = best[one.phase, one.name][0]
    return told


def _side_by_side(titles: list[str], each: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: {title: one.get(name) for title, one in zip(titles, each, strict=True)} for name in names}


def _shown(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and name not in FACTS):
        return value
    text = cell(name, value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
