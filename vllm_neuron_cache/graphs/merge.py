"""Graphs that bring cached rows into the language model's input.

A row of the buffer is as wide as the hidden state and every deepstack level together ("fat"), in this order. The
targets belong to the caller and have one row more than the step (`T + 1`): row T is the dummy row, which takes what
padding writes.
"""

import torch

from vllm_neuron_cache.graphs.spec import GraphSpec


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


def merge_rows_spec(buckets: tuple[int, ...], row_bytes: int) -> GraphSpec:
    """`row_bytes` is the size of one row of the buffer; so in the specs below."""
    return GraphSpec(
        name="merge_rows", fn=merge_rows, mutates=("hidden", "deepstack"), buckets=buckets, bytes_per_row=row_bytes
    )


def merge_rows_fat_spec(buckets: tuple[int, ...], row_bytes: int) -> GraphSpec:
    return GraphSpec(
        name="merge_rows_fat", fn=merge_rows_fat, mutates=("fat",), buckets=buckets, bytes_per_row=row_bytes
    )


def merge_multimodal_embeddings_spec(buckets: tuple[int, ...], block_bytes: int) -> GraphSpec:
    """The buckets count blocks, of `block_bytes` each."""
    return GraphSpec(
        name="merge_multimodal_embeddings",
        fn=merge_multimodal_embeddings,
        mutates=("hidden", "deepstack"),
        buckets=buckets,
        bytes_per_row=block_bytes,
    )
