"""Failures that others met in production with caches of this kind, and the tests in which each of them would show."""

import ast
from pathlib import Path

ENGINES = "integrations/vllm/test_field_cases_in_engine.py"
FAULTS = "integrations/vllm/test_fault_matrix.py::test_only_the_request_that_meets_the_fault_fails"
MANAGER = "integrations/vllm/test_manager.py"
POOL = "encoder_cache/test_pool.py"
HOLDS = "encoder_cache/test_holds.py"
READ_PLAN = "encoder_cache/test_read_plan.py"
FRONT_END = "integrations/vllm/test_front_end.py"
AUDIO = "integrations/vllm/test_audio.py"
IDENTITY = "integrations/vllm/test_identity_in_engine.py"

CASES = {
    # Free, evict, reuse
    "evicted and allocated again in one scheduling pass": (
        f"{MANAGER}::test_evicted_and_allocated_again_in_one_pass_is_not_reported_freed",
        "encoder_cache/test_table.py::test_an_item_evicted_and_allocated_again_in_one_pass_is_there_and_unwritten",
        "encoder_cache/test_protocol_machine.py"
        "::test_an_item_evicted_and_scheduled_again_in_one_pass_is_read_from_its_new_rows",
    ),
    "one item twice in a prompt": (
        f"{MANAGER}::test_an_item_twice_in_a_prompt_takes_its_blocks_once_and_stays_until_the_last_use",
        f"{READ_PLAN}::test_the_same_item_twice_in_a_step_is_read_twice",
        f"{ENGINES}::test_one_image_twice_is_read_for_both_spans_when_a_chunk_ends_with_the_first",
    ),
    "speculative progress rolled back": (
        "integrations/vllm/test_plugin.py::test_combinations_that_are_not_served_are_refused",
        f"{HOLDS}::test_blocks_wait_for_the_last_step_that_may_read_them",
        f"{HOLDS}::test_a_hit_on_a_held_item_brings_it_back_in_the_same_generation",
        "integrations/vllm/test_async_scheduling.py::test_blocks_are_reused_at_once_and_rows_stay_right",
    ),
    "freed in the step it was allocated": (
        f"{MANAGER}::test_aborted_in_the_step_that_allocated_it_leaks_nothing",
        f"{POOL}::test_an_item_freed_in_the_step_it_was_allocated_leaves_no_trace_once_evicted",
        "integrations/vllm/test_preemption.py::test_an_abort_at_any_step_leaves_nothing",
    ),
    "free called many times": (
        f"{MANAGER}::test_free_ten_times_frees_once",
        f"{POOL}::test_releasing_again_and_again_frees_nothing_twice",
    ),
    "output buffer reused by the encoder": (
        f"{ENGINES}::test_rows_stay_when_the_encoder_uses_its_output_tensor_again",
        "test_runtime.py::test_output_tensor_that_the_encoder_uses_again",
    ),
    "look-ahead past the item's end": (
        f"{ENGINES}::test_every_row_is_read_once_and_nothing_beside_it_wherever_a_chunk_ends",
        f"{READ_PLAN}::test_a_window_that_reaches_outside_its_item_or_the_step_is_named",
    ),
    "idle or sleep": (
        f"{ENGINES}::test_after_sleep_the_image_is_encoded_again",
        "integrations/vllm/test_fault_matrix.py::test_what_is_called_from_outside_changes_no_tokens",
    ),
    # Budget, stall, starvation
    "item larger than the cache": (
        f"{ENGINES}::test_the_whole_pool_is_served_and_one_block_more_is_refused_with_both_sizes",
        f"{FRONT_END}::test_an_item_larger_than_the_pool_is_refused_with_the_sizes_and_the_remedy",
        f"{FRONT_END}::test_the_largest_item_is_the_smaller_of_the_pool_and_of_what_can_be_encoded",
    ),
    "waiting requests hold entries": (
        f"{ENGINES}::test_preempted_holders_of_the_whole_pool_do_not_stop_an_urgent_request",
        f"{MANAGER}::test_a_reference_taken_in_a_pass_without_being_scheduled_is_dropped",
    ),
    "two big items and alignment": (
        f"{ENGINES}::test_two_items_that_do_not_fit_together_are_served_one_after_the_other",
    ),
    "same image fifty times in a prompt": (
        f"{ENGINES}::test_fifty_times_the_same_image_is_one_item",
        f"{MANAGER}::test_fifty_references_in_one_prompt_cost_one_item",
    ),
    "video larger than profiled": (
        f"{ENGINES}::test_a_video_larger_than_profiled_is_served_while_it_fits",
        f"{ENGINES}::test_a_video_larger_than_the_pool_is_refused_with_both_sizes",
        "encoder_cache/test_item.py::test_an_item_that_fits_densely_always_fits",
    ),
    "fully cached head of the queue": (f"{ENGINES}::test_a_cached_head_of_the_queue_and_its_follower_both_finish",),
    "small images in large blocks": (
        f"{ENGINES}::test_a_hundred_and_two_small_images_pass_through_sixteen_blocks",
        f"{POOL}::test_a_hundred_small_images_pass_through_a_pool_of_sixteen_blocks",
    ),
    # Keys
    "client-chosen id reused": (
        f"{FRONT_END}::test_an_id_with_media_of_another_size_is_refused_and_the_first_stay",
        f"{MANAGER}::test_an_id_sent_again_with_media_of_another_size_is_encoded_again",
        "integrations/vllm/test_preemption.py::test_an_id_used_again_for_media_of_another_size_is_encoded_again_where_it_gets_through",
    ),
    "processor options differ": (
        f"{ENGINES}::test_other_processor_options_are_another_image",
        f"{ENGINES}::test_another_number_of_frames_is_another_video",
    ),
    "dimensions swapped": (f"{ENGINES}::test_the_same_bytes_with_height_and_width_swapped_are_another_image",),
    "dtype differs": (f"{ENGINES}::test_the_same_bytes_in_another_dtype_are_another_item",),
    "adapter reloaded": (f"{IDENTITY}::test_an_adapter_of_the_encoder_is_known_by_its_path",),
    "weights updated": (f"{IDENTITY}::test_after_new_weights_nothing_of_before_is_found",),
    "tenants": (
        f"{IDENTITY}::test_tenants_share_nothing_and_get_the_same_tokens",
        f"{FRONT_END}::test_a_salt_keeps_content_apart_in_the_processor_cache",
    ),
    "fingerprint collides or is zero": (
        f"{ENGINES}::test_two_images_of_one_fingerprint_are_two_entries",
        "encoder_cache/test_identity.py::test_a_key_whose_digest_is_zero_does_not_read_as_empty",
        "test_runtime.py::test_another_key_with_the_same_fingerprint_is_not_taken_for_the_item",
    ),
    # Chunks, placeholders, video, audio
    "chunk begins on the item's first row": (
        f"{ENGINES}::test_every_row_is_read_once_and_nothing_beside_it_wherever_a_chunk_ends",
        f"{READ_PLAN}::test_wherever_a_prompt_is_cut_every_row_is_read_once",
    ),
    "second chunk of an item": (
        f"{ENGINES}::test_every_level_gets_the_encoders_rows_however_the_prompt_is_cut",
        f"{READ_PLAN}::test_chunks_of_any_size_continue_where_the_one_before_ended",
    ),
    "deepstack under chunking": (f"{ENGINES}::test_every_level_gets_the_encoders_rows_however_the_prompt_is_cut",),
    "N rows for M placeholders": (
        f"{ENGINES}::test_a_hundred_rows_for_eighty_placeholders_fail_one_request_with_both_numbers",
        f"{READ_PLAN}::test_an_entry_of_another_size_than_its_placeholder_is_refused_with_both_counts",
        FAULTS,
    ),
    "pruned video": (
        "integrations/vllm/test_plugin.py::test_combinations_that_vllm_itself_refuses_for_this_model_are_refused",
        f"{FRONT_END}::test_rows_are_what_the_mask_says_and_not_the_length_of_the_placeholder",
        f"{ENGINES}::test_a_pruned_video_is_stored_by_the_rows_that_are_left",
    ),
    "image cached, audio not": (
        f"{AUDIO}::test_a_cached_picture_is_read_while_the_sound_beside_it_is_encoded",
        f"{ENGINES}::test_a_cached_image_is_read_while_the_video_beside_it_is_encoded",
    ),
    "interleaved audio and video": (
        f"{AUDIO}::test_each_row_comes_from_its_own_item",
        f"{AUDIO}::test_rows_of_sound_and_frames_exchanged_change_tokens",
        f"{READ_PLAN}::test_interleaved_items_take_each_row_from_their_own",
        f"{READ_PLAN}::test_masks_that_share_a_row_are_refused_by_the_second",
    ),
    "malformed encoder output": (
        FAULTS,
        "test_runtime.py::test_output_that_is_not_finite_is_refused_and_the_row_is_named",
        "test_runtime.py::test_output_of_the_wrong_size_is_refused_and_nothing_becomes_readable",
    ),
}
"""Every case, and the tests that hold it, by their files in `tests`."""


def test_every_case_names_tests_that_exist():
    tests = Path(__file__).parent
    missing = []
    for name in {name for names in CASES.values() for name in names}:
        path, _, function = name.partition("::")
        defined = [
            node.name for node in ast.parse((tests / path).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        if function not in defined:
            missing.append(name)
    assert not missing
    assert len(CASES) == 8 + 7 + 8 + 8 and all(CASES.values())
