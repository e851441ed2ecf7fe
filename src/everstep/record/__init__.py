"""The run's record: its directory and lock, the journal (the truth), and where the run came from."""

from everstep.contracts.metrics import Block as Block
from everstep.record.batch_digest import array_digest as array_digest, batch_digest as batch_digest
from everstep.record.evaluation_record import Evaluation as Evaluation
from everstep.record.evaluation_record import evaluation_segment as evaluation_segment
from everstep.record.evaluation_record import evaluations as evaluations
from everstep.record.evaluation_record import record_evaluation as record_evaluation
from everstep.record.evaluation_record import values_line as values_line
from everstep.record.event_fields import ACCEPTED as ACCEPTED, CHOSEN as CHOSEN, DIVERGED as DIVERGED
from everstep.record.event_fields import misfit as misfit
from everstep.record.failure_pages import Failure as Failure, FailurePages as FailurePages
from everstep.record.failure_pages import failures as failures, traceback_lines as traceback_lines
from everstep.record.journal import Journal as Journal, NoJournal as NoJournal
from everstep.record.journal_format import Position as Position
from everstep.record.journal_reader import OTHER_CONFIGURATION as OTHER_CONFIGURATION
from everstep.record.journal_reader import OTHER_DATA as OTHER_DATA, OTHER_LAYOUT as OTHER_LAYOUT
from everstep.record.journal_reader import OTHER_RANKS as OTHER_RANKS, Follower as Follower, Row as Row
from everstep.record.journal_reader import RunJournal as RunJournal
from everstep.record.lock import RunLock as RunLock, Watch as Watch, is_held as is_held
from everstep.record.provenance import facts as facts, machine as machine
from everstep.record.remove_run import remove as remove, why_stays as why_stays
from everstep.record.rollback import Batch as Batch, Rollback as Rollback, shared_samples as shared_samples
from everstep.record.rundir import RunDir as RunDir, located as located, new_id as new_id, to_read as to_read
from everstep.record.rundir import user_path as user_path
from everstep.record.segment_file import Event as Event, Item as Item, read_segment as read_segment
from everstep.record.segment_file import segment_number as segment_number
from everstep.record.step_comparison import Divergence as Divergence, EarlierSteps as EarlierSteps
from everstep.record.step_comparison import StepComparison as StepComparison, accept as accept
from everstep.record.step_comparison import read_earlier_steps as read_earlier_steps
from everstep.record.trail import Trail as Trail, last_step as last_step, newest_step as newest_step
from everstep.record.trail import read_trail as read_trail, trail_path as trail_path
from everstep.redaction import redact as redact

__all__ = ["Evaluation", "Event", "Item", "Row", "RunJournal", "accept"]
__all__ += ["evaluations", "failures", "last_step", "redact"]
"""Names for users; the others are for the rooms of the house."""
