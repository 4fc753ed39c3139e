"""Every rank merges its share of a step, and together they make the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron_cache.encoder_cache.read_plan import block_positions
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.check import check_spec
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
from vllm_neuron_cache.graphs.merge import merge_multimodal_embeddings, merge_rows
from vllm_neuron_cache.graphs.sequence_parallel import (
    global_to_local_positions,
    merge_multimodal_embeddings_sharded_spec,
    merge_rows_sharded_spec,
)
from vllm_neuron_cache.graphs.spec import BufferShape

NUM_BLOCKS, BLOCK_SIZE, WIDTH, LEVELS, TOKENS = 9, 8, 6, 2, 48
BUFFER = BufferShape(NUM_BLOCKS, BLOCK_SIZE, WIDTH * (1 + LEVELS), torch.float32)
MAX_BLOCKS, MAX_ROWS = 16, 32


@given(
    positions=st.lists(st.integers(0, 200), min_size=1),
    local_len=st.integers(1, 30),
    rank=st.integers(0, 7),
)
def test_a_row_is_local_on_one_rank_and_the_dummy_row_on_the_others(positions, local_len, rank):
    given_ = torch.tensor(positions, dtype=torch.int32)
    local = global_to_local_positions(given_, local_len, torch.tensor(rank, dtype=torch.int32))
    assert local.dtype == torch.int32
    expected = [p - rank * local_len if p // local_len == rank else local_len for p in positions]
    assert local.tolist() == expected


def whole_step(seed):
    """Targets of a step, a buffer, and the same reads in both forms."""
    random = np.random.default_rng(seed)
    buffer = torch.randn(NUM_BLOCKS, BLOCK_SIZE, BUFFER.fat_dim, generator=torch.Generator().manual_seed(seed))
    targets = [torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed + i)) for i in range(1 + LEVELS)]
    src = random.integers(0, (NUM_BLOCKS - 1) * BLOCK_SIZE, 25).astype(np.int32)
    dst = random.permutation(TOKENS)[:25].astype(np.int32)
    form = block_positions(
        src, dst, block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS, scratch_block_id=NUM_BLOCKS - 1, sentinel=TOKENS
    )
    src_rows = np.full(MAX_ROWS, (NUM_BLOCKS - 1) * BLOCK_SIZE, dtype=np.int32)
    dst_rows = np.full(MAX_ROWS, TOKENS, dtype=np.int32)
    src_rows[:25], dst_rows[:25] = src, dst
    rows = (torch.from_numpy(src_rows), torch.from_numpy(dst_rows))
    return buffer, targets, rows, (torch.from_numpy(form.encoder_block_ids), torch.from_numpy(form.encoder_positions))


def with_dummy_row(rows):
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("lane_name", "num_ranks"),
    [*((lane, ranks) for lane in ("eager", "check") for ranks in (1, 2, 3, 4, 48)), ("inductor", 4)],
)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_all_shares_together_are_the_unsharded_result(form, lane_name, num_ranks):
    if lane_name == "inductor" and not compiler_available():
        pytest.skip("inductor needs a C++ compiler, and there is none")
    local_len = TOKENS // num_ranks
    sizes = {"num_levels": LEVELS, "local_len": local_len, "num_ranks": num_ranks}
    make_spec, merge, bucket = {
        "rows": (merge_rows_sharded_spec, merge_rows, MAX_ROWS),
        "blocks": (merge_multimodal_embeddings_sharded_spec, merge_multimodal_embeddings, MAX_BLOCKS),
    }[form]
    spec = make_spec((bucket,), BUFFER, **sizes)
    lane = make_lane(lane_name)
    graph = BucketedGraph(spec, lane)
    graph.warm_up(spec.example_args)
    lane.seal()
    buffer, targets, rows, blocks = whole_step(num_ranks)
    reads = rows if form == "rows" else blocks
    hidden, *deepstack = map(with_dummy_row, targets)
    merge(hidden, tuple(deepstack), buffer, *reads)
    shares = []
    for rank in range(num_ranks):  # one graph for all of them
        own = [with_dummy_row(target[rank * local_len : (rank + 1) * local_len]) for target in targets]
        graph.run(bucket, own[0], tuple(own[1:]), buffer, *reads, torch.tensor(rank, dtype=torch.int32))
        shares.append([target[:-1] for target in own])
    for whole, parts in zip([hidden, *deepstack], zip(*shares, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), whole[:-1])


@pytest.mark.parametrize("make_spec", [merge_rows_sharded_spec, merge_multimodal_embeddings_sharded_spec])
def test_the_sharded_graphs_obey_the_rules_and_are_in_range_by_construction(make_spec):
    report = check_spec(make_spec((4, 8), BUFFER, num_levels=LEVELS, local_len=12, num_ranks=4), 8)
    assert list(report.aliases) == ["hidden", "deepstack[0]", "deepstack[1]"]


def test_a_share_that_ends_one_row_early_is_noticed():
    """The comparison above can fail: with a wrong length, rows go missing."""
    _, _, (_, dst_rows), _ = whole_step(0)
    ranks = [torch.tensor(rank, dtype=torch.int32) for rank in range(4)]
    live = int((dst_rows < TOKENS).sum())
    assert sum(int((global_to_local_positions(dst_rows, 12, rank) < 12).sum()) for rank in ranks) == live
    assert sum(int((global_to_local_positions(dst_rows, 11, rank) < 11).sum()) for rank in ranks) < live
