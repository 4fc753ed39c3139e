"""Writes rows of an item to their places in the buffer: the kernel that does what the graph `encoder_write` does.

The calls of the kernel and their documentation: see `dialect`.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

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


class ScatterArgs(NamedTuple):
    """What `block_scatter` takes beside the buffer and the rows."""

    row_ids: np.ndarray
    """int32 `[R, 1]`, rows of the flattened buffer, the sentinel where a row goes nowhere."""
    chunk: int


def block_scatter_args(
    buffer: BufferShape, block_ids: np.ndarray, block_rows: np.ndarray, *, scratch_block: int, chunk: int | None = None
) -> ScatterArgs:
    """Checks the places of `R` rows and flattens them, so that the kernel does no integer arithmetic.

    Args:
        buffer: of the cache.
        block_ids: int32 `[R]`; rows of `scratch_block` are padding and go nowhere.
        block_rows: int32 `[R]`, the row within its block.
        scratch_block: the block that padding names.
        chunk: elements of a row that one tile takes; by default as many as fit.

    Raises `ConfigurationError` for sizes that the device cannot take, and `ValueError` for places that are no int32
    lists of one length, lie outside the buffer, or are named twice.
    """
    check_buffer("the buffer", buffer)
    check_indices("block_ids", block_ids, buffer.num_blocks)
    check_indices("block_rows", block_rows, buffer.block_size)
    check_lengths(block_ids=block_ids, block_rows=block_rows)
    row_ids = block_ids * np.int32(buffer.block_size) + block_rows
    row_ids[block_ids == scratch_block] = SENTINEL
    check_distinct("the list of places", row_ids, buffer.num_rows)
    return ScatterArgs(column(row_ids), row_chunk(buffer.fat_dim, buffer.dtype, chunk))


def block_scatter_reference(buffer: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor) -> None:
    """`block_scatter` in PyTorch; mutates `buffer`."""
    live = row_ids[:, 0] >= 0
    buffer.view(-1, buffer.shape[2])[row_ids[live, 0]] = rows[live]


@jit
def block_scatter(buffer: Any, rows: Any, row_ids: Any, chunk: int) -> Any:
    """Writes row `i` of `rows` to row `row_ids[i]` of the flattened buffer. Not to be called with `R` = 0.

    Args:
        buffer: HBM `[num_blocks, block_size, fat_dim]`; mutated and returned.
        rows: HBM `[R, fat_dim]`, of the buffer's dtype.
        row_ids: HBM int32 `[R, 1]`, see `ScatterArgs`.
        chunk: elements of a row per tile.
    """
    fat_dim = buffer.shape[2]
    flat = buffer.reshape((buffer.shape[0] * buffer.shape[1], fat_dim))
    num_rows = rows.shape[0]
    for start in range(0, num_rows, PARTITIONS):
        count = min(PARTITIONS, num_rows - start)
        ids = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=ids, src=row_ids[start : start + count, 0:1])
        for first in range(0, fat_dim, chunk):
            width = min(chunk, fat_dim - first)
            tile = nl.ndarray((count, width), dtype=buffer.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=rows[start : start + count, first : first + width])
            nisa.dma_copy(
                dst=flat.ap(pattern=[[fat_dim, count], [1, width]], offset=first, vector_offset=ids, indirect_dim=0),
                src=tile,
                oob_mode=nisa.oob_mode.skip,
            )
    return buffer
