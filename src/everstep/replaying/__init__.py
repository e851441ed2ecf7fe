"""Steps of a run, executed again in a copy: looked at, compared with the record or with another run."""

from everstep.replaying.execution import Replay, replay

__all__ = ["Replay", "replay"]
