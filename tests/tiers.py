"""Which tests `make test` leaves to `make test-all`, and which only `make torture` runs.

A test that this page does not name runs in `make test`, each of its cases, every day.  `make test-all` runs
every test but the torture, each of its cases.

The choice among cases goes round from day to day: where n of N run, all have had their turn after N / n days.
EVERSTEP_SEED=... repeats the choice of another day; the closing lines of a test run print the seed.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NONE = 0
"""No case runs in `make test`."""

SHARE, WHOLE = "share", "whole"
"""The test loops over `share(cases, n)`: one of its cases takes n of them, and a long one takes all."""

TIERS: Mapping[str, Mapping[str, int | str]] = {
    "backends/test_torch_optimizers.py": {
        "test_in_every_door_a_crash_in_a_window_changes_nothing": 1,
    },
    "backends/test_torch_updates.py": {
        "test_a_program_that_zeroes_now_and_then_resumes_exactly": 2,
    },
    "checkpoint/test_checkpoint_crash.py": {
        "test_a_failing_disk_leaves_the_previous_checkpoint": 4,
    },
    "cli/test_commands.py": {
        "test_a_filter_means_the_same_runs_by_a_name_as_a_comparison": NONE,
        "test_a_run_that_moved_away_is_gone_until_it_is_found_or_forgotten": NONE,
        "test_wrong_usage_is_exit_status_2_with_a_remedy": 10,
    },
    "cli/test_experiment_commands.py": {
        "test_compare_shows_where_the_configs_differ": NONE,
        "test_the_index_is_the_one_that_is_named": NONE,
        "test_schedules_by_name": NONE,
        "test_eval_with_its_profile_and_without": NONE,
        "test_predict_writes_what_the_file_asks_for": NONE,
        "test_strict_git_wants_what_can_be_had_back": NONE,
        "test_a_config_is_drilled": NONE,
        "test_how_a_training_ended_is_its_exit_status": 3,
        "test_a_changed_config_is_the_users_choice": NONE,
        "test_the_best_weights_or_an_earlier_checkpoint_by_name": NONE,
        "test_a_fork_is_made_wholly_or_not_at_all": NONE,
    },
    "cli/test_export_command.py": {
        "test_it_loads_without_everstep": NONE,
        "test_it_is_what_the_service_writes": 1,
    },
    "cli/test_hostile_runs.py": {
        "test_a_hostile_run_is_one_note_and_its_neighbours_are_listed": 12,
    },
    "cli/test_prune.py": {
        "test_a_run_whose_name_only_begins_so_is_not_deleted": NONE,
        "test_a_start_without_a_lock_stays_though_an_earlier_one_had_it": NONE,
        "test_what_is_no_run_or_holds_another_one_stays": NONE,
        "test_a_run_that_was_trained_anew_in_the_place_of_a_deleted_one_stays": NONE,
        "test_killed_anywhere_what_is_left_is_a_run_and_can_be_deleted": 1,
    },
    "cli/test_sweep.py": {
        "test_a_metric_is_shown_in_the_table": NONE,
        "test_optuna_chooses_and_the_same_again": NONE,
        "test_a_search_that_was_cut_off_goes_on": NONE,
        "test_a_search_goes_where_the_metric_is_good": NONE,
        "test_a_trial_that_fails_is_left_out_of_the_search": NONE,
        "test_a_search_by_a_metric_that_is_not_there_names_the_nearest": NONE,
        "test_a_failure_is_told_and_the_others_are_trained": NONE,
        "test_a_training_that_fails_is_reported_and_the_others_are_trained": NONE,
        "test_what_was_cut_off_goes_on": NONE,
        "test_a_signal_stops_the_trainings_and_saves_them": NONE,
        "test_a_grid_in_parallel_and_every_value_with_its_type": NONE,
        "test_draws_are_the_same_again_and_within_their_range": NONE,
    },
    "data/test_huggingface.py": {
        "test_no_sample_is_lost_or_given_twice_by_a_resume": 2,
        "test_a_run_that_was_cut_in_its_first_pass_ends_as_the_one_that_was_not": 1,
    },
    "docs/test_console_lines.py": {
        "test_every_command_of_the_readme_runs_with_what_its_install_line_brings": NONE,
    },
    "docs/test_quickstart.py": {
        "test_the_page_is_walked": NONE,
    },
    "docs/test_snippets.py": {
        "test_snippet_runs": 24,
    },
    "drill/test_drill.py": {
        "test_a_sound_script_is_exact": 1,
        "test_the_head_of_an_epoch_is_reached_from_the_checkpoint_before_it": NONE,
        "test_the_command_prints_a_table_and_writes_json": NONE,
        "test_a_resume_that_fails_is_shown_with_its_output": NONE,
        "test_the_same_seed_aims_the_same_kills": NONE,
        "test_runs_of_the_user_are_not_touched": NONE,
        "test_it_names_the_component_that_a_resume_spoils": 2,
        "test_two_undisturbed_runs_that_differ_are_no_fault_of_the_resume": 1,
    },
    "drill/test_drill_ranks.py": {
        "test_a_sound_script_on_two_ranks_is_exact": NONE,
        "test_it_names_what_a_resume_spoils_and_the_rank": NONE,
    },
    "examples/test_ddp.py": {
        "test_killed_and_started_again": NONE,
        "test_torchrun_starts_the_ranks_again_by_itself": NONE,
    },
    "examples/test_examples.py": {
        "test_digits_through_a_trainer": NONE,
        "test_digits_from_a_config_file": NONE,
        "test_a_gan_with_two_optimizers": NONE,
        "test_the_transformer_learns": NONE,
        "test_the_transformer_through_a_trainer_is_the_one_of_the_loop_to_the_bit": NONE,
        "test_digits": NONE,
    },
    "group/test_agreement_model.py": {
        "test_longer_histories_too": NONE,
    },
    "group/test_decisions.py": {
        "test_what_one_rank_alone_does_after_the_steps_is_named_by_all": NONE,
    },
    "group/test_first_cause.py": {
        "test_a_broken_collective_is_a_consequence_of_the_rank_that_is_lost": 1,
    },
    "group/test_group.py": {
        "test_four_processes_are_a_group": NONE,
    },
    "group/test_lost_group.py": {
        "test_torchrun_is_not_held_by_the_others": NONE,
    },
    "group/test_lost_in_a_run.py": {
        "test_the_other_rank_leaves_with_the_first_cause": 1,
    },
    "group/test_parallel.py": {
        "test_torchrun_starts_the_same_program": NONE,
    },
    "group/test_parallel_task.py": {
        "test_ranks_compute_what_one_process_computes": 1,
    },
    "group/test_peers.py": {
        "test_a_stopped_rank_is_not_lost": NONE,
    },
    "group/test_rank_commit.py": {
        "test_killed_anywhere_in_a_save_it_is_the_newest_or_the_previous_whole": 1,
        "test_a_rank_that_is_late_fails_the_save_on_all_and_the_next_succeeds": NONE,
        "test_a_writer_that_stands_still_and_goes_on": 1,
    },
    "group/test_rank_kills.py": {
        "test_disturbed_ranks_end_as_the_undisturbed": 1,
    },
    "group/test_rank_rollbacks.py": {
        "test_a_step_that_fails_on_one_rank_alone_is_not_undone_and_ends_all": NONE,
    },
    "group/test_rank_windows.py": {
        "test_a_run_killed_inside_windows_ends_as_the_undisturbed": 1,
    },
    "group/test_ranks.py": {
        "test_new_processes_that_load_a_state_go_on_to_the_bit": 1,
        "test_the_first_step_has_the_bits_of_later_ones": 1,
    },
    "group/test_replicas.py": {
        "test_ranks_of_ddp_compare_their_state_and_come_back": 1,
    },
    "group/test_torchrun.py": {
        "test_a_planned_end_has_status_0_and_the_real_one_is_in_the_run": 1,
        "test_a_restart_does_not_read_what_the_attempt_before_has_left": NONE,
        "test_torchrun_prints_why_a_run_could_not_begin": NONE,
    },
    "group/test_trainer_ranks.py": {
        "test_what_follows_from_all_outputs_and_what_is_refused": NONE,
    },
    "index/test_index_queries.py": {
        "test_metrics_too": NONE,
    },
    "index/test_index_training.py": {
        "test_eight_processes_train_into_one_index": NONE,
    },
    "laws/test_attacks.py": {
        "test_two_loaders_share_a_generator": NONE,
        "test_datasets_and_samplers_with_generators_of_their_own": 2,
    },
    "laws/test_kill_points.py": {
        "test_killed_at_every_point": 1,
        "test_refused_by_the_disk_at_every_point": 1,
        "test_a_disk_that_is_full_for_a_while": 1,
    },
    "laws/test_kills.py": {
        "test_killed_in_each_phase_it_is_the_run_that_was_never_killed": NONE,
        "test_a_killed_run_is_the_run_that_was_never_killed": 1,
    },
    "laws/test_law1_any_step.py": {
        "test_crashed_anywhere_with_workers": NONE,
    },
    "laws/test_law1_recovery.py": {
        "test_struck_at_every_third_point_around_a_rollback": 1,
        "test_at_every_door_over_every_kind_of_data": 1,
    },
    "laws/test_law2_observation.py": {
        "test_observed_runs_have_the_bits_of_the_unobserved": 6,
        "test_evaluated_or_not": 1,
        "test_a_bare_evaluation_is_no_observation": 1,
    },
    "laws/test_law3_workers.py": {
        "test_any_number_of_workers_is_the_same_run": 1,
    },
    "laws/test_law5_guards.py": {
        "test_nothing_non_finite_is_committed": 8,
    },
    "laws/test_law7_leftovers.py": {
        "test_nothing_outlives_the_block": 6,
        "test_nothing_outlives_a_failing_disk": 2,
    },
    "laws/test_signals.py": {
        "test_a_signal_to_the_group_loses_no_step": 4,
        "test_a_killed_loader_worker_is_a_clear_error": 1,
    },
    "loop/test_loop_again.py": {
        "test_names_of_the_step_loop_exist_in_the_tail": 3,
        "test_lines_before_the_resume_point_draw_and_change_as_the_first_time": 3,
        "test_what_the_head_of_an_epoch_does_to_the_state_is_not_done_twice": 3,
        "test_two_step_loops_the_second_of_few_steps": 1,
    },
    "loop/test_loop_around.py": {
        "test_a_signal_in_a_step_loses_no_step": 2,
    },
    "loop/test_loop_generators.py": {
        "test_a_head_may_set_the_generators_of_its_loader": 4,
        "test_a_head_may_do_anything_to_the_generators_of_declared_data": 4,
        "test_what_a_resume_cannot_tell_of_data_that_is_not_declared_is_refused": 2,
        "test_in_the_middle_of_a_pass_that_goes_on_over_epochs": NONE,
        "test_two_loaders_that_are_seeded_at_the_head": NONE,
    },
    "loop/test_loop_leaving.py": {
        "test_two_step_loops_in_one_epoch_resume_exactly": 3,
    },
    "loop/test_loop_limits.py": {
        "test_an_epoch_of_two_loops_that_was_cut_goes_on_where_it_was_cut": 4,
        "test_a_raised_max_step_is_a_straight_run_even_from_the_middle_of_a_pass": 2,
        "test_each_limit_alone_and_together_stops_at_the_exact_count": 5,
    },
    "loop/test_loop_random_programs.py": {
        "test_a_random_history_ends_as_the_straight_run": 6,
    },
    "record/test_damaged_places.py": {
        "test_whatever_befalls_a_file_of_a_run": SHARE,
        "test_each_error_of_the_disk_has_its_own_remedy": 3,
        "test_a_journal_that_is_removed_while_the_run_trains_is_written_again": 1,
        "test_a_file_that_may_not_be_read": NONE,
        "test_the_file_of_a_lost_segment_may_be_brought_back": NONE,
    },
    "record/test_divergence.py": {
        "test_a_rollback_of_the_state_by_hand_takes_the_mark_with_it": NONE,
    },
    "record/test_journal_kills.py": {
        "test_a_kill_at_any_operation_then_a_resume_leaves_every_row_once": 5,
    },
    "record/test_links.py": {
        "test_a_training_refuses_a_link_in_its_directory": 3,
        "test_a_training_leaves_alone_what_a_deeper_link_leads_to": 1,
        "test_a_store_moves_nothing_through_a_link": 1,
    },
    "record/test_planted_faults.py": {
        "test_a_resume_finds_out_by_itself": 3,
    },
    "record/test_verified_resume.py": {
        "test_what_a_person_supersedes_is_not_compared_with": 1,
    },
    "services/test_all_together.py": {
        "test_killed_again_and_again": NONE,
        "test_their_order_is_irrelevant": NONE,
        "test_in_a_supervisor_crashed_in_any_step": SHARE,
    },
    "services/test_best.py": {
        "test_the_best_three_ties_keep_the_earlier_and_no_crash_changes_them": SHARE,
        "test_it_keeps_the_laws": NONE,
    },
    "services/test_best_damaged.py": {
        "test_a_start_finds_it_moves_it_away_and_the_run_finishes_with_the_next_best": 1,
    },
    "services/test_doors.py": {
        "test_a_moment_fires_behind_a_door_or_asking_for_it_is_an_error": 8,
    },
    "services/test_dump.py": {
        "test_killed_anywhere_the_folder_ends_as_if_nothing_had_happened": SHARE,
    },
    "services/test_early_stop.py": {
        "test_patience_in_steps_counts_from_the_last_improvement": SHARE,
        "test_what_is_not_better_than_the_baseline_is_no_improvement": SHARE,
        "test_a_threshold_waits_for_min_steps": SHARE,
        "test_a_threshold_stops_at_once": SHARE,
    },
    "services/test_export.py": {
        "test_killed_anywhere_an_export_is_whole_or_absent": NONE,
        "test_it_keeps_the_laws": NONE,
        "test_each_strategy_and_no_crash_changes_the_folder": SHARE,
        "test_killed_anywhere_the_folders_end_as_those_of_the_undisturbed_run": NONE,
        "test_killed_anywhere_no_best_is_a_phantom": NONE,
        "test_it_loads_without_everstep": NONE,
    },
    "services/test_loss_bound.py": {
        "test_it_keeps_the_laws": NONE,
        "test_a_run_within_its_bounds_ends_equal_after_any_crash": SHARE,
        "test_times_a_running_median_killed_in_any_step": SHARE,
    },
    "services/test_moments.py": {
        "test_observers_that_return_actions_are_refused": 3,
        "test_a_failing_service_of_any_other_stage_raises": 2,
        "test_controllers_cannot_act_where_only_observing_is_safe": 1,
    },
    "services/test_plateau.py": {
        "test_it_stops": SHARE,
        "test_what_gets_better_is_no_plateau_and_nan_does_not_count": SHARE,
        "test_it_keeps_the_laws": NONE,
    },
    "services/test_profile.py": {
        "test_it_keeps_the_laws": NONE,
        "test_the_profiler_says_nothing_on_standard_error": NONE,
    },
    "services/test_progress_bar.py": {
        "test_it_keeps_the_laws": NONE,
    },
    "services/test_recovery.py": {
        "test_the_run_ends_as_if_the_data_never_had_the_batch": 1,
        "test_killed_and_crashed_in_between_it_ends_the_same": SHARE,
        "test_whatever_names_a_bad_step_is_undone": NONE,
        "test_a_rollback_that_the_journal_has_forgotten_counts_and_keeps_its_batches_out": 1,
        "test_a_stream_whose_batches_have_no_number_is_refused_at_its_start": 1,
        "test_a_sample_that_all_rollbacks_have_in_common_is_named": NONE,
    },
    "services/test_reports.py": {
        "test_they_keep_the_laws": NONE,
        "test_they_change_nothing_after_any_crash": SHARE,
    },
    "services/test_require.py": {
        "test_it_keeps_the_laws": NONE,
        "test_it_is_reached_by_any_value_before_the_deadline": SHARE,
        "test_it_is_not_reached": SHARE,
    },
    "services/test_retry.py": {
        "test_killed_around_a_try": SHARE,
        "test_after_a_try_the_run_is_that_in_which_nothing_failed": 1,
    },
    "services/test_scheduled.py": {
        "test_it_keeps_the_laws": NONE,
        "test_each_step_has_its_value_after_any_crash": SHARE,
    },
    "services/test_set_value.py": {
        "test_killed_before_and_after_a_change_the_run_ends_equal": NONE,
        "test_a_scheduler_that_undoes_it_is_named_once": 2,
    },
    "services/test_sinks.py": {
        "test_killed_anywhere_no_point_is_there_twice_and_none_is_missing": NONE,
        "test_files_that_are_harmed_meanwhile_are_made_anew": 2,
        "test_a_full_disk_costs_no_training_and_the_files_catch_up": 2,
        "test_going_back_to_an_older_checkpoint": NONE,
    },
    "services/test_wait.py": {
        "test_it_keeps_the_laws": NONE,
    },
    "services/test_when.py": {
        "test_it_keeps_the_laws": NONE,
        "test_each_kind_of_condition_sets_a_value_exactly": SHARE,
    },
    "state/test_torchmetrics.py": {
        "test_metrics_and_attributes_in_the_state_come_back": 2,
    },
    "supervisor/test_bad_input.py": {
        "test_a_failing_disk_in_the_middle_costs_saves_and_not_the_training": 1,
        "test_a_damaged_checkpoint_is_passed_over_and_said": 2,
    },
    "supervisor/test_changed_data.py": {
        "test_a_change_is_refused_with_both_values_or_chosen": 6,
        "test_what_only_changes_speed_is_free": 2,
        "test_a_chosen_seed_begins_anew_only_what_depends_on_it": 1,
    },
    "supervisor/test_changed_options.py": {
        "test_a_chosen_schedule_goes_on_from_where_it_would_be": 2,
        "test_a_change_must_be_chosen": 1,
        "test_a_schedule_that_the_state_lacks_is_noticed": 1,
        "test_a_raised_limit_excuses_only_a_longer_schedule": 1,
    },
    "supervisor/test_no_progress.py": {
        "test_epochs_without_a_step_that_may_never_end": 1,
    },
    "supervisor/test_slots.py": {
        "test_what_is_changed_in_place_is_restored_in_place": 4,
        "test_a_value_that_is_assigned_where_lines_run_again_keeps_its_name": 2,
    },
    "supervisor/test_supervisor_use.py": {
        "test_a_crash_at_any_step_resumes_exactly": 3,
    },
    "supervisor/test_trial.py": {
        "test_a_resume_is_exact_whether_its_state_brings_it_back_or_not": 1,
    },
    "test_demo.py": {
        "test_the_demo_on_the_digits": NONE,
    },
    "test_proof_gpu.py": {
        "test_on_a_cpu_it_kills_compares_and_writes_a_table": NONE,
    },
    "test_teeth.py": {
        "test_without_a_fault_they_pass": NONE,
        "test_a_planted_fault_dies_in_make_test": NONE,
    },
    "testing/test_check_service.py": {
        "test_built_in_services_pass": 1,
        "test_a_metric_of_ones_own_is_collected_on_request": NONE,
        "test_random_numbers_drawn_by_an_isolated_service_are_put_back": NONE,
        "test_each_fault_is_found": 6,
    },
    "testing/test_check_sink.py": {
        "test_built_in_sinks_hold_what_the_journal_holds": 1,
        "test_a_broken_sink_is_found": 2,
        "test_a_sink_that_leaves_out_rows_says_which": NONE,
    },
    "tfutils/test_from_params.py": {
        "test_several_models_that_are_killed_resume_exactly": NONE,
    },
    "trainer/test_modes.py": {},
    "trainer/test_multi.py": {
        "test_one_that_fails_leaves_the_others_alone_and_goes_on_behind_them": 1,
        "test_a_signal_saves_all_and_all_go_on": 1,
    },
    "trainer/test_streams.py": {
        "test_a_smoke_test_leaves_everything_where_it_was": 2,
        "test_evaluating_on_the_data_in_training_restarts_nothing": 1,
    },
    "trainer/test_task_again.py": {
        "test_the_same_objects_go_on_after_a_rollback_as_new_ones": 1,
    },
    "trainer/test_torch_task.py": {
        "test_all_of_it_resumes_to_the_bit": 1,
    },
    "trainer/test_trainer_again.py": {
        "test_after_a_rollback_the_same_objects_are_as_good_as_new_ones": 2,
        "test_on_and_on_is_at_once": 1,
    },
    "trainer/test_trainer_law1.py": {
        "test_a_run_that_crashed_anywhere_is_the_run_that_did_not": SHARE,
        "test_ctrl_c_leaves_an_evaluation_within_a_batch_and_loses_no_step": NONE,
        "test_ctrl_c_in_an_evaluation_of_averaged_weights_with_a_dataloader": 1,
    },
    "trainer/test_trainer_moments.py": {
        "test_the_order_of_services_of_different_stages_is_no_matter": NONE,
    },
    "trainer/test_watch.py": {
        "test_both_are_killed_and_nothing_is_evaluated_twice_or_missed": NONE,
    },
}
"""File -> test -> how many of its cases take their turn in `make test`."""

TORTURE: Mapping[str, Sequence[str]] = {
    "drill/test_drill.py": (
        "test_sound_scripts_are_exact_at_every_hazard_many_times",
        "test_a_rate_by_hand_spoils_the_optimizer",
        "test_faults_are_named_at_every_seed",
    ),
    "drill/test_drill_ranks.py": ("test_a_sound_script_is_exact_at_every_hazard_of_ranks",),
    "examples/test_examples.py": ("test_at_every_hazard",),
    "group/test_rank_kills.py": ("test_disturbed_ranks_end_as_the_undisturbed_often",),
    "laws/test_law1_recovery.py": ("test_struck_at_each_point_around_a_rollback",),
    "laws/test_torture.py": (
        "test_fifty_kills_of_each_program",
        "test_crashed_anywhere",
        "test_killed_at_every_point_every_time",
    ),
    "loop/test_loop_random_programs.py": ("test_many_random_histories_end_as_the_straight_run",),
}
"""File -> tests that `make torture` alone runs."""

PROOFS: Mapping[str, str] = {
    "law 1, killed from outside": "laws/test_kills.py::test_a_killed_run_is_the_run_that_was_never_killed",
    "law 1, ranks killed": "group/test_rank_kills.py::test_disturbed_ranks_end_as_the_undisturbed",
    "law 1, crashed in any step": "laws/test_law1_any_step.py::test_crashed_anywhere",
    "law 1, rolled back": "laws/test_law1_recovery.py::test_at_every_door_over_every_kind_of_data",
    "law 1, killed at every operation": "laws/test_kill_points.py::test_killed_at_every_point",
    "law 1, signals": "laws/test_signals.py::test_a_signal_to_the_group_loses_no_step",
    "law 1, programs": "loop/test_loop_random_programs.py::test_a_random_history_ends_as_the_straight_run",
    "law 2": "laws/test_law2_observation.py::test_observed_runs_have_the_bits_of_the_unobserved",
    "law 3": "laws/test_law3_workers.py::test_any_number_of_workers_is_the_same_run",
    "law 4": "laws/test_kill_points.py::test_refused_by_the_disk_at_every_point",
    "law 5": "laws/test_law5_guards.py::test_nothing_non_finite_is_committed",
    "law 6": "laws/test_law6_no_sync.py::test_trainer",
    "law 7": "laws/test_law7_leftovers.py::test_nothing_outlives_the_block",
    "law 8": "test_arguments.py::test_unknown_keywords_come_with_the_nearest",
    "the drill": "drill/test_drill.py::test_it_names_the_component_that_a_resume_spoils",
    "a resume verifies itself": "record/test_planted_faults.py::test_a_resume_finds_out_by_itself",
    "a journal killed at its writes": "record/test_journal_kills.py::"
    "test_a_kill_at_any_operation_then_a_resume_leaves_every_row_once",
    "a checkpoint and a failing disk": "checkpoint/test_checkpoint_crash.py::"
    "test_a_failing_disk_leaves_the_previous_checkpoint",
    "files that are harmed": "record/test_damaged_places.py::test_whatever_befalls_a_file_of_a_run",
    "a service crashed in any step": "services/test_early_stop.py::"
    "test_patience_in_steps_counts_from_the_last_improvement",
    "services keep the laws": "testing/test_check_service.py::test_built_in_services_pass",
    "sinks killed at random times": "services/test_sinks.py::test_killed_at_random_times",
    "a config killed and resumed": "tfutils/test_from_params.py::"
    "test_the_tutorial_is_trained_killed_and_resumed_exactly",
    "the index and an outage": "index/test_index_outages.py::test_rows_arrive_when_the_server_is_back",
    "the snippets of the docs": "docs/test_snippets.py::test_snippet_runs",
}
"""Kind of proof -> the test that stands for it in `make test`, with a case or more every day."""


def today() -> int:
    """EVERSTEP_SEED, else the number of the day.

    The workers of pytest-xdist inherit the answer, so that midnight does not divide them.
    """
    day = os.environ.get("EVERSTEP_SEED") or int(time.time() // 86400)
    return int(os.environ.setdefault("EVERSTEP_TURN", str(day)))


def turns(n: int, of: int, name: str) -> set[int]:
    """Which `n` of `of` cases of the test, numbered from 0, have their turn today: spread evenly."""
    n = min(n, of)
    first = today() + zlib.crc32(name.encode())
    return {(first + i * of // n) % of for i in range(n)}


_sharing: str | None = None  # name of the running test, where only a share is wanted


def share(cases: Iterable[T], n: int) -> list[T]:
    """All of `cases`; for the short form of a test, the n of them whose turn it is, in their order."""
    listed = list(cases)
    chosen = range(len(listed)) if _sharing is None else turns(n, len(listed), _sharing)
    return [case for number, case in enumerate(listed) if number in chosen]


def share_for(name: str | None) -> None:
    """Make `share` choose for the test of this name, or take all with None."""
    global _sharing
    _sharing = name


def place(items: Iterable[Any], folder: str) -> None:
    """Mark each collected test with its tier: `long`, `in_turn` (both tiers) or `torture`."""
    listed: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        path = os.path.relpath(item.path, folder)
        if item.originalname in TORTURE.get(path, ()):
            item.add_marker("torture")
        elif item.originalname in TIERS.get(path, {}):
            listed.setdefault((path, item.originalname), []).append(item)
    for (path, name), cases in listed.items():
        _divide(cases, TIERS[path][name], f"{path}::{name}")


def _divide(cases: Sequence[Any], n: int | str, name: str) -> None:
    if isinstance(n, str):
        for item in cases:
            if item.callspec.params["extent"] == WHOLE:
                item.add_marker("long")
        return
    chosen = turns(n, len(cases), name)
    for number, item in enumerate(cases):
        item.add_marker("in_turn" if number in chosen else "long")
