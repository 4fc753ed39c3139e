"""The write and merge graphs against plain loops, in every lane, and the two read forms against each other."""

import numpy as np
import pytest
import torch

from vllm_neuron_cache.encoder_cache.read_plan import block_positions, row_lists
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.encoder_write import encoder_stamp_spec, encoder_write_spec
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.merge import merge_multimodal_embeddings_spec, merge_rows_fat_spec, merge_rows_spec
from vllm_neuron_cache.graphs.spec import BufferShape

NUM_BLOCKS, BLOCK_SIZE, WIDTH, LEVELS, TOKENS = 9, 8, 6, 3, 64
FAT = WIDTH * (1 + LEVELS)
STEP = {"num_levels": LEVELS, "max_step_tokens": TOKENS}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=["eager", "check", "inductor"])
def lane(request):
    if request.param == "inductor":
        from vllm_neuron_cache.graphs.lanes.inductor import compiler_available

        if not compiler_available():
            pytest.skip("inductor needs a C++ compiler, and there is none")
    return make_lane(request.param)


def lowered(spec, lane, args):
    """The graph in its only bucket, compiled on clones, so that `args` stay as they are."""
    graph = BucketedGraph(spec, lane)
    clones = tuple(tuple(t.clone() for t in arg) if isinstance(arg, tuple) else arg.clone() for arg in args)
    graph.warm_up(lambda bucket: clones)
    return graph


