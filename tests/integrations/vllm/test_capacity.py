"""Pools that are too small for all that is asked of them at once, on real vLLM: everything ends with stock's tokens."""

import numpy as np
import pytest
from engines import mixed_requests, serve, small_media, start, stock_tokens

from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

pytestmark = pytest.mark.vllm

NUM_CLIPS = 9


@pytest.fixture(scope="module")
def clips():
    """Nine different clips of 16 frames of 448 x 448: 8 merged frames of 196 rows, two to a block of 512."""
    generator = np.random.default_rng(0)
    media = []
    for _ in range(NUM_CLIPS):
        frames = generator.integers(0, 255, (16, 14, 14, 3), dtype=np.uint8).repeat(32, axis=1).repeat(32, axis=2)
        metadata = {
            "fps": 2,
            "duration": 8,
            "total_num_frames": 16,
            "frames_indices": list(range(16)),
            "video_backend": "opencv",
            "do_sample_frames": False,
        }
        media.append(Media(clip=(frames, metadata)))
    return media


WIDE = {"max_model_len": 16384, "max_num_batched_tokens": 16384, "kv_cache_memory_bytes": 1 << 30}


@pytest.fixture(scope="module")
def expected_of_clips(checkpoint, clips):
    """What stock vLLM makes of them."""
    stock = start(checkpoint, None, **WIDE)
    prompts = [engine_prompt(MediaRequest(clip=True), media) for media in clips]
    expected = [completion.token_ids for completion in stock.generate(prompts, max_tokens=4)]
    stock.close()
    assert len(set(expected)) > 1
    return expected


@pytest.mark.parametrize("block_size, num_blocks", [(512, 33), (16, 33 * 32 // 4)], ids=["coarse", "fine-quarter"])
def test_the_ninth_distinct_video(checkpoint, clips, expected_of_clips, block_size, num_blocks):
    """vLLM's budget of 16384 tokens admits ten; the blocks hold eight, or two."""
    prompts = [engine_prompt(MediaRequest(clip=True), media) for media in clips]
    pool = {"lane": "eager", "encoder_cache_block_size": block_size, "encoder_cache_num_blocks_exact": num_blocks}
    ours = start(checkpoint, pool, max_num_seqs=16, **WIDE)
    tokens = [completion.token_ids for completion in ours.generate(prompts, max_tokens=4)]
    assert tokens == expected_of_clips
    assert {item.layout.num_tokens for item in ours.manager.pool.items()} == {1568}
    counts = ours.manager.stats.of("video")
    assert counts.evictions > 0 and counts.misses == NUM_CLIPS
    ours.worker.check_encoder_cache_integrity()
    ours.manager.check_integrity()
    ours.close()


@pytest.mark.parametrize("eviction", ["lru", "gdsf"])
def test_the_smallest_pool_under_either_policy(checkpoint, eviction):
    """The largest photograph, of 837 rows, leaves six blocks of 16."""
    media, requests = small_media(), mixed_requests()
    arguments = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
    expected = stock_tokens(checkpoint, **arguments)
    pool = {
        "lane": "eager",
        "eviction": eviction,
        "encoder_cache_block_size": 16,
        "encoder_cache_num_blocks_exact": 60,
    }
    ours = start(checkpoint, pool, **arguments)
    assert serve(ours, requests, media) == expected
    stats = ours.manager.stats
    assert stats.evictions > 10 and stats.waits > 0 and stats.refusals == 0
    gauges = ours.manager.gauges()
    assert sum(gauges.blocks) == 59 and gauges.blocks.resident == gauges.blocks.reserved == 0
    assert 0 < gauges.padding_waste < 0.1
    histograms = ours.manager.pool.histograms
    assert 0 < histograms.lifetime.num_observed < stats.evictions
    ours.manager.check_integrity()
    ours.close()
