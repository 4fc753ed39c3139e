"""Failures that others met in production with caches of this kind, as far as no other file has a test for them.

Most of it runs on two real engines: a roomy one, whose pool holds as many rows as a step but few blocks, and a tight
one, whose pool holds two items only if both are small. `tests/test_field_cases.py` lists all such failures and where
they are tested.
"""

from contextlib import contextmanager

import numpy as np
import pytest
from engines import start
from PIL import Image

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import ProcessorInputs

from vllm_neuron_cache.demo.checkpoint import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, chat_prompt
from vllm_neuron_cache.encoder_cache.identity import Fingerprint
from vllm_neuron_cache.errors import ConfigurationError, EncoderOutputError, ItemTooLargeError, request_error

pytestmark = pytest.mark.vllm

NUM_ITEM_BLOCKS = 16
ROOMY = {"lane": "eager", "encoder_cache_num_blocks_exact": NUM_ITEM_BLOCKS + 1}
ROOMY_ARGUMENTS = {
    "max_model_len": 12288,
    "max_num_batched_tokens": 8192,  # as many rows as 16 blocks of 512 have
    "limit_mm_per_prompt": {"image": 50, "video": 1},
    "block_size": 32,
}
TIGHT = {"lane": "eager", "encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 12}
TIGHT_ROWS = 704
TIGHT_ARGUMENTS = {
    "max_num_batched_tokens": 768,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
    "mm_processor_kwargs": {"max_pixels": TIGHT_ROWS * 1024},
    "disable_chunked_mm_input": True,
    "scheduling_policy": "priority",
    "block_size": 32,
}
TOKENS = 4


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Noise of `height * width` token rows: a token stands for 32 by 32 pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (32 * height, 32 * width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def clip(seed: int, num_frames: int, height: int, width: int, **metadata) -> tuple[np.ndarray, dict]:
    """Frames of `height * width` rows; two of them make one of the encoder's."""
    shape = (num_frames, 32 * height, 32 * width, 3)
    frames = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return frames, {
        "fps": 8.0,
        "duration": num_frames / 8,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    } | metadata


def prompt(*images, before: str = "", after: str = "Describe.", video=None, **options) -> dict:
    data = ({"image": list(images)} if images else {}) | ({"video": [video]} if video is not None else {})
    placeholders = IMAGE_PLACEHOLDER * len(images) + (VIDEO_PLACEHOLDER if video is not None else "")
    return {"prompt": chat_prompt(before + placeholders + after), "multi_modal_data": data, **options}


def answers(engine, *prompts) -> list[tuple[int, ...]]:
    """Tokens of each, asked one after the other."""
    return [engine.generate([one], max_tokens=TOKENS)[0].token_ids for one in prompts]


def answers_within(engine, num_steps: int, *prompts) -> list[tuple[int, ...]]:
    """Tokens of each, asked all at once, or `AssertionError` if it takes more steps."""
    for number, one in enumerate(prompts):
        add(engine, f"bounded-{number}", one)
    tokens = finish(engine, num_steps)
    return [tokens[f"bounded-{number}"] for number in range(len(prompts))]


def add(engine, request_id: str, one: dict, priority: int = 0) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    engine.llm.llm_engine.add_request(request_id, dict(one), sampling, priority=priority)


def finish(engine, num_steps: int) -> dict[str, tuple[int, ...]]:
    """Steps until nothing is left. Tokens by request id, in the order in which the requests finished."""
    llm_engine, tokens = engine.llm.llm_engine, {}
    for _ in range(num_steps):
        for output in llm_engine.step():
            if output.finished:
                tokens[output.request_id] = tuple(output.outputs[0].token_ids)
        if not llm_engine.has_unfinished_requests():
            return tokens
    raise AssertionError(f"not finished after {num_steps} steps; finished are {list(tokens)}")


def keys_of(engine, one: dict) -> list[str]:
    """Keys of the items of a prompt, as they reach the scheduler."""
    keys, add_request = [], engine.scheduler.add_request

    def recording(request):
        add_request(request)
        keys.extend(feature.identifier for feature in request.mm_features)

    engine.scheduler.add_request = recording
    try:
        engine.generate([one], max_tokens=1)
    finally:
        del engine.scheduler.add_request
    return keys


@contextmanager
def one_output_tensor(engine):
    """An encoder that writes whatever it returns into the same tensor, from its first row on."""
    model, tensor = engine.runner.model, []
    embed = model.embed_multimodal

    def embedding(**inputs):
        views, first = [], 0
        for output in embed(**inputs):
            tensor[:] = tensor or [torch.zeros(1024, output.shape[1], dtype=output.dtype)]
            view = tensor[0][first : first + len(output)]
            view.copy_(output)
            views.append(view)
            first += len(output)
        return views

    model.embed_multimodal = embedding
    try:
        yield
    finally:
        model.embed_multimodal = embed


def forget(engine) -> None:
    engine.llm.reset_prefix_cache()
    engine.llm.llm_engine.reset_encoder_cache()


# Prompts whose tokens stock vLLM is asked for first; one engine at a time.

BEACH, FOREST = picture(1, 8, 10), picture(2, 8, 10)
SMALL = [picture(100 + number, 8, 10) for number in range(102)]
BIG = [picture(200 + number, 20, 20) for number in range(4)]
WHOLE_POOL = picture(210, 22, 32)
CLIP = clip(3, 8, 4, 6)
LARGE_CLIP = clip(4, 6, 32, 32)
LONGER_EDGES = {"mm_processor_kwargs": {"size": {"longest_edge": 1 << 26, "shortest_edge": 64 * 64}}}
FLAT = np.random.default_rng(5).integers(0, 255, 30 * 150 * 3, dtype=np.uint8)

PROMPTS = {
    "beach": [prompt(BEACH)],
    "forest": [prompt(FOREST)],
    "twice": [prompt(BEACH, BEACH, before="Twice. ")],
    "fifty": [prompt(*[picture(6, 2, 2)] * 50)],
    "small pixels": [prompt(BEACH, mm_processor_kwargs={"max_pixels": 128 * 128})],
    "frames": [
        prompt(video=clip(3, 8, 4, 6, do_sample_frames=True), mm_processor_kwargs={"fps": fps}) for fps in (8, 4)
    ],
    "swapped": [prompt(FLAT.reshape(30, 150, 3)), prompt(FLAT.reshape(150, 30, 3))],
    "beach and clip": [prompt(BEACH, video=CLIP)],
    "large clip": [prompt(video=LARGE_CLIP, **LONGER_EDGES)],
    "small by 17": [prompt(*SMALL[first : first + 17]) for first in range(0, 102, 17)],
    "big pairs": [prompt(*BIG[:2]), prompt(*BIG[2:])],
    "holders": [prompt(picture(220, 16, 20)), prompt(picture(221, 16, 24))],
    "whole pool": [prompt(WHOLE_POOL)],
    "head": [prompt(BIG[0])],
}


@pytest.fixture(scope="module")
def stock(checkpoint):
    """Tokens of stock vLLM for `PROMPTS`, and what it answers when its encoder uses one output tensor."""
    engine = start(checkpoint, None, **ROOMY_ARGUMENTS)
    expected = {name: answers(engine, *prompts) for name, prompts in PROMPTS.items()}
    forget(engine)
    with one_output_tensor(engine):
        answers(engine, *PROMPTS["beach"], *PROMPTS["forest"])
        engine.llm.reset_prefix_cache()
        expected["beach, overwritten"] = answers(engine, *PROMPTS["beach"])
    engine.close()
    return expected


@pytest.fixture(scope="module")
def roomy_engine(checkpoint, stock):
    engine = start(checkpoint, ROOMY, **ROOMY_ARGUMENTS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tight_engine(checkpoint, stock):
    engine = start(checkpoint, TIGHT, **TIGHT_ARGUMENTS)
    yield engine
    engine.close()


@contextmanager
def checked(engine):
    """The engine as after its start; afterwards nothing is left of what the test asked."""
    forget(engine)
    yield engine
    engine.worker.check_encoder_cache_integrity()
    engine.manager.check_integrity()
    assert not engine.scheduler.requests and not engine.manager._inputs
    assert (
        engine.manager.pool.num_free_blocks + engine.manager.pool.num_evictable_blocks == engine.manager.pool.num_blocks
    )


@pytest.fixture
def roomy(roomy_engine):
    with checked(roomy_engine) as engine:
        yield engine


@pytest.fixture
def tight(tight_engine):
    with checked(tight_engine) as engine:
        yield engine


# Free, evict, reuse --------------------------------------------------------------------------------------------


def test_rows_stay_when_the_encoder_uses_its_output_tensor_again(roomy, stock):
    runs = roomy.encoder_runs
    with one_output_tensor(roomy):
        assert answers(roomy, *PROMPTS["beach"], *PROMPTS["forest"]) == stock["beach"] + stock["forest"]
        roomy.llm.reset_prefix_cache()
        assert answers(roomy, *PROMPTS["beach"]) == stock["beach"]
    assert roomy.encoder_runs - runs == 2


def test_control_a_cache_that_keeps_the_encoders_tensor_answers_wrongly(stock):
    assert stock["beach, overwritten"] != stock["beach"]


def test_one_image_twice_is_read_for_both_spans_when_a_chunk_ends_with_the_first(roomy, stock, monkeypatch):
    (one,) = PROMPTS["twice"]
    runs, windows = roomy.encoder_runs, recorded_windows(roomy, monkeypatch)
    offset = one_offset(roomy, one)
    forget(roomy)
    windows.clear()
    monkeypatch.setattr(roomy.scheduler.scheduler_config, "long_prefill_token_threshold", offset + 80)
    assert answers(roomy, one) == stock["twice"]
    assert [(first, count) for step in windows for _, first, count in step] == [(0, 80)] * 2
    assert len([step for step in windows if step]) == 2
    assert roomy.encoder_runs - runs == 2  # once to learn the offset, once for both spans


def test_after_sleep_the_image_is_encoded_again(roomy, stock):
    assert answers(roomy, *PROMPTS["beach"]) == stock["beach"]
    roomy.llm.reset_prefix_cache()
    runs = roomy.encoder_runs
    assert answers(roomy, *PROMPTS["beach"]) == stock["beach"]
    assert roomy.encoder_runs == runs
    roomy.llm.llm_engine.step()  # idle
    roomy.llm.collective_rpc("sleep", args=(1,))
    assert not roomy.runner.encoder_runtime.blocks.table.entries()
    assert not roomy.manager.pool.items() and roomy.manager.pool.num_free_blocks == NUM_ITEM_BLOCKS
    roomy.llm.collective_rpc("wake_up")
    roomy.llm.reset_prefix_cache()
    assert answers(roomy, *PROMPTS["beach"]) == stock["beach"]
    assert roomy.encoder_runs == runs + 1


# Budget, stall, starvation -------------------------------------------------------------------------------------


def test_the_whole_pool_is_served_and_one_block_more_is_refused_with_both_sizes(tight, stock):
    assert answers_within(tight, 20, *PROMPTS["whole pool"]) == stock["whole pool"]
    assert tight.manager.pool.num_used_blocks == tight.manager.pool.num_blocks == 11
    larger = prompt(picture(211, 23, 32), mm_processor_kwargs={"max_pixels": 1 << 20})
    with pytest.raises(ItemTooLargeError, match="736 token rows and needs 12 blocks of 64 rows; the cache has 11"):
        answers(tight, larger)
    assert not tight.scheduler.requests
    assert answers_within(tight, 20, *PROMPTS["head"]) == stock["head"]


def test_preempted_holders_of_the_whole_pool_do_not_stop_an_urgent_request(tight, stock, monkeypatch):
    monkeypatch.setattr(tight.scheduler.scheduler_config, "disable_chunked_mm_input", False)
    monkeypatch.setattr(tight.scheduler.scheduler_config, "long_prefill_token_threshold", 200)
    for number, holder in enumerate(PROMPTS["holders"]):
        add(tight, f"holder-{number}", holder, priority=5)
    tight.llm.llm_engine.step()
    assert sorted(len(item.block_ids) for item in tight.manager.pool.items() if item.references) == [5, 6]
    tight.llm.llm_engine.reset_prefix_cache(True)  # preempts whoever runs
    assert not [item for item in tight.manager.pool.items() if item.references]
    add(tight, "urgent", PROMPTS["whole pool"][0], priority=0)
    tokens = finish(tight, 40)
    assert next(iter(tokens)) == "urgent"
    assert tokens["urgent"] == stock["whole pool"][0]
    assert [tokens[f"holder-{number}"] for number in range(2)] == stock["holders"]


@pytest.mark.parametrize(("whole_items", "threshold"), [(True, 0), (True, 401), (False, 0), (False, 401)])
def test_two_items_that_do_not_fit_together_are_served_one_after_the_other(
    tight, stock, monkeypatch, whole_items, threshold
):
    """Of each pair, 7 blocks of 11. Where items are not to be cut, a step ends before the item that does not fit."""
    monkeypatch.setattr(tight.scheduler.scheduler_config, "disable_chunked_mm_input", whole_items)
    monkeypatch.setattr(tight.scheduler.scheduler_config, "long_prefill_token_threshold", threshold)
    runs = tight.encoder_runs
    assert answers_within(tight, 60, *PROMPTS["big pairs"]) == stock["big pairs"]
    assert tight.encoder_runs - runs == 4


def test_fifty_times_the_same_image_is_one_item(roomy, stock):
    runs, written = roomy.encoder_runs, roomy.runner.encoder_runtime.stats()
    assert answers_within(roomy, 10, *PROMPTS["fifty"]) == stock["fifty"]
    assert roomy.encoder_runs - runs == 1
    assert roomy.manager.pool.num_used_blocks == 1
    stats = roomy.runner.encoder_runtime.stats()
    assert (stats.items_written - written.items_written, stats.rows_read - written.rows_read) == (1, 200)


def test_a_video_larger_than_profiled_is_served_while_it_fits(roomy, stock):
    """3072 rows where vLLM planned with fewer."""
    planned = roomy.runner.mm_budget.mm_max_toks_per_item["video"]
    assert answers_within(roomy, 20, *PROMPTS["large clip"]) == stock["large clip"]
    (item,) = roomy.manager.pool.items()
    assert item.layout.num_tokens == 3072 > planned


def test_a_video_larger_than_the_pool_is_refused_with_both_sizes(roomy, stock):
    with pytest.raises(ItemTooLargeError, match="9216 token rows and needs 18 blocks of 512 rows; the cache has 16"):
        answers(roomy, prompt(video=clip(7, 18, 32, 32), **LONGER_EDGES))
    assert not roomy.scheduler.requests
    assert answers_within(roomy, 10, *PROMPTS["beach"]) == stock["beach"]


@pytest.mark.parametrize("kv_cached", [True, False], ids=["by KV blocks", "by the encoder cache"])
def test_a_cached_head_of_the_queue_and_its_follower_both_finish(tight, stock, kv_cached):
    """The follower needs every block, also those of the image that the head reads."""
    assert answers(tight, *PROMPTS["head"]) == stock["head"]
    if not kv_cached:
        tight.llm.reset_prefix_cache()
    runs = tight.encoder_runs
    tokens = answers_within(tight, 20, *PROMPTS["head"], *PROMPTS["whole pool"])
    assert tokens == stock["head"] + stock["whole pool"]
    assert tight.encoder_runs - runs == 1


def test_a_hundred_and_two_small_images_pass_through_sixteen_blocks(roomy, stock):
    """8160 rows, which the 8192 of a step and of the pool would hold; but every image takes a block of 512. No prompt
    has its images there at once."""
    runs, peak = roomy.encoder_runs, roomy.manager.pool.peak_used_blocks
    assert answers_within(roomy, 60, *PROMPTS["small by 17"]) == stock["small by 17"]
    assert roomy.encoder_runs - runs == 102
    assert max(peak, roomy.manager.pool.peak_used_blocks) == NUM_ITEM_BLOCKS
    assert roomy.manager.stats.evictions >= 102 - NUM_ITEM_BLOCKS


# Keys ----------------------------------------------------------------------------------------------------------


def test_other_processor_options_are_another_image(roomy, stock):
    runs = roomy.encoder_runs
    assert answers(roomy, *PROMPTS["beach"], *PROMPTS["small pixels"]) == stock["beach"] + stock["small pixels"]
    assert roomy.encoder_runs - runs == 2
    assert len({keys_of(roomy, *PROMPTS[name])[0] for name in ("beach", "small pixels")}) == 2
    assert sorted(item.layout.num_tokens for item in roomy.manager.pool.items()) == [12, 80]


def test_another_number_of_frames_is_another_video(roomy, stock):
    runs = roomy.encoder_runs
    assert answers(roomy, *PROMPTS["frames"]) == stock["frames"]
    assert roomy.encoder_runs - runs == 2
    assert len({keys_of(roomy, one)[0] for one in PROMPTS["frames"]}) == 2
    assert sorted(item.layout.num_tokens for item in roomy.manager.pool.items()) == [2 * 24, 4 * 24]


def test_the_same_bytes_with_height_and_width_swapped_are_another_image(roomy, stock):
    runs = roomy.encoder_runs
    assert answers(roomy, *PROMPTS["swapped"]) == stock["swapped"]
    assert stock["swapped"][0] != stock["swapped"][1]
    assert roomy.encoder_runs - runs == 2
    assert len({keys_of(roomy, one)[0] for one in PROMPTS["swapped"]}) == 2
    assert [item.layout.num_tokens for item in roomy.manager.pool.items()] == [5, 5]


def test_the_same_bytes_in_another_dtype_are_another_item(roomy):
    """By the method that names items, which this package wraps."""
    half = torch.rand(3, 64, 64, dtype=torch.float16)
    forms = [half, half.view(torch.bfloat16), half.view(torch.int16), half.view(torch.uint8)]
    hashes = []
    for form in forms:
        items = MultiModalDataParser().parse_mm_data({"image": [form]})
        hashes += ProcessorInputs([], items).get_mm_hashes("model", "blake3")["image"]
    assert len(set(hashes)) == len(forms)
    same = MultiModalDataParser().parse_mm_data({"image": [half.clone()]})
    assert ProcessorInputs([], same).get_mm_hashes("model", "blake3")["image"] == hashes[:1]


def test_two_images_of_one_fingerprint_are_two_entries(roomy, stock, monkeypatch):
    """Fingerprints are for readers outside; entries are found by the whole key."""
    for module in ("writer", "encoder_cache.blocks"):
        monkeypatch.setattr(f"vllm_neuron_cache.{module}.mm_hash_fingerprint", lambda key: Fingerprint(7, 7))
    runs = roomy.encoder_runs
    for _ in range(2):
        assert answers(roomy, *PROMPTS["beach"], *PROMPTS["forest"]) == stock["beach"] + stock["forest"]
        roomy.llm.reset_prefix_cache()
    assert roomy.encoder_runs - runs == 2
    entries = roomy.worker.check_encoder_cache_integrity()
    tags = {tuple(roomy.runner.encoder_runtime.blocks.mm_hash_tags[entry.block_ids[0]].tolist()) for entry in entries}
    assert len(entries) == 2 and tags == {(7, 7)}
    roomy.llm.llm_engine.reset_encoder_cache()  # whoever checks later knows the true fingerprints


# Chunks, placeholders, video, audio ----------------------------------------------------------------------------


def recorded_windows(engine, monkeypatch) -> list[list[tuple[int, int, int]]]:
    """Of every step: where in it the engine reads, from which row of the item, how many rows."""
    steps, read_windows = [], engine.runner._read_windows

    def recording(scheduler_output):
        windows = read_windows(scheduler_output)
        steps.append([(window.step_position, window.first_row, window.num_rows) for window in windows])
        return windows

    monkeypatch.setattr(engine.runner, "_read_windows", recording)
    return steps


def one_offset(engine, one: dict) -> int:
    """Where the first item of a prompt begins."""
    (output,) = engine.generate([one], max_tokens=1)
    return output.prompt_token_ids.index(engine.llm.llm_engine.model_config.hf_config.image_token_id)


@pytest.mark.parametrize("edge", ["begin", "end"])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_every_row_is_read_once_and_nothing_beside_it_wherever_a_chunk_ends(roomy, stock, monkeypatch, edge, shift):
    (one,) = PROMPTS["beach"]
    offset = one_offset(roomy, one)
    forget(roomy)
    chunk = offset + shift if edge == "begin" else offset + 80 + shift
    steps = recorded_windows(roomy, monkeypatch)
    monkeypatch.setattr(roomy.scheduler.scheduler_config, "long_prefill_token_threshold", chunk)
    assert answers(roomy, one) == stock["beach"]
    begin, read = 0, []
    for windows in steps:
        end = begin + chunk
        first, last = max(begin, offset), min(end, offset + 80)
        assert windows == ([(first - begin, first - offset, last - first)] if first < last else [])
        read += [row for _, first_row, num_rows in windows for row in range(first_row, first_row + num_rows)]
        begin = end
    assert read == list(range(80))


@pytest.mark.parametrize("chunk", [0, 29, 40, 80])
def test_every_level_gets_the_encoders_rows_however_the_prompt_is_cut(roomy, stock, monkeypatch, chunk):
    runner, outputs, merged = roomy.runner, [], []
    embed, merge = runner.model.embed_multimodal, runner.encoder_runtime.merge

    def embedding(**inputs):
        outputs.extend(embed(**inputs))
        return outputs

    def merging(plan):
        merge(plan)
        places = torch.from_numpy(np.flatnonzero(plan.is_embed))
        levels = [runner.inputs_embeds.gpu, *runner.model.deepstack_input_embeds]
        merged.append(torch.cat([level[places] for level in levels], dim=1).clone())

    monkeypatch.setattr(runner.model, "embed_multimodal", embedding)
    monkeypatch.setattr(runner.encoder_runtime, "merge", merging)
    monkeypatch.setattr(roomy.scheduler.scheduler_config, "long_prefill_token_threshold", chunk)
    assert answers(roomy, *PROMPTS["beach"]) == stock["beach"]
    assert len(runner.model.deepstack_input_embeds) == 3
    assert (len(merged) > 1) == bool(chunk)
    assert torch.equal(torch.cat(merged), outputs[0])


def test_a_hundred_rows_for_eighty_placeholders_fail_one_request_with_both_numbers(roomy, stock, monkeypatch):
    model = roomy.runner.model
    embed = model.embed_multimodal
    with monkeypatch.context() as patch:
        patch.setattr(
            model, "embed_multimodal", lambda **inputs: [torch.cat([rows, rows[:20]]) for rows in embed(**inputs)]
        )
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS)
        (output,) = roomy.llm.generate([dict(*PROMPTS["beach"])], sampling, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    error = request_error(output.outputs[0].stop_reason)
    assert isinstance(error, EncoderOutputError) and "[100, " in str(error) and "[80, " in str(error)
    assert answers(roomy, *PROMPTS["beach"]) == stock["beach"]


def test_a_pruned_video_is_stored_by_the_rows_that_are_left(roomy):
    """This version refuses pruning at start; the placeholder is what counts where a mask leaves rows out."""
    from vllm_neuron_cache.integrations.vllm.geometry import placeholder_layout

    mask = torch.ones(1200, dtype=torch.bool)
    mask[100:700] = False
    layout = placeholder_layout("video", PlaceholderRange(0, 1200, mask), roomy.manager.geometry)
    assert layout.num_tokens == 600 and layout.tokens_per_block == (100, 500)


def test_a_modality_that_is_not_known_is_refused_at_start_with_the_remedy(roomy, monkeypatch):
    """A model with one, as the runner's budget would show it as it measures the encoder."""
    limits = roomy.runner.mm_budget.mm_max_toks_per_item
    monkeypatch.setitem(limits, "vision_chunk", 100)
    with pytest.raises(ConfigurationError, match=r"vision_chunk.*limit_mm_per_prompt"):
        roomy.runner._measure_encoder_width()


def test_a_cached_image_is_read_while_the_video_beside_it_is_encoded(roomy, stock, monkeypatch):
    assert answers(roomy, *PROMPTS["beach"]) == stock["beach"]
    roomy.llm.reset_prefix_cache()
    runs, steps = roomy.encoder_runs, recorded_windows(roomy, monkeypatch)
    assert answers(roomy, *PROMPTS["beach and clip"]) == stock["beach and clip"]
    assert roomy.encoder_runs - runs == 1
    assert [num_rows for _, _, num_rows in steps[0]] == [80, 96]
