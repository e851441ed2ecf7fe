"""The report: the page with its data as one HTML file, and a policy that forbids every connection."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from everstep.display.cells import in_line, json_safe, shown, with_leaves
from everstep.ui import STATIC
from everstep.ui.curves import CurveOptions, curves
from everstep.ui.one_run import MissingError, content_of, last_lines, one_run, summaries_of
from everstep.ui.runs_table import differing, plain, streams_of
from everstep.views.describe_run import Found, titles_of

BEGIN = b"<!doctype html>\n<!-- everstep report -->\n"
"""First bytes of each report."""
_MOST_POINTS, _FEWEST_POINTS = 100_000, 10
"""Most points of all lines together, about 8 MB, and the points that a line has even so."""

_SUMMARY_STEPS, _SUMMARY_BYTES, _LOG_BYTES = 10, 8_000_000, 50_000
"""Most steps of each summary, the newest; most bytes of all summaries of a run, and of its log, the end."""

_STYLES = ("vendor/uPlot.min.css", "charts.css", "style.css")
_LIBRARIES = ("preact.umd.js", "hooks.umd.js", "htm.umd.js", "uPlot.iife.min.js")
MODULES = (
    *("words", "preact", "dom", "looks", "icons", "axes", "drawing", "chart_frame", "charts", "histogram"),
    *("timeline", "api", "route", "parts", "chart_view", "runs", "compare", "run", "app"),
)
"""Modules of the page in the order in which they need each other."""

_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";$', re.MULTILINE)


def report_data(names: Sequence[str], entries: Sequence[Found], points: int = 1000) -> dict[str, Any]:
    """Return the answers of the page's addresses for some runs, as JSON; equal runs give equal data.

    `names`: as a person named the runs; `points`: most of a line, each with least, largest and last value.
    """
    runs = [one_run(run.database, run.facts) for run in entries]
    for at, (run, title) in enumerate(zip(runs, titles_of(names, entries), strict=True)):
        run |= {"id": str(at), "name": title, "heartbeat": None, "parent": None}
    pairs = {(each["stream"], name) for run in runs for each in run["streams"] for name in each["metrics"]}
    points = max(_FEWEST_POINTS, min(points, _MOST_POINTS // max(1, len(pairs) * len(runs))))

    def series(stream: str, metric: str) -> list[dict[str, Any]]:
        """Return a line for each run, with the time of each point."""
        options = CurveOptions(stream, metric, points=points, superseded=True, timed=True)
        lines = [curves(run.database, [run.facts], options)["series"][0] for run in entries]
        return [{**line, "run": str(at)} for at, line in enumerate(lines)]

    data = {
        "runs": runs,
        "settings": differing([plain({"config": run["facts"].get("config")}) for run in runs]),
        "streams": streams_of(pairs),
        "series": {"/".join(pair): series(*pair) for pair in sorted(pairs)},
        "summaries": [_summaries(run, one) for run, one in zip(entries, runs, strict=True)],
        "logs": [last_lines(run.database, run.facts, _LOG_BYTES) for run in entries],
    }
    as_json: dict[str, Any] = with_leaves(
        data,
        lambda leaf: [*map(json_safe, leaf.tolist())] if isinstance(leaf, np.ndarray) else json_safe(leaf),
    )
    return as_json


def _summaries(run: Found, page: dict[str, Any]) -> dict[str, str]:
    """Return "KIND NAME STEP" -> content; steps without content are taken out of what is shown of the run."""
    contents: dict[str, str] = {}
    room = _SUMMARY_BYTES
    for (name, kind), steps in summaries_of(run.database, run.id).items():
        for step in sorted(steps)[-_SUMMARY_STEPS:]:
            try:
                content, media = content_of(run.database, run.facts, steps[step])
            except MissingError:
                continue
            text = f"data:{media};base64,{base64.b64encode(content).decode()}"
            text = text if kind == "image" else content.decode()
            if (room := room - len(json.dumps(text))) >= 0:
                contents[f"{kind} {name} {step}"] = text
    for one in page["summaries"]:
        one["steps"] = [step for step in one["steps"] if f"{one['kind']} {one['name']} {step}" in contents]
    page["summaries"] = [one for one in page["summaries"] if one["steps"]]
    return contents


def report_page(data: Mapping[str, Any], title: str, version: str, created: float) -> bytes:
    """Write a report as the bytes of an HTML file; equal arguments give equal bytes.

    `created` (seconds since 1970) stands in one line, apart from the data.
    """
    style = "\n".join((STATIC / name).read_text() for name in _STYLES)
    scripts = [(STATIC / "vendor" / name).read_text() for name in _LIBRARIES]
    program = bundle(MODULES)
    time = datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds")
    heading, embedded = html.escape(in_line(title)), _embed(data)
    libraries = "\n".join(f"<script>{script}</script>" for script in scripts)
    page = f"""<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy([*scripts, program], style)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{heading}</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This report draws with JavaScript. Its data are the JSON in this file.</noscript>
<footer class="soft"><bdi>{heading}</bdi>, made by everstep {html.escape(version)} at
<time datetime="{time}">{time}</time>; SHA-256 of its data:
<code class="path" id="hash">{hashlib.sha256(embedded.encode()).hexdigest()}</code>
</footer>
<script type="application/json" id="data">{embedded}</script>
{libraries}
<script type="module">{program}</script>
</body>
</html>
"""
    return BEGIN + page.encode()


def _embed(data: Mapping[str, Any]) -> str:
    """Write JSON that no HTML parser takes for markup: ASCII, without the signs that begin or end a tag."""
    readable = with_leaves(data, lambda value: shown(value) if isinstance(value, str) else value)
    text = json.dumps(readable, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Iterable[str], style: str) -> str:
    """Allow these scripts and this style, by their hashes, and nothing else, no connection above all."""
    allowed = (f"script-src {' '.join(map(_hash, scripts))}", f"style-src {_hash(style)}")
    images = "img-src data:"  # pictures of the runs, which stand in the data
    return "; ".join(("default-src 'none'", *allowed, images, "base-uri 'none'", "form-action 'none'"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(names: Iterable[str]) -> str:
    """Turn modules of the page, in the order in which they need each other, into one script."""
    return "\n".join(("const modules = {};", *map(_module, names)))


def _module(name: str) -> str:
    """Turn a module of ours into an object of its exports, so that several fit into one script."""
    source = (STATIC / f"{name}.js").read_text()
    exports = ", ".join(_EXPORT.findall(source))
    body = _IMPORT.sub(r"const { \1 } = modules.\2;", _EXPORT.sub("", source))
    return f"modules.{name} = (() => {{\n{body}return {{ {exports} }};\n}})();"
