"""Graphs that write the encoder cache's buffer and its tags, in place."""

import torch

from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec


def encoder_write(buffer: torch.Tensor, rows: torch.Tensor, block_ids: torch.Tensor, block_rows: torch.Tensor) -> None:
    """Writes rows of an item to their places.

    Named row by row and not block by block: an item moves its own rows only, whatever the size of the block, and
    whole blocks are the case in which the rows of each follow one another.

    Args:
        buffer: `[num_blocks, block_size, fat_dim]`; mutated.
        rows: `[R, fat_dim]`, of the buffer's dtype.
        block_ids: int32 `[R]`, the block of each row; padding names the scratch block.
        block_rows: int32 `[R]`, the row within its block.
    """
    buffer.index_put_((block_ids, block_rows), rows)


def encoder_stamp(
    mm_hash_tags: torch.Tensor,
    generations: torch.Tensor,
    block_ids: torch.Tensor,
    tags: torch.Tensor,
    stamps: torch.Tensor,
) -> None:
    """Writes the tags of whole blocks: zeros before their rows change, the item's own after.

    Args:
        mm_hash_tags: int32 `[num_blocks, 2]`; mutated.
        generations: int32 `[num_blocks]`; mutated.
        block_ids: int32 `[K]`; padding names the scratch block.
        tags: int32 `[K, 2]`.
        stamps: int32 `[K]`.
    """
    mm_hash_tags.index_put_((block_ids,), tags)
    generations.index_put_((block_ids,), stamps)


def encoder_write_spec(buckets: tuple[int, ...], buffer: BufferShape) -> GraphSpec:
    """The buckets count rows."""

    def example_args(bucket: int) -> tuple[torch.Tensor, ...]:
        return (
            buffer.example(),
            torch.zeros(bucket, buffer.fat_dim, dtype=buffer.dtype),
            torch.zeros(bucket, dtype=torch.int32),
            torch.zeros(bucket, dtype=torch.int32),
        )

    return GraphSpec(
        name="encoder_write",
        fn=encoder_write,
        mutates=("buffer",),
        buckets=buckets,
        bytes_per_row=buffer.row_bytes,
        example_args=example_args,
        index_limits={"block_ids": buffer.num_blocks, "block_rows": buffer.block_size},
    )


def encoder_stamp_spec(buckets: tuple[int, ...], num_blocks: int) -> GraphSpec:
    """The buckets count blocks, of a buffer of `num_blocks`."""

    def example_args(bucket: int) -> tuple[torch.Tensor, ...]:
        return (
            torch.zeros(num_blocks, 2, dtype=torch.int32),
            torch.zeros(num_blocks, dtype=torch.int32),
            torch.zeros(bucket, dtype=torch.int32),
            torch.zeros(bucket, 2, dtype=torch.int32),
            torch.zeros(bucket, dtype=torch.int32),
        )

    return GraphSpec(
        name="encoder_stamp",
        fn=encoder_stamp,
        mutates=("mm_hash_tags", "generations"),
        buckets=buckets,
        bytes_per_row=12,
        example_args=example_args,
        index_limits={"block_ids": num_blocks},
    )
