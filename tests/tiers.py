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
    "backends/test_trainable.py": {
        "test_what_is_trained_later_frozen_later_or_changed_by_hand_is_saved": 1,
        "test_a_resume_is_the_run_that_was_never_stopped": 1,
        "test_the_whole_model_and_the_trained_part_meet": NONE,
        "test_wrapped_it_has_the_same_names": NONE,
        "test_in_a_container_it_is_the_same": NONE,
    },
    "backends/test_torch_updates.py": {
        "test_a_program_that_zeroes_now_and_then_resumes_exactly": 2,
    },
    "campaign/test_sittings.py": {
        "test_ctrl_c_leaves_whole_records_and_the_next_sitting_goes_on": NONE,
        "test_a_record_that_was_torn_is_a_case_to_do": NONE,
        "test_a_time_limit_begins_no_further_case": NONE,
        "test_a_case_that_failed_counts_nothing_runs_again_and_stays_named": NONE,
        "test_another_commit_begins_anew_and_the_page_alone_is_none": NONE,
        "test_one_sitting_at_a_time": NONE,
    },
    "checkpoint/test_crash_points.py": {
        "test_data_then_the_name_then_its_folder_in_each_scenario": NONE,
        "test_struck_at_some_calls": 1,
    },
    "checkpoint/test_power_cut.py": {
        "test_a_power_cut_at_some_calls": 2,
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
        "test_shards_of_a_checkpoint_by_its_step": NONE,
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
    "cli/test_du.py": {
        "test_shared_bytes_count_once_and_links_not_at_all": NONE,
        "test_the_table_adds_up_and_says_units": NONE,
        "test_odd_places": NONE,
    },
    "cli/test_labels.py": {
        "test_what_is_taken_away_is_gone": NONE,
        "test_an_index_that_was_lost_has_them_again": NONE,
        "test_labels_that_reached_the_file_alone_reach_the_index": NONE,
        "test_a_further_start_keeps_them_and_the_run_is_the_same": NONE,
        "test_while_the_run_trains": NONE,
        "test_in_a_database_that_several_machines_share": NONE,
        "test_a_mistake_changes_nothing": 1,
        "test_what_a_note_says_is_data": NONE,
        "test_the_file_of_a_stranger_stops_nothing": 1,
        "test_a_damaged_file_is_not_written_over": NONE,
        "test_a_link_is_not_followed": NONE,
        "test_a_run_that_is_sent_away_takes_them_along": NONE,
        "test_runs_without_labels_are_listed_without_numpy": NONE,
    },
    "cli/test_run.py": {
        "test_killed_now_and_then_it_ends_as_if_it_never_was": NONE,
        "test_a_time_budget_is_used_again_and_again_at_once": NONE,
        "test_what_never_gets_further_is_given_up_also_if_each_start_could_be_resumed": NONE,
        "test_a_directory_of_its_own_for_each_start_is_no_progress": NONE,
        "test_a_signal_ends_the_wait_before_a_start": NONE,
        "test_people_are_told_of_a_process_that_was_killed": NONE,
        "test_what_a_crash_leaves_behind_is_gone_at_the_next_start": NONE,
        "test_the_status_that_torchrun_hides_is_found": NONE,
        "test_no_further_start_where_it_would_not_help": 1,
        "test_a_signal_reaches_the_command_which_saves_and_ends_it": 1,
    },
    "cli/test_watch_command.py": {
        "test_it_stays_when_a_start_ends_if_another_follows": NONE,
        "test_starts_and_whether_they_were_verified": NONE,
        "test_it_writes_nothing": NONE,
        "test_ctrl_c_ends_it_and_not_the_run": NONE,
        "test_in_a_terminal_it_draws_over_itself": NONE,
        "test_a_run_on_another_machine_is_followed_through_the_server": NONE,
        "test_a_mistake_is_told": 1,
    },
    "cli/test_sweep.py": {
        "test_the_same_command_again_opens_no_run_that_is_finished": NONE,
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
    "drill/test_drill_limits.py": {
        "test_runs_are_left_at_a_number_of_steps": NONE,
        "test_a_fault_is_found_before_the_runs_are_left": NONE,
        "test_a_verdict_comes_within_the_budget_on_a_script_whose_epoch_takes_longer": NONE,
        "test_a_junit_file_has_a_case_per_hazard": NONE,
        "test_a_junit_file_has_failures_and_errors": NONE,
        "test_a_script_without_a_seed_is_told_so_and_not_failed_for_it": NONE,
        "test_hash_order_is_named": NONE,
        "test_chance_is_not_blamed_on_the_state": NONE,
        "test_the_line_that_draws_in_one_run_alone_is_named": NONE,
        "test_a_line_that_cannot_be_found_is_said": NONE,
    },
    "drill/test_drill_ranks.py": {
        "test_a_sound_script_on_two_ranks_is_exact": NONE,
        "test_it_names_what_a_resume_spoils_and_the_rank": NONE,
    },
    "replaying/test_diverge.py": {
        "test_a_planted_fault_is_found_by_step_and_component": NONE,
        "test_equal_runs_are_equal_and_another_cadence_of_saves_changes_nothing": NONE,
        "test_a_moment_that_a_resume_loses_is_found": NONE,
        "test_a_resume_that_is_not_exact_is_told_of_one_program": NONE,
        "test_a_run_and_its_replay": NONE,
        "test_chance_is_told_from_a_fault": NONE,
        "test_other_instructions_of_the_processor_differ_by_a_few_units_in_the_last_place": NONE,
        "test_records_alone_are_compared_where_nothing_can_be_executed": NONE,
    },
    "replaying/test_histories.py": {
        "test_a_run_that_was_killed_three_times_is_equal_to_its_twin": NONE,
        "test_a_rollback_is_another_batch_from_its_step_on_and_is_named": NONE,
        "test_a_fork_and_its_parent_are_compared_from_the_fork_on": NONE,
        "test_loader_workers_with_three_kills": NONE,
        "test_the_demo_with_a_kill": NONE,
    },
    "replaying/test_strangers_plants.py": {
        "test_a_strangers_fault_in_numpy_is_named": 1,
        "test_a_strangers_fault_in_torch_is_named": NONE,
        "test_of_two_updates_in_a_step_the_first_that_differs_is_named": NONE,
    },
    "replaying/test_replay.py": {
        "test_another_program_is_found_out_at_its_first_other_value": NONE,
        "test_nothing_that_is_recorded_verifies_nothing": NONE,
        "test_a_stream_of_another_name_is_found_out": NONE,
        "test_a_resume_after_a_clean_stop_is_verified_though_nothing_was_executed_again": NONE,
        "test_each_door_is_replayed": NONE,
        "test_the_run_of_a_config_is_replayed": NONE,
        "test_a_killed_replay_leaves_no_process_and_the_next_one_clears_its_copy": NONE,
        "test_a_function_gets_what_the_step_would_use": NONE,
        "test_the_debugger_stops_in_the_users_own_code_and_the_replay_ends_with_the_step": NONE,
        "test_the_debugger_stops_in_a_tasks_step": NONE,
        "test_what_cannot_be_executed_again_is_refused_with_the_reason": NONE,
        "test_another_ones_command_line_is_started_only_with_trust": NONE,
        "test_a_file_that_has_changed_since_is_named": NONE,
        "test_a_run_with_three_kills_and_a_rollback_is_verified": NONE,
        "test_a_fork_is_verified": NONE,
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
    "docs/test_site.py": {
        "test_links_and_anchors_lead_somewhere_and_nothing_is_fetched": NONE,
        "test_a_search_finds_pages_and_public_names": NONE,
    },
    "formats/test_foreign_weights.py": {
        "test_a_run_starts_from_them": 2,
        "test_what_does_not_fit_is_listed_and_nothing_is_loaded": 2,
        "test_a_part_under_other_names": 2,
        "test_no_second_copy_of_the_whole_is_in_memory": NONE,
        "test_arrays_of_numpy_need_no_torch": NONE,
        "test_a_sharded_model_takes_its_part": NONE,
    },
    "formats/test_hostile_files.py": {
        "test_a_file_that_was_cut_off": 3,
        "test_flipped_bits_change_a_weight_or_are_an_error": 2,
        "test_a_forged_header": 4,
        "test_an_index_leads_nowhere_else": 4,
        "test_an_index_that_is_none": 2,
        "test_forged_metadata": 5,
        "test_a_pickle_that_is_none_takes_no_memory": 5,
    },
    "examples/test_fsdp.py": {
        "test_it_learns_and_a_kill_changes_nothing": NONE,
        "test_on_one_process_it_goes_on_from_two": NONE,
    },
    "hostile/test_fuzz.py": {
        "test_a_hostile_input_ends_in_a_value_or_an_error": 1,
        "test_the_watch_hears_it": 1,
    },
    "importing/test_import.py": {
        "test_an_import_repeated_adds_nothing_and_a_longer_record_supersedes": NONE,
    },
    "group/test_audit_ranks.py": {
        "test_ranks_that_change_in_number_use_every_sample_once": NONE,
    },
    "group/test_scale.py": {
        "test_files_and_requests_are_those_of_the_page": 1,
    },
    "group/test_agreement_model.py": {
        "test_longer_histories_too": NONE,
    },
    "group/test_decisions.py": {
        "test_what_one_rank_alone_does_after_the_steps_is_named_by_all": NONE,
    },
    "group/test_elastic.py": {
        "test_an_agent_is_lost_and_another_joins": NONE,
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
    "group/test_mirrored_ranks.py": {
        "test_an_empty_machine_goes_on_exactly": NONE,
    },
    "group/test_parallel.py": {
        "test_torchrun_starts_the_same_program": NONE,
    },
    "group/test_other_layouts.py": {
        "test_ddp_on_four_fsdp_on_two_one_process_fsdp_on_three": NONE,
        "test_an_open_window_of_a_sharded_model_is_refused": NONE,
    },
    "group/test_other_ranks.py": {
        "test_four_two_one_three": 1,
        "test_kills_before_and_after_the_change_make_no_difference": NONE,
        "test_the_change_is_recorded_said_and_shown": NONE,
        "test_a_harmed_part_is_named_and_the_checkpoint_before_is_used": NONE,
        "test_what_cannot_be_given_to_other_ranks_is_refused_by_all": 1,
    },
    "group/test_parallel_task.py": {
        "test_ranks_compute_what_one_process_computes": 1,
    },
    "group/test_peers.py": {
        "test_a_stopped_rank_is_not_lost": NONE,
    },
    "group/test_no_copy_ranks.py": {
        "test_a_disk_that_refuses_what_one_rank_keeps_costs_a_warning_on_all": NONE,
        "test_a_state_that_one_rank_cannot_keep_is_kept_on_none": NONE,
    },
    "group/test_rank_commit.py": {
        "test_killed_anywhere_in_a_save_it_is_the_newest_or_the_previous_whole": 1,
        "test_a_rank_that_is_late_fails_the_save_on_all_and_the_next_succeeds": NONE,
        "test_a_writer_that_stands_still_and_goes_on": 1,
    },
    "group/test_rank_kills.py": {
        "test_disturbed_ranks_end_as_the_undisturbed": 1,
    },
    "group/test_virtual_shards.py": {
        "test_kills_that_change_the_number_of_ranks_change_no_bit": 1,
        "test_a_window_of_gradients_continues_on_another_number_of_ranks": NONE,
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
    "group/test_sharded.py": {
        "test_killed_twice_it_ends_as_the_undisturbed": 1,
        "test_each_value_is_written_once_by_a_rank_that_holds_it": NONE,
        "test_struck_at_any_time_it_ends_as_the_undisturbed": NONE,
        "test_a_state_goes_from_one_layout_into_another": NONE,
        "test_a_damaged_or_missing_shard_is_named_and_the_checkpoint_before_is_used": NONE,
        "test_frozen_shards_are_not_written_again_after_a_restart": NONE,
        "test_what_cannot_be_saved_is_refused_by_name": NONE,
        "test_copies_that_differ_make_no_checkpoint_and_the_ranks_are_named": NONE,
    },
    "group/test_sharded_elsewhere.py": {
        "test_one_process_loads_verifies_copies_and_compares": NONE,
        "test_another_mesh_of_as_many_ranks_is_another_layout_and_no_divergence": NONE,
        "test_another_grouping_of_the_parameters_is_another_layout": NONE,
        "test_another_precision_of_a_sharded_model_is_a_changed_setting": NONE,
    },
    "group/test_sharded_wrappers.py": {
        "test_wrapped_optimizers_compute_what_one_process_computes": 1,
        "test_a_window_of_a_wrapped_optimizer_survives_a_kill": NONE,
        "test_a_task_computes_what_one_process_computes": NONE,
        "test_an_overflow_on_one_rank_leaves_out_the_update_on_all": NONE,
        "test_a_short_window_that_was_not_averaged_is_refused": NONE,
        "test_what_a_task_cannot_do_with_a_sharded_model_is_refused": NONE,
    },
    "group/test_tensor_parallel.py": {
        "test_killed_twice_it_ends_as_the_undisturbed": 1,
        "test_struck_at_any_time_it_ends_as_the_undisturbed": NONE,
        "test_it_computes_what_one_process_computes": NONE,
        "test_dropout_of_what_all_ranks_have_is_that_of_one_process": NONE,
        "test_a_run_goes_from_one_layout_into_another": NONE,
        "test_other_parts_on_as_many_ranks_are_another_layout": NONE,
        "test_ranks_of_one_part_draw_the_same_and_count_once": NONE,
        "test_a_trainer_trains_and_evaluates_as_on_one_process": NONE,
        "test_what_is_not_one_training_is_refused": NONE,
    },
    "group/test_torchrun.py": {
        "test_a_planned_end_has_status_0_and_the_real_one_is_in_the_run": 1,
        "test_a_restart_does_not_read_what_the_attempt_before_has_left": NONE,
        "test_torchrun_prints_why_a_run_could_not_begin": NONE,
    },
    "group/test_trainer_ranks.py": {
        "test_what_follows_from_all_outputs_and_what_is_refused": NONE,
    },
    "index/test_hostile_index.py": {
        "test_a_fifo_beside_the_index_holds_nobody": 1,
    },
    "index/test_admission.py": {
        "test_no_part_of_a_run_is_read_through_a_link": 1,
    },
    "index/test_index_queries.py": {
        "test_metrics_too": NONE,
    },
    "index/test_index_training.py": {
        "test_eight_processes_train_into_one_index": NONE,
    },
    "index/test_journal_watch.py": {
        "test_an_accepted_divergence_in_a_file_that_is_empty_at_first": NONE,
        "test_a_label_of_a_finished_run": NONE,
    },
    "laws/test_attacks.py": {
        "test_two_loaders_share_a_generator": NONE,
        "test_an_evaluation_over_the_training_loader_moves_its_generator": SHARE,
        "test_a_loader_draws_from_a_generator_of_the_state": SHARE,
        "test_datasets_and_samplers_with_generators_of_their_own": SHARE,
        "test_lines_before_the_steps_draw_the_same_random_numbers_again": SHARE,
        "test_a_program_with_two_epoch_loops_goes_on_in_the_one_it_was_in": SHARE,
        "test_what_the_program_holds_of_a_container_of_the_state_stays_in_it": SHARE,
        "test_numpy_scalars_in_the_state_of_a_run_with_an_optimizer": SHARE,
        "test_buffers_modes_and_frozen_parameters_come_back": SHARE,
    },
    "laws/test_kill_points.py": {
        "test_killed_at_every_point": 1,
        "test_refused_by_the_disk_at_every_point": 1,
        "test_a_disk_that_is_full_for_a_while": 1,
    },
    "laws/test_run_crash_points.py": {
        "test_calls_are_announced_and_in_order": NONE,
        "test_struck_at_some_calls": 1,
    },
    "laws/test_run_power_cut.py": {
        "test_a_power_cut_at_some_calls": 1,
    },
    "supervisor/test_no_copy.py": {
        "test_the_checkpoints_are_those_with_copies": NONE,
        "test_a_crash_in_any_place": 1,
        "test_a_signal_saves_the_state_in_a_step_and_the_one_kept_on_disk_in_the_tail": 1,
    },
    "laws/test_kills.py": {
        "test_killed_in_each_phase_it_is_the_run_that_was_never_killed": NONE,
        "test_a_killed_run_is_the_run_that_was_never_killed": 1,
    },
    "laws/test_law1_any_step.py": {
        "test_crashed_anywhere_often": NONE,
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
    "mirror/test_folder_mirror.py": {
        "test_the_mirror_holds_what_the_directory_has_and_nothing_else": NONE,
        "test_a_directory_that_had_no_mirror_gets_one": NONE,
        "test_a_directory_that_is_behind_is_brought_up": NONE,
        "test_rows_that_only_the_directory_has_stay": NONE,
        "test_a_checkpoint_that_the_mirror_has_never_had_is_not_passed_over": NONE,
        "test_another_run_is_refused_before_the_first_step": NONE,
        "test_a_machine_that_ends_without_a_further_save_is_refused_too": NONE,
        "test_a_shorter_journal_of_its_own_is_another_history": NONE,
        "test_files_that_checkpoints_share_come_along": NONE,
        "test_a_mirror_that_loses_files_while_a_run_trains_gets_them_again": 1,
        "test_a_shared_file_that_is_damaged_before_its_upload": NONE,
        "test_a_checkpoint_that_is_cut_off_on_the_disk_stops_no_upload": NONE,
        "test_a_damaged_shared_file_of_a_directory_that_is_behind_is_brought_again": NONE,
        "test_an_outage_is_one_warning_and_is_caught_up": NONE,
        "test_what_is_not_mirrored_at_the_end_is_said_and_caught_up": NONE,
        "test_training_and_retention_do_not_wait_for_a_slow_mirror": NONE,
        "test_a_long_outage_does_not_fill_the_disk": NONE,
        "test_a_checkpoint_that_is_damaged_on_the_disk_is_left_out": NONE,
        "test_half_uploaded_files_are_ignored_and_removed": NONE,
        "test_a_damaged_mirror_gives_nothing": NONE,
        "test_a_list_from_a_stranger_leads_nowhere": NONE,
        "test_pins_and_an_edited_pointer_come_back": NONE,
        "test_an_address_that_cannot_be_used_is_refused": NONE,
        "test_a_missing_package_is_named_with_its_extra": NONE,
        "test_a_mirror_inside_the_run_directory_is_refused": NONE,
        "test_a_mirror_that_cannot_be_written_is_refused_before_the_first_step": NONE,
        "test_a_drill_leaves_a_real_mirror_alone": NONE,
    },
    "mirror/test_s3_mirror.py": {
        "test_machines_killed_one_after_another": NONE,
        "test_a_list_is_created_by_one_of_two": NONE,
        "test_of_two_machines_the_earlier_is_refused": NONE,
        "test_the_bytes_in_the_store_are_verified": NONE,
        "test_wrong_credentials_are_refused_before_the_first_step": NONE,
        "test_a_bucket_that_does_not_exist_is_refused_before_the_first_step": NONE,
    },
    "mirror/test_mirror_kills.py": {
        "test_killed_at_each_operation_on_a_folder": NONE,
        "test_killed_at_each_operation_on_s3": NONE,
    },
    "package/test_dist.py": {
        "test_the_wheel_has_every_file_of_the_package": NONE,
        "test_the_sdist_has_every_file_of_the_repository": NONE,
        "test_the_sdist_and_the_tree_build_the_same_wheel": NONE,
    },
    "package/test_installed.py": {
        "test_alone_it_does_what_it_is_for": NONE,
        "test_a_users_type_checker_reads_the_types": NONE,
    },
    "proof/test_conformance.py": {
        "test_a_planted_fault_is_found": 4,
        "test_a_strike_is_repeated_by_its_number": NONE,
        "test_everstep_is_exact_under_every_kind_of_strike": NONE,
    },
    "record/test_audit.py": {
        "test_equal_runs_have_equal_ledgers": NONE,
        "test_each_kind_of_data_is_proven_or_said_to_be_not": 1,
        "test_epochs_that_are_parts_of_passes": NONE,
        "test_a_pass_that_is_left_and_one_that_is_not_over": NONE,
        "test_a_loop_without_epochs": NONE,
        "test_quarantined_batches_are_named_with_their_rollback": NONE,
        "test_other_data_by_choice_is_said": NONE,
        "test_a_run_that_continues_another_says_where_its_beginning_is": NONE,
        "test_a_run_that_an_older_everstep_began_is_proven_from_the_next_pass_on": NONE,
        "test_killed_with_workers_three_times": NONE,
        "test_a_resume_at_a_wrong_batch_is_named": 1,
        "test_an_edited_journal_is_named": 1,
        "test_an_edited_ledger_is_named_also_with_links_made_anew": 1,
        "test_a_lost_file_is_named": NONE,
        "test_a_lost_end_is_named_by_the_checkpoint_that_needs_it": NONE,
        "test_a_hostile_ledger_is_wrong_or_not_provable_at_once": 1,
        "test_a_run_without_a_ledger_says_so": NONE,
    },
    "record/test_damaged_run.py": {
        "test_some_files_in_every_way": SHARE,
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
    "services/test_notify.py": {
        "test_a_divergence_is_told_once_however_often_it_is_met": NONE,
        "test_a_run_that_is_stuck_is_told_while_it_is": NONE,
        "test_a_process_that_ends_itself_is_told": NONE,
        "test_what_does_not_take_it_is_one_warning_and_costs_the_run_nothing": 1,
        "test_a_step_does_not_wait_for_a_slow_receiver": NONE,
        "test_a_mistake_is_told_and_no_secret_with_it": 1,
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
        "test_a_value_that_is_assigned_where_lines_run_again_keeps_its_name": 2,
    },
    "supervisor/test_supervisor_use.py": {
        "test_a_crash_at_any_step_resumes_exactly": 3,
    },
    "supervisor/test_trial.py": {
        "test_a_resume_is_exact_whether_its_state_brings_it_back_or_not": 1,
    },
    "test_benchmarks.py": {
        "test_it_runs_and_its_figures_are_numbers": NONE,
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
    "test_tiers.py": {
        "test_a_test_with_a_share_gets_it": SHARE,
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
    "ui/test_access.py": {
        "test_names_that_are_given_or_local_are_answered": NONE,
        "test_ctrl_c_ends_it_at_once_also_with_a_live_connection": NONE,
        "test_a_link_in_another_page_leads_to_the_page": NONE,
    },
    "ui/test_hostile_events.py": {
        "test_a_long_id_is_no_run_and_a_fault_is_told_in_short": NONE,
        "test_half_requests_neither_hold_the_page_nor_stay": NONE,
        "test_a_head_of_a_request_has_a_limit": 1,
        "test_a_hundred_thousand_settings_are_no_answer": NONE,
        "test_a_picture_of_too_many_pixels_is_not_served": 1,
    },
    "ui/test_run_page.py": {
        "test_a_killed_run_shows_where_and_that_its_resume_was_verified": NONE,
        "test_a_curve_is_the_journal": NONE,
        "test_wrong_questions_for_curves_say_what_to_do": NONE,
        "test_a_run_is_named_by_its_id_alone": NONE,
        "test_a_log_is_followed_from_where_it_was_read": NONE,
        "test_curves_of_another_machines_run_come_from_the_index": NONE,
        "test_a_curve_grows_while_the_run_trains": NONE,
        "test_runs_side_by_side_say_what_everstep_compare_says": NONE,
        "test_best_weights_of_which_nothing_was_recorded_are_listed": NONE,
        "test_a_directory_that_is_used_again_has_the_new_runs_curves": NONE,
        "test_rows_from_the_index_are_those_of_the_journals_while_they_grow": NONE,
        "test_a_block_that_everstep_does_not_write_is_a_malformed_index": 1,
        "test_beyond_a_part_there_are_points_for_lines_that_go_on": NONE,
        "test_the_list_says_of_resumes_what_the_page_of_the_run_says": 2,
        "test_a_curve_of_many_blocks_is_read_again_at_the_cost_of_one": NONE,
    },
    "ui/test_live_points.py": {
        "test_a_point_of_a_slow_training_is_there_within_two_seconds": 1,
        "test_what_was_seen_early_is_superseded_after_a_kill": NONE,
    },
    "ui/test_list.py": {
        "test_filters_mean_what_they_mean_to_everstep_runs": NONE,
        "test_columns_pages_and_order": NONE,
        "test_wrong_questions_are_told_what_to_do": NONE,
        "test_looking_at_a_run_neither_changes_nor_locks_it": NONE,
        "test_a_run_directory_alone_is_read_without_an_index": NONE,
        "test_a_folder_that_this_user_cannot_write_is_shown_from_its_journals": NONE,
        "test_new_points_and_new_runs_are_live_within_two_seconds": NONE,
        "test_an_index_that_is_replaced_under_the_page_comes_back": NONE,
        "test_a_run_that_was_forgotten_is_not_looked_for_again_and_again": NONE,
        "test_the_runs_of_a_sweep_stand_together_in_any_order": NONE,
        "test_columns_with_numbers_of_the_runs_that_match": NONE,
        "test_faults_of_journals_and_index_are_told_until_they_are_mended": NONE,
    },
    "ui/test_report.py": {
        "test_lines_keep_their_extremes": NONE,
        "test_many_lines_share_the_points": NONE,
        "test_a_run_given_twice_is_there_once": NONE,
        "test_wrong_use_has_a_remedy": 1,
        "test_it_carries_its_data_with_their_digest": NONE,
        "test_what_does_not_fit_is_left_out_and_counted": NONE,
        "test_a_picture_that_is_gone_is_left_out": NONE,
    },
    "ui/browser/test_report_file.py": {
        "test_its_digest_is_that_of_the_standard_library": 1,
        "test_runs_are_hidden_and_shown_and_superseded_points_seen": NONE,
        "test_a_chart_is_saved_as_png_and_csv": NONE,
        "test_changed_data_are_told": NONE,
        "test_labels_and_a_damaged_checkpoint_are_told": NONE,
        "test_its_charts_have_an_axis_of_time": NONE,
        "test_values_that_are_all_superseded_are_shown_by_a_button": NONE,
        "test_its_timeline_is_saved_as_a_picture": NONE,
    },
    "ui/browser/test_broken_answers.py": {
        "test_an_answer_that_breaks_off_is_an_error": NONE,
    },
    "ui/browser/test_chart_axes.py": {
        "test_every_range_is_drawn": 1,
        "test_a_timeline_of_any_values_is_drawn": 1,
    },
    "ui/browser/test_compare_view.py": {
        "test_two_hundred_runs_are_one_chart": NONE,
        "test_settings_stand_side_by_side_and_differences_are_marked": NONE,
        "test_a_setting_is_drawn_against_a_metric": NONE,
        "test_a_run_is_left_out_by_a_click": NONE,
        "test_facts_of_the_runs_are_no_settings": NONE,
        "test_the_command_that_sends_a_comparison_is_copied": NONE,
        "test_a_click_opens_the_run_of_the_line": NONE,
        "test_a_metric_that_comes_later_gets_a_chart": NONE,
        "test_the_values_of_all_runs_stand_beside_the_pointer": NONE,
        "test_a_larger_chart_is_in_sight": NONE,
        "test_a_table_that_goes_on_shows_that_it_does": NONE,
    },
    "ui/browser/test_run_view.py": {
        "test_a_divergence_is_told_with_its_step": NONE,
        "test_a_rollback_is_a_row_of_the_timeline": NONE,
        "test_a_drag_zooms_and_a_key_shows_all_again": NONE,
        "test_a_chart_is_saved_as_a_picture_and_as_a_table": NONE,
        "test_each_tab_shows_what_was_recorded_and_nothing_is_markup": NONE,
        "test_a_point_is_seen_soon_after_it_was_measured": NONE,
        "test_a_failure_and_a_damaged_checkpoint_are_told": NONE,
        "test_the_timeline_is_saved_as_a_picture": NONE,
        "test_pictures_texts_and_histograms_are_shown": NONE,
        "test_a_metric_of_superseded_values_alone_says_so": NONE,
        "test_a_zoomed_line_goes_on_to_the_edges": NONE,
        "test_the_header_tells_of_settings_and_the_charts_of_phases": NONE,
    },
    "ui/browser/test_many_runs.py": {
        "test_ten_thousand_runs_are_scrolled_sorted_and_filtered": NONE,
        "test_ten_thousand_points_are_drawn": NONE,
    },
    "ui/browser/test_screenshots.py": {
        "test_the_pictures_of_the_page_and_of_a_report_can_be_made_again": NONE,
    },
    "ui/browser/test_runs_view.py": {
        "test_an_error_of_a_filter_stands_beside_it_and_the_list_stays": NONE,
        "test_a_click_on_a_column_sorts_and_another_turns_the_order": NONE,
        "test_columns_are_chosen": NONE,
        "test_a_chosen_column_is_scrolled_into_sight": NONE,
        "test_a_scrolled_table_keeps_names_and_boxes_under_their_headings": NONE,
        "test_a_row_that_is_ticked_looks_so_below_the_pointer_and_after_a_comparison": NONE,
        "test_settings_of_most_values_are_columns_and_the_others_are_counted": NONE,
        "test_a_name_with_a_comma_is_a_column": NONE,
        "test_runs_of_a_sweep_are_a_group": NONE,
        "test_a_setting_is_drawn_against_a_metric_of_all_runs_that_match": NONE,
        "test_what_cannot_be_read_is_told_in_the_header": NONE,
        "test_a_status_has_a_shape_and_a_word": NONE,
        "test_nothing_is_wider_than_the_window": 1,
    },
}
"""File -> test -> how many of its cases take their turn in `make test`."""

TORTURE: Mapping[str, Sequence[str]] = {
    "checkpoint/test_crash_points.py": ("test_struck_at_every_call",),
    "checkpoint/test_power_cut.py": ("test_a_power_cut_at_every_call",),
    "drill/test_drill.py": (
        "test_sound_scripts_are_exact_at_every_hazard_many_times",
        "test_a_rate_by_hand_spoils_the_optimizer",
        "test_faults_are_named_at_every_seed",
    ),
    "drill/test_drill_ranks.py": ("test_a_sound_script_is_exact_at_every_hazard_of_ranks",),
    "examples/test_examples.py": ("test_at_every_hazard",),
    "group/test_rank_kills.py": ("test_disturbed_ranks_end_as_the_undisturbed_often",),
    "group/test_sharded.py": ("test_struck_at_any_time_it_ends_as_the_undisturbed_often",),
    "group/test_tensor_parallel.py": ("test_struck_at_any_time_it_ends_as_the_undisturbed_often",),
    "hostile/test_fuzz.py": ("test_thousands_of_hostile_inputs_end_so",),
    "laws/test_law1_recovery.py": ("test_struck_at_each_point_around_a_rollback",),
    "laws/test_run_crash_points.py": ("test_struck_at_every_call",),
    "laws/test_run_power_cut.py": ("test_a_power_cut_at_every_call",),
    "laws/test_torture.py": (
        "test_a_hundred_kills_of_each_program",
        "test_crashed_anywhere",
        "test_killed_at_every_point_every_time",
    ),
    "loop/test_loop_random_programs.py": ("test_many_random_histories_end_as_the_straight_run",),
    "record/test_damaged_run.py": ("test_every_file_in_every_way",),
}
"""File -> tests that `make torture` alone runs."""

TOGETHER: Mapping[str, int] = {"faults/test_faults_": 5}
"""Beginning of files -> how many of the cases of all their tests, taken together, run in `make test`."""

PROOFS: Mapping[str, str] = {
    "law 1, killed from outside": "laws/test_kills.py::test_a_killed_run_is_the_run_that_was_never_killed",
    "law 1, ranks killed": "group/test_rank_kills.py::test_disturbed_ranks_end_as_the_undisturbed",
    "law 1, crashed in any step": "laws/test_law1_any_step.py::test_crashed_anywhere",
    "law 1, rolled back": "laws/test_law1_recovery.py::test_at_every_door_over_every_kind_of_data",
    "law 1, killed at every operation": "laws/test_kill_points.py::test_killed_at_every_point",
    "law 1, struck from outside": "laws/test_run_crash_points.py::test_struck_at_some_calls",
    "law 4, power cuts": "laws/test_run_power_cut.py::test_a_power_cut_at_some_calls",
    "the order of calls": "checkpoint/test_crash_points.py::test_data_then_the_name_then_its_folder",
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
    together: dict[str, list[Any]] = {beginning: [] for beginning in TOGETHER}
    for item in items:
        path = os.path.relpath(item.path, folder)
        for beginning in TOGETHER:
            if path.startswith(beginning):
                together[beginning].append(item)
        if item.originalname in TORTURE.get(path, ()):
            item.add_marker("torture")
        elif item.originalname in TIERS.get(path, {}):
            listed.setdefault((path, item.originalname), []).append(item)
    for (path, name), cases in listed.items():
        _divide(cases, TIERS[path][name], f"{path}::{name}")
    for beginning, cases in together.items():
        _divide(cases, TOGETHER[beginning], beginning)


def _divide(cases: Sequence[Any], n: int | str, name: str) -> None:
    if isinstance(n, str):
        for item in cases:
            if item.callspec.params["extent"] == WHOLE:
                item.add_marker("long")
        return
    chosen = turns(n, len(cases), name)
    for number, item in enumerate(cases):
        item.add_marker("in_turn" if number in chosen else "long")