def random_reads(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` live pairs: any rows of the blocks that items own, each row of the step at most once."""
    generator = np.random.default_rng(seed)
    src = generator.integers(0, (NUM_BLOCKS - 1) * BLOCK_SIZE, count).astype(np.int32)
    dst = generator.permutation(TOKENS)[:count].astype(np.int32)
    return src, dst


def targets(dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS + 1, WIDTH, generator=generator).to(dtype)
    return hidden, tuple(torch.randn(TOKENS + 1, WIDTH, generator=generator).to(dtype) for _ in range(LEVELS))


def buffer_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(NUM_BLOCKS, BLOCK_SIZE, FAT, generator=torch.Generator().manual_seed(0)).to(dtype)


def shape_of(buffer: torch.Tensor) -> BufferShape:
    return BufferShape(*buffer.shape, buffer.dtype)


def merged_by_hand(hidden, deepstack, buffer, src, dst):
    hidden, deepstack = hidden.clone(), tuple(level.clone() for level in deepstack)
    for source, destination in zip(src.tolist(), dst.tolist()):
        row = buffer[source // BLOCK_SIZE, source % BLOCK_SIZE]
        for level, target in enumerate((hidden, *deepstack)):
            target[destination] = row[level * WIDTH : (level + 1) * WIDTH]
    return hidden, deepstack


def padded(src: np.ndarray, dst: np.ndarray, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
    src_rows = np.full(bucket, (NUM_BLOCKS - 1) * BLOCK_SIZE, dtype=np.int32)
    dst_rows = np.full(bucket, TOKENS, dtype=np.int32)
    src_rows[: len(src)], dst_rows[: len(dst)] = src, dst
    return torch.from_numpy(src_rows), torch.from_numpy(dst_rows)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 31, 32])
def test_merge_moves_the_named_rows_and_no_others(lane, dtype, count):
    src, dst = random_reads(count, count)
    buffer, (hidden, deepstack) = buffer_of(dtype), targets(dtype)
    wanted_hidden, wanted_deepstack = merged_by_hand(hidden, deepstack, buffer, src, dst)
    before = buffer.clone()
    args = (hidden, deepstack, buffer, *padded(src, dst, 32))
    lowered(merge_rows_spec((32,), shape_of(buffer), **STEP), lane, args).run(32, *args)
    assert torch.equal(hidden[:TOKENS], wanted_hidden[:TOKENS])
    for level, wanted in zip(deepstack, wanted_deepstack):
        assert torch.equal(level[:TOKENS], wanted[:TOKENS])
    assert torch.equal(buffer, before)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_fat_target_gets_the_same_rows_as_split_targets(lane, dtype):
    src, dst = random_reads(3, 20)
    buffer, (hidden, deepstack) = buffer_of(dtype), targets(dtype)
    fat = torch.cat([hidden, *deepstack], dim=1)
    pairs = padded(src, dst, 32)
    split_args, fat_args = (hidden, deepstack, buffer, *pairs), (fat, buffer, *pairs)
    lowered(merge_rows_spec((32,), shape_of(buffer), **STEP), lane, split_args).run(32, *split_args)
    lowered(merge_rows_fat_spec((32,), shape_of(buffer), max_step_tokens=TOKENS), lane, fat_args).run(32, *fat_args)
    assert torch.equal(fat[:TOKENS], torch.cat([hidden, *deepstack], dim=1)[:TOKENS])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_both_read_forms_are_equal_to_the_bit(lane, dtype, seed):
    src, dst = random_reads(seed, 25)
    form = block_positions(
        src, dst, block_size=BLOCK_SIZE, max_blocks=16, scratch_block_id=NUM_BLOCKS - 1, sentinel=TOKENS
    )
    buffer = buffer_of(dtype)
    by_rows, by_blocks = targets(dtype), targets(dtype)
    row_args = (*by_rows, buffer, *padded(*row_lists(form, sentinel=TOKENS), 32))
    block_args = (
        *by_blocks,
        buffer,
        torch.from_numpy(form.encoder_block_ids),
        torch.from_numpy(form.encoder_positions),
    )
    lowered(merge_rows_spec((32,), shape_of(buffer), **STEP), lane, row_args).run(32, *row_args)
    lowered(
        merge_multimodal_embeddings_spec((16,), shape_of(buffer), **STEP),
        lane,
        block_args,
    ).run(16, *block_args)
    wanted = merged_by_hand(*targets(dtype), buffer, src, dst)
    for rows, blocks, by_hand in zip(
        (by_rows[0], *by_rows[1]), (by_blocks[0], *by_blocks[1]), (wanted[0], *wanted[1]), strict=True
    ):
        assert torch.equal(rows[:TOKENS], blocks[:TOKENS])
        assert torch.equal(rows[:TOKENS], by_hand[:TOKENS])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_changes_the_named_rows_in_place(lane, dtype):
    buffer = buffer_of(dtype)
    before, address = buffer.clone(), buffer.data_ptr()
    rows = torch.randn(10, FAT).to(dtype)
    block_ids = torch.tensor([3] * 8 + [0] * 2, dtype=torch.int32)
    block_rows = torch.tensor([*range(8), 5, 2], dtype=torch.int32)
    args = (buffer, rows, block_ids, block_rows)
    lowered(encoder_write_spec((10,), shape_of(buffer)), lane, args).run(10, *args)
    wanted = before.clone()
    wanted[3], wanted[0, 5], wanted[0, 2] = rows[:8], rows[8], rows[9]
    assert torch.equal(buffer, wanted)
    assert buffer.data_ptr() == address


@torch.inference_mode()
def test_stamp_writes_both_tags(lane):
    tags, generations = torch.zeros(NUM_BLOCKS, 2, dtype=torch.int32), torch.zeros(NUM_BLOCKS, dtype=torch.int32)
    block_ids = torch.tensor([4, 1], dtype=torch.int32)
    args = (
        tags,
        generations,
        block_ids,
        torch.tensor([[7, -8], [9, 10]], dtype=torch.int32),
        torch.ones(2, dtype=torch.int32),
    )
    lowered(encoder_stamp_spec((2,), NUM_BLOCKS), lane, args).run(2, *args)
    assert tags[4].tolist() == [7, -8] and tags[1].tolist() == [9, 10]
    assert generations.tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 0]
