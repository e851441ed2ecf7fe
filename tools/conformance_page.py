"""Judge the set-ups of conformance/, and write their scores and the tables of docs/conformance.md.

    make conformance                                # all, one after another
    make conformance ARGS="--only hf --kills 20"    # one set-up, whose score and rows are made anew
    make conformance ARGS="--page"                  # the tables alone, from the stored scores

Each score lies in conformance/scores/, with every strike and what became of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
ADAPTERS = ROOT / "conformance"
sys.path.insert(0, str(ADAPTERS))
from score import counted, table  # noqa: E402
from strikes import KINDS, MID_EPOCH  # noqa: E402
from verdicts import EXACT  # noqa: E402

SCORES = ADAPTERS / "scores"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- tables: tools/conformance_page.py writes them -->", "<!-- end of the tables -->"
MEMORY, ROOM = Path("/dev/shm"), 2 * 2**30
EPOCH = 50


class SetUp(NamedTuple):
    """An adapter with its options.

    Attributes:
        name: name on the page.
        file: the adapter.
        preload: what is imported once for all starts.
        options: arguments of the adapter, before the folder.
        save_every: steps between two checkpoints.
    """

    name: str
    file: str
    preload: str
    options: tuple[str, ...] = ()
    save_every: int = 20


SETUPS = {
    "lightning": SetUp("Lightning", "lightning_trainer.py", "lightning"),
    "lightning_stateful": SetUp(
        "Lightning, StatefulDataLoader",
        "lightning_trainer.py",
        "lightning,torchdata.stateful_dataloader",
        ("--stateful",),
    ),
    "hf": SetUp("HF Trainer", "hf_trainer.py", "transformers.trainer"),
    "accelerate": SetUp("Accelerate, skip_first_batches", "accelerate_loop.py", "accelerate"),
    "accelerate_stateful": SetUp(
        "Accelerate, StatefulDataLoader",
        "accelerate_loop.py",
        "accelerate,torchdata.stateful_dataloader",
        ("--stateful",),
    ),
    "ignite": SetUp("Ignite, DeterministicEngine", "ignite_engine.py", "ignite.engine,ignite.handlers"),
    "keras": SetUp("Keras (torch backend), BackupAndRestore", "keras_fit.py", "keras"),
    "torchtnt": SetUp(
        "torchtnt, StatefulDataLoader",
        "torchtnt_unit.py",
        "torchtnt.framework.callbacks,torchtnt.framework.train",
    ),
    "skorch": SetUp("skorch, a checkpoint per epoch", "skorch_net.py", "skorch", save_every=EPOCH),
    "by_hand": SetUp("a careful loop by hand", "by_hand.py", "torch,numpy"),
    "everstep": SetUp("**everstep**", "everstep_loop.py", "torch,numpy,everstep.torch"),
}


def judge(key: str, kills: int, seed: int, kinds: Sequence[str]) -> None:
    """Judge a set-up, and store its score; with `kinds` these strikes alone are made anew."""
    file = SCORES / f"{key}.json"
    before = json.loads(file.read_text()) if kinds else {}
    setup = SETUPS[key]
    command = [sys.executable, str(ADAPTERS / "judge.py"), "--name", setup.name, "--preload", setup.preload]
    command += ["--save-every", str(setup.save_every), "--epoch", str(EPOCH), "--kills", str(kills)]
    command += [
        "--seed",
        str(seed),
        "--json",
        str(file),
        *(part for kind in kinds for part in ("--only", kind)),
    ]
    environment = {
        **os.environ,
        "KERAS_BACKEND": "torch",
        "CUDA_VISIBLE_DEVICES": "",
        "EVERSTEP_INDEX": "off",
    }
    if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK):
        found = os.statvfs(MEMORY)
        if found.f_bavail * found.f_frsize >= ROOM:
            environment["TMPDIR"] = str(
                MEMORY
            )  # a kill loses nothing of the kernel's; nothing here cuts the power
    print(f"\n{key}", flush=True)
    done = subprocess.run(
        [*command, "--", sys.executable, str(ADAPTERS / setup.file), *setup.options], env=environment
    )
    if done.returncode not in (0, 1, 3):
        sys.exit(f"{key}: the suite ended with status {done.returncode}")
    if kinds:
        score = json.loads(file.read_text())
        score["strikes"] = [each for each in before["strikes"] if each["kind"] not in kinds] + score[
            "strikes"
        ]
        score["score"] = counted(score["strikes"])
        file.write_text(json.dumps(score, indent=1) + "\n")


def stored() -> dict[str, dict[str, Any]]:
    """Return the stored scores in the order of the page."""
    paths = {key: SCORES / f"{key}.json" for key in SETUPS}
    return {key: json.loads(path.read_text()) for key, path in paths.items() if path.exists()}


def tables(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Make the tables of the page."""
    machines = sorted({each["machine"] for each in scores.values()})
    disks = sorted({each["full_disk"] for each in scores.values()} - {""})
    return "\n".join(
        [
            f"Measured on: {'; '.join(machines)}. Full disk: {', '.join(disks)}.",
            "",
            table(scores.values()),
            "",
            "Of the kills in mid-epoch:",
            "",
            "| | versions | measured | resumed in mid-epoch, exact | first difference "
            "| samples too often, too seldom | steps again |",
            "|---|---|---|---|---|---|---|",
            *(_detail(key, each) for key, each in scores.items() if each["judged"]),
        ]
    )


def _detail(key: str, score: Mapping[str, Any]) -> str:
    strikes = [each for each in score["strikes"] if each["kind"] == MID_EPOCH]
    inside = [each for each in strikes if each["resumed_after"] and each["resumed_after"] % score["epoch"]]
    exact = sum(each["outcome"] == EXACT for each in inside)
    first = Counter(each["difference"]["what"] for each in strikes if each["difference"])
    versions = ", ".join(
        f"{name} {version}" for name, version in score["versions"].items() if name != "python"
    )
    cells = [
        f"[{score['name'].strip('*')}](../conformance/{SETUPS[key].file})",
        versions,
        f"{score['date']}, seed {score['seed']}",
        f"{exact} of {len(inside)}",
        ", ".join(f"{what} {count}" for what, count in first.items()) or "none",
        f"{_mean(strikes, 'used_too_often')}, {_mean(strikes, 'used_too_seldom')}",
        _mean(strikes, "steps_again"),
    ]
    return f"| {' | '.join(cells)} |"


def _mean(strikes: Sequence[Mapping[str, Any]], key: str) -> str:
    return f"{sum(each[key] for each in strikes) / len(strikes):.1f}" if strikes else ""


def page(text: str) -> str:
    """Return the page with its tables made anew from the stored scores."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(stored())}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Judge what is asked for, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SETUPS, action="append", help="a set-up; as often as you like")
    parser.add_argument(
        "--kind", choices=KINDS, action="append", default=[], help="of strike; all others stay"
    )
    parser.add_argument("--kills", type=int, default=5, help="in mid-epoch, per set-up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="write the tables from the stored scores")
    chosen = parser.parse_args()
    SCORES.mkdir(exist_ok=True)
    for key in [] if chosen.page else chosen.only or SETUPS:
        judge(key, chosen.kills, chosen.seed, chosen.kind)
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
