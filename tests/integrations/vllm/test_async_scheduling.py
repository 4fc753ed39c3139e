"""With vLLM's asynchronous scheduler, which schedules a step before the one before it has come back."""

import numpy as np
import pytest
from asynchrony import assert_asynchronous, asynchronous_scheduling
from engines import PHOTOGRAPHS, mixed_requests, serve, small_media, start

from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

pytestmark = pytest.mark.vllm


@pytest.fixture
def asynchronous():
    with asynchronous_scheduling():
        yield


def test_tokens_are_those_of_stock(checkpoint, asynchronous):
    media, requests = small_media(), mixed_requests()
    arguments = {"max_num_batched_tokens": 256}
    stock = start(checkpoint, None, **arguments)
    expected = serve(stock, requests, media)
    stock.close()
    ours = start(checkpoint, {}, **arguments)
    assert_asynchronous(ours)
    assert serve(ours, requests, media) == expected
    ours.manager.check_integrity()
    ours.worker.check_encoder_cache_integrity()
    assert not [item for item in ours.manager.pool.items() if item.references]
    ours.close()


def test_blocks_are_reused_at_once_and_rows_stay_right(checkpoint, asynchronous):
    """32 requests at once through a pool of four blocks: items are evicted while steps are in flight."""
    generator = np.random.default_rng(3)
    media = Media(images=small_media().images)
    requests = [
        MediaRequest(
            before=f"Request {number}. ",
            images=tuple(generator.choice(PHOTOGRAPHS, size=generator.integers(1, 3)).tolist()),
        )
        for number in range(32)
    ]
    prompts = [engine_prompt(request, media) for request in requests]
    arguments = {
        "max_num_batched_tokens": 512,
        "max_model_len": 2048,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
        "enable_prefix_caching": False,
    }
    stock = start(checkpoint, None, **arguments)
    expected = [completion.token_ids for completion in stock.generate(prompts, max_tokens=6)]
    stock.close()
    ours = start(checkpoint, {"encoder_cache_block_size": 256, "lane": "eager"}, **arguments)
    assert_asynchronous(ours)
    in_flight = []
    close_pass = ours.manager.get_manager_metadata

    def watching():
        metadata = close_pass()
        in_flight.append(metadata.step.seq - metadata.step.acknowledged)
        return metadata

    ours.manager.get_manager_metadata = watching
    tokens = [completion.token_ids for completion in ours.generate(prompts, max_tokens=6)]
    assert tokens == expected
    assert max(in_flight) > 1, "no step was scheduled while another was in flight"
    assert ours.manager.stats.evictions > 10
    ours.manager.check_integrity()
    ours.close()
