"""The run's record: its directory and lock, the journal (the truth), and where the run came from."""

from everstep.contracts.metrics import Block
from everstep.record.batch_digest import array_digest, batch_digest, data_digest
from everstep.record.event_fields import (
    ACCEPTED,
    CHOSEN,
    DIVERGED,
    WARNED,
    Batch,
    Rollback,
    misfit,
    shared_samples,
)
from everstep.record.journal import Journal, NoJournal
from everstep.record.journal_format import Event, Item, Position, read_segment, segment_number
from everstep.record.journal_reader import (
    OTHER_CONFIGURATION,
    OTHER_DATA,
    OTHER_LAYOUT,
    OTHER_RANKS,
    Follower,
    Row,
    RunJournal,
)
from everstep.record.lock import RunLock, is_held, remove, why_stays
from everstep.record.pages import (
    Evaluation,
    Failure,
    FailurePages,
    evaluations,
    failures,
    record_evaluation,
    traceback_lines,
    values_line,
)
from everstep.record.provenance import facts, machine
from everstep.record.rundir import RunDir, located, new_id, to_read, user_path
from everstep.record.step_comparison import (
    ABSENT,
    COMPONENTS,
    Difference,
    EarlierSteps,
    StepComparison,
    accept,
    first_difference,
    read_earlier_steps,
)
from everstep.record.trail import Trail, last_step, newest_step, rank_trails, read_trail, trail_path
from everstep.redaction import redact

__all__ = ["Evaluation", "Event", "Item", "Row", "RunJournal", "accept"]
__all__ += ["evaluations", "failures", "last_step", "redact"]
"""Names for users; the others are for the rooms of the house."""
