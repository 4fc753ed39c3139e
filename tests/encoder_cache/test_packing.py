"""Packing against plans that are plain to see: one segment in each block, one size of block, a first fit by looking."""

import random
from collections import Counter
from functools import cache
from itertools import groupby, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_neuron_cache.encoder_cache.packing import Bucket, Ladder, Launch, Placement, pack, padding_ratio


def ladder_of(positions, num_blocks=(1, 2, 4), **kwargs):
    """Every size of block in launches of each number of blocks."""
    return Ladder(tuple(Bucket(size, count) for size in positions for count in num_blocks), **kwargs)


@st.composite
def ladders(draw, *, with_single_blocks=False):
    """Up to three sizes of block, each with numbers of blocks of its own, as compiled graphs may happen to be."""
    buckets = set()
    for positions in draw(st.sets(st.integers(1, 24), min_size=1, max_size=3)):
        counts = draw(st.sets(st.integers(1, 5), min_size=1, max_size=3))
        buckets |= {Bucket(positions, count) for count in counts | ({1} if with_single_blocks else set())}
    return Ladder(
        tuple(draw(st.permutations(sorted(buckets)))),
        max_segments=draw(st.sampled_from([1, 2, 3, 32])),
        attention_cost=draw(st.sampled_from([0.0, 0.03, 1.0])),
    )


@st.composite
def problems(draw, **kwargs):
    ladder = draw(ladders(**kwargs))
    segments = st.lists(st.integers(1, ladder.largest_segment), max_size=8)
    return draw(st.lists(segments, max_size=8)), ladder


def block_cost(positions, ladder):
    return positions * (1 + ladder.attention_cost * positions)


def cost_of(launches, ladder):
    """Sums in one order, for plans that differ in the order of their launches to compare equal."""
    return sum(sorted(bucket.num_blocks * block_cost(bucket.positions, ladder) for bucket, _ in launches))


@cache
def fewest(num_blocks, rungs):
    """(Blocks computed, launches) with which launches of `rungs` blocks run `num_blocks`, by trying them all."""
    if num_blocks <= 0:
        return 0, 0
    ways = (fewest(num_blocks - rung, rungs) for rung in rungs)
    return min((blocks + rung, launches + 1) for rung, (blocks, launches) in zip(rungs, ways))


def cost_of_blocks(sizes, ladder):
    """Cost of running blocks of these sizes as they are."""
    costs = []
    for positions, count in Counter(sizes).items():
        rungs = tuple(bucket.num_blocks for bucket in ladder.buckets if bucket.positions == positions)
        costs.append(fewest(count, rungs)[0] * block_cost(positions, ladder))
    return sum(sorted(costs))


def smallest_holding(length, ladder):
    return min(positions for positions in ladder.block_positions if positions >= length)


def first_fit_by_looking(items, cap, ladder):
    """Contents of the blocks, lists of lengths, and the sizes that they were opened at."""
    blocks, sizes = [], []
    for length in sorted((length for lengths in items for length in lengths), reverse=True):
        for block, size in zip(blocks, sizes):
            if sum(block) + length <= size and len(block) < ladder.max_segments:
                block.append(length)
                break
        else:
            blocks.append([length])
            sizes.append(max(cap, smallest_holding(length, ladder)))
    return blocks, sizes


def blocks_of(launch):
    """The placements of each block that has any."""
    return [list(group) for _, group in groupby(launch.placements, key=lambda placement: placement.block)]


def contents(launches):
    """(Size, lengths) of each block that has segments, sorted."""
    return sorted(
        (launch.bucket.positions, tuple(placement.length for placement in block))
        for launch in launches
        for block in blocks_of(launch)
    )


def check(launches, items, ladder):
    """What every plan keeps to."""
    placements = [placement for launch in launches for placement in launch.placements]
    placed = sorted((placement.item, placement.segment, placement.length) for placement in placements)
    assert placed == [(i, s, length) for i, lengths in enumerate(items) for s, length in enumerate(lengths)]
    for bucket, in_launch in launches:
        assert bucket in ladder.buckets
        assert in_launch, "a launch that encodes nothing"
        assert [(p.block, p.first) for p in in_launch] == sorted((p.block, p.first) for p in in_launch)
    for launch in launches:
        blocks = blocks_of(launch)
        assert [block[0].block for block in blocks] == list(range(len(blocks)))
        assert len(blocks) <= launch.bucket.num_blocks
        for block in blocks:
            assert block[0].first == 0
            assert all(after.first == before.first + before.length for before, after in pairwise(block))
            assert block[-1].first + block[-1].length <= launch.bucket.positions
            assert len(block) <= ladder.max_segments


