"""Python's regular expressions for both databases, with a limit of time."""

from __future__ import annotations

import json
import subprocess
import sys

from everstep.errors import ConfigError

SECONDS = 5.0
"""Seconds that a pattern may take for all strings."""

_PROGRAM = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
pattern, texts = json.load(sys.stdin)
find = re.compile(pattern).search
json.dump([at for at, text in enumerate(texts) if find(text)], sys.stdout)
"""


def matching(pattern: str, texts: list[str]) -> list[str]:
    """Select the strings in which a pattern is found.

    The search runs in a process of its own: a pattern such as "(a+)+$" can take years for forty characters,
    and only a process can be ended.

    Raises:
        ConfigError: the search takes longer than `SECONDS`.
    """
    if not texts:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([pattern, texts]).encode(),
            stdout=subprocess.PIPE,
            timeout=SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the pattern {pattern!r} did not end within {SECONDS:g} s; give one without "
            "repetitions inside repetitions"
        ) from None
    return [texts[at] for at in json.loads(done.stdout)]
