"""The one function that says how many blocks there are, and what it refuses."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.config import EncoderNeuronConfig, NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.item import item_layout
from vllm_neuron_cache.encoder_cache.sizing import (
    CacheGeometry,
    cache_geometry,
    choose_block_size,
    num_blocks_needed,
    round_up_num_blocks,
)
from vllm_neuron_cache.errors import ConfigurationError


def config_of(patches=2048, *, floor=None, block_size=None, exact=None):
    encoder = EncoderNeuronConfig(encoder_attention_block_size=patches, encoder_cache_num_blocks=floor)
    return NeuronCacheConfig(encoder=encoder, encoder_cache_block_size=block_size, encoder_cache_num_blocks_exact=exact)


def geometry_of(config, *, merge_factor=4, budget=0, largest=(), smallest=None):
    return cache_geometry(
        config,
        merge_factor=merge_factor,
        encoder_cache_size=budget,
        largest_item_tokens=largest,
        smallest_item_tokens=smallest,
    )


def refusal(config, **kwargs) -> str:
    with pytest.raises(ConfigurationError) as caught:
        geometry_of(config, **kwargs)
    return str(caught.value)


def test_the_last_block_is_the_scratch_block_and_items_own_the_others():
    geometry = CacheGeometry(num_blocks=9, block_size=4, encoder_block_size=8)
    assert geometry.scratch_block_id == 8
    assert geometry.num_item_blocks == 8


def test_without_a_smallest_image_the_block_is_the_encoders_block_after_the_merger():
    geometry = geometry_of(config_of(2048), budget=4096)
    assert geometry == CacheGeometry(num_blocks=9, block_size=512, encoder_block_size=512)


def test_a_finer_block_leaves_the_encoders_block_as_it_is():
    geometry = geometry_of(config_of(2048, block_size=64), budget=4096)
    assert geometry == CacheGeometry(num_blocks=65, block_size=64, encoder_block_size=512)


@pytest.mark.parametrize(
    "budget, largest, num_item_blocks",
    [
        (0, (), 1),  # never a pool without a block for items
        (1, (), 1),
        (512, (), 1),
        (513, (), 2),
        (1024, (513,), 2),
        (1024, (100, 1025), 3),
        (1024, (1025, 100), 3),
        (45_536, (74_717,), 152),  # a video larger than the budget: 146 blocks, and the next rung
        (5000, iter([700, 1600]), 10),
    ],
)
def test_the_pool_holds_the_budget_and_the_largest_item_whichever_is_larger(budget, largest, num_item_blocks):
    geometry = geometry_of(config_of(), budget=budget, largest=largest)
    assert geometry.num_item_blocks == num_item_blocks
    assert geometry.num_blocks == num_item_blocks + 1


@pytest.mark.parametrize("floor, num_blocks", [(2, 9), (9, 9), (10, 10), (500, 513)])
def test_a_configured_number_of_blocks_is_a_floor_with_the_scratch_block_in_it(floor, num_blocks):
    assert geometry_of(config_of(floor=floor), budget=4096).num_blocks == num_blocks


@given(num_blocks=st.integers(2, 100_000))
def test_a_slightly_larger_pool_is_the_same_pool(num_blocks):
    rung = round_up_num_blocks(num_blocks)
    assert num_blocks <= rung < num_blocks * 17 / 16 + 1
    assert {round_up_num_blocks(between) for between in range(num_blocks, rung + 1)} == {rung}
    assert num_blocks > 33 or rung == num_blocks


def test_a_pool_that_doubles_meets_no_more_than_sixteen_rungs():
    assert len({round_up_num_blocks(num_blocks) for num_blocks in range(1026, 2050)}) == 16


@pytest.mark.parametrize("exact", [2, 8, 9, 10, 500])
@pytest.mark.parametrize("largest", [(), (100_000,)])
def test_an_exact_number_of_blocks_is_taken_as_it_is_however_large_items_are(exact, largest):
    assert geometry_of(config_of(exact=exact), budget=4096, largest=largest).num_blocks == exact


@pytest.mark.parametrize(
    "budget, largest, needed",
    [(4096, (), 9), (512, (4000, 4096), 9), (4000, iter([4096]), 9), (4097, (1,), 10), (4096, (4097,), 10), (0, (), 2)],
)
def test_the_number_needed_is_what_is_derived_without_configuration(budget, largest, needed):
    largest = list(largest)
    assert num_blocks_needed(512, budget, iter(largest)) == needed
    assert geometry_of(config_of(), budget=budget, largest=largest).num_blocks == needed


@pytest.mark.parametrize("patches, merge_factor", [(2047, 4), (2050, 4), (1, 4), (2, 4), (10, 7), (1000, 16)])
def test_an_attention_block_that_the_merger_does_not_divide_is_refused_and_the_remedy_works(patches, merge_factor):
    message = refusal(config_of(patches), merge_factor=merge_factor)
    assert f"encoder_attention_block_size is {patches}" in message and f"multiple of {merge_factor}" in message
    remedy = int(re.search(r"(\d+) for example", message)[1])
    assert abs(remedy - patches) <= merge_factor
    assert geometry_of(config_of(remedy), merge_factor=merge_factor).encoder_block_size == remedy // merge_factor


@pytest.mark.parametrize("block_size", [5, 7, 24, 48, 1000])
def test_a_block_that_does_not_divide_the_encoders_block_is_refused_with_every_divisor(block_size):
    message = refusal(config_of(48, block_size=block_size))
    assert f"encoder_cache_block_size is {block_size}" in message and "48 patches over 4" in message
    assert message.endswith("1, 2, 3, 4, 6, 12.")


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 12])
def test_every_divisor_of_the_encoders_block_is_a_legal_block(block_size):
    geometry = geometry_of(config_of(48, block_size=block_size), budget=24)
    assert geometry == CacheGeometry(num_blocks=24 // block_size + 1, block_size=block_size, encoder_block_size=12)


@given(
    data=st.data(),
    block_size=st.integers(1, 6),
    ratio=st.integers(1, 3),
    budget=st.integers(0, 60),
    largest=st.lists(st.integers(0, 60), max_size=3),
    floor=st.none() | st.integers(2, 20),
)
def test_every_item_that_the_budget_or_a_modality_admits_fits_into_an_empty_pool(
    data, block_size, ratio, budget, largest, floor
):
    config = config_of(4 * block_size * ratio, block_size=block_size, floor=floor)
    geometry = geometry_of(config, budget=budget, largest=largest)
    num_tokens = data.draw(st.integers(0, max([budget, *largest])))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=6)))
    frames = [end - begin for begin, end in zip([0, *cuts], [*cuts, num_tokens])]
    layout = item_layout(
        num_tokens,
        frames,
        encoder_block_size=geometry.encoder_block_size,
        block_size=geometry.block_size,
        max_blocks=geometry.num_item_blocks,
    )
    assert layout.num_tokens == num_tokens
    assert layout.num_blocks <= geometry.num_item_blocks
    assert geometry.num_item_blocks * block_size >= budget
    assert geometry.num_blocks >= (floor or 2)


# The chosen block ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encoder_block_size, smallest, block_size",
    [
        (512, 64, 16),  # Qwen3-VL: 256 x 256 pixels
        (512, 4, 16),  # Qwen2-VL: 56 x 56
        (512, 63, 16),
        (512, 256, 64),
        (512, 255, 32),
        (512, 1 << 20, 512),
        (509, 64, 509),  # a prime has no other divisor
        (500, 64, 20),
        (8, 64, 8),
    ],
)
def test_the_chosen_block_is_a_quarter_of_the_smallest_image(encoder_block_size, smallest, block_size):
    assert choose_block_size(encoder_block_size, smallest) == block_size
    geometry = geometry_of(config_of(4 * encoder_block_size), budget=4096, smallest=smallest)
    assert (geometry.block_size, geometry.encoder_block_size) == (block_size, encoder_block_size)


@given(st.integers(1, 4096), st.integers(1, 100_000))
def test_a_chosen_block_divides_and_wastes_little(encoder_block_size, smallest):
    block_size = choose_block_size(encoder_block_size, smallest)
    assert encoder_block_size % block_size == 0
    if block_size > 16 and any(encoder_block_size % size == 0 for size in range(16, block_size)):
        assert 4 * block_size <= smallest
        num_rows = -(-smallest // block_size) * block_size
        assert (num_rows - smallest) / num_rows <= 0.2


@pytest.mark.parametrize("fixed", [{"floor": 9}, {"exact": 9}, {"block_size": 512}])
def test_what_is_configured_is_not_chosen(fixed):
    """A number of blocks is one of the encoder's blocks, as in vLLM Neuron."""
    assert geometry_of(config_of(**fixed), budget=4096, smallest=64).block_size == 512
