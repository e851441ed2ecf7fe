"""Each of the forty-two faults has its test, at each door (see conftest.py); none can vanish."""

from __future__ import annotations

import re
from pathlib import Path


def test_each_of_the_forty_two_is_tested_once() -> None:
    texts = (path.read_text() for path in Path(__file__).parent.glob("test_faults_*.py"))
    numbers = [int(number) for text in texts for number in re.findall(r"^def test_fault_(\d\d)_", text, re.M)]
    assert sorted(numbers) == list(range(1, 43))
