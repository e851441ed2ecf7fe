"""The mirror: what a run has committed, kept elsewhere, so that a disk may vanish."""

from everstep.mirror.place import MirrorAt
from everstep.mirror.run_mirror import RunMirror, open_mirror

__all__ = ["MirrorAt", "RunMirror", "open_mirror"]