@given(problem=problems())
@example(problem=([[]], ladder_of((8,))))
@example(problem=([[8]] * 3, ladder_of((8,), (2,))))
def test_every_segment_has_one_place_in_a_block_that_holds_it(problem):
    items, ladder = problem
    check(pack(items, ladder), items, ladder)


@given(problem=problems(), seed=st.randoms(use_true_random=False))
def test_neither_a_second_call_nor_the_order_of_the_buckets_changes_the_plan(problem, seed):
    items, ladder = problem
    shuffled = list(ladder.buckets)
    seed.shuffle(shuffled)
    launches = pack(items, ladder)
    assert pack(items, ladder) == launches
    assert pack([tuple(lengths) for lengths in items], ladder._replace(buckets=(*shuffled, shuffled[0]))) == launches


@given(problem=problems(), seed=st.randoms(use_true_random=False))
def test_the_order_of_the_items_changes_neither_the_cost_nor_the_launches(problem, seed):
    items, ladder = problem
    shuffled = list(items)
    seed.shuffle(shuffled)
    before, after = pack(items, ladder), pack(shuffled, ladder)
    assert [launch.bucket for launch in after] == [launch.bucket for launch in before]
    assert cost_of(after, ladder) == cost_of(before, ladder)


@given(problem=problems())
def test_no_plan_costs_more_than_a_block_for_each_segment(problem):
    items, ladder = problem
    sizes = [smallest_holding(length, ladder) for lengths in items for length in lengths]
    assert cost_of(pack(items, ladder), ladder) <= cost_of_blocks(sizes, ladder) * (1 + 1e-12)


@given(problem=problems())
def test_no_plan_costs_more_than_blocks_of_one_size(problem):
    items, ladder = problem
    cost = cost_of(pack(items, ladder), ladder)
    needed = max((length for lengths in items for length in lengths), default=1)
    for positions in ladder.block_positions:
        if positions >= needed:
            alone = ladder._replace(buckets=tuple(b for b in ladder.buckets if b.positions == positions))
            assert cost <= cost_of(pack(items, alone), ladder) * (1 + 1e-12)


@given(problem=problems())
def test_the_plan_is_the_cheapest_of_first_fits_with_each_size(problem):
    items, ladder = problem
    costs = []
    for cap in ladder.block_positions:
        blocks, opened = first_fit_by_looking(items, cap, ladder)
        shrunk = [smallest_holding(sum(block), ladder) for block in blocks]
        costs += [cost_of_blocks(opened, ladder), cost_of_blocks(shrunk, ladder)]
    assert cost_of(pack(items, ladder), ladder) == pytest.approx(min(costs), rel=1e-12)


@given(problem=problems(with_single_blocks=True))
def test_no_block_is_padding_where_launches_of_one_block_exist(problem):
    items, ladder = problem
    for launch in pack(items, ladder):
        assert len(blocks_of(launch)) == launch.bucket.num_blocks


@given(problem=problems())
def test_padding_blocks_are_fewer_than_the_smallest_launch_has_and_in_one_launch_of_each_size(problem):
    items, ladder = problem
    launches = pack(items, ladder)
    for positions, group in groupby(launches, key=lambda launch: launch.bucket.positions):
        group = list(group)
        padding = [launch.bucket.num_blocks - len(blocks_of(launch)) for launch in group]
        assert not any(padding[:-1])
        assert padding[-1] < min(bucket.num_blocks for bucket in ladder.buckets if bucket.positions == positions)
        assert [launch.bucket.num_blocks for launch in group] == sorted(
            (launch.bucket.num_blocks for launch in group), reverse=True
        )
    sizes = [launch.bucket.positions for launch in launches]
    assert sizes == sorted(sizes, reverse=True)


@given(num_blocks=st.integers(1, 60), rungs=st.sets(st.integers(1, 9), min_size=1, max_size=4))
@example(num_blocks=6, rungs={3, 4})  # not 4 and 3
@example(num_blocks=6, rungs={1, 3, 4})  # not 4, 1 and 1
@example(num_blocks=9, rungs={4, 6})  # 6 and 4, not 4, 4 and 4
def test_blocks_are_split_into_the_fewest_blocks_and_then_the_fewest_launches(num_blocks, rungs):
    launches = pack([[8]] * num_blocks, ladder_of((8,), rungs))
    computed = sum(launch.bucket.num_blocks for launch in launches)
    assert (computed, len(launches)) == fewest(num_blocks, tuple(rungs))


