"""Commands that look at runs: `show`, `watch`, `compare`, `tag`, `note`, `audit`, `sql`, `report`, `ui`."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
import webbrowser
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep import labels
from everstep.cli.common_options import index_option, json_option, run_argument, runs_argument
from everstep.cli.find_run import find, find_all, open_index, ship_labels
from everstep.cli.output import note, print_json, print_table, say, status_of
from everstep.display.cells import cell, in_line, size
from everstep.durable import write_whole
from everstep.errors import ConfigError
from everstep.index.run_facts import FACTS, GONE
from everstep.untrusted_files import open_regular

if TYPE_CHECKING:
    from everstep.views.find_run import Found


def _section(title: str, rows: list[dict[str, Any]], columns: str) -> None:
    """Print a table below a title, if it has rows; `columns`: names with spaces between."""
    if rows:
        say(f"\n{title}")
        print_table(rows, columns.split(), indent="  ")


# ------------------------------------------------------------------------------------------- show


@click.command("show")
@run_argument
@click.option("--metric", metavar="NAME", help="Print the rows of this metric: NAME, or PHASE/NAME.")
@click.option("--phase", help="Only rows of this phase (head, step, tail, epoch, eval/STREAM).")
@index_option
@json_option
def show_command(run: str, metric: str | None, phase: str | None, index: str | None, as_json: bool) -> None:
    """Show one RUN: facts, starts, metrics, failures, best weights, checkpoints, evaluations elsewhere.

    The tracebacks, and the stacks of a hang, are in the files of RUN/failures.

    If RUN is a directory, only its journal is read: no index is needed, nothing is written.
    """
    from everstep.index.run_queries import metric_rows
    from everstep.views.describe_run import describe

    found = find(run, index)
    with found.database.read() as connection:
        if metric is not None:
            rows = [row._asdict() for row in metric_rows(connection, found.id, metric, phase)]
            if as_json:
                print_json(rows)
            else:
                print_table(rows, ("epoch", "step", "phase", "name", "value"))
            return
        described = describe(connection, found)
    if as_json:
        print_json(described)
    else:
        _print_run(described)


def _print_run(run: dict[str, Any]) -> None:
    from everstep.views.checkpoint_tables import BEST

    reason = in_line(f": {run['reason']}") if run["reason"] else ""
    say(f"{in_line(run['name'])}  {status_of(run)}{reason}")
    if run["status"] == GONE:
        say("  its directory is gone: everstep sync FOLDER finds the run in its new place")
    if run["diverged"] is not None:
        accept = f"everstep accept {run['name']} --divergence {run['diverged']}"
        say(f"  steps that were executed again gave other results: drill the script, or {accept}")
    facts = run["facts"]
    git = facts.get("git") or {}
    newest = next((one for one in reversed(run["checkpoints"]) if one["whole"]), None)
    mixed = newest is not None and not newest["one_fingerprint"]
    machines = " (computed on more than one kind of machine, number or layout of ranks)" if mixed else ""
    lines = {
        "directory": run["path"],
        "stands at": f"step {run['step']}" + (f", epoch {run['epoch']}" if run["epoch"] else ""),
        "digest": run["digest"] and f"{run['digest']}{machines}",
        "created": cell("created", run["created"]),
        "last seen": cell("heartbeat", run["heartbeat"]),
        "seed": run["seed"],
        "tags": " ".join(map(str, run["tags"])),
        "note": run["note"],
        "command": " ".join(map(str, facts.get("argv", []))),
        "code": " ".join(
            [str(git.get("commit") or "")[:12], git.get("branch") or "", "dirty" if git.get("dirty") else ""]
        ).strip(),
        "machine": f"{facts.get('host', '-')}, Python {facts.get('python', '-')}",
    }
    for name, value in lines.items():
        if value not in ("", None):
            say(f"  {name:10} {in_line(str(value))}")
    starts = []
    for start in run["segments"]:
        before = f"{start['ranks_before']} -> " if start["ranks_before"] else ""
        starts.append({**start, "ranks": f"{before}{start['ranks'] or '-'}"})
    ranks = "ranks" if any(start["ranks"] not in ("-", "1") for start in starts) else ""
    _section("starts", starts, f"number started from {ranks} status step verified reason")
    _section("metrics", run["metrics"], "phase name rows last step smallest largest best best_step")
    _section("failures", run["failures"], "segment rank kind step time what cause")
    _section("rollbacks", run["rollbacks"], "number step checkpoint quarantined reason")
    _section("checkpoints", run["checkpoints"], "name bytes created pinned next")
    _section("best weights", run["best"], " ".join(BEST))
    for one in run["evaluations"]:
        one["found"] = ", ".join(f"{name} {cell(name, value)}" for name, value in one["metrics"].items())
    _section("evaluations", run["evaluations"], "stream checkpoint step time found")


# --------------------------------------------------------------------------------- compare, audit

_WIDEST = 48
"""Most characters in a cell of the table; --json cuts nothing."""


@click.command("compare")
@runs_argument
@click.option("--all", "show_all", is_flag=True, help="Show facts that are equal, too.")
@index_option
@json_option
def compare_command(runs: tuple[str, ...], show_all: bool, index: str | None, as_json: bool) -> None:
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
    facts = compared.facts if show_all else compared.differing()
    if as_json:
        print_json({"runs": compared.runs, "facts": facts, "metrics": compared.metrics})
        return

    def shown(name: str, value: Any) -> Any:
        if value is None or (isinstance(value, int | float) and name not in FACTS):
            return value
        text = cell(name, value)
        return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"

    for heading, values in (
        ("facts" if show_all else "facts that differ", facts),
        ("metrics", compared.metrics),
    ):
        say(heading)
        rows = [{"": name, **{t: shown(name, v[t]) for t in compared.runs}} for name, v in values.items()]
        print_table(rows, ("", *compared.runs), indent="  ")
        say()
    if (verdict := compared.verdict()) is not None:
        say(verdict)


@click.command("audit")
@run_argument
@index_option
@json_option
def audit_command(run: str, index: str | None, as_json: bool) -> None:
    """Prove that RUN used every sample once in each pass, over all crashes; or name the first that was not.

    Read are the ledger that each start keeps of the batches in its complete steps, and the newest
    checkpoint.  The order of the samples is computed again for everstep.data.arrays and
    everstep.data.loader; of other data an audit knows batches, and not samples.

    Exit status: 0 "proven" or "not provable", 1 "wrong".
    """
    from everstep.proof.audit import audit

    found = audit(find(run, index).path)
    passes = [each._asdict() for each in found.passes]
    if as_json:
        print_json({**found._asdict(), "passes": passes})
    else:
        state = "finished" if found.finished else "not finished"
        starts = f"{found.starts} start{'s' * (found.starts != 1)}"
        say(f"{in_line(found.run)}: {found.verdict} ({state}, step {found.step:,}, {starts})")
        for kind, texts in (("wrong", found.problems), ("note", found.notes)):
            for text in texts:
                say(f"  {kind}: {in_line(text)}")
        for row, one in zip(passes, found.passes, strict=True):
            row["passes"] = one.passes
        _section("passes", passes, "stream passes verdict found")
    if found.verdict == "wrong":
        sys.exit(1)


# ------------------------------------------------------------------------------------- tag, note


@click.command("tag")
@run_argument
@click.argument("words", nargs=-1, metavar="[+]WORD...")
@click.option("--remove", "removed", multiple=True, metavar="WORD", help="Tag to take away; may be repeated.")
@index_option
def tag_command(run: str, words: tuple[str, ...], removed: tuple[str, ...], index: str | None) -> None:
    """Give RUN tags, and print all that it has.

    \b
      everstep tag digits baseline paper
      everstep tag digits --remove paper
      everstep runs tags=baseline --columns name,tags,note

    The run may be training meanwhile.
    """
    found = find(run, index)
    path = found.path
    own = labels.labels(path)
    if words:
        own = labels.add_tags(path, [word.removeprefix("+") for word in words])
    if removed:
        own = labels.remove_tags(path, list(removed))
    if words or removed:
        ship_labels(found, index)
    say(in_line(" ".join([f"{found.facts['name']}:", *own.tags])))


@click.command("note")
@run_argument
@click.argument("text", required=False)
@index_option
def note_command(run: str, text: str | None, index: str | None) -> None:
    """Give RUN a note in place of its old one, or print it.

    \b
      everstep note digits "with the old data; see lab book, page 12"
      everstep note digits ""

    An empty TEXT removes the note.  The run may be training meanwhile.
    """
    found = find(run, index)
    if text is None:
        say(labels.labels(found.path).note)
        return
    labels.set_note(found.path, text)
    ship_labels(found, index)


# -------------------------------------------------------------------------------------------- sql


@click.command("sql")
@click.argument("statement")
@index_option
@json_option
def sql_command(statement: str, index: str | None, as_json: bool) -> None:
    """Ask the index by a SELECT; nothing can be changed.

    \b
      everstep sql "select name, status, step from runs where kills > 0"
      everstep sql "select run, step, value from evaluations where name = 'valid_loss'"

    Tables: runs, segments (starts), facts (the record of a run's newest start, as JSON), series, metrics,
    checkpoints, events.  Views: valid_metrics has the values that no resume superseded, with the names of
    runs and metrics; evaluations those measured outside steps.  Times are seconds since 1970, NaN is NULL.
    """
    from sqlalchemy.exc import DBAPIError

    database = open_index(index)
    with database.read() as connection:
        try:
            found = connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
            rows = [dict(row) for row in found.mappings()] if found.returns_rows else None
        except DBAPIError as error:
            raise ConfigError(
                f"the index {database.name} does not take this statement: {error.orig}"
            ) from None
    if rows is None:
        raise ConfigError(f"{statement!r} returns no rows; give a SELECT")
    cells: list[dict[str, Any]] = [
        {name: f"{len(value)} bytes" if isinstance(value, bytes) else value for name, value in row.items()}
        for row in rows
    ]
    if as_json:
        print_json(cells)
    else:
        print_table(cells, list(found.keys()))


# ------------------------------------------------------------------------------------- report, ui


@click.command("report")
@runs_argument
@click.option(
    "-o",
    "--out",
    default="report.html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, which ends in .html; an earlier report there is replaced.",
)
@click.option("--title", help="Headline of the report; default: the names of the runs.")
@click.option(
    "--points",
    default=1000,
    type=click.IntRange(10, 100_000),
    help="Most points of a line; all lines together have at most 100,000.",
)
@index_option
def report_command(
    runs: tuple[str, ...], out: Path, title: str | None, points: int, index: str | None
) -> None:
    """Write RUNS as one HTML file, to send, to attach, to keep: charts, timeline, images, config, log.

    A browser opens the file from disk, and shows what `everstep ui` shows; nothing is loaded from a network
    or a server.  Equal runs give equal files, but for the time at its end (SOURCE_DATE_EPOCH sets this time).

    The file has what the runs recorded of themselves: also names of machines, paths, command lines, the log.
    """
    from importlib.metadata import version

    from everstep.ui.report import report_data, report_page

    _require_free(out)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch and not (epoch.isascii() and epoch.isdigit() and len(epoch) < 12):
        raise ConfigError(f"SOURCE_DATE_EPOCH is seconds since 1970, an integer; change {epoch!r}")
    # each run once; a run that is gone may have the path of another one
    once: dict[tuple[str, str], Found] = {
        (str(run.facts["path"]), str(run.facts["name"])): run for run in find_all(runs, index)
    }
    data = report_data([path for path, _ in once], [*once.values()], points)
    names = [run["name"] for run in data["runs"]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    headline = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names[:3])}{more}"
    now = float(epoch) if epoch else time.time()
    page = report_page(data, title or headline, version("everstep"), now)
    try:
        write_whole(out.absolute(), page, "report")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; give another file") from None
    say(f"{out}: {len(once)} run{'s' * (len(once) > 1)}, {size(len(page))}")


def _require_free(out: Path) -> None:
    """Refuse to replace a file that is not a report."""
    from everstep.ui.report import BEGIN

    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {str(out)!r}: give a file that ends in .html")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}; make it first")
    if os.path.lexists(out):
        try:
            with open_regular(out) as file:
                is_ours = file.read(len(BEGIN)) == BEGIN
        except OSError as error:
            raise ConfigError(f"{out} cannot be replaced ({error.strerror}); give another file") from None
        if not is_ours:
            raise ConfigError(f"{out} is not a report of everstep, and stays; give another file")


@click.command("ui")
@click.argument("index", metavar="[FOLDER|URL]", required=False)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1; default: a free one."
)
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="Further name that leads here, as of a proxy."
)
@click.option("--no-browser", is_flag=True, help="Print the link, and open no browser.")
def ui_command(index: str | None, port: int, hosts: tuple[str, ...], no_browser: bool) -> None:
    """Show runs in the browser: a page that is live, and only reads.

    FOLDER is a folder of runs, an index file or a run directory; URL is postgresql://USER@HOST/DATABASE.
    Default: the index that the other commands use here.

    The page is on 127.0.0.1.  The printed link opens it once, in one browser; then the next link is printed.
    From another machine: ssh -L PORT:127.0.0.1:PORT, and the same link.  Ctrl-C ends the page.
    """
    from everstep.ui.followed_index import followed
    from everstep.ui.server import serve

    # a browser in the terminal would take it away
    display = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    opens = sys.stdout.isatty() and display and not no_browser
    found = followed(index)
    with tempfile.TemporaryDirectory(prefix="everstep-link-") as folder:
        note(found.problems)
        names = [found.database.name]

        def tell(link: str) -> None:
            if names:
                say(f"{names.pop()}: {link}")
                if opens:
                    _open(link, Path(folder))
            else:
                say(f"a browser has used the link; for another browser: {link}")
            sys.stdout.flush()

        try:
            serve(found, port, hosts, tell)
        except KeyboardInterrupt:
            say()


def _open(link: str, folder: Path) -> None:
    """Open a link by a file: everybody on the machine can read the arguments of a browser."""
    page = folder / "open.html"
    page.touch(stat.S_IRUSR | stat.S_IWUSR)
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(link)}">')
    webbrowser.open(page.as_uri())
