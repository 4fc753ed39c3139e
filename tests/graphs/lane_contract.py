"""What a lane for AWS's compilers has to hand over, graph by graph, and what its calls then do."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vendor_stand_ins import ModelBuilder, TorchCompile, TorchNeuronx, described

from vllm_neuron_cache.errors import GraphRecompiledError
from vllm_neuron_cache.graphs.attention import plain_attention
from vllm_neuron_cache.graphs.catalog import merge_spec, stamp_spec, write_spec
from vllm_neuron_cache.graphs.decoder import DecoderShape, prefill_spec
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flat_names, flatten, unflatten

BLOCKS, BLOCK_SIZE, WIDTH, LEVELS, TOKENS = 5, 4, 8, 2, 16
FAT = WIDTH * (1 + LEVELS)
DTYPE = torch.bfloat16
BUFFER = BufferShape(BLOCKS, BLOCK_SIZE, FAT, DTYPE)
BUCKETS = (2, 3)

LAYERS, SLOTS, CONTEXT = 2, 13, 5
DECODER = DecoderShape(
    vocab_size=13,
    hidden_size=WIDTH,
    intermediate_size=12,
    num_layers=LAYERS,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-6,
    dtype=DTYPE,
    num_slots=SLOTS,
    context_rows=CONTEXT,
)

SETS = ("compiler", "nki", "prefill")
"""The graphs of the cache by either kernel, and the language model's."""

# What every lane has to hand over, written down and not derived from the code that does.
MUTATED = {
    "encoder_write": ("buffer",),
    "encoder_stamp": ("mm_hash_tags", "generations"),
    "merge_rows": ("hidden", "deepstack[0]", "deepstack[1]"),
    "encoder_write_nki": ("buffer",),
    "merge_rows_nki": ("hidden", "deepstack[0]", "deepstack[1]"),
    "prefill": ("key_caches[0]", "key_caches[1]", "value_caches[0]", "value_caches[1]"),
}
INPUTS = {
    "encoder_write": ("rows", "block_ids", "block_rows"),
    "encoder_stamp": ("block_ids", "tags", "stamps"),
    "merge_rows": ("buffer", "src_rows", "dst_rows"),
    "encoder_write_nki": ("rows", "row_ids"),
    "merge_rows_nki": ("buffer", "src_rows", "dst_rows"),
    "prefill": (
        *("input_ids", "cos", "sin", "src_rows", "buffer", "embed_tokens"),
        *(f"layers[{number}]" for number in range(16)),
        *("norm", *(f"metadata[{number}]" for number in range(6))),
    ),
}
WRITES = {
    "encoder_write": {"index_put_": 1},
    "encoder_stamp": {"index_put_": 2},
    "merge_rows": {"index_put_": 3},
    "encoder_write_nki": {"vllm_neuron_cache.block_scatter_nki": 1},
    "merge_rows_nki": {"vllm_neuron_cache.gather_merge_nki": 3},
    "prefill": {"index_put_": 4},
}
"""Operators that change an argument, in the graph that a compiler of the native stack gets, and how often each."""


NKI_OPERATORS = [
    ("vllm_neuron_cache::block_scatter_nki", {"buffer"}),
    ("vllm_neuron_cache::gather_merge_nki", {"target"}),
]
"""What is made of kernels for the native stack: name, and the arguments that change."""


