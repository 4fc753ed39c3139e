"""Each kernel on random data against its reference, and the ways to run it. Used by the tests beside this module."""

import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import nki_stand_in
import numpy as np
import pytest
import torch

from vllm_neuron_cache import kernels
from vllm_neuron_cache.encoder_cache.item import dense_layout, frame_layout
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.kernels import block_scatter, compact_blocks, dialect, gather_merge
from vllm_neuron_cache.kernels.limits import MAX_CHUNK_BYTES

BF16, F32 = torch.bfloat16, torch.float32
LARGEST = MAX_CHUNK_BYTES // BF16.itemsize
FOLDER = Path(kernels.__file__).parent


# Ways to run a kernel ------------------------------------------------------------------------------------------


def stand_in_module(name: str, old: str = "", new: str = "") -> ModuleType:
    """A kernel's module made anew from its source, with `old` replaced by `new`, on the stand-in instead of NKI."""
    source = (FOLDER / f"{name}.py").read_text()
    if old:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
        source = source.replace(old, new)
    fake = ModuleType(dialect.__name__)
    fake.nl, fake.nisa, fake.jit = nki_stand_in.nl, nki_stand_in.nisa, lambda kernel: kernel
    module = ModuleType(f"{name}_on_stand_in")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, dialect.__name__, fake)
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, str(FOLDER / f"{name}.py"), "exec"), module.__dict__)
    return module


class StandIn:
    def modules(self):
        return {name: stand_in_module(name) for name in MODULES}

    def run(self, kernel, *args):
        return nki_stand_in.simulate(kernel)(*args)


class Simulator:
    """`nki.simulate`: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.32.0/nki/api/generated/nki.simulate.html"""

    def modules(self):
        return MODULES

    def run(self, kernel, *args):
        import nki

        return nki.simulate(kernel)(*args)


class Device:
    """A kernel called with tensors on the device:
    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/how-to-work-with-nki.html"""

    def modules(self):
        return MODULES

    def run(self, kernel, *args):
        on_device = [arg.to("neuron") if isinstance(arg, torch.Tensor) else arg for arg in args]
        return kernel(*on_device).cpu()


MODULES = {"block_scatter": block_scatter, "gather_merge": gather_merge, "compact_blocks": compact_blocks}


# Data ----------------------------------------------------------------------------------------------------------


