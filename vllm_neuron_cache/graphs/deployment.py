"""Which graphs a deployment needs, from a model's configuration files and the cache's."""

from typing import NamedTuple

import torch

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry, cache_geometry
from vllm_neuron_cache.encoders.families import encoder_adapters
from vllm_neuron_cache.encoders.interface import EncoderAdapter
from vllm_neuron_cache.encoders.static_encoder import ONE_RANK, encoder_ladder, encoder_specs
from vllm_neuron_cache.encoders.weights import plain_form
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.catalog import encoder_cache_specs
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec
from vllm_neuron_cache.planner.model import ModelShape
from vllm_neuron_cache.planner.tokens import largest_item_tokens, smallest_image_tokens

DEVICES = ("cpu", "neuron")


class Deployment(NamedTuple):
    """A cache as an engine would set it up, and its graphs."""

    geometry: CacheGeometry
    buffer: BufferShape
    num_levels: int
    """Deepstack levels beside the hidden state."""
    max_step_tokens: int
    kernel: str
    """What moves rows, one of `config.KERNELS`."""
    merges_in_prefill: bool
    """Whether the model merges in its own prefill, and no graph does."""
    encoders: tuple[EncoderAdapter, ...]
    """Those that are compiled, without a model behind them."""
    attention_block: int
    """Patches in the encoder's largest attention block."""
    specs: tuple[GraphSpec, ...]


def plan_deployment(
    shape: ModelShape,
    config: NeuronCacheConfig,
    *,
    max_num_batched_tokens: int,
    max_model_len: int | None = None,
    device: str = "cpu",
) -> Deployment:
    """What an engine of these options would compile.

    `max_num_batched_tokens` and `max_model_len` are vLLM's, in tokens; without the latter it is the model's. On a
    "neuron" `device` the default block is the encoder's. Raises `ConfigurationError` for another device than that and
    "cpu", and as `cache_geometry` and `write_spec` do.
    """
    if device not in DEVICES:
        raise ConfigurationError(f"device is {device!r}; give {' or '.join(DEVICES)}.")
    largest = largest_item_tokens(shape, max_model_len or shape.max_model_len)
    geometry = cache_geometry(
        config,
        merge_factor=shape.merge_factor,
        encoder_cache_size=max(max_num_batched_tokens, *largest.values()),
        largest_item_tokens=largest.values(),
        smallest_item_tokens=None if device == "neuron" else smallest_image_tokens(shape),
    )
    buffer = BufferShape(geometry.num_blocks, geometry.block_size, shape.fat_dim, getattr(torch, shape.dtype))
    levels = shape.num_deepstack_levels
    specs = list(
        encoder_cache_specs(
            buffer,
            config.kernel,
            num_levels=levels,
            max_step_tokens=max_num_batched_tokens,
            merges_in_prefill=config.compiled_prefill,
        )
    )
    attention_block = config.encoder.encoder_attention_block_size
    encoders = encoder_adapters(shape.model_type, shape.towers, buffer.dtype) if config.compiled_encoder else []
    for adapter in encoders:
        form = plain_form(adapter.weight_shapes, adapter.dtype)
        specs += encoder_specs(adapter, form, buffer, encoder_ladder(adapter, attention_block), ONE_RANK).values()
    return Deployment(
        geometry=geometry,
        buffer=buffer,
        num_levels=levels,
        max_step_tokens=max_num_batched_tokens,
        kernel=config.kernel,
        merges_in_prefill=config.compiled_prefill,
        encoders=tuple(encoders),
        attention_block=attention_block,
        specs=tuple(specs),
    )
