"""Graphs of the stage cache's device pool: rows into their slots in place, and rows of slots out of it."""

import dataclasses

import torch

from vllm_neuron_cache.graphs.encoder_write import encoder_write_spec
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec


def stage_gather(pool: torch.Tensor, block_ids: torch.Tensor, block_rows: torch.Tensor) -> tuple[torch.Tensor]:
    """The rows of a hit.

    Args:
        pool: `[num_blocks, block_size, width]`.
        block_ids, block_rows: int32 `[T]`, the place of each row.

    Returns:
        `[T, width]`.
    """
    return (pool[block_ids, block_rows],)


def stage_write_spec(buckets: tuple[int, ...], pool: BufferShape) -> GraphSpec:
    """The buckets count rows. Rows go to their slots as an encoder's do to their blocks: it is the same graph."""
    return dataclasses.replace(encoder_write_spec(buckets, pool), name="stage_write")


def stage_gather_spec(buckets: tuple[int, ...], pool: BufferShape) -> GraphSpec:
    """The buckets count rows."""

    def example_args(bucket: int) -> tuple[torch.Tensor, ...]:
        return (
            pool.example(),
            torch.zeros(bucket, dtype=torch.int32),
            torch.zeros(bucket, dtype=torch.int32),
        )

    return GraphSpec(
        name="stage_gather",
        fn=stage_gather,
        mutates=(),
        buckets=buckets,
        bytes_per_row=pool.row_bytes,
        example_args=example_args,
        index_limits={"block_ids": pool.num_blocks, "block_rows": pool.block_size},
    )
