"""Tokens are those of stock vLLM, along every axis alone and in every pair of axes."""

import itertools

import pytest
import torch
from engines import mixed_requests, serve, small_media, start, stock_tokens

pytestmark = pytest.mark.vllm

AXES = ("prefix_caching", "chunked", "compiled", "separate_process", "eager_lane")

# Every pair of axes takes all four combinations of values in some row (checked below): a covering array of strength
# two, columns being the three-element sets {1, a, b} of rows (Katona's construction).
COVERING_ARRAY = (
    (True, True, True, True, True),
    (True, True, True, False, False),
    (True, False, False, True, True),
    (False, True, False, True, False),
    (False, False, True, False, True),
    (False, False, False, False, False),
)


def test_array_covers_every_pair_of_values():
    for first, second in itertools.combinations(range(len(AXES)), 2):
        assert {(row[first], row[second]) for row in COVERING_ARRAY} == set(itertools.product((True, False), repeat=2))


@pytest.mark.parametrize(
    AXES, COVERING_ARRAY, ids=["-".join(name for name, on in zip(AXES, row) if on) or "plain" for row in COVERING_ARRAY]
)
def test_tokens_are_those_of_stock(checkpoint, prefix_caching, chunked, compiled, separate_process, eager_lane):
    media, requests = small_media(), mixed_requests()
    arguments = {
        "enable_prefix_caching": prefix_caching,
        # 256 cuts every photograph but one, and the clip; 4096 cuts nothing.
        "max_num_batched_tokens": 256 if chunked else 4096,
        "enforce_eager": not compiled,
    }
    expected = stock_tokens(checkpoint, **arguments)
    lane = "eager" if eager_lane else "inductor"
    ours = start(checkpoint, {"lane": lane}, in_process=not separate_process, **arguments)
    tokens = serve(ours, requests, media)
    (stats,) = ours.llm.collective_rpc("encoder_cache_stats")
    ours.llm.collective_rpc("check_encoder_cache_integrity")
    ours.close()

    assert tokens == expected
    # The comparison means something: the cache really served them.
    num_items = 2 * sum(len(request.item_keys) for request in requests)
    assert 0 < stats["items_written"] < num_items
    assert stats["rows_read"] > 0
    assert stats["recompiles_after_warmup"] == 0
    assert (stats["graphs_compiled"] > 0) == (not eager_lane)


@pytest.mark.parametrize("block_size", [16, 64, 512])
def test_tokens_are_those_of_stock_in_bfloat16_and_blocks_of_any_size(checkpoint, block_size):
    media, requests = small_media(), mixed_requests()
    arguments = {"dtype": "bfloat16", "max_num_batched_tokens": 512}
    expected = stock_tokens(checkpoint, **arguments)
    ours = start(checkpoint, {"encoder_cache_block_size": block_size, "lane": "eager"}, **arguments)
    assert ours.runner.encoder_runtime.blocks.buffer.dtype is torch.bfloat16
    tokens = serve(ours, requests, media)
    ours.manager.check_integrity()
    ours.close()
    assert tokens == expected