def noise(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaN and infinities among them."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(data.reshape(-1)).view(dtype).reshape(shape)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
    assert torch.equal(got.view(bits), expected.view(bits))


def device_args(args: NamedTuple) -> list[torch.Tensor]:
    """The index lists among a kernel's arguments."""
    return [torch.from_numpy(value) for value in args if isinstance(value, np.ndarray)]


# Block scatter write -------------------------------------------------------------------------------------------


class ScatterCase(NamedTuple):
    live: int
    padding: int
    block_size: int
    fat_dim: int
    chunk: int | None = None
    dtype: torch.dtype = BF16


SCATTER_CASES = [
    ScatterCase(1, 0, 4, 6),
    ScatterCase(0, 3, 4, 6),
    ScatterCase(0, 0, 4, 6),
    ScatterCase(5, 9, 1, 10, chunk=4, dtype=F32),
    ScatterCase(128, 0, 16, 8, chunk=8),
    ScatterCase(127, 2, 16, 21, chunk=5),
    ScatterCase(300, 21, 16, 24, chunk=7, dtype=F32),
    ScatterCase(256, 0, 64, 9),
    ScatterCase(3, 1, 2, LARGEST),
    ScatterCase(2, 1, 2, LARGEST + 1),
]


def scatter_inputs(case: ScatterCase):
    """Buffer, rows and their places: the live ones shuffled among padding that names the scratch block's rows."""
    generator = np.random.default_rng(case.live)
    num_blocks = -(-case.live // case.block_size) + 3
    shape = BufferShape(num_blocks, case.block_size, case.fat_dim, case.dtype)
    live = generator.permutation((num_blocks - 1) * case.block_size)[: case.live]
    padding = (num_blocks - 1) * case.block_size + generator.integers(0, case.block_size, case.padding)
    places = generator.permutation(np.concatenate([live, padding])).astype(np.int32)
    buffer = noise(1, (num_blocks, case.block_size, case.fat_dim), case.dtype)
    rows = noise(2, (len(places), case.fat_dim), case.dtype)
    return shape, buffer, rows, places // case.block_size, places % case.block_size


def check_scatter(module, case, run):
    """Runs the kernel and its reference on the case; returns the inputs and what the kernel made of the buffer."""
    shape, buffer, rows, block_ids, block_rows = inputs = scatter_inputs(case)
    args = module.block_scatter_args(shape, block_ids, block_rows, scratch_block=shape.num_blocks - 1, chunk=case.chunk)
    (row_ids,) = device_args(args)
    got = run(module.block_scatter, buffer.clone(), rows, row_ids, args.chunk)
    expected = buffer.clone()
    module.block_scatter_reference(expected, rows, row_ids)
    assert_same_bits(got, expected)
    by_hand = buffer.clone()
    for row, block, place in zip(rows, block_ids, block_rows):
        if block != shape.num_blocks - 1:
            by_hand[block, place] = row
    assert_same_bits(got, by_hand)
    return inputs, got


# Gather-merge --------------------------------------------------------------------------------------------------


class MergeCase(NamedTuple):
    live: int
    padding: int
    tokens: int
    width: int
    levels: int
    chunk: int | None = None
    dtype: torch.dtype = BF16


MERGE_CASES = [
    MergeCase(1, 0, 1, 6, 3),
    MergeCase(0, 4, 5, 6, 1),
    MergeCase(0, 0, 5, 6, 0),
    MergeCase(31, 1, 64, 10, 3, chunk=4, dtype=F32),
    MergeCase(128, 0, 128, 8, 2, chunk=8),
    MergeCase(129, 2, 200, 7, 3, chunk=3),
    MergeCase(300, 20, 310, 12, 1, chunk=5, dtype=F32),
    MergeCase(3, 1, 4, LARGEST, 0),
    MergeCase(2, 1, 4, LARGEST + 1, 1),
]
MERGE_BLOCKS, MERGE_BLOCK_SIZE = 9, 8


def merge_inputs(case: MergeCase):
    """Targets, buffer and pairs: sources may repeat, each row of the step is filled once, padding is anywhere."""
    generator = np.random.default_rng(case.live)
    shape = BufferShape(MERGE_BLOCKS, MERGE_BLOCK_SIZE, case.width * (1 + case.levels), case.dtype)
    scratch_row = (MERGE_BLOCKS - 1) * MERGE_BLOCK_SIZE
    src = np.full(case.live + case.padding, scratch_row, dtype=np.int32)
    dst = np.full(case.live + case.padding, case.tokens, dtype=np.int32)
    places = generator.permutation(len(src))[: case.live]
    src[places] = generator.integers(0, scratch_row, case.live)
    dst[places] = generator.permutation(case.tokens)[: case.live]
    buffer = noise(3, (MERGE_BLOCKS, MERGE_BLOCK_SIZE, shape.fat_dim), case.dtype)
    targets = [noise(4 + level, (case.tokens + 1, case.width), case.dtype) for level in range(1 + case.levels)]
    return shape, targets, buffer, src, dst


def check_merge(module, case, run):
    """Runs the kernel and its reference for every target; returns the inputs and the kernel's targets."""
    shape, targets, buffer, src, dst = inputs = merge_inputs(case)
    args = module.gather_merge_args(shape, src, dst, num_levels=case.levels, dummy_row=case.tokens, chunk=case.chunk)
    src_rows, dst_rows = device_args(args)
    results = []
    for level, (target, first) in enumerate(zip(targets, args.columns, strict=True)):
        got = run(module.gather_merge, target.clone(), buffer, src_rows, dst_rows, first, args.chunk)
        expected = target.clone()
        module.gather_merge_reference(expected, buffer, src_rows, dst_rows, first)
        assert_same_bits(got, expected)
        by_hand = target.clone()
        for source, destination in zip(src.tolist(), dst.tolist()):
            if destination != case.tokens:
                row = buffer[source // MERGE_BLOCK_SIZE, source % MERGE_BLOCK_SIZE]
                by_hand[destination] = row[level * case.width : (level + 1) * case.width]
        assert_same_bits(got, by_hand)
        results.append(got)
    return inputs, results


# Compaction ----------------------------------------------------------------------------------------------------


class CompactCase(NamedTuple):
    coarse_size: int
    coarse_tokens: tuple[int, ...]
    block_size: int
    tokens_per_block: tuple[int, ...]
    padding: int
    fat_dim: int
    chunk: int | None = None
    dtype: torch.dtype = BF16


def dense_case(coarse_size, coarse_tokens, block_size, *rest, **settings):
    layout = dense_layout(sum(coarse_tokens), block_size).tokens_per_block
    return CompactCase(coarse_size, coarse_tokens, block_size, layout, *rest, **settings)


def frames_case(coarse_size, frames, block_size, *rest, **settings):
    """Whole frames in coarse blocks, of which the sub-blocks that hold rows are kept."""
    coarse = frame_layout(frames, coarse_size, coarse_size).tokens_per_block
    fine = frame_layout(frames, coarse_size, block_size).tokens_per_block
    return CompactCase(coarse_size, coarse, block_size, fine, *rest, **settings)


COMPACT_CASES = [
    dense_case(8, (1,), 4, 0, 6),
    dense_case(8, (), 4, 3, 6),
    dense_case(8, (), 4, 0, 6),
    dense_case(64, (64, 16), 16, 0, 10, chunk=4, dtype=F32),
    dense_case(128, (128,), 16, 0, 8, chunk=8),
    dense_case(100, (60, 100, 41), 16, 55, 13, chunk=5),
    frames_case(64, (30, 30, 30, 50), 16, 20, 11, chunk=4),
    frames_case(512, (200, 200, 100), 32, 12, 6, dtype=F32),
    dense_case(4, (3,), 2, 1, LARGEST),
    dense_case(4, (3,), 2, 1, LARGEST + 1),
]


def compact_inputs(case: CompactCase):
    """Both tensors, and blocks for the item, the scratch block not among them."""
    num_blocks = len(case.tokens_per_block) + 3
    buffer_shape = BufferShape(num_blocks, case.block_size, case.fat_dim, case.dtype)
    coarse_shape = BufferShape(len(case.coarse_tokens) + 1, case.coarse_size, case.fat_dim, case.dtype)
    owned = np.random.default_rng(5).permutation(num_blocks - 1)[: len(case.tokens_per_block)].astype(np.int32)
    return (
        buffer_shape,
        noise(6, buffer_shape[:3], case.dtype),
        coarse_shape,
        noise(7, coarse_shape[:3], case.dtype),
        owned,
    )


def check_compact(module, case, run):
    """Runs the kernel and its reference on the case; returns the inputs and what the kernel made of the buffer."""
    buffer_shape, buffer, coarse_shape, coarse, owned = inputs = compact_inputs(case)
    args = module.compact_blocks_args(
        coarse_shape,
        buffer_shape,
        coarse_tokens=case.coarse_tokens,
        block_ids=owned,
        tokens_per_block=case.tokens_per_block,
        num_rows=sum(case.coarse_tokens) + case.padding,
        scratch_block=buffer_shape.num_blocks - 1,
        chunk=case.chunk,
    )
    src_rows, dst_rows = device_args(args)
    got = run(module.compact_blocks, buffer.clone(), coarse, src_rows, dst_rows, args.chunk)
    expected = buffer.clone()
    module.compact_blocks_reference(expected, coarse, src_rows, dst_rows)
    assert_same_bits(got, expected)
    by_hand, rows = buffer.clone(), iter([r for block, n in zip(coarse, case.coarse_tokens) for r in block[:n]])
    for block, tokens in zip(owned, case.tokens_per_block):
        for place in range(tokens):
            by_hand[block, place] = next(rows)
    assert_same_bits(got, by_hand)
    return inputs, got


CHECKS = {
    "block_scatter": (check_scatter, SCATTER_CASES),
    "gather_merge": (check_merge, MERGE_CASES),
    "compact_blocks": (check_compact, COMPACT_CASES),
}
ALL_CASES = [(name, case) for name, (_, cases) in CHECKS.items() for case in cases]
