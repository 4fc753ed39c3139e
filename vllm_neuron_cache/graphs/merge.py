"""Graphs that bring cached rows into the language model's input.

A row of the buffer is as wide as the hidden state and every deepstack level together ("fat"), in this order. The
targets belong to the caller and have one row more than the step (`T + 1`): row T is the dummy row, which takes what
padding writes.
"""

from typing import Any

import torch

from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec


def _scatter_levels(
    hidden: torch.Tensor, deepstack: tuple[torch.Tensor, ...], rows: torch.Tensor, dst_rows: torch.Tensor
) -> None:
    width = hidden.shape[1]
    for level, target in enumerate((hidden, *deepstack)):
        target.index_put_((dst_rows,), rows[:, level * width : (level + 1) * width])


def merge_rows(
    hidden: torch.Tensor,
    deepstack: tuple[torch.Tensor, ...],
    buffer: torch.Tensor,
    src_rows: torch.Tensor,
    dst_rows: torch.Tensor,
) -> None:
    """Row-list form into one target per level.

    Args:
        hidden: `[T + 1, H]`; mutated.
        deepstack: one `[T + 1, H]` per deepstack level; mutated.
        buffer: `[num_blocks, block_size, H * (1 + levels)]`.
        src_rows: int32 `[R]`, rows of the flattened buffer.
        dst_rows: int32 `[R]`, rows of the targets.
    """
    rows = buffer.view(-1, buffer.shape[2]).index_select(0, src_rows)
    _scatter_levels(hidden, deepstack, rows, dst_rows)


def merge_rows_fat(fat: torch.Tensor, buffer: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
    """Row-list form into one target `fat` `[T + 1, H * (1 + levels)]`, laid out like the buffer; mutated."""
    fat.index_put_((dst_rows,), buffer.view(-1, buffer.shape[2]).index_select(0, src_rows))


def merge_multimodal_embeddings(
    hidden: torch.Tensor,
    deepstack: tuple[torch.Tensor, ...],
    buffer: torch.Tensor,
    encoder_block_ids: torch.Tensor,
    encoder_positions: torch.Tensor,
) -> None:
    """Block-position form, with vLLM Neuron's arguments: gathers whole blocks, scatters every row of them.

    Args:
        hidden: `[T + 1, H]`; mutated.
        deepstack: one `[T + 1, H]` per deepstack level; mutated.
        buffer: `[num_blocks, block_size, H * (1 + levels)]`.
        encoder_block_ids: int32 `[max_blocks]`.
        encoder_positions: int32 `[max_blocks, block_size]`, the sentinel T where a row goes nowhere.
    """
    rows = buffer.index_select(0, encoder_block_ids).flatten(0, 1)
    _scatter_levels(hidden, deepstack, rows, encoder_positions.flatten())


def merge_rows_spec(
    buckets: tuple[int, ...], buffer: BufferShape, *, num_levels: int, max_step_tokens: int
) -> GraphSpec:
    """The buckets count rows. `num_levels` is that of the deepstack levels, `max_step_tokens` the T of the targets; so
    in the specs below."""

    def example_args(bucket: int) -> tuple[Any, ...]:
        return *example_targets(buffer, num_levels, max_step_tokens), buffer.example(), *_indices(2, bucket)

    return GraphSpec(
        name="merge_rows",
        fn=merge_rows,
        mutates=("hidden", "deepstack"),
        buckets=buckets,
        bytes_per_row=buffer.row_bytes,
        example_args=example_args,
        index_limits={"src_rows": buffer.num_rows, "dst_rows": max_step_tokens + 1},
    )


def merge_rows_fat_spec(buckets: tuple[int, ...], buffer: BufferShape, *, max_step_tokens: int) -> GraphSpec:
    """The buckets count rows."""

    def example_args(bucket: int) -> tuple[Any, ...]:
        fat = torch.zeros(max_step_tokens + 1, buffer.fat_dim, dtype=buffer.dtype)
        return fat, buffer.example(), *_indices(2, bucket)

    return GraphSpec(
        name="merge_rows_fat",
        fn=merge_rows_fat,
        mutates=("fat",),
        buckets=buckets,
        bytes_per_row=buffer.row_bytes,
        example_args=example_args,
        index_limits={"src_rows": buffer.num_rows, "dst_rows": max_step_tokens + 1},
    )


def merge_multimodal_embeddings_spec(
    buckets: tuple[int, ...], buffer: BufferShape, *, num_levels: int, max_step_tokens: int
) -> GraphSpec:
    """The buckets count blocks."""

    def example_args(bucket: int) -> tuple[Any, ...]:
        targets = example_targets(buffer, num_levels, max_step_tokens)
        positions = torch.zeros(bucket, buffer.block_size, dtype=torch.int32)
        return *targets, buffer.example(), *_indices(1, bucket), positions

    return GraphSpec(
        name="merge_multimodal_embeddings",
        fn=merge_multimodal_embeddings,
        mutates=("hidden", "deepstack"),
        buckets=buckets,
        bytes_per_row=buffer.row_bytes * buffer.block_size,
        example_args=example_args,
        index_limits={"encoder_block_ids": buffer.num_blocks, "encoder_positions": max_step_tokens + 1},
    )


def example_targets(
    buffer: BufferShape, num_levels: int, max_step_tokens: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Zeros for the hidden state and each deepstack level, `[T + 1, H]`, on torch's default device."""
    width = buffer.fat_dim // (1 + num_levels)
    hidden, *deepstack = (torch.zeros(max_step_tokens + 1, width, dtype=buffer.dtype) for _ in range(1 + num_levels))
    return hidden, tuple(deepstack)


def _indices(count: int, length: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(length, dtype=torch.int32) for _ in range(count))
