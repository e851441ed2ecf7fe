"""Steps of a run, executed again in a copy: looked at, compared with the record or with another run."""

from everstep.replaying.execution import replay
from everstep.services.replayed import Replay

__all__ = ["Replay", "replay"]
