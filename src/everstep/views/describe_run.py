"""A run that is found, and everything about it except its rows: `everstep.runs.show` and `.compare`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection, select

from everstep.display.cells import cell, flat, in_line, plural
from everstep.display.html import Chart, charts_of, notebook_html
from everstep.errors import CheckpointError, ConfigError
from everstep.index import FACTS, GONE
from everstep.index.database import Database
from everstep.index.filters import parse
from everstep.index.location import id_at, is_run
from everstep.index.query import Documents, ask, open_index
from everstep.index.run_queries import find_run, last_values_of, newest_facts, rollbacks, starts, summaries
from everstep.index.shipping import ship
from everstep.index.sql_tables import events, stored
from everstep.labels import NAMES as LABELS
from everstep.record import evaluations, failures
from everstep.record.trust import MARK
from everstep.redaction import without_credentials
from everstep.timing import progress
from everstep.views.checkpoint_tables import BEST, asked_for, best_weights, checkpoints_of, newest_whole

_NOT_COMPARED = {"pid", "name", "created", "heartbeat", MARK}
"""Facts that always differ, and tell nobody anything."""

_MOST_DRAWN = 100_000
"""Values from which on a notebook shows no charts: they would fill the memory."""

SideBySide: TypeAlias = dict[str, dict[str, Any]]
"""Name of a fact -> title of a run -> value; None where a run lacks the fact."""


class Found(NamedTuple):
    """A run, and the index that has it: `facts` is its row in the table `runs`."""

    database: Database
    facts: dict[str, Any]

    @property
    def id(self) -> int:
        """Key of the run in the index."""
        return int(self.facts["id"])

    @property
    def path(self) -> Path:
        """Directory of the run."""
        path, name = self.facts["path"], self.facts["name"]
        other = id_at(path)
        if other not in (None, name):
            raise ConfigError(f"the directory of {name} is gone: {path} is now the run {other}; give {other}")
        if self.is_gone:
            raise ConfigError(f"the directory of {name}, {path}, is gone; give another run")
        return Path(path)

    @property
    def is_gone(self) -> bool:
        return bool(self.facts["status"] == GONE)


def find_all(
    texts: Sequence[str], index: str | None, note: Callable[[list[str]], object], *, exactly: bool = False
) -> list[Found]:
    """Find runs by directory (read from the journal alone) or by name in the index; `note` takes faults."""
    names = [text for text in texts if not _is_run_dir(text)]
    database, problems = open_index(index) if names else (None, [])
    note(problems)
    entries = []
    for text in texts:
        home, name = database, text
        if home is None or text not in names:
            home, name = Database(None), str(Path(text).absolute())
            note(ship(home, Path(name)).problems)
        with home.read() as connection:
            run = find_run(connection, name, exactly=exactly, place=home.name)
        entries.append(Found(home, run))
    return entries


def _is_run_dir(text: str) -> bool:
    folder = Path(text)
    if folder.suffix in (".yaml", ".yml") and folder.is_file():
        raise ConfigError(f"{text} is a config file; give a run, or train it: everstep train {text}")
    if not is_run(folder) and folder.is_dir() and os.sep in text:
        raise ConfigError(f"{text} is not a run directory: it has no run.json; give a run directory")
    return is_run(folder)


class Compared(NamedTuple):
    """Runs side by side: titles, facts (`config.optimizer.lr`), last and best metrics; where they are."""

    runs: list[str]
    facts: SideBySide
    metrics: SideBySide
    found: Sequence[Found]

    def differing(self) -> SideBySide:
        """Return the facts that differ."""
        return {name: each for name, each in self.facts.items() if len(set(map(str, each.values()))) > 1}

    def folded(self) -> SideBySide:
        """Return the facts that differ, many packages in one line: those first that decide about numbers."""
        facts = self.differing()
        names = [name.removeprefix("packages.") for name in facts if name.startswith("packages.")]
        if len(names) > 3:
            names.sort(key=lambda name: name not in ("torch", "numpy", "everstep"))
            rows = {name: facts.pop(f"packages.{name}") for name in names}
            texts = {run: [f"{n} {rows[n][run]}" for n in names if rows[n][run]][:3] for run in self.runs}
            facts[f"packages ({len(names)} differ: --all)"] = {run: ", ".join(texts[run]) for run in texts}
        return facts

    def verdict(self) -> str | None:
        """Say whether the newest checkpoints are equal to the bit, or why they cannot be; else None."""
        digests, seeds = (set(self.facts[name].values()) for name in ("digest", "seed"))
        if len(digests) == 1 and None not in digests:
            return f"the newest checkpoints are equal to the bit: digest {digests.pop()}"
        if len(digests) > 1 and len(seeds) > 1:
            return "the runs have different seeds: give both the same seed= to compare them to the bit"
        return None

    def __repr__(self) -> str:
        return f"<{', '.join(map(in_line, self.runs))}: {len(self.differing())} facts differ>"

    def _repr_html_(self) -> str:
        sections = [(title, rows, ("", *self.runs)) for title, rows in comparison_tables(self).items()]
        return notebook_html(self.verdict() or repr(self), _charts(self.found, self.runs), sections)


def comparison_tables(compared: Compared, *, everything: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Return rows by the title of their table: of the facts that differ, or all, and of the metrics."""
    facts = compared.facts if everything else compared.folded()
    texts = {n: {run: cell(n, v[run]) for run in v} if n in FACTS else v for n, v in facts.items()}
    tables = {"facts" if everything else "facts that differ": texts, "metrics": compared.metrics}
    return {title: [{"": name, **each[name]} for name in each] for title, each in tables.items()}


