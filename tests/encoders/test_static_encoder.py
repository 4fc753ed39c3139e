"""Items through blocks, buckets and masks into the cache's rows, against a loop over segments; every way to fail."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_encoder import FAT, PATCH, PER_ROW, SIZES, Rank, SmallEncoder, Tower, random_item, rows_of

from vllm_neuron_cache.encoder_cache.identity import EMPTY_TAG
from vllm_neuron_cache.encoder_cache.packing import pack, padding_ratio
from vllm_neuron_cache.encoders.interface import EncoderItem
from vllm_neuron_cache.encoders.static_encoder import EncoderRanks, EncoderWork, _StagedInputs
from vllm_neuron_cache.errors import GraphRecompiledError

LARGEST = SIZES[-1]


@pytest.fixture(autouse=True)
def inference_mode():
    """That of vLLM's steps."""
    with torch.inference_mode():
        yield


def spoilt(item: EncoderItem, value: float, segment: int = 0) -> EncoderItem:
    """The item with one number of one patch replaced."""

    def inputs(number: int):
        patches, *others = item.inputs(number)
        if number == segment:
            patches = patches.clone()
            patches[-1, 2] = value
        return patches, *others

    return item._replace(inputs=inputs)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit by bit, NaN too."""
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def encode(rank: Rank, items: dict[str, EncoderItem]) -> dict[str, str]:
    """Encodes with entries, and checks that nothing but entries and the scratch block was written. What failed."""
    rank.reserve_for(items)
    before = rank.without_scratch()
    failures = rank.encoder.encode(items)
    own = torch.zeros(len(before), dtype=torch.bool)
    for key in items:
        own[rank.entry(key).rows.tolist()] = True
    assert same(rank.without_scratch()[~own], before[~own]), "rows of nobody were written"
    for key, item in items.items():
        assert rank.entry(key).written == rank.holds(key) == (key not in failures)
        if key not in failures:
            torch.testing.assert_close(rank.rows(key), rows_of(rank.tower, item), rtol=1e-5, atol=1e-5)
    rank.blocks.check_integrity()
    return failures


# Rows ------------------------------------------------------------------------------------------------------------


@cache
def warm_rank(block_size: int) -> Rank:
    return Rank(block_size=block_size, num_blocks=280 // block_size + 1)


FRAMES = st.lists(st.integers(1, LARGEST // PER_ROW), min_size=1, max_size=5)


@settings(max_examples=100)
@given(st.lists(FRAMES, min_size=1, max_size=7), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**31))
@example([[8]], 8, 0)
@example([[8, 8, 8, 8, 8], [8, 8, 8, 8]], 8, 1)  # nine full blocks: launches of four, four and one
@example([[1]] * 7, 1, 2)  # no more than three of them in a block
@example([[3, 5], [3, 3, 2], [7, 1]], 4, 3)  # several frames in a block, and blocks of the cache that end within one
def test_rows_are_those_of_a_loop_over_segments_and_lie_in_their_entries(items, block_size, seed):
    rank = warm_rank(block_size)
    rank.reset()
    made = {
        f"item {number}": random_item([rows * PER_ROW for rows in frames], seed + number)
        for number, frames in enumerate(items)
    }
    before, written = rank.encoder.work, (rank.writer.items_written, rank.writer.rows_written)
    assert encode(rank, made) == {}
    launches = pack([item.segments for item in made.values()], rank.encoder.ladder)
    work = EncoderWork(*(now - before for now, before in zip(rank.encoder.work, before)))
    assert work.launches == len(launches)
    assert work.positions_live == sum(sum(item.segments) for item in made.values())
    assert work.positions_computed / work.positions_live == padding_ratio(launches)
    assert rank.writer.items_written - written[0] == len(items)
    assert rank.writer.rows_written - written[1] == sum(map(sum, items))


def test_several_frames_share_a_block_and_several_blocks_a_launch():
    """The examples above do what they are for."""
    rank = Rank()
    rows = [[3, 5], [3, 3, 2], [7, 1], [8, 8, 8, 8]]
    launches = pack([[count * PER_ROW for count in frames] for frames in rows], rank.encoder.ladder)
    assert max(launch.bucket.num_blocks for launch in launches) == 4
    assert any(placement.first for launch in launches for placement in launch.placements)
    assert {bucket.positions for bucket in rank.encoder.ladder.buckets} == set(SIZES)


def test_padding_is_written_to_the_first_row_of_the_scratch_block():
    rank = Rank()
    before = rank.blocks.buffer[-1].clone()
    assert encode(rank, {"full": random_item([LARGEST], 0)}) == {}
    assert torch.equal(rank.blocks.buffer[-1], before)
    assert encode(rank, {"with padding": random_item([LARGEST - PER_ROW], 0)}) == {}
    assert not torch.equal(rank.blocks.buffer[-1, 0], before[0])
    assert torch.equal(rank.blocks.buffer[-1, 1:], before[1:])


def test_control_without_the_mask_neighbours_leak_into_each_other(monkeypatch):
    def everything(segment_ids, dtype):
        return torch.zeros_like(segment_ids, dtype=dtype)[:, None, None, :]

    monkeypatch.setattr("small_encoder.segment_mask", everything)
    rank = Rank()
    with pytest.raises(AssertionError, match="not close"):
        encode(rank, {"a": random_item([8], 0), "b": random_item([8], 1)})


def test_positions_that_fill_no_row_are_dropped_and_still_attended_to():
    """Chunks of sound have any length, and a block each."""
    rank = Rank(adapter=SmallEncoder(Tower(), max_segments=1))
    items = {"odd": random_item([7, 5, 9], 0), "even": random_item([8], 1), "odder": random_item([31, 6], 2)}
    assert encode(rank, items) == {}


def test_inputs_shorter_than_their_segment_are_filled_with_zeros():
    rank = Rank()
    whole = random_item([LARGEST], 0)
    assert encode(rank, {"before": whole}) == {}
    patches, halves, turns = random_item([8], 1).inputs(0)
    short = EncoderItem((8,), lambda segment: (patches[:6], halves[:3], turns))
    filled = (torch.cat([patches[:6], torch.zeros(2, PATCH)]), torch.cat([halves[:3], torch.zeros(13, 1)]), turns)
    rank.reserve_for({"short": short})
    assert rank.encoder.encode({"short": short}) == {}
    torch.testing.assert_close(rank.rows("short"), rank.tower(*filled), rtol=1e-5, atol=1e-5)


def test_the_same_key_again_is_written_again():
    rank = Rank()
    assert encode(rank, {"a": random_item([8, 12], 0)}) == {}
    entry, tags = rank.entry("a"), rank.tags()
    again = random_item([8, 12], 1)
    assert rank.encoder.encode({"a": again}) == {}
    torch.testing.assert_close(rank.rows("a"), rows_of(rank.tower, again), rtol=1e-5, atol=1e-5)
    assert rank.entry("a") is entry and entry.written
    assert all(torch.equal(now, before) for now, before in zip(rank.tags(), tags))


def test_no_items_are_no_launch():
    rank = Rank()
    before = rank.blocks.buffer.clone()
    assert rank.encoder.encode({}) == {}
    assert rank.encoder.work == (0, 0, 0)
    assert torch.equal(rank.blocks.buffer, before)


def test_warm_up_counts_nothing_and_writes_the_scratch_block_only():
    rank = Rank(warm=False)
    before, tags = rank.without_scratch(), rank.tags()
    rank.writer.warm_up()
    rank.encoder.warm_up()
    assert rank.encoder.work == (0, 0, 0)
    assert torch.equal(rank.without_scratch(), before)
    assert all(torch.equal(now, then) for now, then in zip(rank.tags(), tags))


def test_a_bucket_that_was_not_warmed_up_is_not_compiled_later():
    rank = Rank(warm=False, lane="check")
    rank.writer.warm_up()
    rank.encoder.warm_up()
    rank.lane.seal()
    compiled = rank.lane.num_compiled
    for seed in range(20):
        items = {
            f"{seed} {n}": random_item([PER_ROW * (1 + (seed * n) % 8)] * (1 + n % 3), n) for n in range(1 + seed % 4)
        }
        rank.reset()
        assert encode(rank, items) == {}
    assert (rank.lane.num_compiled, rank.lane.num_recompiles_refused) == (compiled, 0)
    with pytest.raises(GraphRecompiledError):
        rank.encoder.warm_up()


# Failures --------------------------------------------------------------------------------------------------------


def test_an_item_that_is_not_finite_fails_alone_among_neighbours_in_its_block():
    rank = Rank()
    items = {
        "good": random_item([8], 0),
        "bad": spoilt(random_item([8, 4], 1), float("nan"), segment=1),
        "other": random_item([8], 2),
    }
    (launch,) = pack([item.segments for item in items.values()], rank.encoder.ladder)[:1]
    sharing = {placement.item for placement in launch.placements if placement.block == 0}
    assert len(sharing) > 1
    failures = encode(rank, items)
    assert list(failures) == ["bad"]
    assert failures["bad"] == "item bad: rows of the 3 that the encoder made hold NaN or infinity"
    tags = rank.blocks.mm_hash_tags[list(rank.entry("bad").block_ids)]
    assert (tags == torch.tensor(EMPTY_TAG)).all()
    assert encode(rank, {"next": random_item([LARGEST, 4], 3)}) == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_an_item_alone_that_is_not_finite_fails(value):
    rank = Rank()
    assert list(encode(rank, {"bad": spoilt(random_item([16, 24], 1), value)})) == ["bad"]


def test_two_items_that_are_not_finite_fail_and_the_one_between_does_not():
    rank = Rank()
    bad = {key: spoilt(random_item([8], seed), float("inf")) for seed, key in enumerate(("first", "last"))}
    items = {"first": bad["first"], "good": random_item([8], 5), "last": bad["last"]}
    assert list(encode(rank, items)) == ["first", "last"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_enough(value):
    class OneNumber(SmallEncoder):
        def forward(self, inputs, segment_ids, weights):
            rows = super().forward(inputs, segment_ids, weights)
            marked = inputs[0].unflatten(1, (-1, PER_ROW))[:, :, -1, 2:3] > 1e6
            return torch.cat([rows[..., :-1], torch.where(marked, value, rows[..., -1:])], dim=-1)

    rank = Rank(adapter=OneNumber(Tower()))
    items = {"good": random_item([12], 0), "bad": spoilt(random_item([12], 1), 1e7), "other": random_item([8], 2)}
    assert list(encode(rank, items)) == ["bad"]
    assert (~rank.rows("bad").isfinite()).sum() == 1
    assert rank.encoder.work.launches == 2, "the neighbours in its block were not encoded again"


def test_what_an_infinite_item_leaves_in_the_staged_arrays_harms_nobody():
    rank = Rank()
    everywhere = EncoderItem(
        (LARGEST,), lambda segment: tuple(torch.full_like(t, float("inf")) for t in random_item([LARGEST], 0).inputs(0))
    )
    assert list(encode(rank, {"infinite": everywhere})) == ["infinite"]
    # 25 positions or more take the same block, and leave some of it as padding.
    assert encode(rank, {"small": random_item([LARGEST - PER_ROW], 1)}) == {}
    four = {f"infinite {n}": everywhere for n in range(4)}
    assert list(encode(rank, four)) == list(four)
    assert encode(rank, {"a": random_item([28], 1), "b": random_item([28], 2), "c": random_item([28, 28], 3)}) == {}


def test_control_without_zeros_in_the_padding_a_good_item_fails(monkeypatch):
    fill = _StagedInputs._fill
    monkeypatch.setattr(
        _StagedInputs, "_fill", lambda self, first, length, sources: sources and fill(self, first, length, sources)
    )
    with pytest.raises(AssertionError):
        test_what_an_infinite_item_leaves_in_the_staged_arrays_harms_nobody()


@pytest.mark.parametrize(
    ("key", "lengths", "message"),
    [
        (
            "large",
            (8, LARGEST + PER_ROW),
            f"item large: .* has {LARGEST + PER_ROW} patches, .*block {LARGEST}.*Raise encoder_attention_block",
        ),
        ("unknown", (8,), "item unknown: the encoder makes 2 rows and no blocks are reserved"),
        ("other count", (8, 8), "item other count: the encoder makes 4 rows; its placeholder takes 3"),
    ],
)
def test_an_item_that_cannot_be_placed_fails_alone_with_nothing_written(key, lengths, message):
    rank = Rank()
    good = random_item([12], 0)
    rank.reserve({"large": (2, 9 if key == "large" else 2), "other count": (3,), "good": (3,)})
    rows, tags = rank.without_scratch(), rank.tags()
    failures = rank.encoder.encode({key: random_item(lengths, 1), "good": good})
    assert list(failures) == [key]
    assert re.match(message, failures[key])
    own = rank.entry("good")
    others = torch.ones(len(rows), dtype=torch.bool)
    others[own.rows.tolist()] = False
    assert same(rank.without_scratch()[others], rows[others])
    blocks = [block for block in range(len(tags[0])) if block not in own.block_ids]
    assert all(torch.equal(now[blocks], then[blocks]) for now, then in zip(rank.tags(), tags))
    assert own.written and rank.holds("good")
    torch.testing.assert_close(rank.rows("good"), rows_of(rank.tower, good), rtol=1e-5, atol=1e-5)


def test_tags_are_empty_while_the_graph_writes():
    rank = Rank()
    item = random_item([LARGEST] * 9, 0)
    seen = []

    def look():
        entry = rank.entry("a")
        seen.append((entry.written, rank.blocks.mm_hash_tags[list(entry.block_ids)].any().item()))

    rank.reserve_for({"a": item})
    assert rank.encoder.encode({"a": item}) == {}
    rank.entry("a").written = False
    assert rank.holds("a")
    rank.adapter.on_forward = look
    assert rank.encoder.encode({"a": item}) == {}
    assert seen == [(False, False)] * 3
    assert rank.holds("a")


@pytest.mark.parametrize("failing_launch", [0, 1, 2])
def test_a_graph_that_raises_leaves_every_entry_unwritten_and_its_tags_empty(failing_launch):
    rank = Rank()
    items = {"a": random_item([LARGEST] * 5, 0), "b": random_item([LARGEST] * 4, 1)}
    rank.reserve_for(items)
    launches = iter(range(9))

    def fail():
        if next(launches) == failing_launch:
            raise RuntimeError("planted")

    rank.adapter.on_forward = fail
    with pytest.raises(RuntimeError, match="planted"):
        rank.encoder.encode(items)
    for key in items:
        assert not rank.entry(key).written
        assert (rank.blocks.mm_hash_tags[list(rank.entry(key).block_ids)] == torch.tensor(EMPTY_TAG)).all()
    rank.adapter.on_forward = lambda: None
    assert rank.encoder.encode(items) == {}
    for key, item in items.items():
        assert rank.holds(key)
        torch.testing.assert_close(rank.rows(key), rows_of(rank.tower, item), rtol=1e-5, atol=1e-5)


def test_data_that_cannot_be_read_leave_every_entry_unwritten():
    rank = Rank()

    def unreadable(segment):
        raise OSError("planted")

    items = {"a": random_item([LARGEST], 0), "b": EncoderItem((8,), unreadable)}
    rank.reserve_for(items)
    with pytest.raises(OSError, match="planted"):
        rank.encoder.encode(items)
    assert not any(rank.entry(key).written or rank.holds(key) for key in items)


# Weights ---------------------------------------------------------------------------------------------------------


def test_other_weights_are_taken_after_forget_weights():
    rank = Rank()
    item = random_item([8, 4], 0)
    assert encode(rank, {"a": item}) == {}
    before = rank.rows("a").clone()
    rank.tower.out.weight = torch.nn.Parameter(torch.rand(FAT, 8 * PER_ROW), requires_grad=False)
    rank.encoder.encode({"a": item})
    assert torch.equal(rank.rows("a"), before), "the control: the weights were not read again"
    rank.encoder.forget_weights()
    assert rank.adapter.num_forgotten == 1
    assert rank.encoder.encode({"a": item}) == {}
    assert not torch.allclose(rank.rows("a"), before)
    torch.testing.assert_close(rank.rows("a"), rows_of(rank.tower, item), rtol=1e-5, atol=1e-5)


# Ranks -----------------------------------------------------------------------------------------------------------


class Lockstep:
    """Gathers the rows of encoders that run in threads of one process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=20)
        self._rows: list[torch.Tensor | None] = [None] * count
        self.apart = True
        """While graphs are traced and warmed up, each rank has its own rows only."""

    def ranks(self, rank: int) -> EncoderRanks:
        def gather(rows: torch.Tensor) -> torch.Tensor:
            if self.apart:
                return torch.cat([rows] * self.count)
            self._rows[rank] = rows
            self._barrier.wait()
            gathered = torch.cat(self._rows)
            self._barrier.wait()
            return gathered

        return EncoderRanks(self.count, rank, gather)

    def encode(self, ranks: list[Rank], items: dict[str, EncoderItem]) -> list[dict[str, str]]:
        def run(rank: Rank) -> dict[str, str]:
            with torch.inference_mode():
                return rank.encoder.encode(items)

        self.apart = False
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(run, ranks))


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_share_the_work_write_what_one_rank_writes(count):
    together = Lockstep(count)
    ranks = [Rank(ranks=together.ranks(rank)) for rank in range(count)]
    one = Rank()
    items = {
        "video": random_item([LARGEST] * 7 + [12, 4], 0),
        "bad": spoilt(random_item([8], 1), float("nan")),
        "good": random_item([8, 20], 2),
        "large": random_item([LARGEST + 4], 3),
    }
    for rank in (one, *ranks):
        rank.reserve_for(items)
    failures = one.encoder.encode(items)
    assert list(failures) == ["large", "bad"]
    assert together.encode(ranks, items) == [failures] * count
    for rank in ranks:
        assert same(rank.blocks.buffer, ranks[0].blocks.buffer)
        assert torch.equal(rank.blocks.mm_hash_tags, one.blocks.mm_hash_tags)
        good = [row for key in ("video", "good") for row in rank.entry(key).rows.tolist()]
        torch.testing.assert_close(rank.without_scratch()[good], one.without_scratch()[good], rtol=1e-5, atol=1e-5)
        others = [row for row in range(len(rank.without_scratch())) if row not in {*good, *rank.entry("bad").rows}]
        assert same(rank.without_scratch()[others], one.without_scratch()[others])
    for key in ("video", "good"):
        torch.testing.assert_close(one.rows(key), rows_of(one.tower, items[key]), rtol=1e-5, atol=1e-5)
    # Each rank staged its own share of the launches and no more.
    assert len({rank.encoder.work for rank in ranks}) == 1
    assert all(bucket.num_blocks % count == 0 for bucket in ranks[0].encoder.ladder.buckets)


def test_control_ranks_that_gather_in_another_order_write_other_rows():
    together = Lockstep(2)
    ranks = [Rank(ranks=together.ranks(1 - rank)) for rank in range(2)]
    item = random_item([LARGEST] * 3 + [8], 0)
    for number, rank in enumerate(ranks):
        rank.encoder._staged._ranks = rank.encoder._staged._ranks._replace(rank=number)
        rank.reserve_for({"a": item})
    together.encode(ranks, {"a": item})
    assert not torch.allclose(ranks[0].rows("a"), rows_of(ranks[0].tower, item), atol=1e-3)
