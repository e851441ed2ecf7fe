"""The victim where a file system maps no trail: it is written by calls, and strace sees all of its bytes."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from everstep.record import trail
from law_support import victim

trail._overwrites = lambda descriptor: False
victim.main(sys.argv[1:])
