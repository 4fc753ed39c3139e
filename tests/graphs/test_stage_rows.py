"""The graphs of the stage cache's device pool keep the rules, and write in place."""

from importlib.util import find_spec

import pytest
import torch

from vllm_neuron_cache.graphs.check import check_spec
from vllm_neuron_cache.graphs.lanes import EagerLane, InductorLane
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.graphs.stage_rows import stage_gather_spec, stage_write_spec

BUCKETS = (16, 32, 64)


def pool_shape(num_blocks=9, dtype=torch.float32, width=24):
    return BufferShape(num_blocks, 8, width, dtype)


def places(bucket, shape, seed=0):
    """Places of `bucket` rows, all different."""
    order = torch.randperm(shape.num_rows, generator=torch.Generator().manual_seed(seed))[:bucket]
    return (order // shape.block_size).to(torch.int32), (order % shape.block_size).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("make_spec", [stage_write_spec, stage_gather_spec], ids=lambda spec: spec.__name__)
def test_the_rules_are_kept_in_every_bucket(make_spec, bucket, dtype):
    spec = make_spec(BUCKETS, pool_shape(dtype=dtype))
    assert tuple(check_spec(spec, bucket).aliases) == spec.mutates


@pytest.mark.parametrize("lane", [EagerLane, InductorLane])
def test_what_is_written_is_gathered_and_nothing_else_changes(lane):
    shape = pool_shape()
    write, gather = stage_write_spec(BUCKETS, shape), stage_gather_spec(BUCKETS, shape)
    for bucket in BUCKETS:
        pool = torch.randn(shape[:3])
        before, rows, at = pool.clone(), torch.randn(bucket, shape.fat_dim), places(bucket, shape)
        pointer = pool.data_ptr()
        lane().lower(write, bucket, write.example_args(bucket))(pool, rows, *at)
        (gathered,) = lane().lower(gather, bucket, gather.example_args(bucket))(pool, *at)
        assert torch.equal(gathered, rows) and pool.data_ptr() == pointer
        written = torch.zeros(shape[:2], dtype=torch.bool)
        written[at[0].long(), at[1].long()] = True
        assert torch.equal(pool[~written], before[~written])


@pytest.mark.xla
@pytest.mark.skipif(
    not all(find_spec(name) for name in ("jax", "torchax")), reason="needs jax and torchax; scripts/xla_env runs these"
)
def test_the_write_is_in_place_by_the_compiled_graph_itself():
    from vllm_neuron_cache.graphs.lanes.xla import XlaLane

    temporary = {}
    for num_blocks in (9, 90):
        shape = pool_shape(num_blocks)
        spec, lane = stage_write_spec(BUCKETS, shape), XlaLane(strict=False)
        for bucket in BUCKETS:
            call = lane.lower(spec, bucket, spec.example_args(bucket))
            pool, rows, at = torch.zeros(shape[:3]), torch.randn(bucket, shape.fat_dim), places(bucket, shape)
            call(pool, rows, *at)
            assert torch.equal(pool[at[0].long(), at[1].long()], rows)
            lane.proofs[spec.name, bucket].require()
        temporary[num_blocks] = [proof.temp_bytes for proof in lane.proofs.values()]
    assert temporary[9] == temporary[90]
