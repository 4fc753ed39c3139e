"""Graphs of the stage cache's device pool: rows into their slots in place, and rows of slots out of it."""

import torch

from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec


def stage_write(pool: torch.Tensor, rows: torch.Tensor, block_ids: torch.Tensor, block_rows: torch.Tensor) -> None:
    """Writes a step's rows to their slots.

    Args:
        pool: `[num_blocks, block_size, width]`; mutated.
        rows: `[T, width]`, of the pool's dtype.
        block_ids: int32 `[T]`, the block of each row; padding names the scratch block.
        block_rows: int32 `[T]`, the row within its block.
    """
    pool.index_put_((block_ids, block_rows), rows)


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
    """The buckets count rows."""

    def example_args(bucket: int) -> tuple[torch.Tensor, ...]:
        return (
            pool.example(),
            torch.zeros(bucket, pool.fat_dim, dtype=pool.dtype),
            torch.zeros(bucket, dtype=torch.int32),
            torch.zeros(bucket, dtype=torch.int32),
        )

    return GraphSpec(
        name="stage_write",
        fn=stage_write,
        mutates=("pool",),
        buckets=buckets,
        bytes_per_row=pool.row_bytes,
        example_args=example_args,
        index_limits={"block_ids": pool.num_blocks, "block_rows": pool.block_size},
    )


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
