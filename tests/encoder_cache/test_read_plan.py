"""Read plans against counting row by row: chunks, masks, repeated items, both forms, refusals."""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.encoder_cache.read_plan import (
    BlockPositions,
    ReadPlanner,
    ReadWindow,
    block_positions,
    row_lists,
)
from vllm_neuron_cache.encoder_cache.steps import Allocation, EncoderCacheStep, StepDelta
from vllm_neuron_cache.encoder_cache.table import EntryTable
from vllm_neuron_cache.errors import EncoderCacheReadError, StepProtocolError

NUM_ITEM_BLOCKS = 24
DUMMY_ROW = 64
BUCKETS = (4, 16, 64)


class Span(NamedTuple):
    """A placeholder in a prompt: where the item `key` stands, and which of its positions take a row."""

    key: str
    offset: int
    takes: tuple[bool, ...]
    masked: bool
    """False: the placeholder has no mask, and every position takes a row."""


def make_table(allocations, block_size, *, written=True):
    table = EntryTable(NUM_ITEM_BLOCKS, block_size)
    table.apply(EncoderCacheStep(1, 0, 0, (StepDelta(1, 0, (), tuple(allocations)),)))
    for entry in table.entries() if written else ():
        table.mark_written(entry)
    return table


def make_planner(block_size, buckets=BUCKETS):
    return ReadPlanner(buckets=buckets, scratch_row=NUM_ITEM_BLOCKS * block_size, dummy_row=DUMMY_ROW)


def dense_table(written=True):
    """`a`: 10 rows in blocks 2 5 0 of four rows, that is rows 8-11, 20-23, 0-1. `b`: 3 rows, 12-14."""
    allocations = [Allocation("a", 1, (2, 5, 0), (4, 4, 2)), Allocation("b", 2, (3,), (3,))]
    return make_table(allocations, 4, written=written)


A_ROWS = [8, 9, 10, 11, 20, 21, 22, 23, 0, 1]


def window(key="a", num_tokens=10, first=0, count=10, position=0, mask=None, request="r1"):
    if isinstance(mask, str):
        mask = np.array([bit == "1" for bit in mask])
    return ReadWindow(request, key, num_tokens, first, count, position, mask)


def windows_of(spans, begin, end, row=0, request="r1"):
    """The windows of positions `begin` to `end` of a prompt, the first of which is row `row` of the step."""
    windows = []
    for span in spans:
        first = max(begin - span.offset, 0)
        last = min(end - span.offset, len(span.takes))
        count = sum(span.takes[first:last]) if first < last else 0
        if count:
            mask = np.array(span.takes[first:last]) if span.masked else None
            position = row + span.offset + first - begin
            windows.append(
                ReadWindow(request, span.key, sum(span.takes), sum(span.takes[:first]), count, position, mask)
            )
    return windows


def moves_by_row(spans, begin, end, allocations, block_size, row=0):
    """(source, target) for every position of a chunk, counted one by one."""
    places = {
        a.key: [b * block_size + t for b, tokens in zip(a.block_ids, a.tokens_per_block) for t in range(tokens)]
        for a in allocations
    }
    moves = []
    for span in spans:
        taken = 0
        for place, takes in enumerate(span.takes):
            position = span.offset + place
            if takes:
                if begin <= position < end:
                    moves.append((places[span.key][taken], row + position - begin))
                taken += 1
    return moves


def two_requests(prompt, begin, end):
    """Windows and moves of a step in which two requests with the same prompt compute the same chunk."""
    block_size, allocations, spans, _ = prompt
    windows, moves = [], []
    for request, row in (("r1", 0), ("r2", end - begin)):
        windows += windows_of(spans, begin, end, row, request)
        moves += moves_by_row(spans, begin, end, allocations, block_size, row)
    return windows, moves


def live_pairs(plan):
    return list(zip(plan.src_rows[: plan.num_rows].tolist(), plan.dst_rows[: plan.num_rows].tolist()))