def side_by_side(texts: Sequence[str], runs: list[Found]) -> Compared:
    titles = titles_of(texts, runs)
    facts, metrics = zip(*map(_facts_and_metrics, runs), strict=True)

    def by_name(each: Sequence[dict[str, Any]]) -> SideBySide:
        names = dict.fromkeys(name for one in each for name in one)
        return {name: {t: one.get(name) for t, one in zip(titles, each, strict=True)} for name in names}

    return Compared(titles, by_name(facts), by_name(metrics), runs)


def _charts(runs: Sequence[Found], titles: Sequence[str]) -> list[Chart]:
    """Draw what runs measured outside steps, or, without that, in steps: a line for each run."""

    def rows(collection: str) -> list[dict[str, Any]]:
        points: list[dict[str, Any]] = []
        for run, title in zip(runs, titles, strict=True):
            where = parse({"run": run.facts["name"], "wall": False})
            found = ask(run.database, collection, where, limit=_MOST_DRAWN - len(points))
            points += [{**row, "run": title} for row in found]
            if len(points) == _MOST_DRAWN:
                break
        return points

    points = rows("evaluations") or rows("metrics")
    return charts_of(points) if len(points) < _MOST_DRAWN else []


def titles_of(texts: Sequence[str], runs: Sequence[Found]) -> list[str]:
    """Return the names of the runs, or the given strings where names are equal, as of copies of a run."""
    names = [str(run.facts["name"]) for run in runs]
    return names if len(set(names)) == len(names) else list(texts)


