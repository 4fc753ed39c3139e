"""The cache's geometry, resolved once in the front end and carried to every process in vLLM's own configuration."""

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import PlaceholderRange
from vllm.platforms import current_platform

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.item import ItemLayout, item_layout, mask_runs
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry, cache_geometry, num_blocks_needed
from vllm_neuron_cache.planner.families import FAMILIES

logger = init_logger("vllm.neuron_cache")

_MAX_ITEM_TOKENS = "max_item_tokens"
_MAX_SEGMENT_TOKENS = "max_segment_tokens"


def resolve_geometry(vllm_config: VllmConfig) -> CacheGeometry:
    """The geometry that every process of this engine uses.

    The first call per engine derives it (which builds vLLM's multimodal budget once more) and leaves it in
    `ec_manager_config.manager_config`; processes that get their configuration from there only read it. It warns if
    the pool cannot hold every item that vLLM admits.

    Raises `ConfigurationError` for sizes that cannot work.
    """
    resolved = vllm_config.ec_manager_config.manager_config
    if "num_blocks" not in resolved:
        budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
        config = NeuronCacheConfig.from_additional_config(vllm_config.additional_config)
        geometry = cache_geometry(
            config,
            merge_factor=merge_factor(vllm_config),
            encoder_cache_size=budget.encoder_cache_size,
            largest_item_tokens=budget.mm_max_toks_per_item.values(),
            # The vendor's plugin lays out its encoder's output by the encoder's block.
            smallest_item_tokens=None if current_platform.device_type == "neuron" else smallest_image_tokens(budget),
        )
        _warn_if_too_small(geometry, budget)
        _warn_of_attention_block(geometry, budget, config)
        resolved.update(geometry._asdict())
        resolved[_MAX_ITEM_TOKENS] = min(budget.encoder_compute_budget, budget.encoder_cache_size)
        # A placeholder does not tell whether its rows come ready-made and enter no encoder; the worker sees that.
        if config.compiled_encoder and not vllm_config.model_config.multimodal_config.enable_mm_embeds:
            resolved[_MAX_SEGMENT_TOKENS] = geometry.encoder_block_size
    return CacheGeometry(**{name: resolved[name] for name in CacheGeometry._fields})


def max_item_tokens(vllm_config: VllmConfig) -> int:
    """Token rows of the largest item that the scheduler can ever give to the encoder."""
    resolve_geometry(vllm_config)
    return vllm_config.ec_manager_config.manager_config[_MAX_ITEM_TOKENS]


def max_segment_tokens(vllm_config: VllmConfig) -> int | None:
    """Token rows of the largest image, or frame of a video, that the encoder can attend over; None for no limit."""
    resolve_geometry(vllm_config)
    return vllm_config.ec_manager_config.manager_config.get(_MAX_SEGMENT_TOKENS)


def placeholder_layout(modality: str, position: PlaceholderRange, geometry: CacheGeometry) -> ItemLayout:
    """The layout of the item whose rows go to a placeholder: by frames for a video whose mask tells them, else dense.

    In a video with its sound in between, what the mask tells are the frames between two stretches of sound.

    Front end and scheduler derive the same, because the placeholder travels with the request. The item's data would
    not do: it stays away when vLLM's processor cache knows the item.
    """
    frames = mask_runs(position.is_embed.numpy()) if modality == "video" and position.is_embed is not None else ()
    return item_layout(
        position.get_num_embeds(),
        frames,
        encoder_block_size=geometry.encoder_block_size,
        block_size=geometry.block_size,
        max_blocks=geometry.num_item_blocks,
    )


def largest_segment_tokens(modality: str, position: PlaceholderRange, vllm_config: VllmConfig) -> int | None:
    """Token rows of an image, or of a video's largest frame, which a vision encoder attends over as one. None where the
    placeholder does not tell: in a model whose frames follow one another without text in between, and of sound."""
    if modality == "image":
        return position.get_num_embeds()
    if modality == "video" and position.is_embed is not None and _frames_apart(vllm_config):
        return max(mask_runs(position.is_embed.numpy()), default=None)
    return None


def _frames_apart(vllm_config: VllmConfig) -> bool:
    model_type = vllm_config.model_config.hf_config.model_type
    return any(family.frames_apart and family.model_type == model_type for family in FAMILIES)


def smallest_image_tokens(budget: MultiModalBudget) -> int | None:
    """Token rows of the smallest image that the model's processor makes, by its lower limit of pixels; None if it takes
    no images, or tells no such limit."""
    if "image" not in budget.mm_max_toks_per_item:
        return None
    info = budget.processor.info
    processor = getattr(info.get_hf_processor(), "image_processor", None)
    # The engine's options are applied at every call, and are not in the processor's attributes.
    options = info.ctx.get_merged_mm_kwargs({})
    size = (getattr(processor, "size", None) or {}) | (options.get("size") or {})
    min_pixels = options.get("min_pixels") or size.get("shortest_edge")
    patch_size, merge_size = (getattr(processor, name, None) for name in ("patch_size", "merge_size"))
    if not (min_pixels and patch_size and merge_size):
        return None
    # Rounded up, as the processor does to reach the limit, and as the planner.
    return -(-min_pixels // (patch_size * merge_size) ** 2)


def merge_factor(vllm_config: VllmConfig) -> int:
    """Patches that the model's vision merger turns into one token; 1 for a model that does not merge."""
    hf_config = vllm_config.model_config.hf_config
    for config in (hf_config, getattr(hf_config, "thinker_config", None)):  # an omni model's part that takes media
        if (vision_config := getattr(config, "vision_config", None)) is not None:
            return getattr(vision_config, "spatial_merge_size", 1) ** 2
    return 1


def _warn_if_too_small(geometry: CacheGeometry, budget: MultiModalBudget) -> None:
    needed = num_blocks_needed(geometry.block_size, budget.encoder_cache_size, budget.mm_max_toks_per_item.values())
    if geometry.num_blocks < needed:
        logger.warning(
            "Encoder cache: encoder_cache_num_blocks_exact is %d, and %d would hold every item that vLLM admits here. "
            "Requests with an item of more than %d blocks (%d token rows) will be refused.",
            geometry.num_blocks,
            needed,
            geometry.num_item_blocks,
            geometry.num_item_blocks * geometry.block_size,
        )


def _warn_of_attention_block(geometry: CacheGeometry, budget: MultiModalBudget, config: NeuronCacheConfig) -> None:
    largest = budget.mm_max_toks_per_item.get("image", 0)
    if config.compiled_encoder and largest > geometry.encoder_block_size:
        logger.warning(
            "Encoder cache: the compiled encoder's attention block takes %d patches, and the processor makes images of "
            "up to %d. Requests with an image above %d token rows will be refused; raise encoder_attention_block_size "
            "to serve them.",
            config.encoder.encoder_attention_block_size,
            largest * config.encoder.encoder_attention_block_size // geometry.encoder_block_size,
            geometry.encoder_block_size,
        )
