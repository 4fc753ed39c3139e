"""Lane `xla`: the same results as eager, and mutations in place, as the compiled graph itself shows them."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from vllm_neuron_cache.errors import ConfigurationError, GraphRecompiledError, GraphRuleError
from vllm_neuron_cache.graphs.encoder_write import encoder_stamp_spec, encoder_write_spec
from vllm_neuron_cache.graphs.lanes.xla import XlaLane, count_compilations
from vllm_neuron_cache.graphs.merge import merge_multimodal_embeddings_spec, merge_rows_fat_spec, merge_rows_spec
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flat_names, flatten, unflatten

# Looked for and not imported: only the lane can import torchax, which it adapts to this torch.
if not all(find_spec(name) for name in ("jax", "torchax")):
    pytest.skip("needs jax and torchax; scripts/xla_env runs these", allow_module_level=True)

pytestmark = pytest.mark.xla

BLOCK_SIZE, FAT_DIM, STEP_TOKENS = 8, 16, 32


def specs(dtype: torch.dtype, num_blocks: int = 9) -> dict[str, GraphSpec]:
    buffer = BufferShape(num_blocks, BLOCK_SIZE, FAT_DIM, dtype)
    merge = {"num_levels": 3, "max_step_tokens": STEP_TOKENS}
    found = (
        encoder_write_spec((1, 4, 32), buffer),
        encoder_stamp_spec((1, 4), num_blocks),
        merge_rows_spec((1, 8, 32), buffer, **merge),
        merge_rows_fat_spec((1, 8, 32), buffer, max_step_tokens=STEP_TOKENS),
        merge_multimodal_embeddings_spec((1, 4), buffer, **merge),
    )
    return {spec.name: spec for spec in found}


NAMES = tuple(specs(torch.float32))


def random_bits(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any pattern of bits that is a number: no operator promises to keep the payload of a NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(integers)
    values = torch.randint(limits.min, limits.max, shape, dtype=integers, generator=generator).view(dtype)
    return values.nan_to_num(nan=1.0) if dtype.is_floating_point else values


def random_args(spec: GraphSpec, bucket: int, seed: int = 0) -> tuple[Any, ...]:
    """Targets are all different: which of two writes to one place wins is the compiler's choice."""
    generator = torch.Generator().manual_seed(seed)
    example = spec.example_args(bucket)
    args: list[torch.Tensor] = []
    for name, tensor in zip(flat_names(spec.fn, example), flatten(example)):
        if name not in spec.index_limits:
            args.append(random_bits(tensor.shape, tensor.dtype, generator))
        elif name == "block_rows":
            args.append(torch.arange(bucket, dtype=torch.int32) % spec.index_limits[name])
        elif name == "block_ids" and spec.name == "encoder_write":
            args.append(torch.arange(bucket, dtype=torch.int32) // spec.index_limits["block_rows"])
        else:
            order = torch.randperm(spec.index_limits[name], generator=generator, dtype=torch.int32)
            args.append(order[: tensor.numel()].view(tensor.shape))
    return unflatten(args, example)


def copy_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return unflatten([tensor.clone() for tensor in flatten(args)], args)


def assert_same_bits(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    for one, other in zip(flatten(left), flatten(right), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def lowered(spec: GraphSpec, bucket: int, lane: XlaLane | None = None) -> tuple[XlaLane, Callable[..., Any]]:
    lane = lane or XlaLane(strict=False)
    return lane, lane.lower(spec, bucket, spec.example_args(bucket))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_result_is_eagers_and_the_proof_holds_in_every_bucket(name, dtype):
    spec, lane = specs(dtype)[name], XlaLane(strict=False)
    for bucket in spec.buckets:
        call = lowered(spec, bucket, lane)[1]
        args = random_args(spec, bucket)
        expected = copy_of(args)
        spec.fn(*expected)
        assert call(*args) is None
        assert_same_bits(args, expected)

        proof = lane.proofs[name, bucket]
        proof.require()
        mutated = spec.mutated_names(args)
        sizes = dict(zip(flat_names(spec.fn, args), (tensor.nbytes for tensor in flatten(args))))
        assert proof.aliases == {argument: output for output, argument in enumerate(mutated)}
        assert proof.alias_bytes == proof.expected_bytes == sum(sizes[argument] for argument in mutated)
        assert proof.whole_buffer_copies == ()
        assert proof.stable_pointers
        assert proof.moved_as_bits is (dtype is torch.bfloat16 and name != "encoder_stamp")
    assert lane.num_compiled == len(spec.buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_temporary_bytes_are_flat_in_the_number_of_blocks(name, dtype):
    temporary = set()
    for num_blocks in (9, 90, 900):
        spec = specs(dtype, num_blocks)[name]
        lane, _ = lowered(spec, 4 if 4 in spec.buckets else 8)
        (proof,) = lane.proofs.values()
        proof.require()
        temporary.add(proof.temp_bytes)
    assert len(temporary) == 1


def test_the_lowered_text_depends_on_the_bucket_and_not_on_the_values():
    spec = specs(torch.float32)["encoder_write"]
    hashes = set()
    for bucket, seed in ((4, 0), (4, 1), (32, 0)):
        lane = XlaLane(strict=False)
        lane.lower(spec, bucket, random_args(spec, bucket, seed))
        hashes.add(lane.proofs[spec.name, bucket].stablehlo_sha256)
    assert len(hashes) == 2


def test_lowering_changes_none_of_its_arguments():
    spec = specs(torch.float32)["encoder_write"]
    args = random_args(spec, 4)
    before = copy_of(args)
    XlaLane(strict=False).lower(spec, 4, args)
    assert_same_bits(args, before)


# A claim that does not hold is found. ------------------------------------------------------------------------------


class DonatesRows(XlaLane):
    """Donates the second argument instead of the first."""

    def _donated(self, graph):
        return (1,)


class DonatesNothing(XlaLane):
    def _donated(self, graph):
        return ()


@pytest.mark.parametrize("mutates", [(), ("rows",), ("buffer", "rows")])
def test_a_wrong_alias_map_is_refused(mutates):
    spec = replace(specs(torch.float32)["encoder_write"], mutates=mutates)
    lane = XlaLane(strict=False)
    with pytest.raises(GraphRuleError, match="alias_map"):
        lowered(spec, 4, lane)
    with pytest.raises(GraphRuleError, match="alias_proof"):
        lane.proofs["encoder_write", 4].require()


@pytest.mark.parametrize("lane_class", [DonatesRows, DonatesNothing])
def test_a_wrong_donation_is_refused(lane_class):
    # As many rows as the buffer has, or XLA would not take them for its memory.
    spec, lane = same_shape_spec(), lane_class()
    with pytest.raises(GraphRuleError, match="buffer: is declared in mutates, and not mutated"):
        lowered(spec, 4, lane)
    texts = " ".join(violation.text for violation in lane.proofs[spec.name, 4].violations)
    assert "buffer is mutated and has no alias entry" in texts
    assert ("rows has an alias entry and is not mutated" in texts) is (lane_class is DonatesRows)
    assert ("0 bytes are aliased" in texts) is (lane_class is DonatesNothing)
    assert "another address" in texts


def same_shape_spec() -> GraphSpec:
    def write(buffer, rows, ids):
        buffer.index_put_((ids,), rows.index_select(0, ids))

    def example_args(bucket: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(64, 16), torch.zeros(64, 16), torch.zeros(bucket, dtype=torch.int32)

    return GraphSpec(
        name="write",
        fn=write,
        mutates=("buffer",),
        buckets=(4,),
        bytes_per_row=64,
        example_args=example_args,
        index_limits={"ids": 64},
    )


def read_before_write(buffer, rows, block_ids, block_rows):
    before = buffer[block_ids, block_rows]
    buffer.index_put_((block_ids, block_rows), rows)
    return before


def returned(buffer, rows, block_ids, block_rows):
    buffer.index_put_((block_ids, block_rows), rows)
    return buffer


def through_transposed_view(buffer, rows, block_ids, block_rows):
    buffer.transpose(0, 1).index_put_((block_rows, block_ids), rows)


def shifted_as_a_whole(buffer, rows, block_ids, block_rows):
    buffer.copy_(buffer.roll(1, 0))


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (read_before_write, "copy of a whole argument"),
        (returned, "copy of a whole argument"),
        (shifted_as_a_whole, "copy of a whole argument"),
        (through_transposed_view, "allocates"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_proof_fails_where_the_compiler_copies(fn, found, dtype):
    spec = replace(specs(dtype, 90)["encoder_write"], fn=fn)
    lane, call = lowered(spec, 4)
    with pytest.raises(GraphRuleError, match=found):
        lane.proofs[spec.name, 4].require()
    # Slow, but right.
    args = random_args(spec, 4)
    expected = copy_of(args)
    result, right = call(*args), fn(*expected)
    assert_same_bits(args, expected)
    assert right is None or torch.equal(result[0], right)


def through_plain_view(buffer, rows, block_ids, block_rows):
    buffer.view(-1, FAT_DIM).index_put_((block_ids * BLOCK_SIZE + block_rows,), rows)


def scattered_into_view(buffer, rows, block_ids, block_rows):
    index = block_ids * BLOCK_SIZE + block_rows
    buffer.view(-1, FAT_DIM).scatter_(0, index[:, None].expand(-1, FAT_DIM).long(), rows)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize("fn", [through_plain_view, scattered_into_view])
def test_a_write_through_a_view_is_not_lost(fn):
    """torchax by itself loses it. It works in place too: that views are not mutated is a rule for other compilers."""
    spec = replace(specs(torch.float32, 90)["encoder_write"], fn=fn)
    lane, call = lowered(spec, 4)
    lane.proofs[spec.name, 4].require()
    args = random_args(spec, 4)
    expected = copy_of(args)
    fn(*expected)
    call(*args)
    assert_same_bits(args, expected)


def test_bfloat16_rows_that_are_computed_are_written_in_place():
    def doubled(buffer, rows, block_ids, block_rows):
        buffer.index_put_((block_ids, block_rows), rows + rows)

    spec = replace(specs(torch.bfloat16, 90)["encoder_write"], fn=doubled)
    lane, call = lowered(spec, 4)
    lane.proofs[spec.name, 4].require()
    assert lane.proofs[spec.name, 4].moved_as_bits
    args = random_args(spec, 4)
    expected = copy_of(args)
    doubled(*expected)
    call(*args)
    assert_same_bits(args, expected)


def test_a_bfloat16_argument_that_is_computed_with_is_copied_as_a_whole():
    """A limit of XLA on CPU and not of the graph: in float32 the same graph works in place."""

    def added(buffer, rows, block_ids, block_rows):
        buffer.index_put_((block_ids, block_rows), rows + buffer[0, 0])

    proofs = {}
    for dtype in (torch.float32, torch.bfloat16):
        spec = replace(specs(dtype, 90)["encoder_write"], fn=added)
        proofs[dtype] = lowered(spec, 4)[0].proofs[spec.name, 4]
    proofs[torch.float32].require()
    assert not proofs[torch.bfloat16].moved_as_bits
    with pytest.raises(GraphRuleError, match="allocates"):
        proofs[torch.bfloat16].require()


def test_64_bit_arguments_are_refused():
    spec = specs(torch.float32)["encoder_write"]
    buffer, rows, block_ids, block_rows = spec.example_args(4)
    with pytest.raises(GraphRuleError, match=r"block_ids: is .*int64"):
        XlaLane(strict=False).lower(spec, 4, (buffer, rows, block_ids.long(), block_rows))


# Nothing compiles after warm-up. -----------------------------------------------------------------------------------


def test_calls_compile_nothing_and_another_signature_is_refused():
    spec, lane = specs(torch.bfloat16)["merge_rows"], XlaLane(strict=False)
    calls = {bucket: lowered(spec, bucket, lane)[1] for bucket in spec.buckets}
    lane.seal()
    with count_compilations() as compilations:
        for seed in range(100):
            bucket = spec.buckets[seed % len(spec.buckets)]
            calls[bucket](*random_args(spec, bucket, seed))
        with pytest.raises(GraphRecompiledError, match="merge_rows, bucket 8"):
            calls[8](*random_args(spec, 32))
        with pytest.raises(GraphRecompiledError, match="after warm-up"):
            lowered(spec, 8, lane)
    assert compilations.count == 0
    assert (lane.num_compiled, lane.num_recompiles_refused) == (3, 2)


def test_the_count_sees_a_compilation():
    with count_compilations() as compilations:
        lowered(specs(torch.float32)["encoder_write"], 4)
    assert compilations.count == 1
    lowered(specs(torch.float32)["encoder_write"], 4)
    assert compilations.count == 1


def test_torch_compile_still_works_beside_the_lane():
    XlaLane(strict=False)
    torch.compiler.reset()
    assert torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]


def test_without_torchax_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchax", None)
    with pytest.raises(ConfigurationError, match="scripts/xla_env"):
        XlaLane(strict=False)


def test_a_strict_lane_starts_with_no_graph_whose_proof_fails():
    def rolled(buffer: torch.Tensor, rows: torch.Tensor, block_ids: torch.Tensor, block_rows: torch.Tensor) -> None:
        buffer.copy_(buffer.roll(1, 0))

    spec = specs(torch.float32)["encoder_write"]
    XlaLane().lower(spec, 4, spec.example_args(4))
    with pytest.raises(GraphRuleError, match="alias_proof"):
        XlaLane().lower(replace(spec, fn=rolled), 4, spec.example_args(4))