def test_segments_of_one_size_of_block_go_where_a_first_fit_puts_them():
    lengths = [5, 3, 7, 1, 4, 2, 6, 2]
    blocks, _ = first_fit_by_looking([lengths], 8, ladder_of((8,)))
    assert blocks == [[7, 1], [6, 2], [5, 3], [4, 2]]
    assert contents(pack([lengths], ladder_of((8,)))) == sorted((8, tuple(block)) for block in blocks)


def test_small_images_fill_the_room_beside_a_large_one():
    items = [[10], [90], [10], [10], [8]]
    assert pack(items, ladder_of((64, 128))) == [
        Launch(
            Bucket(128, 1),
            (
                Placement(1, 0, 0, 0, 90),
                Placement(0, 0, 0, 90, 10),
                Placement(2, 0, 0, 100, 10),
                Placement(3, 0, 0, 110, 10),
                Placement(4, 0, 0, 120, 8),
            ),
        )
    ]


def test_what_the_large_block_has_no_room_for_opens_a_small_one():
    items = [[16]] * 10 + [[100]]
    launches = pack(items, ladder_of((32, 64, 128), (1,)))
    assert contents(launches) == [(32, (16,)), (128, (16,) * 8), (128, (100, 16))]


@pytest.mark.parametrize(
    "num_frames, ladder, buckets",
    [
        (20, ladder_of((128, 256)), [Bucket(256, 4), Bucket(256, 1)]),  # four frames in each block
        (21, ladder_of((128, 256)), [Bucket(256, 4), Bucket(256, 1), Bucket(128, 1)]),
        (20, ladder_of((128, 256), attention_cost=0.001), [Bucket(128, 4), Bucket(128, 4), Bucket(128, 2)]),
        (20, ladder_of((64, 256), attention_cost=0.001), [Bucket(64, 4)] * 5),
    ],
)
def test_frames_of_a_video_share_blocks(num_frames, ladder, buckets):
    items = [[60] * num_frames]
    launches = pack(items, ladder)
    check(launches, items, ladder)
    assert [launch.bucket for launch in launches] == buckets
    # Equal frames keep their order.
    assert [p.segment for launch in launches for p in launch.placements] == list(range(num_frames))


def test_segments_just_over_half_a_block_take_a_larger_one():
    items = [[40]] * 3  # 64 holds one, 128 holds three
    assert contents(pack(items, ladder_of((64, 128)))) == [(128, (40, 40, 40))]
    assert contents(pack(items, ladder_of((64,)))) == [(64, (40,))] * 3
    # 3 * 64 * (1 + 64 * a) is less than 128 * (1 + 128 * a) from a = 1/64 on.
    assert contents(pack(items, ladder_of((64, 128), attention_cost=0.015))) == [(128, (40, 40, 40))]
    assert contents(pack(items, ladder_of((64, 128), attention_cost=0.017))) == [(64, (40,))] * 3


def test_a_size_between_the_smallest_and_the_largest_may_be_the_best():
    items = [[40]] * 6  # 64 holds one (384 positions in all), 128 three (256), 192 four and then 128 two (320)
    assert contents(pack(items, ladder_of((64, 128, 192)))) == [(128, (40, 40, 40))] * 2
    assert contents(pack(items, ladder_of((64, 192)))) == [(192, (40,) * 2), (192, (40,) * 4)]


def test_of_plans_that_cost_the_same_the_one_with_fewer_blocks_is_kept():
    assert [launch.bucket for launch in pack([[32]] * 4, ladder_of((32, 64, 128)))] == [Bucket(128, 1)]


def test_where_none_may_share_each_segment_has_the_smallest_block_that_holds_it():
    items = [[5, 5], [], [17], [33]]
    ladder = ladder_of((8, 32, 64), max_segments=1)
    assert contents(pack(items, ladder)) == [(8, (5,)), (8, (5,)), (32, (17,)), (64, (33,))]


