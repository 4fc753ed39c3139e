"""Compiled encoders in vLLM's model runner: which of a model's towers have one, and what of a step goes through it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer, Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer, Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderItem
from vllm_neuron_cache.encoders.qwen2_5_vl import Qwen2_5VLEncoder
from vllm_neuron_cache.encoders.qwen3_vl import Qwen3VLEncoder
from vllm_neuron_cache.encoders.qwen_omni_audio import QwenOmniAudioEncoder
from vllm_neuron_cache.encoders.ranks import gathering_ranks
from vllm_neuron_cache.encoders.static_encoder import ONE_RANK, StaticEncoder
from vllm_neuron_cache.encoders.weights import ModelWeights
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.runtime import EncoderCacheRuntime

logger = init_logger("vllm.neuron_cache")

_TOWERS: dict[type, tuple[type[EncoderAdapter], str]] = {
    Qwen3_VisionTransformer: (Qwen3VLEncoder, "vision_config"),
    Qwen2_5_VisionTransformer: (Qwen2_5VLEncoder, "vision_config"),
    Qwen2_5OmniAudioEncoder: (QwenOmniAudioEncoder, "audio_config"),
}
"""For each class of tower its adapter, and the part of the model's configuration that describes it."""

_MODELS = (
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)
"""Models that hand on what their tower returns as it is. Others have such a tower too, and something after it."""

_LANES_WITH_LAYERS = ("inductor", "eager")
"""Those that can call a layer of vLLM's as it is."""


class CompiledItem(NamedTuple):
    """An item of a step that a compiled encoder takes."""

    request_id: str
    input_id: int
    key: str
    encoder: StaticEncoder
    item: EncoderItem


class CompiledEncoders:
    """The compiled encoders of one worker's model, by modality."""

    def __init__(self, model: Any, runtime: EncoderCacheRuntime, vllm_config: Any, attention_block: int) -> None:
        """Adds an encoder to `runtime` for each tower that has an adapter. The tower stays as it is, and so do its
        weights.

        Raises `ConfigurationError` if there is none, or for weights that are not the adapter's.
        """
        self._encoders: dict[str, StaticEncoder] = {}
        data_parallel = vllm_config.model_config.multimodal_config.mm_encoder_tp_mode == "data"
        group = get_tp_group()
        for tower in model.children():
            if type(model) not in _MODELS or type(tower) not in _TOWERS:
                continue
            adapter_cls, config_name = _TOWERS[type(tower)]
            adapter = adapter_cls(
                getattr(model.config, config_name),
                dtype=next(tower.parameters()).dtype,
                tensor_parallel_size=1 if data_parallel else group.world_size,
                tower=tower,
            )
            call_layers = runtime.lane_name in _LANES_WITH_LAYERS and runtime.blocks.buffer.device.type == "cpu"
            if group.world_size > 1 and not data_parallel and not call_layers:
                raise ConfigurationError(
                    f"lane {runtime.lane_name!r} compiles the encoder without vLLM's layers, which add up the parts of "
                    f"{group.world_size} ranks. Set mm_encoder_tp_mode to 'data', or vllm_neuron_cache.lane to one of "
                    f"{', '.join(_LANES_WITH_LAYERS)}."
                )
            ranks = ONE_RANK
            if data_parallel:
                ranks = gathering_ranks(group.world_size, group.rank_in_group, group.device_group.group_name)
            weights = ModelWeights(tower, adapter.weight_shapes, adapter.dtype, call_layers=call_layers)
            encoder = runtime.add_encoder(adapter, weights, attention_block=attention_block, ranks=ranks)
            self._encoders |= dict.fromkeys(adapter.modalities, encoder)
        if not self._encoders:
            known = ", ".join(known.__name__ for known in _MODELS)
            raise ConfigurationError(
                f"{type(model).__name__} has no encoder that can be compiled here (known are {known}). Set "
                "vllm_neuron_cache.compiled_encoder to false."
            )

        logger.info(
            "Encoder cache: %s through compiled encoders, anything else through the model's own",
            ", ".join(sorted(self._encoders)),
        )

    def of_step(self, requests: Mapping[str, Any], scheduler_output: Any) -> list[CompiledItem]:
        """What of a step's encoder inputs goes through a compiled encoder, in their order."""
        return list(self._of_step(requests, scheduler_output))

    def _of_step(self, requests: Mapping[str, Any], scheduler_output: Any) -> Iterator[CompiledItem]:
        for request_id, input_ids in scheduler_output.scheduled_encoder_inputs.items():
            for input_id in input_ids:
                feature = requests[request_id].mm_features[input_id]
                encoder = self._encoders.get(feature.modality)
                if encoder is None or feature.data is None:
                    continue
                data = {name: element.data for name, element in feature.data.items()}
                item = encoder.adapter.item(feature.modality, data)
                if item is not None:
                    yield CompiledItem(request_id, input_id, feature.identifier, encoder, item)

    def forget_weights(self) -> None:
        """The model has other weights now."""
        for encoder in self._encoders.values():
            encoder.forget_weights()


def without(scheduler_output: Any, items: list[CompiledItem]) -> Any:
    """The step without the encoder inputs of these items."""
    taken = {(item.request_id, item.input_id) for item in items}
    left = {
        request_id: [input_id for input_id in input_ids if (request_id, input_id) not in taken]
        for request_id, input_ids in scheduler_output.scheduled_encoder_inputs.items()
    }
    return replace(scheduler_output, scheduled_encoder_inputs={id: ids for id, ids in left.items() if ids})
