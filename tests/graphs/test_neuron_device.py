"""The lanes for AWS's compilers on a Trainium: the same results as eager, in place, and nothing compiled in a step.

Elsewhere every test skips and says what is missing. What is handed to the compilers is test_neuron_lanes.py's.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_on_lane import assert_close, chunks_of
from runtime_pair import check_against_the_compiler

from vllm_neuron_cache.errors import ConfigurationError, GraphRecompiledError
from vllm_neuron_cache.graphs.catalog import merge_spec, stamp_spec, write_spec
from vllm_neuron_cache.graphs.lanes import Lane, make_lane
from vllm_neuron_cache.graphs.lanes.neuron import NeuronLane
from vllm_neuron_cache.graphs.lanes.neuronx_trace import NeuronxTraceLane
from vllm_neuron_cache.graphs.lanes.nxd_builder import NxdBuilderLane
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flat_names, flatten, unflatten

pytestmark = pytest.mark.neuron

DEVICE = "neuron"
BLOCK_SIZE, FAT_DIM, LEVELS, STEP_TOKENS = 128, 2048, 3, 512
LANES = (NeuronLane, NeuronxTraceLane, NxdBuilderLane)
GRAPHS = ("encoder_write", "encoder_stamp", "merge_rows")


def spec_of(graph: str, num_blocks: int = 64, dtype: torch.dtype = torch.bfloat16) -> GraphSpec:
    buffer = BufferShape(num_blocks, BLOCK_SIZE, FAT_DIM, dtype)
    found = {
        "encoder_write": lambda: replace(write_spec(buffer), buckets=(64, 256)),
        "encoder_stamp": lambda: replace(stamp_spec(buffer), buckets=(4, 32)),
        "merge_rows": lambda: replace(
            merge_spec(buffer, num_levels=LEVELS, max_step_tokens=STEP_TOKENS), buckets=(64, 256)
        ),
    }
    return found[graph]()


def new_lane(lane_class: type[Lane], kernel: str) -> Lane:
    """A new lane, where its package and a device are there."""
    try:
        lane = lane_class(kernel)
    except ConfigurationError as error:
        pytest.skip(str(error))
    try:
        torch.zeros(1, device=DEVICE)
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"no Neuron device: {error}")
    return lane


@pytest.fixture(params=LANES, ids=lambda lane: lane.name)
def lane(request):
    """With the compiler's own graphs."""
    return new_lane(request.param, "compiler")


@pytest.fixture(params=LANES, ids=lambda lane: lane.name)
def nki_lane(request):
    """With kernels in its graphs."""
    return new_lane(request.param, "nki")


def random_values(spec: GraphSpec, bucket: int, seed: int = 0) -> tuple[Any, ...]:
    """Arguments on the CPU. Targets are all different: which of two writes to one place wins is the compiler's."""
    generator = torch.Generator().manual_seed(seed)
    example = spec.example_args(bucket)
    values: list[torch.Tensor] = []
    for name, tensor in zip(flat_names(spec.fn, example), flatten(example)):
        if name == "block_rows":
            value = torch.arange(bucket) % BLOCK_SIZE
        elif name == "block_ids" and spec.name == "encoder_write":
            value = torch.arange(bucket) // BLOCK_SIZE
        elif name in spec.index_limits:
            value = torch.randperm(spec.index_limits[name], generator=generator)[: tensor.numel()]
        elif tensor.dtype.is_floating_point:
            value = torch.randn(tensor.shape, generator=generator)
        else:
            value = torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=generator)
        values.append(value.view(tensor.shape).to(tensor.dtype))
    return unflatten(values, example)


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return unflatten([tensor.to(DEVICE) for tensor in flatten(args)], args)


