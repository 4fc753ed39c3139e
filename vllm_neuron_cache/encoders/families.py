"""Which encoders a model has, by its configuration alone."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from vllm_neuron_cache.encoders.interface import EncoderAdapter
from vllm_neuron_cache.encoders.qwen2_5_vl import Qwen2_5VLEncoder
from vllm_neuron_cache.encoders.qwen3_vl import Qwen3VLEncoder
from vllm_neuron_cache.encoders.qwen_omni_audio import QwenOmniAudioEncoder
from vllm_neuron_cache.errors import ConfigurationError

_ADAPTERS: dict[str, tuple[tuple[type[EncoderAdapter], str], ...]] = {
    "qwen3_vl": ((Qwen3VLEncoder, "vision_config"),),
    "qwen3_vl_moe": ((Qwen3VLEncoder, "vision_config"),),
    "qwen2_5_vl": ((Qwen2_5VLEncoder, "vision_config"),),
    "qwen2_5_omni": ((Qwen2_5VLEncoder, "vision_config"), (QwenOmniAudioEncoder, "audio_config")),
}
"""For each `model_type`: its adapters, and the part of the configuration that each takes."""

_DEFAULTS = {"in_channels": 3}
"""Of transformers' configuration classes; files of Qwen2.5-VL have this one under another name."""


def encoder_adapters(
    model_type: str, towers: Mapping[str, Mapping[str, Any]], dtype: torch.dtype
) -> list[EncoderAdapter]:
    """Adapters without a tower. `towers` are the parts of the model's config.json that describe encoders, by name.

    Raises `ConfigurationError` for a family that has no adapter, or a configuration that lacks a size.
    """
    if model_type not in _ADAPTERS:
        raise ConfigurationError(
            f"{model_type} has no encoder that can be compiled here (known are {', '.join(_ADAPTERS)}). Set "
            "vllm_neuron_cache.compiled_encoder to false."
        )
    return [_adapter(adapter, name, towers, dtype) for adapter, name in _ADAPTERS[model_type]]


def _adapter(
    adapter: type[EncoderAdapter], name: str, towers: Mapping[str, Mapping[str, Any]], dtype: torch.dtype
) -> EncoderAdapter:
    try:
        return adapter(SimpleNamespace(**(_DEFAULTS | towers.get(name, {}))), dtype=dtype)
    except AttributeError as error:
        raise ConfigurationError(
            f"{name} of the model's config.json has no {error.name!r}, which its encoder {adapter.name} needs. Take "
            "the file of the whole checkpoint."
        ) from error
