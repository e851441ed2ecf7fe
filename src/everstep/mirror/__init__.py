"""The mirror: what a run has committed, kept elsewhere, so that a disk may vanish."""

from everstep.mirror.address import MirrorAt
from everstep.mirror.run_mirror import NoMirror, RunMirror, open_mirror

__all__ = ["MirrorAt", "NoMirror", "RunMirror", "open_mirror"]
