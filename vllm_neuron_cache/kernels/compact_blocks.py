"""Moves an item's rows out of the encoder's padded blocks into the cache's finer ones.

The calls of the kernel and their documentation: see `dialect`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.kernels.dialect import jit, nisa, nl
from vllm_neuron_cache.kernels.limits import (
    PARTITIONS,
    SENTINEL,
    check_buffer,
    check_distinct,
    check_indices,
    check_lengths,
    column,
    row_chunk,
)


class CompactArgs(NamedTuple):
    """What `compact_blocks` takes beside the two tensors: the row map."""

    src_rows: np.ndarray
    """int32 `[R, 1]`, rows of the flattened coarse blocks."""
    dst_rows: np.ndarray
    """int32 `[R, 1]`, rows of the flattened buffer, the sentinel where a row goes nowhere."""
    chunk: int


def layout_rows(block_ids: np.ndarray, tokens_per_block: Sequence[int], block_size: int) -> np.ndarray:
    """int32 `[sum(tokens_per_block)]`: rows of the flattened blocks that hold an item, in its order.

    Block `i` of the item is `block_ids[i]` (int32) and holds `tokens_per_block[i]` rows from its row 0 on.
    """
    parts = [
        np.arange(block * block_size, block * block_size + tokens, dtype=np.int32)
        for block, tokens in zip(block_ids.tolist(), tokens_per_block, strict=True)
    ]
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])


def compact_blocks_args(
    coarse: BufferShape,
    buffer: BufferShape,
    *,
    coarse_tokens: Sequence[int],
    block_ids: np.ndarray,
    tokens_per_block: Sequence[int],
    num_rows: int,
    scratch_block: int,
    chunk: int | None = None,
) -> CompactArgs:
    """The row map of one item, padded to `num_rows` with pairs that read row 0 and go nowhere.

    Args:
        coarse: the encoder's output, in its own blocks.
        buffer: of the cache; rows of the same width and dtype.
        coarse_tokens: rows of the item in each coarse block, from its row 0 on.
        block_ids: int32, the blocks that the item owns in the cache; none is `scratch_block`.
        tokens_per_block: rows in each of them (`ItemLayout.tokens_per_block`; of a dense item all full but the last).
        num_rows: the length of the lists, R.
        chunk: elements of a row that one tile takes; by default as many as fit.

    Raises `ConfigurationError` for sizes that the device cannot take, and `ValueError` for layouts that do not fit
    their blocks, differ in their number of rows, or exceed `num_rows`.
    """
    check_buffer("the encoder's output", coarse)
    check_buffer("the buffer", buffer)
    if (coarse.fat_dim, coarse.dtype) != (buffer.fat_dim, buffer.dtype):
        raise ConfigurationError(
            f"the encoder gives rows of {coarse.fat_dim} {coarse.dtype}, the cache holds rows of {buffer.fat_dim} "
            f"{buffer.dtype}: they must be the same"
        )
    check_indices("block_ids", block_ids, buffer.num_blocks)
    check_lengths(block_ids=block_ids, tokens_per_block=tokens_per_block)
    _check_layout("coarse_tokens", coarse_tokens, coarse)
    _check_layout("tokens_per_block", tokens_per_block, buffer)
    if scratch_block in block_ids:
        raise ValueError(f"block_ids names the scratch block {scratch_block}: an item never owns it")
    coarse_ids = np.arange(len(coarse_tokens), dtype=np.int32)
    src = layout_rows(coarse_ids, coarse_tokens, coarse.block_size)
    dst = layout_rows(block_ids, tokens_per_block, buffer.block_size)
    if not len(src) == len(dst) <= num_rows:
        raise ValueError(
            f"{len(src)} rows in the encoder's blocks, {len(dst)} in the cache's, {num_rows} in the lists: the first "
            "two must be equal and fit"
        )
    check_distinct("the row map", dst, buffer.num_rows)
    padding = (0, num_rows - len(src))
    return CompactArgs(
        column(np.pad(src, padding)),
        column(np.pad(dst, padding, constant_values=SENTINEL)),
        row_chunk(buffer.fat_dim, buffer.dtype, chunk),
    )


def _check_layout(name: str, tokens: Sequence[int], blocks: BufferShape) -> None:
    fits = len(tokens) <= blocks.num_blocks and all(0 <= count <= blocks.block_size for count in tokens)
    if not fits:
        raise ValueError(
            f"{name} has {len(tokens)} blocks of up to {max(tokens, default=0)} rows, and there are "
            f"{blocks.num_blocks} of {blocks.block_size}: the layout is of other blocks"
        )


def compact_blocks_reference(
    buffer: torch.Tensor, coarse: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor
) -> None:
    """`compact_blocks` in PyTorch; mutates `buffer`."""
    live = dst_rows[:, 0] >= 0
    rows = coarse.view(-1, coarse.shape[2]).index_select(0, src_rows[live, 0])
    buffer.view(-1, buffer.shape[2])[dst_rows[live, 0]] = rows


@jit
def compact_blocks(buffer: Any, coarse: Any, src_rows: Any, dst_rows: Any, chunk: int) -> Any:
    """Copies row `src_rows[i]` of the coarse blocks to row `dst_rows[i]` of the buffer. Not to be called with `R` = 0.

    Args:
        buffer: HBM `[num_blocks, block_size, fat_dim]`; mutated and returned.
        coarse: HBM `[coarse_blocks, coarse_size, fat_dim]`, of the buffer's dtype; rows that the map leaves out may
            hold anything.
        src_rows: HBM int32 `[R, 1]`, see `CompactArgs`.
        dst_rows: HBM int32 `[R, 1]`.
        chunk: elements of a row per tile.
    """
    fat_dim = buffer.shape[2]
    flat_coarse = coarse.reshape((coarse.shape[0] * coarse.shape[1], fat_dim))
    flat = buffer.reshape((buffer.shape[0] * buffer.shape[1], fat_dim))
    num_rows = src_rows.shape[0]
    for start in range(0, num_rows, PARTITIONS):
        count = min(PARTITIONS, num_rows - start)
        src_ids = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=src_ids, src=src_rows[start : start + count, 0:1])
        dst_ids = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=dst_ids, src=dst_rows[start : start + count, 0:1])
        for first in range(0, fat_dim, chunk):
            width = min(chunk, fat_dim - first)
            tile = nl.ndarray((count, width), dtype=buffer.dtype, buffer=nl.sbuf)
            nisa.dma_copy(
                dst=tile,
                src=flat_coarse.ap(
                    pattern=[[fat_dim, count], [1, width]], offset=first, vector_offset=src_ids, indirect_dim=0
                ),
            )
            nisa.dma_copy(
                dst=flat.ap(
                    pattern=[[fat_dim, count], [1, width]], offset=first, vector_offset=dst_ids, indirect_dim=0
                ),
                src=tile,
                oob_mode=nisa.oob_mode.skip,
            )
    return buffer