@pytest.mark.parametrize("max_segments, num_blocks", [(1, 12), (2, 6), (5, 3), (11, 2), (12, 1), (32, 1)])
def test_a_block_takes_no_more_segments_than_the_graph_tells_apart(max_segments, num_blocks):
    launches = pack([[1]] * 12, ladder_of((64,), max_segments=max_segments))
    assert len(contents(launches)) == num_blocks


@pytest.mark.parametrize(
    "num_blocks, parts", [(1, [2]), (2, [2]), (3, [4]), (4, [4]), (5, [4, 2]), (6, [4, 2]), (7, [4, 4]), (8, [4, 4])]
)
def test_without_launches_of_one_block_a_rest_is_padded(num_blocks, parts):
    items = [[8]] * num_blocks
    launches = pack(items, ladder_of((8,), (2, 4)))
    check(launches, items, ladder_of((8,), (2, 4)))
    assert [launch.bucket.num_blocks for launch in launches] == parts
    assert padding_ratio(launches) == sum(parts) / num_blocks


def test_a_block_stays_large_where_shrinking_it_would_cost_a_launch_of_its_own():
    items = [[100], [60]]
    assert contents(pack(items, ladder_of((64, 128), (2,)))) == [(128, (60,)), (128, (100,))]
    assert contents(pack(items, ladder_of((64, 128), (1, 2)))) == [(64, (60,)), (128, (100,))]


def test_nothing_to_pack_is_no_launch():
    assert pack([], ladder_of((8,))) == []
    assert pack([[], []], ladder_of((8,))) == []
    assert padding_ratio([]) == 1.0


def test_padding_counts_tails_and_blocks():
    launches = [
        Launch(Bucket(8, 2), (Placement(0, 0, 0, 0, 5),)),
        Launch(Bucket(4, 1), (Placement(0, 1, 0, 0, 2), Placement(1, 0, 0, 2, 1))),
    ]
    assert padding_ratio(launches) == (16 + 4) / 8
    assert padding_ratio(launch for launch in launches) == (16 + 4) / 8
    assert padding_ratio(pack([[8], [4, 4]], ladder_of((8,)))) == 1.0


def test_the_ladder_names_its_sizes():
    ladder = Ladder((Bucket(64, 1), Bucket(16, 2), Bucket(64, 4), Bucket(32, 1)))
    assert ladder.block_positions == (16, 32, 64)
    assert ladder.largest_segment == 64


@pytest.mark.parametrize("length", [0, -1, 65])
def test_a_segment_that_no_block_holds_is_named(length):
    with pytest.raises(ValueError) as caught:
        pack([[1], [2, 64, length]], ladder_of((64, 16)))
    assert str(caught.value) == (
        f"segment 2 of item 1 has {length} positions; a segment lies in one attention block and has 1 to 64 (blocks "
        "have 16, 64)"
    )


@pytest.mark.parametrize(
    "ladder",
    [
        Ladder(()),
        Ladder((Bucket(8, 1), Bucket(0, 1))),
        Ladder((Bucket(8, 0),)),
        ladder_of((8,), max_segments=0),
        ladder_of((8,), attention_cost=-0.1),
    ],
)
def test_a_ladder_that_can_hold_nothing_is_refused(ladder):
    with pytest.raises(ValueError, match="needs a bucket"):
        pack([], ladder)


def test_one_position():
    ladder = Ladder((Bucket(1, 1),))
    assert pack([[1]], ladder) == [Launch(Bucket(1, 1), (Placement(0, 0, 0, 0, 1),))]


@pytest.mark.parametrize("length, bucket", [(15, 16), (16, 16), (17, 64), (64, 64)])
def test_a_segment_as_large_as_a_block_fills_it(length, bucket):
    assert contents(pack([[length]], ladder_of((16, 64)))) == [(bucket, (length,))]


def test_segments_that_together_are_as_large_as_a_block_fill_it():
    assert contents(pack([[40], [24]], ladder_of((64, 65)))) == [(64, (40, 24))]
    assert contents(pack([[40], [25]], ladder_of((64, 65)))) == [(65, (40, 25))]


@pytest.mark.parametrize("largest", [64, 300, 4096])
def test_a_thousand_segments(largest):
    rng = random.Random(largest)
    items = [[rng.randint(1, largest) for _ in range(4)] for _ in range(250)]
    ladder = ladder_of((256, 512, 1024, 4096), (1, 2, 8), attention_cost=1e-4)
    launches = pack(items, ladder)
    check(launches, items, ladder)
    assert padding_ratio(launches) < 1.1
