"""Which stages get a stage cache: one gate, which refuses what the cache cannot mirror."""

from typing import Any

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.interface import PrefixCacheConfig

MIRRORED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's classes of a KV group that keeps every token in its block until the request ends. By name, because this module
does without vllm, and exactly: a subclass may evict."""

_TURN_OFF = "turn enable_prefix_caching off for this stage"


def stage_prefix_cache_config(
    *,
    kv_cache_config: Any,
    cache_config: Any,
    kv_transfer_config: Any,
    scheduler_config: Any,
    model_config: Any,
    is_pooling_model: bool,
    speculative_config: Any = None,
    host_bytes: int | None = None,
    device_bytes: int | None = None,
) -> PrefixCacheConfig | None:
    """Whether a stage gets a cache, and of what size. Arguments are vLLM's objects, as the runner has them when its KV
    cache is initialized, and the caps of `PrefixCacheConfig`.

    None for a stage that has no use for one: without prefix caching, pooling (it never saves), or diffusion (it has no
    KV cache). Raises `OmniPrefixCacheUnmatchError` for a stage that asks for one and whose rows it could not mirror;
    what is unknown is refused.
    """
    if is_pooling_model or kv_cache_config is None:
        return None
    if not _known(cache_config, "enable_prefix_caching", "cache_config"):
        return None
    _refuse_stage_without_consumer(model_config)
    _refuse_received_kv(kv_transfer_config)
    _refuse_speculation(speculative_config)
    _refuse_context_parallelism(kv_cache_config, cache_config, model_config)
    block_size = _mirrored_block_size(_known(kv_cache_config, "kv_cache_groups", "kv_cache_config"))
    _refuse_part_blocks(cache_config, block_size)
    num_blocks = _known(kv_cache_config, "num_blocks", "kv_cache_config")
    capacity = getattr(scheduler_config, "max_num_batched_tokens", None) or getattr(model_config, "max_model_len", None)
    if not capacity:
        raise OmniPrefixCacheUnmatchError(
            "the stage cache cannot size its staging: scheduler_config has no max_num_batched_tokens and model_config "
            f"no max_model_len; set one, or {_TURN_OFF}"
        )
    return PrefixCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        staging_capacity_tokens=capacity,
        host_bytes=host_bytes,
        device_bytes=device_bytes,
    )


def holds_mirror(*, pipeline_rank: int, pipeline_size: int, tensor_rank: int) -> bool:
    """Whether this rank keeps rows. The last pipeline rank alone sees a stage's outputs, and every tensor-parallel rank
    sees the same: one mirror is enough."""
    return pipeline_rank == pipeline_size - 1 and tensor_rank == 0


def _known(config: Any, name: str, of: str) -> Any:
    try:
        return getattr(config, name)
    except AttributeError:
        raise OmniPrefixCacheUnmatchError(
            f"{of} has no {name}, so that it is unknown whether the stage cache can mirror this stage; {_TURN_OFF}"
        ) from None


def _refuse_stage_without_consumer(model_config: Any) -> None:
    if getattr(model_config, "worker_type", None) == "generation":
        raise OmniPrefixCacheUnmatchError(
            f"stage {getattr(model_config, 'model_stage', 'of generation')} decodes codecs: nothing after it takes its "
            f"hidden states, and the stage cache would only copy them to the host; {_TURN_OFF}"
        )


def _refuse_received_kv(kv_transfer_config: Any) -> None:
    if kv_transfer_config is not None and _known(kv_transfer_config, "is_kv_consumer", "kv_transfer_config"):
        raise OmniPrefixCacheUnmatchError(
            f"kv_role {getattr(kv_transfer_config, 'kv_role', 'kv_consumer')} receives KV that was computed elsewhere. "
            "It is reported like a local hit, and the stage cache has no rows for it. Make the stage a kv_producer, or "
            f"{_TURN_OFF}"
        )


def _refuse_speculation(speculative_config: Any) -> None:
    if speculative_config is not None:
        raise OmniPrefixCacheUnmatchError(
            "speculative decoding: under asynchronous scheduling a step's positions are those of accepted drafts "
            f"before any is, and rows would go to wrong slots. Turn speculation off, or {_TURN_OFF}"
        )


def _refuse_part_blocks(cache_config: Any, block_size: int) -> None:
    unit = getattr(cache_config, "prefix_match_unit", None)
    if unit is not None and unit != block_size:
        raise OmniPrefixCacheUnmatchError(
            f"prefix_match_unit {unit} lets a hit end within a block of {block_size}, and the stage cache mirrors "
            f"whole blocks. Unset prefix_match_unit, or {_TURN_OFF}"
        )


def _refuse_context_parallelism(*configs: Any) -> None:
    for config in configs:
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            size = getattr(getattr(config, "parallel_config", config), name, 1)
            if size != 1:
                raise OmniPrefixCacheUnmatchError(
                    f"{name} {size} spreads the tokens of a block over ranks, which the stage cache does not mirror; "
                    f"{_TURN_OFF}"
                )


def _mirrored_block_size(kv_cache_groups: Any) -> int:
    groups = list(kv_cache_groups or ())
    if len(groups) != 1:
        raise OmniPrefixCacheUnmatchError(
            f"the KV cache has {len(groups)} groups of layers, each with blocks of its own, and the stage cache "
            f"mirrors exactly one; {_TURN_OFF}"
        )
    spec = _known(groups[0], "kv_cache_spec", "the KV group")
    kind = type(spec).__name__
    if kind not in MIRRORED_SPECS:
        raise OmniPrefixCacheUnmatchError(
            f"the KV group is a {kind}; the stage cache mirrors {' and '.join(MIRRORED_SPECS)} alone, whose blocks "
            f"keep every token of a request; {_TURN_OFF}"
        )
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            raise OmniPrefixCacheUnmatchError(
                f"the KV group has {name} {getattr(spec, name)}: its blocks may be given up before a request ends, "
                f"which the stage cache does not mirror; {_TURN_OFF}"
            )
    return _known(spec, "block_size", "the KV group's spec")
