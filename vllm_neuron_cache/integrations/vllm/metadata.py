"""What the scheduler sends to the workers beside vLLM's own output."""

from dataclasses import dataclass

from vllm.config.ec_manager_config import EncoderCacheManagerMetadata

from vllm_neuron_cache.encoder_cache.steps import EncoderCacheStep


@dataclass(frozen=True, kw_only=True)
class BlockCacheMetadata(EncoderCacheManagerMetadata):
    """Travels in `SchedulerOutput.ec_manager_metadata`, once per scheduling pass."""

    step: EncoderCacheStep
