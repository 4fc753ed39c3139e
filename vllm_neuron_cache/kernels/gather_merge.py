"""Moves rows of the buffer into a target of the language model: the kernel for the graph `merge_rows`.

One call per target, the hidden state and each deepstack level: a kernel's arguments are single tensors, and the number
of levels is the model's. A level's part of a row is contiguous, and long enough to fill a transfer (4 KiB and more).

The calls of the kernel and their documentation: see `dialect`.
"""

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
    check_indices,
    check_lengths,
    check_tensor,
    column,
    repeated,
    row_chunk,
)


class MergeArgs(NamedTuple):
    """What `gather_merge` takes beside its target and the buffer."""

    src_rows: np.ndarray
    """int32 `[R, 1]`, rows of the flattened buffer."""
    dst_rows: np.ndarray
    """int32 `[R, 1]`, rows of the target, the sentinel where a row goes nowhere."""
    columns: tuple[int, ...]
    """Where the row's part for each target begins: hidden state first, then the deepstack levels."""
    chunk: int


def gather_merge_args(
    buffer: BufferShape,
    src_rows: np.ndarray,
    dst_rows: np.ndarray,
    *,
    num_levels: int,
    dummy_row: int,
    chunk: int | None = None,
) -> MergeArgs:
    """Checks the pairs of a step. A pair that repeats an earlier one is padding, as is one that writes the dummy row.

    Args:
        buffer: of the cache.
        src_rows: int32 `[R]`, rows of the flattened buffer.
        dst_rows: int32 `[R]`, rows of the targets.
        num_levels: of the deepstack levels.
        dummy_row: the last row of each target, T.
        chunk: elements of a level that one tile takes; by default as many as fit.

    Raises `ConfigurationError` for sizes that the device cannot take, and `ValueError` for pairs that are no int32
    lists of one length, lie outside their tensors, or write one row from two sources.
    """
    check_buffer("the buffer", buffer)
    width, rest = divmod(buffer.fat_dim, 1 + num_levels)
    if rest:
        raise ConfigurationError(
            f"rows of {buffer.fat_dim} do not divide into a hidden state and {num_levels} deepstack levels: check the "
            "model's number of levels"
        )
    check_tensor("a target", dummy_row + 1, width, buffer.dtype)
    check_indices("src_rows", src_rows, buffer.num_rows)
    check_indices("dst_rows", dst_rows, dummy_row + 1)
    check_lengths(src_rows=src_rows, dst_rows=dst_rows)
    columns = tuple(level * width for level in range(1 + num_levels))
    return MergeArgs(
        column(src_rows),
        column(_live_destinations(src_rows, dst_rows, dummy_row)),
        columns,
        row_chunk(width, buffer.dtype, chunk),
    )


def _live_destinations(src_rows: np.ndarray, dst_rows: np.ndarray, dummy_row: int) -> np.ndarray:
    rows = np.where(dst_rows == dummy_row, np.int32(SENTINEL), dst_rows)
    first = repeated(rows, dummy_row + 1)
    again = first != np.arange(len(rows), dtype=np.int32)
    other = np.flatnonzero(again & (src_rows != src_rows[first]))
    if len(other):
        raise ValueError(
            f"dst_rows names row {rows[other[0]]} twice (of {len(rows)}), for the sources {src_rows[first[other[0]]]} "
            f"and {src_rows[other[0]]}: each row of a step can be filled once"
        )
    return np.where(again, np.int32(SENTINEL), rows)


def gather_merge_reference(
    target: torch.Tensor, buffer: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor, first_column: int
) -> None:
    """`gather_merge` in PyTorch; mutates `target`."""
    live = dst_rows[:, 0] >= 0
    rows = buffer.view(-1, buffer.shape[2]).index_select(0, src_rows[live, 0])
    target[dst_rows[live, 0]] = rows[:, first_column : first_column + target.shape[1]]


@jit
def gather_merge(target: Any, buffer: Any, src_rows: Any, dst_rows: Any, first_column: int, chunk: int) -> Any:
    """Copies row `src_rows[i]`, from `first_column` on, to row `dst_rows[i]`. Not to be called with `R` = 0.

    Args:
        target: HBM `[T + 1, H]`, of the buffer's dtype; mutated and returned.
        buffer: HBM `[num_blocks, block_size, fat_dim]`.
        src_rows: HBM int32 `[R, 1]`, see `MergeArgs`.
        dst_rows: HBM int32 `[R, 1]`.
        first_column: one of `MergeArgs.columns`.
        chunk: elements of a row per tile.
    """
    fat_dim = buffer.shape[2]
    hidden = target.shape[1]
    flat = buffer.reshape((buffer.shape[0] * buffer.shape[1], fat_dim))
    num_rows = src_rows.shape[0]
    for start in range(0, num_rows, PARTITIONS):
        count = min(PARTITIONS, num_rows - start)
        src_ids = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=src_ids, src=src_rows[start : start + count, 0:1])
        dst_ids = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=dst_ids, src=dst_rows[start : start + count, 0:1])
        for first in range(0, hidden, chunk):
            width = min(chunk, hidden - first)
            tile = nl.ndarray((count, width), dtype=buffer.dtype, buffer=nl.sbuf)
            nisa.dma_copy(
                dst=tile,
                src=flat.ap(
                    pattern=[[fat_dim, count], [1, width]],
                    offset=first_column + first,
                    vector_offset=src_ids,
                    indirect_dim=0,
                ),
            )
            nisa.dma_copy(
                dst=target.ap(
                    pattern=[[hidden, count], [1, width]], offset=first, vector_offset=dst_ids, indirect_dim=0
                ),
                src=tile,
                oob_mode=nisa.oob_mode.skip,
            )
    return target
