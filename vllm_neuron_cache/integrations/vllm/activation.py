"""What the one key turns on: fills in manager, scheduler and worker of an engine's configuration."""

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.config.ec_manager_config import EncoderCacheManagerConfig
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_neuron_cache.config import NeuronCacheConfig, is_enabled
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.integrations.vllm.geometry import resolve_geometry
from vllm_neuron_cache.integrations.vllm.scheduler import BASE_SCHEDULER_KEY, acknowledges_steps

logger = init_logger("vllm.neuron_cache")

MANAGER_CLS = "vllm_neuron_cache.integrations.vllm.manager.BlockEncoderCacheManager"
SCHEDULER_CLS = "vllm_neuron_cache.integrations.vllm.scheduler.block_scheduler"
WORKER_CLS = {"vllm.v1.worker.cpu_worker.CPUWorker": "vllm_neuron_cache.integrations.vllm.worker.BlockCPUWorker"}
"""The worker to use in place of the one that the platform chose."""


def is_requested(engine_args: Any) -> bool:
    """Whether an engine's arguments ask for the cache: by the key, or by naming one of our classes."""
    manager = engine_args.ec_manager_config
    return (
        is_enabled(engine_args.additional_config)
        or getattr(manager, "encoder_cache_manager_cls", None) == MANAGER_CLS
        or engine_args.scheduler_cls == SCHEDULER_CLS
        or engine_args.worker_cls in WORKER_CLS.values()
    )


def uses_block_cache(vllm_config: VllmConfig) -> bool:
    """Whether an engine has this cache. Another in the same process may have none."""
    return vllm_config.ec_manager_config.encoder_cache_manager_cls == MANAGER_CLS


def validate(additional_config: Any) -> None:
    """Raises `ConfigurationError` for what is wrong in our namespaces, before vLLM builds anything."""
    NeuronCacheConfig.from_additional_config(additional_config)


def activate(vllm_config: VllmConfig) -> None:
    """Puts the encoder cache into a finished engine configuration, over the classes that vLLM chose. Mutates it.

    A model that this cache has nothing to do for (text only, or encoder-decoder) is left as it is, with a warning, and
    so is a stage of vLLM-Omni's with a stage cache whose worker has no encoder cache.
    Raises `ConfigurationError` for a combination that it cannot serve.
    """
    if NeuronCacheConfig.from_additional_config(vllm_config.additional_config).stage_cache is not None:
        # Only now: without the key this package does without vLLM-Omni.
        from vllm_neuron_cache.integrations.vllm_omni.activation import check_stage

        check_stage(vllm_config)
        if not _has_cache_worker(vllm_config.parallel_config.worker_cls):
            logger.info("Encoder cache: %s has none; vLLM's own cache stays.", vllm_config.parallel_config.worker_cls)
            return
    model_config = vllm_config.model_config
    if not _takes_multimodal_input(model_config) or model_config.is_encoder_decoder:
        kind = "is an encoder-decoder model" if model_config.is_encoder_decoder else "takes no multimodal input here"
        logger.warning("Encoder cache: %s %s; vLLM's own cache stays.", model_config.model, kind)
        return
    _refuse_unsupported(vllm_config)
    _set_manager(vllm_config)
    _set_scheduler(vllm_config)
    _set_worker(vllm_config)
    resolve_geometry(vllm_config)


def _takes_multimodal_input(model_config: Any) -> bool:
    if hasattr(type(model_config), "supports_multimodal_inputs"):  # vLLM 0.31 and later
        return model_config.supports_multimodal_inputs
    return MULTIMODAL_REGISTRY.supports_multimodal_inputs(model_config)


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    for what, remedy in _unsupported(vllm_config):
        raise ConfigurationError(
            f"the encoder cache does not work with {what} in this version. {remedy}, or remove the vllm_neuron_cache "
            "key."
        )