def _facts_and_metrics(run: Found) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return name -> value of a run's facts, and "PHASE/NAME last" and "PHASE/NAME best" -> value."""
    with run.database.read() as connection:
        record = without_credentials(newest_facts(connection, [run.id]).get(run.id, {}))
        results = summaries(connection, run.id)
    facts = {name: run.facts[name] for name in FACTS}
    newest = {} if run.is_gone else newest_whole(asked_for(checkpoints_of(run.path)))
    facts["digest"] = newest.get("digest")
    facts = {**_flat({**record, **newest.get("options", {})}), **facts}
    metrics = {}
    for one in results:
        for kind in ("last", "best"):
            if one[kind] is not None:
                metrics[f"{one['phase']}/{one['name']} {kind}"] = one[kind]
    return {name: value for name, value in facts.items() if name not in _NOT_COMPARED}, metrics


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Map each path in a tree to its value, also in lists of mappings."""
    values: dict[str, Any] = {}
    for path, value in flat(tree):
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            values |= _flat({f"{path}.{at}": part for at, part in enumerate(value)})
        else:
            values[path] = value
    return values


_FACTS = ("reason", "step", "epoch", "created", "heartbeat", "duration", "seed", "digest", "path")
_COLUMNS = {
    "settings": "name value",
    "starts": "number started duration from ranks status step verified reason",
    "metrics": "phase name rows last step smallest largest best best_step",
    "failures": "segment rank kind step time what cause",
    "rollbacks": "number step checkpoint quarantined reason",
    "checkpoints": "name bytes created pinned next",
    "best weights": " ".join(BEST),
    "evaluations": "stream checkpoint step time found",
}
"""Title of each table of a run -> names of its columns."""


def describe(connection: Connection, run: Found, *, steps: bool = True) -> dict[str, Any]:
    """Return everything about a run except its rows, as JSON; a summary of `steps` takes time per row."""
    record = without_credentials(newest_facts(connection, [run.id]).get(run.id, {}))
    problems = stored(run.facts["problems"], list)
    checkpoints, best = [], []
    exists = not run.is_gone and is_run(run.path)
    if exists:
        try:
            checkpoints, best = asked_for(checkpoints_of(run.path)), best_weights(run.path)
        except CheckpointError as error:
            problems.append(str(error))
    return {
        **{name: run.facts[name] for name in FACTS},
        "facts": {name: value for name, value in record.items() if name not in LABELS},
        "tags": record.get("tags", []),
        "note": record.get("note", ""),
        "segments": starts(connection, run.id),
        "rollbacks": [
            one._asdict()
            | {"batches": [each._asdict() for each in one.batches], "quarantined": len(one.batches)}
            for one in rollbacks(connection, run.id)
        ],
        "digest": newest_whole(checkpoints).get("digest"),
        "checkpoints": checkpoints,
        "best": best,
        "evaluations": [one._asdict() for one in evaluations(run.path)] if exists else [],
        "failures": [one._asdict() for one in failures(run.path)] if exists else [],
        "problems": problems,
        "metrics": summaries(connection, run.id, steps=steps),
    }


def tables_of(run: Mapping[str, Any]) -> dict[str, Documents]:
    """Return the tables of what `describe` returned, by title, as a terminal and a notebook show them."""
    config = flat(run["facts"].get("config") or {})
    segments = [dict(start) for start in run["segments"]]
    for start in segments:
        earlier = f"{start['ranks_before']} -> " if start["ranks_before"] else ""
        start["ranks"] = f"{earlier}{start['ranks'] or '-'}"
    columns = {title: names.split() for title, names in _COLUMNS.items()}
    if all(start["ranks"] in ("-", "1") for start in segments):
        columns["starts"].remove("ranks")
    rows = {
        "settings": [{"name": name, "value": value} for name, value in config],
        "starts": segments,
        "best weights": run["best"],
        "evaluations": [
            one
            | {"found": ", ".join(f"{name} {cell(name, value)}" for name, value in one["metrics"].items())}
            for one in run["evaluations"]
        ],
    }
    return {title: Documents(rows.get(title, run.get(title, ())), columns[title]) for title in columns}


def live_state(database: Database, run_dir: Path) -> dict[str, Any]:
    """Bring an index up to date with the journal of a run; return the run's row, and
    "progress": the part that is done, 0 to 1; None without a limit,
    "eta": the seconds that are left at the pace of this start; None if nobody knows,
    "metrics": the last value of each, and the best of those that a `Best` watches or that were measured
        outside steps.
    """
    ship(database, run_dir)
    with database.read() as connection:
        run = find_run(connection, str(run_dir))
        key = run["id"]
        limits = newest_facts(connection, [key], ["limits"]).get(key, {}).get("limits") or {}
        trained = [start for start in starts(connection, key) if start["badge"] is not None]
        metrics, last = summaries(connection, key, steps=False), last_values_of(connection, [key])
        epochs = select(events.c.data).where(events.c.run == key, events.c.kind == "times")
        epochs = epochs.order_by(events.c.segment.desc(), events.c.offset.desc()).limit(1)
        times = stored(connection.execute(epochs).scalar() or '{"epoch": 1}')
    fraction = progress(
        *(run["step"], run["epoch"], limits.get("max_step"), limits.get("max_epoch")),
        steps_per_epoch=times.get("steps", [0])[-1] / times["epoch"],
        within_epoch=True,
    )
    eta = None
    for start in trained[-1:]:
        steps = run["step"] - start["from_step"]
        if run["status"] == "running" and fraction and steps > 0:
            eta = (start["last"] - start["started"]) / steps * (run["step"] / fraction - run["step"])
    best = {(one["phase"], one["name"]): one for one in metrics if one["phase"] == "step"}
    metrics = [one for one in metrics if one["phase"] != "step"]
    for (phase, name), value in last.get(key, {}).items():
        if phase in ("step", "head"):
            metrics.append(best.get((phase, name), {"phase": phase, "name": name}) | {"last": value})
    return {**run, "progress": fraction, "eta": eta, "metrics": metrics}


class ShownRun:
    """Everything about a run, as `everstep show` prints it; a notebook shows tables and charts.

    Attributes:
        facts: the content of `everstep show RUN --json`.
        starts, metrics, checkpoints: parts of it, as results of a query: lists that become frames.
    """

    def __init__(self, facts: dict[str, Any], run: Found) -> None:
        self.facts, self._run, self._tables = facts, run, tables_of(facts)
        self.starts = Documents(facts["segments"], self._tables["starts"].columns, ("started", "last"))
        self.metrics, self.checkpoints = self._tables["metrics"], self._tables["checkpoints"]

    def __repr__(self) -> str:
        facts = self.facts
        diverged = "" if facts["diverged"] is None else f", diverged at {facts['diverged']}"
        return (
            f"<run {in_line(facts['name'])}: {facts['status']}{diverged}, step {facts['step']}, "
            f"{plural(len(self.starts), 'start')}>"
        )

    def _repr_html_(self) -> str:
        facts = Documents([{"": n, "value": cell(n, self.facts[n])} for n in _FACTS], ("", "value"))
        charts = _charts([self._run], [self.facts["name"]])
        tables = {"": facts, **self._tables}.items()
        return notebook_html(repr(self), charts, [(title, each, each.columns) for title, each in tables])


def show(run: str | os.PathLike[str], *, index: str | os.PathLike[str] | None = None) -> ShownRun:
    """Return everything about a run except its rows.

    Args:
        run: a run directory, of which only the journal is read, or a name in the index; the beginning of a
            name is enough.
        index: as in `everstep.query`.

    Warns:
        RuntimeWarning: a journal is damaged or the index could not be brought up to date.
    """
    (entry,) = _find([run], index)
    with entry.database.read() as connection:
        return ShownRun(describe(connection, entry), entry)


def compare(*runs: str | os.PathLike[str], index: str | os.PathLike[str] | None = None) -> Compared:
    """Return the facts and metrics of two or more runs, side by side.

    Args:
        runs, index: as in `everstep.runs.show`.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs two runs or more, not {len(runs)}; give their directories or names")
    return side_by_side([os.fspath(run) for run in runs], _find(runs, index))


def _find(runs: Sequence[str | os.PathLike[str]], index: str | os.PathLike[str] | None) -> list[Found]:
    problems: list[str] = []
    place = None if index is None else os.fspath(index)
    entries = find_all([os.fspath(run) for run in runs], place, problems.extend)
    for problem in problems:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
    return entries
