"""The merge where each rank holds a share of the step's rows.

Every rank gets the same ids and positions and keeps what falls into its share; nothing is exchanged. The rank is data,
so that all ranks run one graph.
"""

from dataclasses import replace
from typing import Any

import torch

from vllm_neuron_cache.graphs.merge import (
    merge_multimodal_embeddings,
    merge_multimodal_embeddings_spec,
    merge_rows,
    merge_rows_spec,
)
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec


def global_to_local_positions(positions: torch.Tensor, local_len: int, rank: torch.Tensor) -> torch.Tensor:
    """Rows of the whole step as rows of one rank's share, which are `rank * local_len` to `(rank + 1) * local_len`.

    Args:
        positions: int32, of any shape; 0 or more. The dummy row of the whole step must lie behind every share, at
            `num_ranks * local_len` or above: a step is padded to whole shares.
        local_len: rows of a share.
        rank: int32 `[]` or `[1]`.

    Returns int32 of the shape of `positions`: 0 to `local_len - 1`, and `local_len`, the dummy row of the share, for a
    row that another rank has.
    """
    local = positions - rank * local_len
    inside = (local >= 0) & (local < local_len)
    # The clamp changes nothing that is chosen; with it the result is in range whatever the positions are.
    return torch.where(inside, local.clamp(0, local_len - 1), local_len)


def merge_rows_sharded(
    hidden: torch.Tensor,
    deepstack: tuple[torch.Tensor, ...],
    buffer: torch.Tensor,
    src_rows: torch.Tensor,
    dst_rows: torch.Tensor,
    rank: torch.Tensor,
) -> None:
    """`merge_rows` into one rank's share: targets `[local_len + 1, H]`, mutated; `dst_rows` of the whole step."""
    merge_rows(hidden, deepstack, buffer, src_rows, global_to_local_positions(dst_rows, hidden.shape[0] - 1, rank))


def merge_multimodal_embeddings_sharded(
    hidden: torch.Tensor,
    deepstack: tuple[torch.Tensor, ...],
    buffer: torch.Tensor,
    encoder_block_ids: torch.Tensor,
    encoder_positions: torch.Tensor,
    rank: torch.Tensor,
) -> None:
    """`merge_multimodal_embeddings` into one rank's share; `encoder_positions` of the whole step."""
    positions = global_to_local_positions(encoder_positions, hidden.shape[0] - 1, rank)
    merge_multimodal_embeddings(hidden, deepstack, buffer, encoder_block_ids, positions)


def merge_rows_sharded_spec(
    buckets: tuple[int, ...], buffer: BufferShape, *, num_levels: int, local_len: int, num_ranks: int
) -> GraphSpec:
    """The buckets count rows."""
    spec = merge_rows_spec(buckets, buffer, num_levels=num_levels, max_step_tokens=local_len)
    return _sharded(spec, merge_rows_sharded, "dst_rows", local_len, num_ranks)


def merge_multimodal_embeddings_sharded_spec(
    buckets: tuple[int, ...], buffer: BufferShape, *, num_levels: int, local_len: int, num_ranks: int
) -> GraphSpec:
    """The buckets count blocks."""
    spec = merge_multimodal_embeddings_spec(buckets, buffer, num_levels=num_levels, max_step_tokens=local_len)
    return _sharded(spec, merge_multimodal_embeddings_sharded, "encoder_positions", local_len, num_ranks)


def _sharded(spec: GraphSpec, fn: Any, positions: str, local_len: int, num_ranks: int) -> GraphSpec:
    return replace(
        spec,
        name=f"{spec.name}_sharded",
        fn=fn,
        example_args=lambda bucket: (*spec.example_args(bucket), torch.zeros((), dtype=torch.int32)),
        index_limits={**spec.index_limits, positions: num_ranks * local_len + 1, "rank": num_ranks},
    )