def refill(args: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for tensor, value in zip(flatten(args), flatten(values)):
        tensor.copy_(value)


def lowered(lane: Lane, spec: GraphSpec, bucket: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The graph, and the arguments that it was lowered for, on the device."""
    args = on_device(spec.example_args(bucket))
    return lane.lower(spec, bucket, args), args


def addresses(args: tuple[Any, ...]) -> list[int]:
    return [tensor.data_ptr() for tensor in flatten(args)]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_result_is_eagers_to_the_bit_in_every_bucket(lane, graph, dtype):
    spec = spec_of(graph, dtype=dtype)
    for bucket in spec.buckets:
        call, args = lowered(lane, spec, bucket)
        for seed in (1, 2):
            values = random_values(spec, bucket, seed)
            refill(args, values)
            before = addresses(args)
            spec.fn(*values)
            call(*args)
            for name, tensor, value in zip(flat_names(spec.fn, args), flatten(args), flatten(values), strict=True):
                assert torch.equal(tensor.cpu().view(torch.uint8), value.view(torch.uint8)), (name, bucket, seed)
            assert addresses(args) == before


@torch.inference_mode()
@pytest.mark.parametrize("graph", GRAPHS)
def test_nothing_compiles_after_warm_up_whatever_the_data(lane, graph):
    spec = spec_of(graph)
    graphs = {bucket: lowered(lane, spec, bucket) for bucket in spec.buckets}
    lane.seal()
    for seed in range(20):
        for bucket, (call, args) in graphs.items():
            refill(args, random_values(spec, bucket, seed))
            call(*args)
    assert (lane.num_compiled, lane.num_recompiles_refused) == (len(spec.buckets), 0)


@torch.inference_mode()
@pytest.mark.parametrize("graph", GRAPHS)
def test_another_shape_is_refused_after_warm_up_and_changes_nothing(lane, graph):
    spec = spec_of(graph)
    small, large = spec.buckets
    call, _ = lowered(lane, spec, small)
    lane.seal()
    other = on_device(random_values(spec, large))
    before = [tensor.cpu() for tensor in flatten(other)]
    with pytest.raises(GraphRecompiledError, match=f"{graph}, bucket {small}"):
        call(*other)
    assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(flatten(other), before))
    assert (lane.num_compiled, lane.num_recompiles_refused) == (1, 1)


@torch.inference_mode()
def test_graphs_share_the_buffer(lane):
    """What the write graph writes is what the merge graph reads, in every bucket of both."""
    write, merge = spec_of("encoder_write"), spec_of("merge_rows")
    buffer = write.example_args(64)[0].to(DEVICE)
    targets = on_device(merge.example_args(64)[:2])
    for bucket in (64, 256):
        written, merged = random_values(write, bucket, bucket), random_values(merge, bucket, bucket)
        write_args = (buffer, *on_device(written[1:]))
        read_rows = written[2] * BLOCK_SIZE + written[3]
        merge_args = (*targets, buffer, read_rows.to(DEVICE), merged[4].to(DEVICE))
        write_call, merge_call = lane.lower(write, bucket, write_args), lane.lower(merge, bucket, merge_args)
        refill(write_args[1:], written[1:])
        write_call(*write_args)
        merge_call(*merge_args)
        got = torch.cat([target.cpu()[merged[4]] for target in flatten(targets)], dim=1)
        assert torch.equal(got, written[1])


def seconds_of(lane: Lane, spec: GraphSpec) -> float:
    """Of 50 launches of the smallest bucket."""
    call, args = lowered(lane, spec, 64)
    small = next(tensor for tensor in flatten(args) if tensor.dtype is torch.int32)
    call(*args)
    small.cpu()
    started = time.perf_counter()
    for _ in range(50):
        call(*args)
    small.cpu()  # waits for the device
    return time.perf_counter() - started


@torch.inference_mode()
@pytest.mark.slow
@pytest.mark.parametrize("graph", ["encoder_write", "merge_rows"])
def test_time_does_not_grow_with_the_buffer(lane, graph):
    """A copy of the whole buffer in a launch would take 32 times as long at 2048 blocks (1 GiB) as at 64."""
    seconds = [seconds_of(lane, spec_of(graph, num_blocks)) for num_blocks in (64, 2048)]
    assert seconds[1] < 3 * seconds[0]


@torch.inference_mode()
@pytest.mark.parametrize("graph", GRAPHS)
def test_memory_does_not_grow_by_a_call(lane, graph):
    """Neither a second buffer nor one more with each call."""
    memory = getattr(torch, DEVICE, None)
    if not all(hasattr(memory, name) for name in ("memory_allocated", "max_memory_allocated")):
        pytest.skip("this torch-neuronx does not count the device's memory")
    spec = spec_of(graph)
    call, args = lowered(lane, spec, spec.buckets[0])
    call(*args)
    before = memory.memory_allocated()
    largest = max(tensor.nbytes for tensor in flatten(args))
    for _ in range(20):
        call(*args)
    assert memory.memory_allocated() <= before
    assert memory.max_memory_allocated() < before + largest


# Kernels in the graphs, `kernel` "nki" -----------------------------------------------------------------------------


def kernel_spec(graph: str, dtype: torch.dtype, num_blocks: int = 64) -> GraphSpec:
    """With the same buckets as the compiler's."""
    buffer = BufferShape(num_blocks, BLOCK_SIZE, FAT_DIM, dtype)
    if graph == "encoder_write":
        return replace(write_spec(buffer, "nki"), buckets=(64, 256))
    merge = merge_spec(buffer, "nki", num_levels=LEVELS, max_step_tokens=STEP_TOKENS)
    return replace(merge, buckets=(64, 256))


def as_columns(graph: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call of the compiler's graph as one of the kernel's."""
    if graph == "encoder_write":
        return *values[:2], (values[2] * BLOCK_SIZE + values[3])[:, None]
    return *values[:3], values[3][:, None], values[4][:, None]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("graph", ["encoder_write", "merge_rows"])
def test_a_kernel_in_a_graph_gives_what_the_compilers_graph_gives(nki_lane, graph, dtype):
    compiler, spec = spec_of(graph, dtype=dtype), kernel_spec(graph, dtype)
    for bucket in spec.buckets:
        call, args = lowered(nki_lane, spec, bucket)
        for seed in (1, 2):
            values = random_values(compiler, bucket, seed)
            refill(args, as_columns(graph, values))
            before = addresses(args)
            compiler.fn(*values)
            call(*args)
            for name, tensor, value in zip(flat_names(spec.fn, args), flatten(args), flatten(values)):
                if spec.mutates[0] == name or name.startswith("deepstack"):
                    assert torch.equal(tensor.cpu().view(torch.uint8), value.view(torch.uint8)), (name, bucket, seed)
            assert addresses(args) == before


@torch.inference_mode()
def test_a_cache_with_kernels_is_the_cache_with_the_compilers_graphs(nki_lane):
    runtime = check_against_the_compiler(nki_lane, torch.device(DEVICE))
    assert [graph.spec.name for graph in runtime.graphs] == ["encoder_write_nki", "encoder_stamp", "merge_rows_nki"]
    assert nki_lane.num_compiled == sum(len(graph.buckets) for graph in runtime.graphs)


@torch.inference_mode()
@pytest.mark.slow
@pytest.mark.parametrize("graph", ["encoder_write", "merge_rows"])
def test_time_of_a_kernel_does_not_grow_with_the_buffer(nki_lane, graph):
    """Nor do the operators around it copy the buffer."""
    seconds = [seconds_of(nki_lane, kernel_spec(graph, torch.bfloat16, num_blocks)) for num_blocks in (64, 2048)]
    assert seconds[1] < 3 * seconds[0]


# The language model's prefill, for `compiled_prefill` --------------------------------------------------------------


@torch.inference_mode()
def test_prefill_takes_the_caches_rows_and_gives_the_hidden_states_of_a_cpu(lane):
    got = chunks_of(lane, torch.device(DEVICE))
    assert_close(got, chunks_of(make_lane("eager"), torch.device("cpu")))
    with pytest.raises(AssertionError):
        assert_close(got, chunks_of(make_lane("eager"), torch.device("cpu"), item_at=21))
