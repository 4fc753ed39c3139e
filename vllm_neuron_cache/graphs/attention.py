"""Attention over a paged KV cache, as an operator that a graph does not look into.

On the device attention is a kernel of the vendor's. Here it is one node, `vllm_neuron_cache::paged_attention`, with a
plain implementation behind it, so that the graphs around it can be traced, checked and run.
"""

from typing import NamedTuple

import torch

PAGED_ATTENTION = "vllm_neuron_cache.paged_attention"
"""The operator's name, for `GraphSpec.opaque`."""

_FAR_BELOW = -1e30
"""Instead of minus infinity: the row of a padding token sees nothing, and must not become NaN."""


class AttentionMetadata(NamedTuple):
    """Which KV rows a step writes and which of them each token sees. All int32; T tokens, C rows of context.

    A slot is a row of a KV cache. What the step itself writes is part of the context.
    """

    slots: torch.Tensor
    """`[T]`, where each token's key and value go; padding names a slot that nothing else uses."""
    context_slots: torch.Tensor
    """`[C]`, the rows of all requests in the step, through their block tables."""
    query_sequences: torch.Tensor
    """`[T]`, number of the token's request in the step; padding has -1."""
    query_positions: torch.Tensor
    """`[T]`, the token's place in its request, by which it is causal."""
    context_sequences: torch.Tensor
    """`[C]`, likewise; padding has -2."""
    context_positions: torch.Tensor
    """`[C]`."""


@torch.library.custom_op(PAGED_ATTENTION.replace(".", "::"), mutates_args=("key_cache", "value_cache"))
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    context_slots: torch.Tensor,
    query_sequences: torch.Tensor,
    query_positions: torch.Tensor,
    context_sequences: torch.Tensor,
    context_positions: torch.Tensor,
) -> torch.Tensor:
    """`plain_attention` as one operator; its metadata one by one."""
    metadata = AttentionMetadata(
        slots, context_slots, query_sequences, query_positions, context_sequences, context_positions
    )
    return plain_attention(query, key, value, key_cache, value_cache, *metadata)


@paged_attention.register_fake
def _(query: torch.Tensor, *_args: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *metadata: torch.Tensor,
) -> torch.Tensor:
    """Writes the step's keys and values, then attends: in operators that every lane lowers.

    Args:
        query: `[T, num_heads, head_dim]`.
        key: `[T, num_kv_heads, head_dim]`.
        value: like `key`.
        key_cache: `[num_slots, num_kv_heads, head_dim]`; mutated.
        value_cache: like `key_cache`; mutated.
        metadata: the fields of `AttentionMetadata`, in their order.

    Returns `[T, num_heads, head_dim]`, contiguous, computed in float32; rows of padding hold something finite.
    """
    slots, context_slots, query_sequences, query_positions, context_sequences, context_positions = metadata
    key_cache.index_put_((slots,), key)
    value_cache.index_put_((slots,), value)
    group = query.shape[1] // key.shape[1]
    keys = key_cache.index_select(0, context_slots).repeat_interleave(group, dim=1).transpose(0, 1).float()
    values = value_cache.index_select(0, context_slots).repeat_interleave(group, dim=1).transpose(0, 1).float()
    scores = query.transpose(0, 1).float() @ keys.transpose(1, 2) * query.shape[2] ** -0.5
    same = query_sequences.unsqueeze(1) == context_sequences
    earlier = query_positions.unsqueeze(1) >= context_positions
    scores = scores.masked_fill(~(same & earlier), _FAR_BELOW)
    return (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype).contiguous()
