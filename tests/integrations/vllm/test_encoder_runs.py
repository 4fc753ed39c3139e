"""The encoder runs when a simple least-recently-used cache in blocks says so, and a hit skips the preprocessor too."""

import numpy as np
import pytest
from engines import PHOTOGRAPHS, small_media, start

from vllm_neuron_cache.demo.comparison import compare, expected_encoder_runs
from vllm_neuron_cache.demo.media import load_photograph
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

pytestmark = pytest.mark.vllm


def random_requests(count: int, most: int) -> list[MediaRequest]:
    """One to `most` photographs each, drawn so that some repeat soon and some late."""
    generator = np.random.default_rng(5)
    weights = np.array([0.4, 0.25, 0.15, 0.1, 0.1])
    return [
        MediaRequest(
            before=f"Request {number}. ",
            images=tuple(generator.choice(PHOTOGRAPHS, size=generator.integers(1, most + 1), p=weights).tolist()),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(("block_size", "num_blocks", "most"), [(512, 4, 3), (64, 16, 2)], ids=["coarse", "fine"])
def test_encoder_runs_are_those_of_the_reference_under_eviction(checkpoint, block_size, num_blocks, most):
    """More rows of photographs than fit in 4 coarse blocks or 16 fine ones, just enough for the largest request."""
    from vllm_neuron_cache.integrations.vllm.offline import placeholder_tokens

    images = {name: load_photograph(name) for name in PHOTOGRAPHS}
    images["hubble"] = images["hubble"].resize((832, 832))  # 676 tokens in place of 837: most of the time goes there
    media = Media(images=images)
    arguments = {
        "max_num_batched_tokens": num_blocks * block_size,
        "max_model_len": 2048,
        "limit_mm_per_prompt": {"image": 3, "video": 0},
        "enable_prefix_caching": False,
    }
    stock = start(checkpoint, None, **arguments)
    blocks = start(checkpoint, {"encoder_cache_block_size": block_size, "lane": "eager"}, **arguments)
    geometry = blocks.manager.geometry
    assert geometry.num_item_blocks == num_blocks
    results = list(compare(stock, blocks, random_requests(40, most), media, max_tokens=4))
    image_token, video_token = placeholder_tokens(checkpoint)
    expected = expected_encoder_runs(
        results,
        num_blocks=geometry.num_item_blocks,
        block_size=geometry.block_size,
        image_token=image_token,
        video_token=video_token,
    )
    stats = blocks.manager.stats
    blocks.manager.check_integrity()
    blocks.worker.check_encoder_cache_integrity()
    stock.close()
    blocks.close()
    assert [result.blocks.encoder_runs for result in results] == expected
    assert all(result.tokens_identical for result in results)
    assert stats.misses == sum(expected)
    assert stats.evictions > 0 and stats.hits > 0


def test_a_hit_runs_neither_the_encoder_nor_the_preprocessor_and_a_reset_encodes_again(checkpoint):
    media = small_media()
    engine = start(checkpoint, {})
    engine.generate([engine_prompt(MediaRequest(images=("astronaut",)), media)], max_tokens=2)
    assert (engine.encoder_runs, engine.manager.stats.hits) == (1, 0)
    processor_hits = engine.metric("vllm:mm_cache_hits")
    for number in range(3):
        request = MediaRequest(before=f"Other text {number}. ", images=("astronaut",))
        engine.generate([engine_prompt(request, media)], max_tokens=2)
    assert engine.encoder_runs == 1
    assert engine.manager.stats.hits == 3
    assert engine.metric("vllm:mm_cache_hits") - processor_hits == 3
    assert engine.runner.encoder_runtime.stats().items_written == 1

    prompt = engine_prompt(MediaRequest(images=("coffee", "chelsea")), media)
    (before,) = engine.generate([prompt], max_tokens=8)
    engine.llm.reset_prefix_cache()
    engine.llm.llm_engine.reset_encoder_cache()
    (after,) = engine.generate([prompt], max_tokens=8)
    assert engine.encoder_runs == 1 + 4
    assert after.token_ids == before.token_ids
    engine.manager.check_integrity()
    engine.worker.check_encoder_cache_integrity()
    engine.close()


def test_every_layout_on_scheduler_and_worker_is_the_same(checkpoint):
    """Block tables travel; nothing is derived twice."""
    media = small_media()
    engine = start(checkpoint, {"encoder_cache_block_size": 32, "lane": "eager"})
    requests = [MediaRequest(images=("chelsea", "china")), MediaRequest(clip=True)]
    engine.generate([engine_prompt(request, media) for request in requests], max_tokens=2)
    table = engine.runner.encoder_runtime.blocks.table
    items = engine.manager.pool.items()
    assert len(items) == len(table) == 3
    for item in items:
        entry = table.get(item.key)
        assert (entry.generation, entry.block_ids) == (item.generation, item.block_ids)
        assert entry.tokens_per_block == item.layout.tokens_per_block
    clip = max(items, key=lambda item: len(set(item.layout.tokens_per_block)))
    assert len(set(clip.layout.tokens_per_block)) > 1, "the clip's frames leave part of a block empty"
    engine.close()


def test_with_a_hold_time_requests_wait_for_blocks_and_all_end(checkpoint):
    """As a disaggregated producer would be run: blocks that an item gave up rest for 50 ms before reuse."""
    requests = [
        MediaRequest(before=f"{number}. ", images=(name,))
        for number, name in enumerate(("china", "hubble", "astronaut", "coffee", "hubble", "china"))
    ]
    media = small_media()
    prompts = [engine_prompt(request, media) for request in requests]
    stock = start(checkpoint, None)
    expected = [completion.token_ids for completion in stock.generate(prompts, max_tokens=4)]
    stock.close()
    cache = {"lane": "eager", "encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 16}
    ours = start(checkpoint, cache, encoder={"encoder_cache_min_hold_time_ms": 50})
    held = []
    can_allocate = ours.manager.can_allocate

    def watching(*args):
        try:
            return can_allocate(*args)
        finally:
            held.append(ours.manager.pool.num_held_blocks)

    ours.manager.can_allocate = watching
    assert [completion.token_ids for completion in ours.generate(prompts, max_tokens=4)] == expected
    assert max(held) > 0
    ours.manager.check_integrity()
    assert not [item for item in ours.manager.pool.items() if item.references]
    ours.close()
