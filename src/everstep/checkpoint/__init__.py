"""Checkpoints: format, atomic commit, verification, retention."""

from everstep.checkpoint.array_file import write_arrays
from everstep.checkpoint.commit import (
    CommittedCheckpoint,
    Draft,
    is_finite,
    place_apart,
    retire_others,
    save_apart,
)
from everstep.checkpoint.exchange import Exchange, first_error
from everstep.checkpoint.files import disk_failed, forecast, trial_write
from everstep.checkpoint.format import FORMAT, Checkpoint, Phase, read_own_trees
from everstep.checkpoint.format import read as read_checkpoint
from everstep.checkpoint.format import read_body as read_manifest
from everstep.checkpoint.format import verify as verify_checkpoint
from everstep.checkpoint.retention import CheckpointName, Retention, is_interim
from everstep.checkpoint.store import Store, find_checkpoint
