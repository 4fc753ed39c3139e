"""Lanes compile in warm-up and never after, and say so when they would have to."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from vllm_neuron_cache.config import HARDWARE_LANES, LANES
from vllm_neuron_cache.errors import ConfigurationError, GraphRecompiledError, GraphRuleError
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.lanes import CheckLane, EagerLane, InductorLane, make_lane
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
from vllm_neuron_cache.graphs.merge import merge_rows_fat_spec
from vllm_neuron_cache.graphs.spec import BufferShape, bucket_for, doubling_buckets, split_by_buckets

needs_compiler = pytest.mark.skipif(not compiler_available(), reason="inductor needs a C++ compiler, and there is none")


SHAPE = BufferShape(3, 4, 8, torch.float32)


def merge_args(rows: int, tokens: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    index = torch.arange(rows, dtype=torch.int32)
    return torch.zeros(tokens + 1, 8, dtype=dtype), torch.ones(3, 4, 8, dtype=dtype), index, index.clone()


@pytest.mark.parametrize("name", LANES)
def test_every_configured_lane_exists(name):
    missing = {"inductor": not compiler_available(), "xla": find_spec("jax") is None}
    missing |= {lane: find_spec("torch_neuronx") is None for lane in HARDWARE_LANES}
    if missing.get(name):
        with pytest.raises(ConfigurationError, match=f"lane '{name}'"):
            make_lane(name)
    else:
        assert make_lane(name).name == name


@needs_compiler
@torch.inference_mode()
def test_one_compilation_per_bucket_and_none_after():
    lane = InductorLane()
    graph = BucketedGraph(merge_rows_fat_spec((2, 4, 8), SHAPE, max_step_tokens=16), lane)
    graph.warm_up(merge_args)
    lane.seal()
    assert lane.num_compiled == 3
    for _ in range(3):
        for bucket in graph.buckets:
            graph.run(bucket, *merge_args(bucket))
    assert (lane.num_compiled, lane.num_recompiles_refused) == (3, 0)


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize(
    "args",
    [merge_args(8), merge_args(4, tokens=17), merge_args(4, dtype=torch.bfloat16), merge_args(4)[:3]],
    ids=["other bucket", "other step", "other dtype", "argument missing"],
)
def test_a_call_that_needs_compiling_raises_and_changes_nothing(args):
    lane = InductorLane()
    graph = BucketedGraph(merge_rows_fat_spec((4,), SHAPE, max_step_tokens=16), lane)
    graph.warm_up(merge_args)
    lane.seal()
    with pytest.raises(GraphRecompiledError, match="merge_rows_fat, bucket 4"):
        graph.run(4, *args)
    assert (lane.num_compiled, lane.num_recompiles_refused) == (1, 1)
    assert not args[0].any()


@needs_compiler
@torch.inference_mode()
def test_other_layout_is_another_signature():
    lane = InductorLane()
    graph = BucketedGraph(merge_rows_fat_spec((4,), SHAPE, max_step_tokens=16), lane)
    graph.warm_up(merge_args)
    fat, buffer, src_rows, dst_rows = merge_args(4)
    with pytest.raises(GraphRecompiledError, match="differ"):
        graph.run(4, fat, buffer.transpose(0, 1).contiguous().transpose(0, 1), src_rows, dst_rows)


@pytest.mark.parametrize("lane_class", [EagerLane, pytest.param(InductorLane, marks=needs_compiler)])
def test_sealed_lane_lowers_nothing(lane_class):
    lane = lane_class()
    lane.seal()
    with pytest.raises(GraphRecompiledError, match="after warm-up"):
        lane.lower(merge_rows_fat_spec((4,), SHAPE, max_step_tokens=16), 4, merge_args(4))


@torch.inference_mode()
@pytest.mark.parametrize("lane_class", [EagerLane, CheckLane, pytest.param(InductorLane, marks=needs_compiler)])
@pytest.mark.parametrize(
    ("mutates", "said"),
    [
        ((), "fat: is mutated, and not declared"),
        (("fat", "buffer"), "buffer: is declared in mutates, and not mutated"),
        (("buffer",), "fat: is mutated, and not declared.*buffer: is declared"),
        (("fat", "fatt"), "fatt: is declared in mutates, and not mutated"),
    ],
)
def test_a_wrong_alias_map_is_refused_in_every_lane(lane_class, mutates, said):
    spec = replace(merge_rows_fat_spec((4,), SHAPE, max_step_tokens=16), mutates=mutates)
    with pytest.raises(GraphRuleError, match=said) as caught:
        BucketedGraph(spec, lane_class()).warm_up(merge_args)
    assert {violation.rule for violation in caught.value.violations} == {"alias_map"}


def test_buckets():
    assert doubling_buckets(64, 64) == (64,)
    assert doubling_buckets(64, 65) == (64, 128)
    assert doubling_buckets(1, 1000)[-1] == 1024
    assert bucket_for(64, (64, 128)) == 64
    assert bucket_for(65, (64, 128)) == 128
    with pytest.raises(ValueError, match="129"):
        bucket_for(129, (64, 128))


@torch.inference_mode()
@pytest.mark.parametrize("lane_class", [EagerLane, CheckLane, pytest.param(InductorLane, marks=needs_compiler)])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (merge_args(4, tokens=17), r"fat: is \[18, 8\] torch.float32, the spec has \[17, 8\]"),
        (merge_args(4, dtype=torch.bfloat16), "fat: is .*bfloat16"),
    ],
)
def test_other_arguments_than_those_of_the_spec_are_not_lowered(lane_class, args, said):
    """What was checked for the shapes of the spec says nothing of others."""
    with pytest.raises(GraphRuleError, match=said):
        lane_class().lower(merge_rows_fat_spec((4,), SHAPE, max_step_tokens=16), 4, args)


@torch.inference_mode()
def test_two_graphs_of_one_name_have_their_own_alias_maps():
    lane, spec = EagerLane(), merge_rows_fat_spec((4,), SHAPE, max_step_tokens=16)
    lane.lower(spec, 4, merge_args(4))

    def other(fat, buffer, src_rows, dst_rows):
        buffer.index_put_((src_rows,), buffer.new_zeros(4, 4, 8))

    with pytest.raises(GraphRuleError, match="buffer: is mutated"):
        lane.lower(replace(spec, fn=other), 4, merge_args(4))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 191, 192, 837, 2048, 2049, 9000])
def test_split_fills_buckets_and_leaves_less_than_the_smallest(size):
    parts = split_by_buckets(size, (64, 128, 256, 512, 1024, 2048))
    assert sum(parts) == size
    assert all(part in (64, 128, 256, 512, 1024, 2048) for part in parts[:-1])
    assert not parts or parts[-1] in (64, 128, 256, 512, 1024, 2048) or parts[-1] < 64