def check_padding(plan, block_size):
    assert len(plan.src_rows) == len(plan.dst_rows) == plan.bucket
    assert (plan.src_rows[plan.num_rows :] == NUM_ITEM_BLOCKS * block_size).all()
    assert (plan.dst_rows[plan.num_rows :] == DUMMY_ROW).all()


def merge_by_rows(buffer, src_rows, dst_rows):
    """What the merge graph does with row lists. Returns the targets without the dummy row, -1 where nothing went."""
    hidden = np.full(DUMMY_ROW + 1, -1)
    hidden[dst_rows] = buffer.reshape(-1)[src_rows]
    return hidden[:DUMMY_ROW].tolist()


def merge_by_blocks(buffer, form):
    """What the merge graph does with block positions."""
    hidden = np.full(DUMMY_ROW + 1, -1)
    hidden[form.encoder_positions.reshape(-1)] = buffer[form.encoder_block_ids].reshape(-1)
    return hidden[:DUMMY_ROW].tolist()


def most_read(moves, block_size):
    """How often each block has to be named: as often as its most-read row."""
    reads = Counter(src for src, _ in moves)
    times = Counter()
    for src, count in reads.items():
        times[src // block_size] = max(times[src // block_size], count)
    return times


@st.composite
def prompts(draw):
    """(block_size, allocations, spans, chunks): up to three items that stand up to four times in a prompt.

    The chunks are `(begin, end)` and make up the prompt; none is longer than half of the longest step.
    """
    block_size = draw(st.integers(1, 5))
    free = draw(st.permutations(range(NUM_ITEM_BLOCKS)))
    allocations, shapes = [], []
    for number in range(draw(st.integers(1, 3))):
        tokens_per_block = tuple(draw(st.lists(st.integers(1, block_size), min_size=1, max_size=4)))
        ids, free = free[: len(tokens_per_block)], free[len(tokens_per_block) :]
        allocations.append(Allocation("abc"[number], number + 1, tuple(ids), tokens_per_block))
        shapes.append(draw(placeholders("abc"[number], sum(tokens_per_block))))
    spans, offset = [], 0
    for shape in draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=4)):
        offset += draw(st.integers(0, 2))
        spans.append(shape._replace(offset=offset))
        offset += len(shape.takes)
    length = offset + draw(st.integers(0, 2))
    cuts = draw(st.sets(st.integers(1, length), max_size=4)) | set(range(0, length, DUMMY_ROW // 2)) | {length}
    return block_size, allocations, spans, list(pairwise(sorted(cuts)))


@st.composite
def placeholders(draw, key, num_rows):
    """A placeholder of an item of `num_rows` rows, with a mask or without."""
    if draw(st.booleans()):
        return Span(key, 0, (True,) * num_rows, False)
    gaps = draw(st.lists(st.integers(0, 2), min_size=num_rows + 1, max_size=num_rows + 1))
    takes = [take for gap in gaps[:-1] for take in [False] * gap + [True]] + [False] * gaps[-1]
    return Span(key, 0, tuple(takes), True)


# Row lists -----------------------------------------------------------------------------------------------------


@given(prompts())
def test_a_plan_equals_counting_row_by_row(prompt):
    block_size, allocations, _, chunks = prompt
    table, planner = make_table(allocations, block_size), make_planner(block_size)
    for begin, end in chunks:
        windows, moves = two_requests(prompt, begin, end)
        num_step_tokens = 2 * (end - begin)
        plan = planner.plan(windows, num_step_tokens, table)
        assert live_pairs(plan) == moves
        assert plan.src_rows.dtype == plan.dst_rows.dtype == np.int32
        assert plan.bucket == min(bucket for bucket in BUCKETS if bucket >= len(moves))
        check_padding(plan, block_size)
        assert plan.is_embed.dtype == bool and len(plan.is_embed) == num_step_tokens
        assert np.flatnonzero(plan.is_embed).tolist() == sorted(dst for _, dst in moves)


@given(prompts())
def test_row_lists_and_block_positions_describe_the_same_moves(prompt):
    block_size, allocations, _, chunks = prompt
    table, planner = make_table(allocations, block_size), make_planner(block_size)
    buffer = np.arange((NUM_ITEM_BLOCKS + 1) * block_size).reshape(-1, block_size)
    for begin, end in chunks:
        windows, moves = two_requests(prompt, begin, end)
        plan = planner.plan(windows, 2 * (end - begin), table)
        times = most_read(moves, block_size)
        form = block_positions(
            plan.src_rows[: plan.num_rows],
            plan.dst_rows[: plan.num_rows],
            block_size=block_size,
            max_blocks=times.total() + 1,
            scratch_block_id=NUM_ITEM_BLOCKS,
            sentinel=DUMMY_ROW,
        )
        assert form.encoder_block_ids.dtype == form.encoder_positions.dtype == np.int32
        assert Counter(form.encoder_block_ids.tolist()) == times + Counter([NUM_ITEM_BLOCKS])
        src_rows, dst_rows = row_lists(form, sentinel=DUMMY_ROW)
        assert src_rows.dtype == dst_rows.dtype == np.int32
        assert sorted(zip(src_rows.tolist(), dst_rows.tolist())) == sorted(moves)

        expected = [-1] * DUMMY_ROW
        for src, dst in moves:
            expected[dst] = src
        assert merge_by_rows(buffer, plan.src_rows, plan.dst_rows) == expected
        assert merge_by_blocks(buffer, form) == expected


@given(prompts())
def test_the_chunks_of_a_prompt_together_read_every_row_of_every_span_once(prompt):
    block_size, allocations, spans, chunks = prompt
    table, planner = make_table(allocations, block_size), make_planner(block_size)
    read = []
    for begin, end in chunks:
        plan = planner.plan(windows_of(spans, begin, end), end - begin, table)
        read += [(src, begin + dst) for src, dst in live_pairs(plan)]
    assert read == moves_by_row(spans, 0, chunks[-1][1], allocations, block_size)
    assert len(read) == sum(sum(span.takes) for span in spans)


PLACEHOLDERS = {
    "image": Span("a", 3, (True,) * 10, False),
    "video": Span("a", 3, tuple(bit == "1" for bit in "001111001111001100"), True),
    "video from its first to its last position": Span("a", 3, tuple(bit == "1" for bit in "11110111100011"), True),
}


@pytest.mark.parametrize("span", PLACEHOLDERS.values(), ids=PLACEHOLDERS)
@pytest.mark.parametrize("again", [False, True])
def test_wherever_a_prompt_is_cut_every_row_is_read_once(span, again):
    spans = [span, span._replace(offset=span.offset + len(span.takes) + 1)] if again else [span]
    length = spans[-1].offset + len(span.takes) + 2
    table, planner = dense_table(), make_planner(4)
    whole = A_ROWS * len(spans)
    targets = [s.offset + place for s in spans for place, takes in enumerate(s.takes) if takes]
    for cut in range(length + 1):
        read = []
        for begin, end in ((0, cut), (cut, length)):
            plan = planner.plan(windows_of(spans, begin, end), end - begin, table)
            read += [(src, begin + dst) for src, dst in live_pairs(plan)]
        assert read == list(zip(whole, targets)), f"cut at {cut}"


@pytest.mark.parametrize("span", PLACEHOLDERS.values(), ids=PLACEHOLDERS)
@pytest.mark.parametrize("chunk", range(1, 24))
def test_chunks_of_any_size_continue_where_the_one_before_ended(span, chunk):
    length = span.offset + len(span.takes) + 2
    table, planner = dense_table(), make_planner(4)
    read = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        plan = planner.plan(windows_of([span], begin, end), end - begin, table)
        read += [(src, begin + dst) for src, dst in live_pairs(plan)]
    targets = [span.offset + place for place, takes in enumerate(span.takes) if takes]
    assert read == list(zip(A_ROWS, targets))


@pytest.mark.parametrize(
    "first, count, rows",
    [(0, 1, A_ROWS[:1]), (9, 1, A_ROWS[9:]), (3, 2, [11, 20]), (7, 3, [23, 0, 1]), (0, 10, A_ROWS), (5, 0, [])],
)
def test_a_window_reads_its_own_rows_to_its_own_place(first, count, rows):
    plan = make_planner(4).plan([window(first=first, count=count, position=6)], 16, dense_table())
    assert live_pairs(plan) == list(zip(rows, range(6, 6 + count)))


@pytest.mark.parametrize("position", [0, 54])
def test_an_item_may_stand_at_the_first_and_at_the_last_row_of_the_longest_step(position):
    plan = make_planner(4).plan([window(position=position)], DUMMY_ROW, dense_table())
    assert live_pairs(plan) == list(zip(A_ROWS, range(position, position + 10)))
    assert np.flatnonzero(plan.is_embed).tolist() == list(range(position, position + 10))


def test_a_step_without_windows_pads_the_smallest_bucket():
    plan = make_planner(4).plan([], 7, dense_table())
    assert (plan.num_rows, plan.bucket) == (0, 4)
    assert plan.is_embed.tolist() == [False] * 7
    check_padding(plan, 4)


def test_a_step_without_tokens_has_an_empty_plan():
    plan = make_planner(4).plan([], 0, dense_table())
    assert (plan.num_rows, plan.bucket, len(plan.is_embed)) == (0, 4, 0)


@pytest.mark.parametrize(
    "num_rows, bucket", [(1, 4), (3, 4), (4, 4), (5, 16), (15, 16), (16, 16), (17, 64), (63, 64), (64, 64)]
)
def test_rows_are_padded_to_the_smallest_bucket_that_holds_them(num_rows, bucket):
    table = make_table([Allocation("a", 1, tuple(range(16)), (4,) * 16)], 4)
    plan = make_planner(4).plan([window(num_tokens=64, count=num_rows)], num_rows, table)
    assert (plan.num_rows, plan.bucket) == (num_rows, bucket)
    assert live_pairs(plan) == list(zip(range(num_rows), range(num_rows)))
    assert plan.is_embed.all()
    check_padding(plan, 4)


def test_the_same_item_twice_in_a_step_is_read_twice():
    plan = make_planner(4).plan([window(position=0), window(position=12)], 22, dense_table())
    assert live_pairs(plan) == list(zip(A_ROWS * 2, [*range(10), *range(12, 22)]))


def test_interleaved_items_take_each_row_from_their_own():
    windows = [
        window("a", count=4, mask="1010101", position=2),
        window("b", num_tokens=3, count=3, mask="0101010", position=2),
    ]
    plan = make_planner(4).plan(windows, 9, dense_table())
    assert dict((dst, src) for src, dst in live_pairs(plan)) == {2: 8, 3: 12, 4: 9, 5: 13, 6: 10, 7: 14, 8: 11}


def test_a_plan_overwrites_the_arrays_of_the_one_before_but_not_its_mask():
    planner, table = make_planner(4), dense_table()
    first = planner.plan([window()], 10, table)
    second = planner.plan([window("b", num_tokens=3, count=3, position=1)], 10, table)
    assert first.is_embed.tolist() == [True] * 10
    assert second.is_embed.tolist() == [False, True, True, True] + [False] * 6
    assert live_pairs(second) == [(12, 1), (13, 2), (14, 3)]
    check_padding(second, 4)
    assert np.shares_memory(second.src_rows, planner.src_rows) and np.shares_memory(second.dst_rows, planner.dst_rows)
    assert len(planner.src_rows) == len(planner.dst_rows) == BUCKETS[-1]


@pytest.mark.parametrize("buckets", [(), (63,), (16, 4, 64), (4, 4, 64), (64, 32)])
def test_buckets_that_do_not_ascend_to_the_longest_step_are_refused(buckets):
    with pytest.raises(ValueError, match="64"):
        make_planner(4, buckets)


def test_one_bucket_as_long_as_the_longest_step_is_enough():
    assert make_planner(4, (64,)).plan([], 1, dense_table()).bucket == 64
    assert make_planner(4, [64]).buckets == (64,)


# Refusals ------------------------------------------------------------------------------------------------------


def refusal(windows, num_step_tokens, table=None) -> str:
    planner = make_planner(4)
    with pytest.raises(EncoderCacheReadError) as caught:
        planner.plan(windows, num_step_tokens, table or dense_table())
    # The planner is as good as new for the next step.
    plan = planner.plan([window("b", num_tokens=3, count=3)], 3, dense_table())
    assert live_pairs(plan) == [(12, 0), (13, 1), (14, 2)]
    return str(caught.value)


def test_an_item_without_an_entry_is_refused_by_request_and_item():
    message = refusal([window("b", 3, count=3), window("gone", 5, 1, 3, 4, request="r7")], 20)
    assert "request r7" in message and "item gone" in message and "no entry" in message and "rows 1 to 4" in message


def test_an_entry_that_was_not_written_is_refused_by_request_and_item():
    message = refusal([window(request="r7")], 10, dense_table(written=False))
    assert "request r7" in message and "item a" in message and "10 rows" in message and "not written" in message


@pytest.mark.parametrize("num_tokens", [9, 11, 80])
def test_an_entry_of_another_size_than_its_placeholder_is_refused_with_both_counts(num_tokens):
    message = refusal([window(num_tokens=num_tokens, count=4, request="r7")], 10)
    assert "request r7" in message and "item a" in message
    assert "has 10 rows in the encoder cache" in message and f"{num_tokens} rows by its placeholder" in message


@pytest.mark.parametrize("position", [0, 1, 9])
def test_two_items_on_one_row_of_the_step_are_refused_by_the_second(position):
    message = refusal([window(position=0), window("b", 3, count=3, position=position, request="r7")], 20)
    assert "request r7" in message and "item b" in message and f"from row {position} on" in message


def test_two_items_side_by_side_are_no_conflict():
    plan = make_planner(4).plan([window(), window("b", 3, count=3, position=10)], 13, dense_table())
    assert plan.num_rows == 13 and plan.is_embed.all()


def test_masks_that_share_a_row_are_refused_by_the_second():
    windows = [
        window("a", count=4, mask="1010101"),
        window("b", num_tokens=3, count=3, mask="0101100", request="r7"),
    ]
    message = refusal(windows, 12)
    assert "request r7" in message and "item b" in message


@pytest.mark.parametrize("num_step_tokens, position", [(9, 0), (10, 1), (20, 11), (20, 20), (20, 30)])
def test_an_item_that_reaches_past_the_step_is_refused_with_the_steps_length(num_step_tokens, position):
    message = refusal([window(position=position, request="r7")], num_step_tokens)
    assert "request r7" in message and f"of {num_step_tokens}" in message and "rows 0 to 10" in message


@pytest.mark.parametrize(
    "outside",
    [
        {"first": 9, "count": 2},
        {"first": 1, "count": 10},
        {"first": -3, "count": 2},
        {"first": -1, "count": 1},
        {"position": -3, "count": 2},
        {"position": -3, "count": 2, "mask": "11"},
        {"count": 2, "mask": "1110"},
        {"count": 3, "mask": "110"},
        {"position": 14, "count": 3, "mask": "111"},
    ],
    ids=str,
)
def test_a_window_that_reaches_outside_its_item_or_the_step_is_named(outside):
    message = refusal([window(request="r7", **outside)], 16)
    assert "request r7" in message and "item a" in message and "does not fit" in message


def test_a_step_longer_than_the_planner_was_made_for_is_refused():
    with pytest.raises(StepProtocolError, match=f"{DUMMY_ROW + 1} token rows"):
        make_planner(4).plan([window()], DUMMY_ROW + 1, dense_table())


def test_the_item_that_does_not_fit_is_named_and_not_the_one_before():
    message = refusal([window("b", 3, count=3), window("a", position=4, request="r7")], 13)
    assert "request r7" in message and "item a" in message


@pytest.mark.parametrize("num_windows, num_step_tokens", [(2, 15), (7, DUMMY_ROW)])
def test_more_rows_than_the_step_or_the_largest_bucket_has_are_refused(num_windows, num_step_tokens):
    windows = [window(request=f"r{number}") for number in range(num_windows)]
    assert "request r1: item a" in refusal(windows, num_step_tokens)


# Block positions -----------------------------------------------------------------------------------------------


def to_blocks(pairs, max_blocks, block_size=4):
    src_rows, dst_rows = (np.array(rows, dtype=np.int32) for rows in zip(*pairs)) if pairs else (np.empty(0, int),) * 2
    return block_positions(
        src_rows, dst_rows, block_size=block_size, max_blocks=max_blocks, scratch_block_id=9, sentinel=50
    )


def test_a_block_is_named_once_with_the_place_of_each_row():
    form = to_blocks([(8, 3), (9, 4), (11, 7), (1, 0)], max_blocks=4)
    assert form.encoder_block_ids.tolist() == [2, 0, 9, 9]
    assert form.encoder_positions.tolist() == [[3, 4, 50, 7], [50, 0, 50, 50], [50] * 4, [50] * 4]


def test_a_row_read_again_names_its_block_again():
    form = to_blocks([(8, 0), (9, 1), (8, 2), (8, 3), (9, 4)], max_blocks=3)
    assert form.encoder_block_ids.tolist() == [2, 2, 2]
    assert form.encoder_positions.tolist() == [[0, 1, 50, 50], [2, 4, 50, 50], [3, 50, 50, 50]]


def test_no_pairs_name_the_scratch_block_everywhere():
    form = to_blocks([], max_blocks=2)
    assert form.encoder_block_ids.tolist() == [9, 9]
    assert form.encoder_positions.tolist() == [[50] * 4] * 2
    src_rows, dst_rows = row_lists(form, sentinel=50)
    assert (src_rows.tolist(), dst_rows.tolist()) == ([], [])
    assert src_rows.dtype == dst_rows.dtype == np.int32


def test_exactly_as_many_blocks_as_the_graph_takes_fit_and_one_more_is_refused_with_both_counts():
    pairs = [(0, 0), (4, 1), (8, 2)]
    assert to_blocks(pairs, max_blocks=3).encoder_block_ids.tolist() == [0, 1, 2]
    with pytest.raises(EncoderCacheReadError, match="reads 3 blocks and the graph takes 2"):
        to_blocks(pairs, max_blocks=2)


def test_row_lists_follow_the_forms_own_order():
    form = BlockPositions(np.array([5, 2, 9], np.int32), np.array([[50, 7], [1, 3], [50, 50]], np.int32))
    src_rows, dst_rows = row_lists(form, sentinel=50)
    assert list(zip(src_rows.tolist(), dst_rows.tolist())) == [(11, 7), (4, 1), (5, 3)]


def test_row_zero_of_the_step_is_a_place_like_any_other():
    form = to_blocks([(0, 0), (0, 1)], max_blocks=2)
    src_rows, dst_rows = row_lists(form, sentinel=50)
    assert list(zip(src_rows.tolist(), dst_rows.tolist())) == [(0, 0), (0, 1)]
