"""The score of a program as JSON, and as a row of a table.

    {
      "schema": 1,
      "name": "by hand", "command": ["python", "by_hand.py"], "versions": {"torch": "2.13.0"},
      "date": "2026-11-23", "machine": "x86_64, 2 cores, Linux", "seed": 1, "kills": 5,
      "steps": 250, "epoch": 50, "save_every": 20, "full_disk": "tmpfs",
      "judged": true, "why_not": "",
      "strikes": [{"kind": ..., "index": 0, "plan": ..., "outcome": ..., ...}],     see `campaign.Struck`
      "score": {"killed in mid-epoch": {"exact": 4, "inexact": 1}}
    }

A reader ignores keys that it does not know.  `schema` changes when a key changes its meaning.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import verdicts
from strikes import FULL, INT, KINDS, TERM, Campaign, Struck

from faults import DAMAGES

SCHEMA = 1
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+")


def score(
    name: str, campaign: Campaign, kills: int, strikes: Sequence[Struck], why_not: str = ""
) -> dict[str, Any]:
    """Make the score of a program as a value for JSON.

    Args:
        name: name of the program in tables.
        campaign: its campaign, after the strikes.
        kills: kills in mid-epoch that were asked for.
        strikes: the strikes, each with its outcome.
        why_not: why the program cannot be judged; "" if it was.
    """
    told = [as_json(each) for each in strikes]
    return {
        "schema": SCHEMA,
        "name": name,
        "command": [os.path.basename(part) for part in campaign.program.command],
        "versions": campaign.undisturbed.about,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "seed": campaign.seed,
        "kills": kills,
        "steps": len(campaign.undisturbed.steps),
        "epoch": campaign.epoch,
        "save_every": campaign.save_every,
        "full_disk": campaign.disk,
        "judged": not why_not,
        "why_not": why_not,
        "strikes": told,
        "score": counted(told),
    }


def counted(strikes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the outcomes of strikes by kind."""
    counts: dict[str, dict[str, int]] = {}
    for each in strikes:
        of_kind = counts.setdefault(each["kind"], {})
        of_kind[each["outcome"]] = of_kind.get(each["outcome"], 0) + 1
    return counts


def as_json(struck: Struck) -> dict[str, Any]:
    """Make a value for JSON of a strike; of paths in its words the last part stays."""
    found = dataclasses.asdict(struck)
    found["words"] = _FOLDERS.sub(".../", struck.words)
    found["difference"] = struck.difference._asdict() if struck.difference else None
    return found


def table(scores: Iterable[Mapping[str, Any]]) -> str:
    """Make a table in Markdown: a row per program, a column per kind of strike."""
    heads = ["", *(kind for kind in KINDS if kind not in DAMAGES), "newest file damaged"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in scores:
        if not each["judged"]:
            lines.append(
                f"| {each['name']} | cannot be judged: {each['why_not']} |" + " |" * (len(heads) - 2)
            )
            continue
        groups = [[kind] for kind in KINDS if kind not in DAMAGES] + [list(DAMAGES)]
        cells = [_cell([one for one in each["strikes"] if one["kind"] in kinds]) for kinds in groups]
        lines.append(f"| {each['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(strikes: Sequence[Mapping[str, Any]]) -> str:
    """How many were exact; the others by what they were."""
    judged = [each for each in strikes if each["outcome"] not in (verdicts.MISSED, verdicts.NOT_DONE)]
    exact = sum(each["outcome"] == verdicts.EXACT for each in judged)
    if not strikes:
        return ""
    others = Counter(each["outcome"] for each in strikes if each["outcome"] != verdicts.EXACT)
    told = "; ".join(f"{kind} {count}" if len(strikes) > 1 else kind for kind, count in others.items())
    ended = {str(each["struck_status"]) for each in strikes if each["kind"] in (TERM, INT, FULL)} - {"None"}
    status = f"; status {', '.join(sorted(ended))}" if ended else ""
    return f"**{exact} of {len(judged)}**{': ' + told if told else ''}{status}"
