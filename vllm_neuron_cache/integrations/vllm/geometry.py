"""The cache's geometry, resolved once in the front end and carried to every process in vLLM's own configuration."""

from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry, cache_geometry


def resolve_geometry(vllm_config: VllmConfig) -> CacheGeometry:
    """The geometry that every process of this engine uses.

    The first call per engine derives it (which builds vLLM's multimodal budget once more) and leaves it in
    `ec_manager_config.manager_config`; processes that get their configuration from there only read it.

    Raises `ConfigurationError` for sizes that cannot work.
    """
    resolved = vllm_config.ec_manager_config.manager_config
    if "num_blocks" not in resolved:
        budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
        geometry = cache_geometry(
            NeuronCacheConfig.from_additional_config(vllm_config.additional_config),
            merge_factor=merge_factor(vllm_config),
            encoder_cache_size=budget.encoder_cache_size,
            largest_item_tokens=budget.mm_max_toks_per_item.values(),
        )
        resolved.update(geometry._asdict())
    return CacheGeometry(**{name: resolved[name] for name in CacheGeometry._fields})


def merge_factor(vllm_config: VllmConfig) -> int:
    """Patches that the model's vision merger turns into one token; 1 for a model that does not merge."""
    vision_config = getattr(vllm_config.model_config.hf_config, "vision_config", None)
    return getattr(vision_config, "spatial_merge_size", 1) ** 2
