"""The report as one HTML file: scripts, style and data inside, and a policy that forbids every connection."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from everstep.display.cells import in_line, shown, with_leaves

STATIC = Path(__file__).parent / "static"
"""Folder of the page's files."""

BEGIN = b"<!doctype html>\n<!-- everstep report -->\n"
"""First bytes of each report."""

_STYLES = ("vendor/uPlot.min.css", "charts.css", "report.css")
_LIBRARY = "vendor/uPlot.iife.min.js"
MODULES = (
    *("words", "dom", "looks", "icons", "axes", "drawing", "chart_frame", "charts", "histogram"),
    *("timeline_picture", "timeline", "sha256", "report_tables", "report_charts", "report"),
)
"""Modules in the order in which they need each other."""

_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";$', re.MULTILINE)


def report_page(data: Mapping[str, Any], title: str, version: str, made: float) -> tuple[bytes, str]:
    """Write a report as the bytes of an HTML file; also return the SHA-256 of its data, which it verifies.

    Equal arguments give equal bytes.  `made` (seconds since 1970) stands in one line, apart from the data.
    """
    text = _embedded(data)
    digest = hashlib.sha256(text.encode()).hexdigest()
    style = "\n".join((STATIC / name).read_text() for name in _STYLES)
    library, program = (STATIC / _LIBRARY).read_text(), bundle(MODULES)
    time = datetime.fromtimestamp(made, UTC).isoformat(timespec="seconds")
    named = html.escape(in_line(title))
    page = f"""<html lang="en" data-sha256="{digest}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy([library, program], [style])}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{named}</title>
<style>{_inline(style, "style")}</style>
</head>
<body>
<header><h1><bdi>{named}</bdi></h1>
<p class="made">made by everstep {html.escape(version)} at
<time datetime="{time}">{time}</time>
</p></header>
<main></main>
<noscript><p>This report draws with JavaScript.  Its data are the JSON in this file.</p></noscript>
<script type="application/json" id="data">{text}</script>
<script>{_inline(library, "script")}</script>
<script type="module">{_inline(program, "script")}</script>
</body>
</html>
"""
    return BEGIN + page.encode(), digest


def _embedded(data: Mapping[str, Any]) -> str:
    """Write JSON that no HTML parser takes for markup: ASCII, without the signs that begin or end a tag."""
    text = json.dumps(with_leaves(data, _readable), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _readable(value: Any) -> Any:
    """Escape characters of a string that a reader cannot see, or that turn the direction of writing."""
    return shown(value) if isinstance(value, str) else value


def _policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Allow these scripts and styles, by their hashes, and nothing else, no connection above all."""
    allowed = (f"script-src {_hashes(scripts)}", f"style-src {_hashes(styles)}")
    own = "img-src data:"  # pictures of the runs, which stand in the data
    return "; ".join(("default-src 'none'", *allowed, own, "base-uri 'none'", "form-action 'none'"))


def _hashes(texts: Iterable[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def bundle(names: Iterable[str]) -> str:
    """Turn modules of the page, in the order in which they need each other, into one script."""
    return "\n".join(("const modules = {};", *map(_module, names)))


def _module(name: str) -> str:
    """Turn a module of ours into an object of its exports, so that several fit into one script."""
    source = (STATIC / f"{name}.js").read_text()
    exports = ", ".join(_EXPORT.findall(source))
    body = _IMPORT.sub(r"const { \1 } = modules.\2;", _EXPORT.sub("", source))
    left = re.search(r"^(?:import|export)\b.*", body, re.MULTILINE)
    if left is not None:
        raise AssertionError(f"{name}.js: the report cannot embed {left[0]!r}; write it as other lines do")
    return f"modules.{name} = (() => {{\n{body}return {{ {exports} }};\n}})();"


def _inline(text: str, element: str) -> str:
    if re.search(rf"</{element}|<!--", text, re.IGNORECASE):
        raise AssertionError(f"a file of the page ends its own <{element}>; write the string in two parts")
    return text
