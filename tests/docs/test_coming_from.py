"""No documented name of a seed's API is left without an answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent.parent / "docs" / "coming-from"

TFSNIPPET = """
    param_vars var_groups show_eta print_func max_epoch max_step metric_formatter checkpoint_dir
    checkpoint_epoch_freq checkpoint_max_to_keep checkpoint_save_objects restore_checkpoint summary_dir
    summary_writer summary_graph summary_metric_prefix summary_skip_pattern summary_commit_freqs
    valid_metric_name valid_metric_smaller_is_better early_stopping
    best_valid_metric epoch step events step_data use_early_stopping within_epoch within_step
    add_summary collect_metrics get_eta get_progress iter_epochs iter_steps make_checkpoint
    metric_collector print_logs print_training_summary println timeit
    ENTER_LOOP EXIT_LOOP BEFORE_EPOCH AFTER_EPOCH BEFORE_STEP AFTER_STEP METRICS_COLLECTED
    TIME_METRICS_COLLECTED METRIC_STATS_PRINTED TIME_METRIC_STATS_PRINTED SUMMARY_ADDED
"""


@pytest.mark.parametrize("name", TFSNIPPET.split())
def test_tfsnippet_name_is_in_a_table(name: str) -> None:
    rows = [line for line in (PAGES / "tfsnippet.md").read_text().splitlines() if line.startswith("| ")]
    left = " ".join(row.split("|")[1] for row in rows)
    assert re.search(rf"`{name}[`(]", left)