def expected(graph: str, bucket: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every argument, in their order."""
    rows, ints, target = (BLOCKS, BLOCK_SIZE, FAT), torch.int32, ((TOKENS + 1, WIDTH), DTYPE)
    layer = ((8,), (16, 8), (4,), (4,), (8, 8), (8,), (24, 8), (8, 12))
    cache = ((SLOTS, 1, 4), DTYPE)
    return {
        "encoder_write": {
            "buffer": (rows, DTYPE),
            "rows": ((bucket, FAT), DTYPE),
            "block_ids": ((bucket,), ints),
            "block_rows": ((bucket,), ints),
        },
        "encoder_stamp": {
            "mm_hash_tags": ((BLOCKS, 2), ints),
            "generations": ((BLOCKS,), ints),
            "block_ids": ((bucket,), ints),
            "tags": ((bucket, 2), ints),
            "stamps": ((bucket,), ints),
        },
        "merge_rows": {
            "hidden": target,
            "deepstack[0]": target,
            "deepstack[1]": target,
            "buffer": (rows, DTYPE),
            "src_rows": ((bucket,), ints),
            "dst_rows": ((bucket,), ints),
        },
        "encoder_write_nki": {
            "buffer": (rows, DTYPE),
            "rows": ((bucket, FAT), DTYPE),
            "row_ids": ((bucket, 1), ints),
        },
        "merge_rows_nki": {
            "hidden": target,
            "deepstack[0]": target,
            "deepstack[1]": target,
            "buffer": (rows, DTYPE),
            "src_rows": ((bucket, 1), ints),
            "dst_rows": ((bucket, 1), ints),
        },
        "prefill": {
            "input_ids": ((bucket,), ints),
            "cos": ((bucket, 2), DTYPE),
            "sin": ((bucket, 2), DTYPE),
            "src_rows": ((bucket,), ints),
            "buffer": (rows, DTYPE),
            "embed_tokens": ((13, 8), DTYPE),
            **{f"layers[{number}]": (layer[number % 8], DTYPE) for number in range(16)},
            "norm": ((8,), DTYPE),
            **{f"{name}[{number}]": cache for name in ("key_caches", "value_caches") for number in range(LAYERS)},
            "metadata[0]": ((bucket,), ints),
            "metadata[1]": ((CONTEXT,), ints),
            "metadata[2]": ((bucket,), ints),
            "metadata[3]": ((bucket,), ints),
            "metadata[4]": ((CONTEXT,), ints),
            "metadata[5]": ((CONTEXT,), ints),
        },
    }[graph]


def returned(graph: str, bucket: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every result."""
    return [((bucket, WIDTH), DTYPE)] if graph == "prefill" else []


def specs(graphs: str = "compiler") -> tuple[GraphSpec, ...]:
    """One of `SETS`."""
    if graphs == "prefill":
        return (prefill_spec(BUCKETS, BUFFER, DECODER, attention=plain_attention),)
    found = (
        write_spec(BUFFER, graphs),
        stamp_spec(BUFFER),
        merge_spec(BUFFER, graphs, num_levels=LEVELS, max_step_tokens=TOKENS),
    )
    return tuple(replace(spec, buckets=BUCKETS) for spec in found)


def new_lane(lane_class: type[Lane], graphs: str) -> Lane:
    return lane_class("nki") if graphs == "nki" else lane_class()


def scattered_by_hand(buffer: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor) -> None:
    for row, place in zip(rows, row_ids[:, 0].tolist()):
        if place >= 0:
            buffer[place // BLOCK_SIZE, place % BLOCK_SIZE] = row


def merged_by_hand(
    hidden: torch.Tensor,
    deepstack: tuple[torch.Tensor, ...],
    buffer: torch.Tensor,
    src_rows: torch.Tensor,
    dst_rows: torch.Tensor,
) -> None:
    for source, place in zip(src_rows[:, 0].tolist(), dst_rows[:, 0].tolist()):
        for level, target in enumerate((hidden, *deepstack)):
            if place >= 0:
                row = buffer[source // BLOCK_SIZE, source % BLOCK_SIZE]
                target[place] = row[level * WIDTH : (level + 1) * WIDTH]


BY_HAND = {"encoder_write_nki": scattered_by_hand, "merge_rows_nki": merged_by_hand}
"""What a kernel has to do, without the kernel or its reference."""
COLUMNS = {
    ("encoder_write_nki", "row_ids"): BLOCKS * BLOCK_SIZE,
    ("merge_rows_nki", "src_rows"): BLOCKS * BLOCK_SIZE,
    ("merge_rows_nki", "dst_rows"): TOKENS + 1,
}
"""Limits of the kernels' indices; those that name a place may be the sentinel too."""


def random_args(spec: GraphSpec, bucket: int, seed: int = 0) -> tuple[Any, ...]:
    """Targets are all different: which of two writes to one place wins is the compiler's choice."""
    generator = torch.Generator().manual_seed(seed)
    example = spec.example_args(bucket)
    values: list[torch.Tensor] = []
    for name, tensor in zip(flat_names(spec.fn, example), flatten(example)):
        if name == "block_rows":
            value = torch.arange(bucket) % BLOCK_SIZE
        elif name == "block_ids" and spec.name == "encoder_write":
            value = torch.arange(bucket) // BLOCK_SIZE
        elif (spec.name, name) in COLUMNS:
            value = torch.randperm(COLUMNS[spec.name, name], generator=generator)[: tensor.numel()]
            if name != "src_rows":
                value[seed % bucket] = -1
        elif spec.name == "prefill" and tensor.is_floating_point():
            value = torch.randn(tensor.shape, generator=generator)
        elif name in spec.index_limits:
            value = torch.randperm(spec.index_limits[name], generator=generator)[: tensor.numel()]
        else:
            value = torch.randint(-1000, 1000, tensor.shape, generator=generator)
        values.append(value.view(tensor.shape).to(tensor.dtype))
    return unflatten(values, example)


def copy_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return unflatten([tensor.clone() for tensor in flatten(args)], args)


def refill(args: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for tensor, value in zip(flatten(args), flatten(values)):
        tensor.copy_(value)


def check_neuron(lane_class: type[Lane], stand_in: TorchCompile, graphs: str = "compiler") -> None:
    lane = new_lane(lane_class, graphs)
    for spec in specs(graphs):
        for bucket in spec.buckets:
            stand_in.calls.clear()
            stand_in.graphs.clear()
            args = copy_of(spec.example_args(bucket))
            call = lane.lower(spec, bucket, args)
            (handed,) = stand_in.calls
            assert handed == {"fn": handed["fn"], "fullgraph": True, "dynamic": False, "backend": "neuron"}
            assert handed["fn"].__name__ == spec.name
            ((operators, inputs),) = stand_in.graphs
            names = flat_names(spec.fn, args)
            assert sorted(inputs, key=str) == sorted((expected(spec.name, bucket)[name] for name in names), key=str)
            found = Counter(name.removesuffix(".default") for name in operators)
            writes = {name: found[name] for name in found if name == "index_put_" or name.startswith("vllm_")}
            assert writes == WRITES[spec.name]
            check_numerics(spec, bucket, call, args)
            assert len(stand_in.graphs) == 1, "nothing compiles in a call"
            check_refusals(spec, bucket, call, args, lane)
            check_guard_refusal(spec, bucket, call, lane)
            assert len(stand_in.graphs) == 1
    assert lane.num_compiled == len(specs(graphs)) * len(BUCKETS)
    assert stand_in.operators == (NKI_OPERATORS if graphs == "nki" else [])
    check_many_buckets(lane, specs(graphs)[0])


def check_many_buckets(lane: Lane, spec: GraphSpec) -> None:
    """More than the number of times that Dynamo recompiles one function."""
    for bucket in range(1, torch._dynamo.config.recompile_limit + 3):
        args = copy_of(spec.example_args(bucket))
        check_numerics(spec, bucket, lane.lower(spec, bucket, args), args)


def check_guard_refusal(spec: GraphSpec, bucket: int, call: Callable[..., Any], lane: Lane) -> None:
    """What the signature does not show, and Dynamo would compile anew for."""
    with torch.inference_mode():
        args = copy_of(random_args(spec, bucket))
        refused_before = lane.num_recompiles_refused
        with pytest.raises(GraphRecompiledError, match="Detected recompile"):
            call(*args)
    assert lane.num_recompiles_refused == refused_before + 1


def check_neuronx_trace(lane_class: type[Lane], stand_in: TorchNeuronx, graphs: str = "compiler") -> None:
    lane = new_lane(lane_class, graphs)
    for spec in specs(graphs):
        for bucket in spec.buckets:
            stand_in.calls.clear()
            stand_in.moved.clear()
            args = copy_of(spec.example_args(bucket))
            call = lane.lower(spec, bucket, args)
            (handed,) = stand_in.calls
            arguments = expected(spec.name, bucket)
            states = [arguments[name] for name in MUTATED[spec.name]]
            assert handed["states"] == states
            assert handed["results"] == states + returned(spec.name, bucket)
            assert handed["inputs"] == [arguments[name] for name in INPUTS[spec.name]]
            assert handed["aliases"] == list(range(len(states))) and handed["order"]
            assert handed["compiler_args"] == ["--auto-cast=none"]
            assert handed["others"] == (None, None, True, False)
            assert stand_in.moved == [(handed["traced"], 0)]
            check_state_is_shared(spec, handed["traced"].parameters(), args)
            check_numerics(spec, bucket, call, args)
            check_refusals(spec, bucket, call, args, lane)
            check_moved_state_is_refused(spec, bucket, call, args, lane)
    assert lane.num_compiled == len(specs(graphs)) * len(BUCKETS)


def parameter(name: str) -> str:
    return name.replace("[", "_").replace("]", "")


def check_nxd_builder(lane_class: type[Lane], stand_in: ModelBuilder, graphs: str = "compiler") -> None:
    lane = new_lane(lane_class, graphs)
    for spec in specs(graphs):
        for bucket in spec.buckets:
            for kept in (stand_in.traces, stand_in.compilations, stand_in.models):
                kept.clear()
            args = copy_of(spec.example_args(bucket))
            call = lane.lower(spec, bucket, args)
            (traced,), (compiled,) = stand_in.traces, stand_in.compilations
            arguments = expected(spec.name, bucket)
            mutated = {parameter(name): arguments[name] for name in MUTATED[spec.name]}
            assert traced.buffers == list(traced.states) == list(mutated)
            assert described(traced.states.values()) == list(mutated.values())
            assert not traced.persistent and traced.preserve_parameters is False
            assert list(traced.inputs) == [parameter(name) for name in INPUTS[spec.name]]
            assert described(traced.inputs.values()) == [arguments[name] for name in INPUTS[spec.name]]
            assert described(traced.result) == (returned(spec.name, bucket) or [((1,), torch.int32)])
            assert (compiled.of, compiled.metaneff) == (traced.hlo, traced.metaneff)
            assert (compiled.key, compiled.compiler_args) == (f"{spec.name}_{bucket}", "--auto-cast=none -O1")
            assert [model.world_size for model in stand_in.models] == [stand_in.num_ranks or 1] * 2
            (served,) = (model for model in stand_in.models if model.ranks is not None)
            assert list(served.models) == [compiled.key]
            check_state_is_shared(spec, [served.ranks[0][name] for name in mutated], args)
            check_numerics(spec, bucket, call, args)
            check_refusals(spec, bucket, call, args, lane)
            check_moved_state_is_refused(spec, bucket, call, args, lane)
    assert lane.num_compiled == len(specs(graphs)) * len(BUCKETS)


# What holds in every lane. ----------------------------------------------------------------------------------------


def check_numerics(spec: GraphSpec, bucket: int, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Two calls on the memory that was lowered for, each compared with eager to the bit."""
    for seed in (1, 2):
        values = random_args(spec, bucket, seed)
        refill(args, values)
        result = BY_HAND.get(spec.name, spec.fn)(*values)
        got = call(*args)
        if result is None:
            assert got is None
        else:
            (got,) = got if isinstance(got, list | tuple) else (got,)
            assert torch.isfinite(got).all() and torch.equal(got, result)
        for tensor, value in zip(flatten(args), flatten(values), strict=True):
            assert torch.equal(tensor, value)


def check_refusals(spec: GraphSpec, bucket: int, call: Callable[..., Any], args: tuple[Any, ...], lane: Lane) -> None:
    """Another bucket's arguments, and one argument less."""
    refused_before = lane.num_recompiles_refused
    before = copy_of(args)
    tensors = list(flatten(args))
    other = random_args(spec, bucket + 1)
    mixed = [
        mine if name in MUTATED[spec.name] else theirs
        for name, mine, theirs in zip(flat_names(spec.fn, args), tensors, flatten(other))
    ]
    for wrong in (unflatten(mixed, args), args[:-1]):
        with pytest.raises(GraphRecompiledError, match=f"{spec.name}, bucket {bucket}"):
            call(*wrong)
    assert lane.num_recompiles_refused == refused_before + 2
    assert all(map(torch.equal, flatten(args), flatten(before)))


def check_moved_state_is_refused(
    spec: GraphSpec, bucket: int, call: Callable[..., Any], args: tuple[Any, ...], lane: Lane
) -> None:
    for name in MUTATED[spec.name]:
        tensors = [
            tensor.clone() if name == argument else tensor
            for argument, tensor in zip(flat_names(spec.fn, args), flatten(args))
        ]
        refused_before = lane.num_recompiles_refused
        with pytest.raises(GraphRecompiledError) as caught:
            call(*unflatten(tensors, args))
        assert f"{name} is another tensor" in str(caught.value)
        assert lane.num_recompiles_refused == refused_before + 1


def check_state_is_shared(spec: GraphSpec, states: Any, args: tuple[Any, ...]) -> None:
    addresses = dict(zip(flat_names(spec.fn, args), (tensor.data_ptr() for tensor in flatten(args))))
    assert [state.data_ptr() for state in states] == [addresses[name] for name in MUTATED[spec.name]]
