"""What the key `stage_cache` turns on in a stage of vLLM-Omni."""

import importlib.util
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_neuron_cache.config import OWN_NAMESPACE, NeuronCacheConfig, StageCacheConfig, is_enabled
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.integrations.vllm.hooks import wrap_once

logger = init_logger("vllm.neuron_cache")

SUPPORTED_VLLM_OMNI = "0.30."
"""How the versions of vLLM-Omni begin whose runner this package knows."""

_KEY = f"{OWN_NAMESPACE}.stage_cache"


def stage_cache_config(vllm_config: Any) -> StageCacheConfig | None:
    """What an engine's configuration says under the key; None without it."""
    if not is_enabled(vllm_config.additional_config):
        return None
    return NeuronCacheConfig.from_additional_config(vllm_config.additional_config).stage_cache


def check_stage(vllm_config: Any) -> None:
    """Raises `ConfigurationError` unless the engine is a stage of a vLLM-Omni that this package knows."""
    if importlib.util.find_spec("vllm_omni") is None:
        raise ConfigurationError(
            f"{_KEY} is for the stages of vLLM-Omni, which is not installed. Install it, or remove the key."
        )
    import vllm_omni
    from vllm_omni.config import OmniModelConfig

    if not vllm_omni.__version__.startswith(SUPPORTED_VLLM_OMNI):
        raise ConfigurationError(
            f"{_KEY} works with vLLM-Omni {SUPPORTED_VLLM_OMNI}x, and {vllm_omni.__version__} is installed. Install "
            "that one, or remove the key."
        )
    if not isinstance(vllm_config.model_config, OmniModelConfig):
        raise ConfigurationError(
            f"{_KEY} is for the stages of vLLM-Omni, and this engine is vLLM's own. Remove the key, or give it to a "
            "stage of a pipeline."
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.warning("%s does nothing in a stage whose enable_prefix_caching is off.", _KEY)


def install() -> None:
    """Puts the mixins over the runner and the scheduler of a stage that has the key, when they are made. Calling it
    again changes nothing."""
    wrap_once(WorkerWrapperBase, "init_device", _composing_runner)
    wrap_once(EngineCore, "_initialize_kv_caches", _composing_scheduler)


def _composing_runner(init_device: Any) -> Any:
    def wrapper(self: WorkerWrapperBase) -> None:
        init_device(self)
        if stage_cache_config(self.vllm_config) is not None:
            from vllm_neuron_cache.integrations.vllm_omni.runner import compose

            self.worker.model_runner.__class__ = compose(type(self.worker.model_runner))

    return wrapper


def _composing_scheduler(initialize_kv_caches: Any) -> Any:
    # The last call before the scheduler is made, in a process that may have loaded its plugins, and this one, just now.
    # The workers have their copies of the configuration: the class, which has no name to be found by, stays here.
    def wrapper(self: EngineCore, vllm_config: Any) -> Any:
        kv_cache_config = initialize_kv_caches(self, vllm_config)
        if stage_cache_config(vllm_config) is not None:
            from vllm_neuron_cache.integrations.vllm_omni.scheduler import compose

            scheduler_config = vllm_config.scheduler_config
            scheduler_config.scheduler_cls = compose(scheduler_config.get_scheduler_cls())
        return kv_cache_config

    return wrapper
