"""The run's record: its directory and lock, the journal (the truth), and where the run came from."""

from everstep.record.evaluation import Evaluation, evaluations, record_evaluation, recording, values_line
from everstep.record.frames import Block, Position
from everstep.record.journal import Journal
from everstep.record.lock import RunLock, is_held
from everstep.record.paths import user_path
from everstep.record.provenance import facts, machine
from everstep.record.reading import (
    Event,
    Follower,
    Item,
    Row,
    RunJournal,
    read_segment,
)
from everstep.record.removing import remove, why_stays
from everstep.record.replay import Replay
from everstep.record.rollback import Batch, Rollback, shared_samples
from everstep.record.rundir import RunDir, located, new_id, to_read
from everstep.redaction import redact

__all__ = [
    "Batch",
    "Block",
    "Evaluation",
    "Event",
    "Follower",
    "Item",
    "Journal",
    "Position",
    "Replay",
    "Rollback",
    "Row",
    "RunDir",
    "RunJournal",
    "RunLock",
    "evaluations",
    "facts",
    "machine",
    "is_held",
    "located",
    "new_id",
    "read_segment",
    "record_evaluation",
    "recording",
    "redact",
    "remove",
    "shared_samples",
    "to_read",
    "user_path",
    "values_line",
    "why_stays",
]