def _unsupported(vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
    """What is set and cannot be served, and what to do about it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline parallelism (pipeline_parallel_size={parallel.pipeline_parallel_size})",
            "Set pipeline_parallel_size to 1",
        )
    for setting in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, setting, 1) > 1:
            yield f"context parallelism ({setting}={getattr(parallel, setting)})", f"Set {setting} to 1"
    if model.runner_type == "pooling":
        # vLLM's front end cannot report one failed pooling request: it stops at an assertion, for all of them.
        yield 'pooling models (runner="pooling")', 'Set runner to "generate"'
    if vllm_config.use_v2_model_runner:
        yield "vLLM's V2 model runner, which this engine chose", "Set VLLM_USE_V2_MODEL_RUNNER=0 to have V1"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding (speculative_config)", "Remove speculative_config"
    if vllm_config.ec_transfer_config is not None:
        yield "encoder disaggregation (ec_transfer_config)", "Remove ec_transfer_config"
    if model.enable_prompt_embeds:
        yield "prompt embeddings (enable_prompt_embeds)", "Set enable_prompt_embeds to false"
    config = NeuronCacheConfig.from_additional_config(vllm_config.additional_config)
    if config.compiled_encoder and vllm_config.lora_config and vllm_config.lora_config.enable_tower_connector_lora:
        # vLLM's adapter layers take the adapter of each row from a table in the order of the requests.
        yield (
            "adapters in a compiled encoder (enable_tower_connector_lora and compiled_encoder)",
            "Set vllm_neuron_cache.compiled_encoder to false, or enable_tower_connector_lora",
        )
    if getattr(model.multimodal_config, "video_pruning_rate", None):
        yield "video pruning (video_pruning_rate)", "Remove video_pruning_rate"


def _set_manager(vllm_config: VllmConfig) -> None:
    configured = vllm_config.ec_manager_config.encoder_cache_manager_cls
    if configured not in (None, MANAGER_CLS):
        raise ConfigurationError(
            f"ec_manager_config names {configured}, and the vllm_neuron_cache key brings a manager of its own. "
            "Remove one of the two."
        )
    # Every engine gets an object of its own: the geometry is written into it.
    vllm_config.ec_manager_config = EncoderCacheManagerConfig(
        encoder_cache_manager_cls=MANAGER_CLS, manager_config=dict(vllm_config.ec_manager_config.manager_config)
    )


def _set_scheduler(vllm_config: VllmConfig) -> None:
    scheduler = vllm_config.scheduler_config
    base = scheduler.scheduler_cls
    if base is not None:
        base = resolve_obj_by_qualname(base) if isinstance(base, str) else base
        if acknowledges_steps(base):
            return
        vllm_config.ec_manager_config.manager_config[BASE_SCHEDULER_KEY] = f"{base.__module__}.{base.__qualname__}"
    scheduler.scheduler_cls = SCHEDULER_CLS


def _set_worker(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.worker_cls in WORKER_CLS:
        parallel.worker_cls = WORKER_CLS[parallel.worker_cls]
        return
    if parallel.worker_cls in WORKER_CLS.values():
        return
    if not _has_cache_worker(parallel.worker_cls):
        raise ConfigurationError(
            f"worker_cls is {parallel.worker_cls}, over which the encoder cache is not known to work; it knows "
            f"{', '.join(WORKER_CLS)}. Name a class that derives from BlockWorkerMixin "
            "(vllm_neuron_cache.integrations.vllm.worker) and from yours, or remove the vllm_neuron_cache key."
        )


def _has_cache_worker(worker_cls: str) -> bool:
    """Whether there is an encoder cache for a worker of this class."""
    if worker_cls in WORKER_CLS or worker_cls in WORKER_CLS.values():
        return True
    from vllm_neuron_cache.integrations.vllm.worker import BlockWorkerMixin

    return issubclass(resolve_obj_by_qualname(worker_cls), BlockWorkerMixin)
