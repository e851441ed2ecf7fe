"""Each of the forty-two faults has its test, at each door; none can vanish."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from faults_support import DOORS

import warm

HERE = Path(__file__).parent


def test_each_of_the_forty_two_is_tested_once_at_each_door() -> None:
    command = ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "--campaign", str(HERE)]
    done = warm.run(
        [sys.executable, *command], cwd=HERE.parent.parent, stdout=subprocess.PIPE, text=True, check=True
    )
    cases = re.findall(r"::(test_fault_(\d\d)_\w+)\[(\w+)", done.stdout)
    assert {(int(number), door) for _, number, door in cases} == {
        (number, door) for number in range(1, 43) for door in DOORS
    }
    tests = {name: number for name, number, _ in cases}
    assert [number for number, count in Counter(tests.values()).items() if count > 1] == []
