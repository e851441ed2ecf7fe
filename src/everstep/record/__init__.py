"""The run's record: its directory and lock, the journal (the truth), and where the run came from."""

from everstep.contracts.metrics import Block
from everstep.record.accepting import accept
from everstep.record.batch_digest import batch_digest
from everstep.record.evaluation import Evaluation, evaluations, record_evaluation, recording, values_line
from everstep.record.frames import Position
from everstep.record.journal import Journal
from everstep.record.lock import RunLock, is_held
from everstep.record.paths import user_path
from everstep.record.provenance import facts, machine
from everstep.record.reading import (
    ACCEPTED,
    CHOSEN,
    DIVERGED,
    OTHER_CONFIGURATION,
    OTHER_DATA,
    Event,
    Follower,
    Item,
    Row,
    RunJournal,
    read_segment,
)
from everstep.record.reference import Reference, reference
from everstep.record.removing import remove, why_stays
from everstep.record.replay import Divergence, Replay
from everstep.record.rollback import Batch, Rollback, shared_samples
from everstep.record.rundir import RunDir, located, new_id, to_read
from everstep.record.trail import Trail
from everstep.record.trail_file import last_step, read_trail, trail_path
from everstep.redaction import redact

__all__ = [
    "ACCEPTED",
    "CHOSEN",
    "DIVERGED",
    "OTHER_CONFIGURATION",
    "OTHER_DATA",
    "Batch",
    "Block",
    "Divergence",
    "Evaluation",
    "Event",
    "Follower",
    "Item",
    "Journal",
    "Position",
    "Reference",
    "Replay",
    "Rollback",
    "Row",
    "RunDir",
    "RunJournal",
    "RunLock",
    "Trail",
    "accept",
    "batch_digest",
    "evaluations",
    "facts",
    "machine",
    "is_held",
    "last_step",
    "located",
    "new_id",
    "read_segment",
    "read_trail",
    "reference",
    "record_evaluation",
    "recording",
    "redact",
    "remove",
    "shared_samples",
    "to_read",
    "trail_path",
    "user_path",
    "values_line",
    "why_stays",
]
