"""The pictures of the page in docs/images, from real runs in a real browser.

    .venv/bin/python tools/screenshots.py       (a minute; needs the extra `test` and Chromium)

Twelve runs of a small program are trained; the first is killed twice and resumed, the second diverges.
tests/ui/browser/test_screenshots.py makes them, too.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import everstep

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parent.parent
sys.path.extend(str(ROOT / "tests" / folder) for folder in ("", "ui", "ui/browser"))
EPOCHS, STEPS = 12, 40


def train(folder: Path, rate: float, seed: int, kill_at: int = 0, scale: float = 1.0) -> None:
    """Fit a line to noisy points by gradient descent; killed within step `kill_at`."""
    draws = np.random.default_rng(0)
    x = draws.standard_normal((STEPS * 8, 16))
    y = x @ np.linspace(-1, 1, 16) + 0.3 * draws.standard_normal(len(x))
    weights = np.zeros(16)
    loop = everstep.TrainLoop(
        folder,
        state={"weights": weights},
        max_epoch=EPOCHS,
        seed=seed,
        config={"optimizer": {"name": "sgd", "rate": rate}, "batch_size": 8},
        services=[
            everstep.Checkpoints(everstep.Every(steps=60)),
            everstep.services.Console(sink=lambda line: None),
        ],
    )
    with loop:
        for _ in loop.iter_epochs():
            data = everstep.data.arrays(x, y, batch_size=8, shuffle=True)
            for step, (bx, by) in loop.iter_steps(data):
                error = bx @ weights - by
                gradient = bx.T @ error / len(bx)
                weights -= rate * gradient
                loop.collect_metrics(loss=scale * float(error @ error) / len(bx))
                loop.collect_metrics(grad_norm=float(np.linalg.norm(gradient)))
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            loop.collect_metrics(valid_loss=float(np.mean((x @ weights - y) ** 2)))


def start(*arguments: object) -> None:
    """Train in a process of its own."""
    subprocess.run([sys.executable, __file__, "--train", *map(str, arguments)], check=False)


def make_runs(folder: Path) -> None:
    rates = [0.02, 0.05, 0.003, 0.2, 0.01, 0.1] * 2
    for number, rate in enumerate(rates):
        place = folder / f"line-{number:02d}"
        if number == 0:
            start(place, rate, number, 152)
            start(place, rate, number, 301)
        if number == 1:
            start(place, rate, number, 200)
        start(place, rate, number, 0, 1.01 if number == 1 else 1.0)


def views(runs: list[str]) -> dict[str, tuple[str, int]]:
    """Picture -> the address of the view and its height in pixels."""
    columns = "name,status,step,epoch,loss,valid_loss,config.optimizer.rate"
    return {
        "ui-runs": (f"#/runs?sort=name&columns={columns}", 520),
        "ui-run": (f"#/run/{runs[0]}", 760),
        "ui-compare": (f"#/compare?logy=1&runs={','.join(runs[:6])}", 560),
    }


def take(images: Path) -> None:
    """Train the runs, and write the pictures into a folder."""
    from chromium import path_of_chromium
    from page_server import running_page
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "runs"
        make_runs(folder)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path_of_chromium(), args=["--no-sandbox"])
            with running_page(folder) as page:
                runs = [run["id"] for run in page.get("/api/runs", sort="name", desc=0).json["rows"]]
                key, _, value = page.cookie.partition("=")
                site = f"http://127.0.0.1:{page.port}/"
                for name, (address, height) in views(runs).items():
                    context = browser.new_context(viewport={"width": 1200, "height": height})
                    context.add_cookies([{"name": key, "value": value, "url": site}])
                    _take(context.new_page(), site + address, images / f"{name}.png", made)
                    context.close()
            written = Path(made) / "report.html"
            command = [sys.executable, "-m", "everstep", "report", "line-00", "line-02", "line-04"]
            command += ["--index", str(folder), "-o", str(written), "--title", "Three learning rates"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            report = browser.new_page(viewport={"width": 1200, "height": 900})
            _take(report, written.as_uri(), images / "report.png", made)
            browser.close()


def _take(view: Page, address: str, picture: Path, made: str) -> None:
    view.goto(address)
    view.wait_for_timeout(2500)
    # the folder of this script is nobody's: a picture of a user's page has a place at home there
    view.evaluate(
        """made => document.querySelectorAll(".path, code").forEach(
            one => { one.textContent = one.textContent.replace(made, "/home/ada") })""",
        made,
    )
    view.screenshot(path=picture)
    view.close()


def main() -> None:
    images = ROOT / "docs" / "images"
    images.mkdir(exist_ok=True)
    take(images)
    for picture in sorted(images.glob("*.png")):
        print(f"docs/images/{picture.name}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args().train
    if given:
        train(
            Path(given[0]),
            *(kind(text) for kind, text in zip((float, int, int, float), given[1:], strict=False)),
        )
    else:
        main()
