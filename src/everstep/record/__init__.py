"""The run's record: its directory and lock, the journal (the truth), and where the run came from."""

from everstep.contracts.metrics import Block
from everstep.record.accept_divergence import accept
from everstep.record.batch_digest import array_digest, batch_digest
from everstep.record.earlier_steps import EarlierSteps, read_earlier_steps
from everstep.record.evaluation_record import (
    Evaluation,
    evaluation_segment,
    evaluations,
    record_evaluation,
    values_line,
)
from everstep.record.failure_pages import Failure, FailurePages, failures, traceback_lines
from everstep.record.journal import Journal, NoJournal
from everstep.record.journal_format import Position
from everstep.record.journal_reader import (
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
from everstep.record.lock import RunLock, is_held
from everstep.record.paths import user_path
from everstep.record.provenance import facts, machine
from everstep.record.remove_run import remove, why_stays
from everstep.record.replay import Divergence, Replay
from everstep.record.rollback import Batch, Rollback, shared_samples
from everstep.record.rundir import RunDir, located, new_id, to_read
from everstep.record.trail import Trail
from everstep.record.trail_format import last_step, read_trail, trail_path
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
    "Failure",
    "FailurePages",
    "Follower",
    "Item",
    "Journal",
    "NoJournal",
    "Position",
    "EarlierSteps",
    "Replay",
    "Rollback",
    "Row",
    "RunDir",
    "RunJournal",
    "RunLock",
    "Trail",
    "accept",
    "array_digest",
    "batch_digest",
    "evaluations",
    "facts",
    "failures",
    "machine",
    "is_held",
    "last_step",
    "located",
    "new_id",
    "read_segment",
    "read_trail",
    "read_earlier_steps",
    "record_evaluation",
    "evaluation_segment",
    "redact",
    "remove",
    "shared_samples",
    "to_read",
    "traceback_lines",
    "trail_path",
    "user_path",
    "values_line",
    "why_stays",
]
