"""Commands that look at runs: `show`, `watch`, `compare`, `audit`, `tag`, `note`, `report`, `ui`."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from everstep import labels
from everstep.cli import common as cli
from everstep.display.cells import cell, in_line, plural, size
from everstep.durable import write_whole
from everstep.errors import ConfigError, RunIndexError, nearest, some
from everstep.index import GONE
from everstep.untrusted_files import open_regular

_MOST_SETTINGS = 20
"""Most settings of a run that `show` prints; --json has all."""


def _section(title: str, rows: Sequence[Mapping[str, Any]], columns: str) -> None:
    """Print a table below a title, if it has rows; `columns`: names with spaces between."""
    if rows:
        cli.say(f"\n{title}")
        cli.print_table(rows, columns.split(), indent="  ")


@cli.command()
def show_command(
    run: str = cli.RUN,
    metric: str | None = cli.option("NAME", "Print rows of this metric: NAME or PHASE/NAME (step/loss)."),
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
) -> None:
    """Show one RUN: facts, starts, metrics, failures, best weights, checkpoints, evaluations elsewhere.

    If RUN is a directory, only its journal is read: no index is needed, nothing is written.
    """
    from everstep.index.filters import parse
    from everstep.index.query import ask
    from everstep.index.run_queries import metric_names
    from everstep.views.describe_run import describe

    entry = cli.find(run, index)
    with entry.database.read() as connection:
        if metric is None:
            described = describe(connection, entry)
            cli.print_json(described) if as_json else _print_run(described)
            return
        known = {"/".join(pair): pair for pair in metric_names(connection, entry.id)}
    pairs = [pair for name, pair in known.items() if metric in (name, pair[1])]
    if not pairs:
        hint = nearest(metric, {*known, *(name for _, name in known.values())})
        raise ConfigError(f"the run has no metric {metric!r}; {hint}")
    series = [{"phase": pair[0], "name": pair[1]} for pair in pairs]
    rows = ask(entry.database, "metrics", parse({"run": entry.facts["name"], "$or": series}))
    columns = ("epoch", "step", "phase", "name", "value")
    cli.print_json(rows) if as_json else cli.print_table(rows, columns)


def _print_run(run: dict[str, Any]) -> None:
    from everstep.views.checkpoint_tables import newest_whole
    from everstep.views.describe_run import tables_of

    reason = in_line(f": {run['reason']}") if run["reason"] else ""
    cli.say(f"{in_line(run['name'])}  {cli.status_of(run)}{reason}")
    if run["status"] == GONE:
        cli.say("  its directory is gone: everstep sync FOLDER finds the run in its new place")
    if run["diverged"] is not None:
        accept = f"everstep accept {run['name']} --divergence {run['diverged']}"
        cli.say(f"  steps that were executed again gave other results: drill the script, or {accept}")
    facts = run["facts"]
    git, parent = facts.get("git") or {}, facts.get("parent")
    code = [str(git.get("commit") or "")[:12], git.get("branch") or "", "dirty" if git.get("dirty") else ""]
    mixed = not newest_whole(run["checkpoints"]).get("one_fingerprint", True)
    machines = " (computed on more than one kind of machine, number or layout of ranks)" if mixed else ""
    lines = {
        "directory": run["path"],
        "stands at": f"step {run['step']}" + (f", epoch {run['epoch']}" if run["epoch"] else ""),
        "digest": run["digest"] and f"{run['digest']}{machines}",
        "created": cell("created", run["created"]),
        "last seen": cell("heartbeat", run["heartbeat"]),
        "duration": cell("duration", run["duration"]),
        "seed": run["seed"],
        "began from": f"{parent.get('run')}, {parent.get('path')}" if isinstance(parent, dict) else "",
        "tags": " ".join(map(str, run["tags"])),
        "note": run["note"],
        "command": " ".join(map(str, facts.get("argv", []))),
        "code": " ".join(code).strip(),
        "machine": f"{facts.get('host', '-')}, Python {facts.get('python', '-')}",
    }
    for name, value in lines.items():
        if value not in ("", None):
            cli.say(f"  {name:10} {in_line(str(value))}")
    for title, table in tables_of(run).items():
        most = _MOST_SETTINGS if title == "settings" else len(table)
        _section(title, table[:most], " ".join(table.columns))
        if len(table) > most:
            cli.say(f"  and {len(table) - most} more: everstep show {run['name']} --json")
        for start in table if title == "starts" else ():
            if start["badge"] in ("not verified", "diverged"):
                cli.say(in_line(f"  start {start['number']}: {start['how']}"))


@cli.command()
def watch_command(
    run: str = cli.RUN,
    once: bool = cli.flag("Print how the run stands now, and end."),
    every: float = cli.option(click.FloatRange(min=0.05), "Seconds between two looks.", default=1.0),
    index: str | None = cli.INDEX,
) -> None:
    """Follow RUN until it ends: status, step, time left, last and best metrics, the newest warning.

    Its journal and log are read, and nothing is written.  A terminal is drawn again at each look; elsewhere
    the state is printed when it has changed.

    Exit status: 0 if the run is finished (--once: or running), 1 if it ended otherwise, 130 after Ctrl-C.
    """
    from everstep.index.database import Database
    from everstep.ui.one_run import last_lines
    from everstep.views.describe_run import live_state

    run_dir, alone, printed = cli.find(run, index).path.absolute(), Database(None), ""
    while True:
        state = live_state(alone, run_dir)
        lines, goes_on = last_lines(alone, state)["text"].splitlines(), state["status"] == "running"
        if sys.stdout.isatty() or repr(state) != printed:
            warnings = [line for line in lines if " warning: " in line]
            _print_state(state, warnings[-1:], clear=not once)
        if once or not goes_on:
            sys.exit(not (goes_on or state["status"] == "finished"))
        printed = repr(state)
        time.sleep(every)


def _print_state(state: Mapping[str, Any], warnings: Sequence[str], *, clear: bool) -> None:
    if clear:
        click.clear()  # does nothing where there is no terminal
    reason = f": {state['reason']}" if state["reason"] else ""
    sign = f", last sign {cell('heartbeat', state['heartbeat'])}" if state["status"] == "running" else ""
    cli.say(in_line(f"{state['name']}  {cli.status_of(state)}{reason}{sign}"))
    place = [f"step {state['step']:,}", f"epoch {state['epoch']:,}" if state["epoch"] else ""]
    place.append("" if state["progress"] is None else f"{state['progress']:.0%}")
    place.append("" if state["eta"] is None else f"{timedelta(seconds=round(state['eta']))} left")
    cli.say(f"  {', '.join(filter(None, place))}")
    _section("metrics", state["metrics"], "phase name step last best best_step")
    cli.say("".join(f"\n  {in_line(line)}" for line in warnings))
    sys.stdout.flush()


@cli.command()
def compare_command(
    runs: tuple[str, ...] = cli.RUNS,
    show_all: bool = cli.flag("Show facts that are equal, and each package, too.", "--all"),
    index: str | None = cli.INDEX,
    as_json: bool = cli.JSON,
) -> None:
    """Compare RUNS by facts and newest checkpoints: what differs, and each metric's last and best value.

    Rows are not compared: everstep diverge finds the first step at which two runs differ.  A long value
    loses its middle here; --json has it whole.

    Facts include the config of the newest start (config.optimizer.lr), and two facts from the newest
    checkpoint: the options of optimizers and schedulers (optimizer.lr), and its digest.  Runs with equal
    digests have equal states, to the bit.  The best value is known if a service of the run (Best, EarlyStop)
    or the name of the metric (that ends in loss, acc or accuracy) says which direction is better.
    """
    if len(runs) < 2:
        raise click.UsageError("give two runs or more")
    from everstep.views.describe_run import comparison_tables, side_by_side

    comparison = side_by_side(runs, cli.find_all(runs, index))
    if as_json:
        facts = comparison.facts if show_all else comparison.differing()
        cli.print_json({"runs": comparison.runs, "facts": facts, "metrics": comparison.metrics})
        return
    for title, rows in comparison_tables(comparison, everything=show_all).items():
        cli.say(title)
        cli.print_table(rows, ("", *comparison.runs), indent="  ", widest=60)
        cli.say()
    if (verdict := comparison.verdict()) is not None:
        cli.say(verdict)


@cli.command()
def audit_command(run: str = cli.RUN, index: str | None = cli.INDEX, as_json: bool = cli.JSON) -> None:
    """Prove that RUN used every sample once in each pass, over all crashes; or name the first that was not.

    Read are the ledger that each start keeps of the batches in its complete steps, and the newest
    checkpoint.  The order of the samples is computed again for everstep.data.arrays and
    everstep.data.loader; of other data an audit knows batches, and not samples.

    Exit status: 0 "proven" or "not provable", 1 "wrong".
    """
    from everstep.proof.audit import audit

    report = audit(cli.find(run, index).path)
    if as_json:
        cli.print_json({**report._asdict(), "passes": [each._asdict() for each in report.passes]})
    else:
        state = "finished" if report.finished else "not finished"
        starts = plural(report.starts, "start")
        cli.say(f"{in_line(report.run)}: {report.verdict} ({state}, step {report.step:,}, {starts})")
        for kind, texts in (("wrong", report.problems), ("note", report.notes)):
            for text in texts:
                cli.say(f"  {kind}: {in_line(text)}")
        passes = [{**each._asdict(), "passes": each.passes} for each in report.passes]
        _section("passes", passes, "stream passes verdict found")
    if report.verdict == "wrong":
        sys.exit(1)


@cli.command()
def tag_command(
    run: str = cli.RUN,
    added: tuple[str, ...] = cli.argument("WORD...", nargs=-1),
    removed: tuple[str, ...] = cli.option("WORD", "Tag to take away; repeatable.", "--remove", multiple=True),
    index: str | None = cli.INDEX,
) -> None:
    """Give RUN tags, and print all that it has.

    \b
      everstep tag digits baseline paper
      everstep tag digits --remove paper
      everstep runs tags=baseline --columns name,tags,note

    The run may be training meanwhile.
    """
    entry = cli.find(run, index)
    if added:
        labels.add_tags(entry.path, added)
    if removed:
        labels.remove_tags(entry.path, removed)
    if added or removed:
        _ship_labels(entry.path, index)
    cli.say(in_line(" ".join([f"{entry.facts['name']}:", *labels.labels(entry.path).tags])))


def _ship_labels(run_dir: Path, index: str | None) -> None:
    from everstep.index.shipping import ship

    try:
        database = cli.index_with(run_dir, index)
        if database is not None and database.exists():
            cli.note(ship(database, run_dir).problems)
    except RunIndexError as error:
        cli.note([f"the index does not have them yet: {error}"])


@cli.command()
def note_command(
    run: str = cli.RUN, text: str | None = cli.argument(required=False), index: str | None = cli.INDEX
) -> None:
    """Give RUN a note in place of its old one, or print it.

    \b
      everstep note digits "with the old data; see lab book, page 12"
      everstep note digits ""

    An empty TEXT removes the note.  The run may be training meanwhile.
    """
    run_dir = cli.find(run, index).path
    if text is None:
        cli.say(labels.labels(run_dir).note)
    else:
        labels.set_note(run_dir, text)
        _ship_labels(run_dir, index)


@cli.command()
def report_command(
    runs: tuple[str, ...] = cli.RUNS,
    out: Path = cli.option(cli.PATH, "HTML file to write, or replace.", "-o --out", default="report.html"),
    title: str | None = cli.option(str, "Headline of the report; default: the names of the runs."),
    points: int = cli.option(click.IntRange(10, 100_000), "Most points of a line.", default=1000),
    index: str | None = cli.INDEX,
) -> None:
    """Write RUNS as one HTML file, to send, to attach, to keep: charts, timeline, images, config, log.

    A browser opens the file from disk, and shows what `everstep ui` shows; nothing is loaded from a network
    or a server.  Equal runs give equal files, but for the time at its end (SOURCE_DATE_EPOCH sets this time).

    The file has what the runs recorded of themselves: also names of machines, paths, command lines, the log.
    """

    from everstep.ui.report import BEGIN, report_data, report_page
    from everstep.version import __version__

    if out.suffix not in (".html", ".htm") or not out.parent.is_dir():
        raise ConfigError(f"--out {str(out)!r}: give a file that ends in .html, in a folder that exists")
    begin = b"" if os.path.lexists(out) else BEGIN
    with suppress(OSError), open_regular(out) as file:
        begin = file.read(len(BEGIN))
    if begin != BEGIN:
        raise ConfigError(f"{out} is not a report of everstep, and stays; give another file")
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or str(time.time())
    if not re.fullmatch(r"\d{1,10}(\.\d+)?", epoch):
        raise ConfigError(f"SOURCE_DATE_EPOCH={epoch!r}: give seconds since 1970, or unset it")
    # each run once; a run that is gone may have the path of another one
    once = {(str(run.facts["path"]), str(run.facts["name"])): run for run in cli.find_all(runs, index)}
    data = report_data([path for path, _ in once], [*once.values()], points)
    names = [run["name"] for run in data["runs"]]
    headline = names[0] if len(names) == 1 else f"{len(names)} runs: {some(names)}"
    page = report_page(data, title or headline, __version__, float(epoch))
    try:
        write_whole(out.absolute(), page, "report")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; give another file") from None
    cli.say(f"{out}: {plural(len(once), 'run')}, {size(len(page))}")


@cli.command()
def ui_command(
    index: str | None = cli.argument("[FOLDER|URL]", required=False),
    port: int = cli.option(click.IntRange(0, 65535), "Port on 127.0.0.1; default: a free one.", default=0),
    hosts: tuple[str, ...] = cli.option("NAME", "Further name, as of a proxy.", "--host", multiple=True),
) -> None:
    """Show runs in the browser: a page that is live, and only reads.

    FOLDER is a folder of runs, an index file or a run directory; URL is postgresql://USER@HOST/DATABASE.
    Default: the index that the other commands use here.

    The page is on 127.0.0.1.  The printed link opens it once, in one browser; then the next link is printed.
    From another machine: ssh -L PORT:127.0.0.1:PORT, and the same link.  Ctrl-C ends the page.
    """
    from everstep.ui.server import FollowedIndex, serve

    index_followed = FollowedIndex(index)
    cli.note(index_followed.problems)
    names = [index_followed.database.name]

    def tell(link: str) -> None:
        cli.say(f"{names.pop() if names else 'a browser has used the link; for another browser'}: {link}")
        sys.stdout.flush()

    try:
        serve(index_followed, port, hosts, tell)
    except KeyboardInterrupt:
        cli.say()
