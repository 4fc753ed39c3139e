"""A Qwen3 text decoder as static graphs: `prefill` with the merge inside, and `decode` without.

Plain operators, weights as arguments. Attention is an opaque operator unless another one is given.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.graphs.attention import PAGED_ATTENTION, AttentionMetadata, paged_attention
from vllm_neuron_cache.graphs.layers import rms_norm, rotate
from vllm_neuron_cache.graphs.prefill import Decoder, prefill
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec

Attention = Callable[..., torch.Tensor]
"""Of the arguments of `attention.plain_attention`."""


class DecoderShape(NamedTuple):
    """Sizes of a decoder and its KV cache."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    dtype: torch.dtype
    num_slots: int
    """Rows of each layer's KV cache, with one that takes what padding writes."""
    context_rows: int
    """KV rows that all requests of a step have together, at most."""

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        return tuple(heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads))


class LayerWeights(NamedTuple):
    """Weights of one layer. Matrices are `[out, in]`."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    """Rows of the query, the key, the value."""
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    """Rows of the gate, then of what it gates."""
    down: torch.Tensor


def prefill_spec(
    buckets: tuple[int, ...], buffer: BufferShape, shape: DecoderShape, *, attention: Attention | None = None
) -> GraphSpec:
    """The buckets count token rows of the step, padding included: with `TEXT_ROW` in `src_rows`.

    `attention` takes the place of the opaque operator, as one that a lane can lower. Returns hidden states `[T, H]`.
    """
    attend = attention or paged_attention

    def fn(
        input_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        src_rows: torch.Tensor,
        buffer: torch.Tensor,
        embed_tokens: torch.Tensor,
        layers: tuple[torch.Tensor, ...],
        norm: torch.Tensor,
        key_caches: tuple[torch.Tensor, ...],
        value_caches: tuple[torch.Tensor, ...],
        metadata: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        decoder = _decoder(shape, attend, embed_tokens, layers, norm, key_caches, value_caches, metadata)
        return prefill(decoder, input_ids, (cos, sin), src_rows, buffer.view(-1, buffer.shape[2]))

    def example_args(bucket: int) -> tuple[Any, ...]:
        tokens, rest = _example_tokens(shape, bucket), _example_state(shape, bucket)
        return *tokens, torch.zeros(bucket, dtype=torch.int32), buffer.example(), *rest

    return _spec("prefill", fn, buckets, shape, example_args, opaque=attention is None, row_bytes=buffer.row_bytes)


def decode_spec(buckets: tuple[int, ...], shape: DecoderShape, *, attention: Attention | None = None) -> GraphSpec:
    """As `prefill_spec`, without merge inputs: steps that read no cached row."""
    attend = attention or paged_attention

    def fn(
        input_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        embed_tokens: torch.Tensor,
        layers: tuple[torch.Tensor, ...],
        norm: torch.Tensor,
        key_caches: tuple[torch.Tensor, ...],
        value_caches: tuple[torch.Tensor, ...],
        metadata: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        decoder = _decoder(shape, attend, embed_tokens, layers, norm, key_caches, value_caches, metadata)
        return prefill(decoder, input_ids, (cos, sin))

    def example_args(bucket: int) -> tuple[Any, ...]:
        return *_example_tokens(shape, bucket), *_example_state(shape, bucket)

    return _spec("decode", fn, buckets, shape, example_args, opaque=attention is None)


def _spec(
    name: str,
    fn: Callable[..., torch.Tensor],
    buckets: tuple[int, ...],
    shape: DecoderShape,
    example_args: Callable[[int], tuple[Any, ...]],
    *,
    opaque: bool,
    row_bytes: int = 0,
) -> GraphSpec:
    widths = 4 * shape.hidden_size + 2 * shape.intermediate_size + sum(shape.qkv_sizes)
    return GraphSpec(
        name=name,
        fn=fn,
        mutates=("key_caches", "value_caches"),
        buckets=buckets,
        bytes_per_row=row_bytes + shape.num_layers * widths * shape.dtype.itemsize,
        example_args=example_args,
        # src_rows needs none: the graph clamps it.
        index_limits={"input_ids": shape.vocab_size, "metadata[0]": shape.num_slots, "metadata[1]": shape.num_slots},
        opaque=frozenset({PAGED_ATTENTION} if opaque else ()),
    )


def _example_tokens(shape: DecoderShape, bucket: int) -> tuple[torch.Tensor, ...]:
    """Ids, and the cosines and sines of the rotary embedding, `[T, head_dim / 2]`, that the host makes of positions."""
    angles = torch.zeros(bucket, shape.head_dim // 2, dtype=shape.dtype)
    return torch.zeros(bucket, dtype=torch.int32), angles, angles.clone()


def _example_state(shape: DecoderShape, bucket: int) -> tuple[Any, ...]:
    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=shape.dtype)

    def caches() -> tuple[torch.Tensor, ...]:
        return tuple(zeros(shape.num_slots, shape.num_kv_heads, shape.head_dim) for _ in range(shape.num_layers))

    width, inner, query = shape.hidden_size, shape.intermediate_size, shape.qkv_sizes[0]
    layers = [
        LayerWeights(
            input_norm=zeros(width),
            qkv=zeros(sum(shape.qkv_sizes), width),
            q_norm=zeros(shape.head_dim),
            k_norm=zeros(shape.head_dim),
            o=zeros(width, query),
            post_norm=zeros(width),
            gate_up=zeros(2 * inner, width),
            down=zeros(width, inner),
        )
        for _ in range(shape.num_layers)
    ]
    sizes = (bucket, shape.context_rows, bucket, bucket, shape.context_rows, shape.context_rows)
    metadata = tuple(torch.zeros(size, dtype=torch.int32) for size in sizes)
    weights = tuple(weight for layer in layers for weight in layer)
    return zeros(shape.vocab_size, width), weights, zeros(width), caches(), caches(), metadata


def _decoder(
    shape: DecoderShape,
    attend: Attention,
    embed_tokens: torch.Tensor,
    layers: tuple[torch.Tensor, ...],
    norm: torch.Tensor,
    key_caches: tuple[torch.Tensor, ...],
    value_caches: tuple[torch.Tensor, ...],
    metadata: tuple[torch.Tensor, ...],
) -> Decoder:
    """The parts of a decoder over a graph's arguments, as `_example_state` has them."""
    count = len(LayerWeights._fields)

    def layer(number: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        weights = LayerWeights(*layers[number * count : (number + 1) * count])

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(query, key, value, key_caches[number], value_caches[number], *AttentionMetadata(*metadata))

        def run(
            positions: tuple[torch.Tensor, torch.Tensor], hidden: torch.Tensor, residual: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return _layer(shape, weights, attention, positions, hidden, residual)

        return run

    return Decoder(
        embed_tokens=lambda input_ids: embed_tokens.index_select(0, input_ids),
        layers=[layer(number) for number in range(shape.num_layers)],
        norm=lambda hidden, residual: _add_norm(shape, hidden, residual, norm),
    )


def _layer(
    shape: DecoderShape,
    weights: LayerWeights,
    attention: Callable[..., torch.Tensor],
    positions: tuple[torch.Tensor, torch.Tensor],
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = hidden.shape[0]
    hidden, residual = _add_norm(shape, hidden, residual, weights.input_norm)
    query, key, value = (
        part.view(num_tokens, -1, shape.head_dim) for part in (hidden @ weights.qkv.t()).split(shape.qkv_sizes, dim=1)
    )
    query = rotate(rms_norm(query, weights.q_norm, shape.rms_norm_eps), *positions)
    key = rotate(rms_norm(key, weights.k_norm, shape.rms_norm_eps), *positions)
    attended = attention(query, key, value.contiguous())
    hidden = attended.reshape(num_tokens, -1) @ weights.o.t()
    hidden, residual = _add_norm(shape, hidden, residual, weights.post_norm)
    gate, up = (hidden @ weights.gate_up.t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ weights.down.t(), residual


def _add_norm(
    shape: DecoderShape, hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum, and the sum."""
    total = hidden if residual is None else hidden + residual
    return rms_norm(total, weight, shape.rms_norm_eps), total
