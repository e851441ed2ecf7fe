"""Regular expressions: Python's, for both databases, and never without end."""

from __future__ import annotations

import json
import subprocess
import sys

from everstep.errors import ConfigError

SECONDS = 5.0
"""How long a pattern may take over all texts."""

_PROGRAM = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
pattern, texts = json.load(sys.stdin)
find = re.compile(pattern).search
json.dump([at for at, text in enumerate(texts) if find(text)], sys.stdout)
"""


def matching(pattern: str, texts: list[str]) -> list[str]:
    """Select the values in which a pattern is found.

    A process of its own looks for it: a pattern such as "(a+)+$" can take years over forty characters,
    and only a process can be ended.

    Raises:
        ConfigError: it takes longer than `SECONDS`.
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
            f"the pattern {pattern!r} did not come to an end within {SECONDS:g} s; give one without "
            "repetitions inside repetitions"
        ) from None
    return [texts[at] for at in json.loads(done.stdout)]
