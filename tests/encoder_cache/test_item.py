"""Layouts of items in blocks, and the buffer rows that follow from them."""

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.encoder_cache.item import (
    ItemLayout,
    buffer_rows,
    dense_layout,
    frame_layout,
    item_layout,
    mask_runs,
    num_dense_blocks,
)

block_sizes = st.integers(1, 9)


def frame_layout_by_token(frame_tokens, encoder_block_size, block_size):
    """Every token placed on its own: frames go whole into the encoder's blocks, one after another."""
    occupied = Counter()
    encoder_block, used = 0, 0
    for tokens in frame_tokens:
        if used + tokens > encoder_block_size:
            encoder_block, used = encoder_block + 1, 0
        for token in range(used, used + tokens):
            occupied[encoder_block, token // block_size] += 1
        used += tokens
    return tuple(occupied[place] for place in sorted(occupied))


def rows_by_token(block_ids, tokens_per_block, block_size):
    return [block * block_size + token for block, tokens in zip(block_ids, tokens_per_block) for token in range(tokens)]


@pytest.mark.parametrize(
    "num_tokens, block_size, expected",
    [(0, 4, ()), (1, 4, (1,)), (3, 4, (3,)), (4, 4, (4,)), (5, 4, (4, 1)), (8, 4, (4, 4)), (3, 1, (1, 1, 1))],
)
def test_a_dense_layout_fills_every_block_but_the_last(num_tokens, block_size, expected):
    assert dense_layout(num_tokens, block_size).tokens_per_block == expected


@given(num_tokens=st.integers(0, 200), block_size=block_sizes)
def test_a_dense_layout_has_the_items_tokens_in_the_fewest_blocks(num_tokens, block_size):
    layout = dense_layout(num_tokens, block_size)
    assert layout.num_tokens == num_tokens
    assert layout.num_blocks == num_dense_blocks(num_tokens, block_size)
    assert (layout.num_blocks - 1) * block_size < num_tokens <= layout.num_blocks * block_size or num_tokens == 0
    assert all(0 < tokens <= block_size for tokens in layout.tokens_per_block)


@pytest.mark.parametrize("block_size, num_blocks", [(512, 1), (64, 2), (16, 5)])
def test_a_small_image_takes_as_many_blocks_as_its_rows_need(block_size, num_blocks):
    assert dense_layout(80, block_size).num_blocks == num_blocks


@pytest.mark.parametrize(
    "frames, expected",
    [
        ((), ()),
        ((3,), (3,)),
        ((4, 4), (8,)),  # fills the encoder's block to the last row
        ((4, 5), (4, 5)),  # one row too many for one block
        ((8, 8), (8, 8)),
        ((3, 3, 3), (6, 3)),
        ((8, 1, 1), (8, 2)),
        ((0, 3, 0, 5), (8,)),
        ((8, 0, 0), (8,)),
    ],
)
def test_whole_frames_are_packed_into_the_encoders_blocks(frames, expected):
    assert frame_layout(frames, 8, 8) == ItemLayout(expected)


@pytest.mark.parametrize(
    "frames, expected",
    [
        ((3, 3), (2, 2, 2)),
        ((5, 5), (2, 2, 1, 2, 2, 1)),
        ((1, 8), (1, 2, 2, 2, 2)),  # three of the first encoder block's four cache blocks hold nothing
        ((4, 4, 2), (2, 2, 2, 2, 2)),
    ],
)
def test_only_cache_blocks_that_hold_rows_are_kept_of_an_encoder_block(frames, expected):
    assert frame_layout(frames, 8, 2) == ItemLayout(expected)


@pytest.mark.parametrize("frames", [(9,), (1, 9), (9, 1), (8, 8, 9, 8)])
def test_a_frame_larger_than_the_encoders_block_has_no_frame_layout(frames):
    assert frame_layout(frames, 8, 4) is None


@given(data=st.data(), block_size=block_sizes, ratio=st.integers(1, 4))
def test_a_frame_layout_equals_placing_every_token_on_its_own(data, block_size, ratio):
    encoder_block_size = block_size * ratio
    frames = data.draw(st.lists(st.integers(0, encoder_block_size), max_size=12))
    layout = frame_layout(frames, encoder_block_size, block_size)
    assert layout.tokens_per_block == frame_layout_by_token(frames, encoder_block_size, block_size)
    assert layout.num_tokens == sum(frames)


def layout_of(num_tokens, frames, max_blocks=100):
    return item_layout(num_tokens, frames, encoder_block_size=8, block_size=4, max_blocks=max_blocks)


@pytest.mark.parametrize("frames", [(), (10,)])
def test_an_item_without_several_frames_lies_densely(frames):
    assert layout_of(10, frames).tokens_per_block == (4, 4, 2)


def test_an_item_of_several_frames_lies_by_frames():
    assert layout_of(10, (5, 5)).tokens_per_block == (4, 1, 4, 1)


def test_a_video_is_laid_out_densely_only_when_its_frames_need_more_blocks_than_there_are():
    assert layout_of(10, (5, 5), max_blocks=4).tokens_per_block == (4, 1, 4, 1)
    assert layout_of(10, (5, 5), max_blocks=3).tokens_per_block == (4, 4, 2)


def test_a_video_with_a_frame_larger_than_the_encoders_block_lies_densely():
    assert layout_of(10, (9, 1)).tokens_per_block == (4, 4, 2)


@given(data=st.data(), block_size=block_sizes, ratio=st.integers(1, 4), max_blocks=st.integers(1, 20))
def test_an_item_that_fits_densely_always_fits(data, block_size, ratio, max_blocks):
    frames = data.draw(st.lists(st.integers(1, 2 * block_size * ratio), min_size=1, max_size=12))
    layout = item_layout(
        sum(frames), frames, encoder_block_size=block_size * ratio, block_size=block_size, max_blocks=max_blocks
    )
    assert layout.num_tokens == sum(frames)
    assert layout.num_blocks <= max(max_blocks, num_dense_blocks(sum(frames), block_size))
    assert all(0 < tokens <= block_size for tokens in layout.tokens_per_block)


@pytest.mark.parametrize(
    "mask, runs",
    [
        ("", ()),
        ("0", ()),
        ("1", (1,)),
        ("0110", (2,)),
        ("1101", (2, 1)),
        ("00111000110", (3, 2)),
        ("101", (1, 1)),
    ],
)
def test_the_runs_of_a_video_mask_are_its_frames(mask, runs):
    assert mask_runs(np.array([bit == "1" for bit in mask], dtype=bool)) == runs


@given(st.lists(st.booleans(), max_size=40))
def test_runs_equal_grouping_the_mask_by_hand(mask):
    expected = tuple(len(list(group)) for value, group in groupby(mask) if value)
    runs = mask_runs(np.array(mask, dtype=bool))
    assert runs == expected
    assert all(type(run) is int for run in runs)


@pytest.mark.parametrize(
    "block_ids, tokens_per_block, expected",
    [
        ((), (), []),
        ((0,), (3,), [0, 1, 2]),
        ((2,), (4,), [8, 9, 10, 11]),
        ((5, 1), (4, 2), [20, 21, 22, 23, 4, 5]),
        ((3, 0, 7), (1, 4, 1), [12, 0, 1, 2, 3, 28]),
        ((1, 2), (3, 4), [4, 5, 6, 8, 9, 10, 11]),  # as many rows as a dense item of two blocks may have
    ],
)
def test_rows_follow_the_blocks_in_item_order(block_ids, tokens_per_block, expected):
    assert buffer_rows(block_ids, tokens_per_block, 4).tolist() == expected


@given(data=st.data(), block_size=block_sizes)
def test_rows_equal_counting_token_by_token(data, block_size):
    tokens_per_block = data.draw(st.lists(st.integers(0, block_size), max_size=10))
    block_ids = data.draw(st.permutations(range(20)))[: len(tokens_per_block)]
    rows = buffer_rows(block_ids, tokens_per_block, block_size)
    assert rows.dtype == np.int32
    assert rows.tolist() == rows_by_token(block_ids, tokens_per_block, block_size)
    assert len(set(rows.tolist())) == sum(tokens_per_block)


def test_rows_of_blocks_that_are_not_full_keep_to_their_blocks():
    assert buffer_rows((0, 1), (1, 2), 2).tolist() == [0, 2, 3]
    assert buffer_rows((4, 2), (300, 300), 512).tolist() == [*range(2048, 2348), *range(1024, 1324)]
