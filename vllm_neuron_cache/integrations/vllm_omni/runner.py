"""The stage cache in the model runner of an autoregressive stage."""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm_omni.core.prefix_cache.runner_mixin import PrefixCacheRunnerMixin

from vllm_neuron_cache.config import OWN_NAMESPACE, NeuronCacheConfig
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.integrations.vllm_omni.cache import RunnerStageCache
from vllm_neuron_cache.integrations.vllm_omni.failures import attach_failures
from vllm_neuron_cache.stage_cache import (
    HIDDEN_KEY,
    HostRowStore,
    KeySpec,
    ModelCachePolicy,
    PrefixCacheConfig,
    holds_mirror,
    stage_prefix_cache_config,
)
from vllm_neuron_cache.stage_cache.policy import check_memory
from vllm_neuron_cache.stage_cache.row_store import RowStore

logger = init_logger("vllm.neuron_cache")


class StageCacheRunnerMixin:
    """Over a runner of vLLM-Omni's: makes this package's cache where that runner would make its own, and calls it
    through that runner's own methods. A rank without the mirror runs as it does without prefix caching; what it puts
    out is not used."""

    _failed_requests: frozenset[str] = frozenset()
    """Requests whose rows were not to be had, until they finish."""

    def _snapshot_prefix_cache_model_policy(self, model: Any) -> None:
        self._omni_cache_policy = ModelCachePolicy.from_model(model)

    def initialize_metadata_builders(self, kv_cache_config: Any, kernel_block_sizes: list[int]) -> None:
        # Before the base class, whose gate lets nothing pass that is refused here: so the reasons are these.
        self._stage_cache_sizes(kv_cache_config)
        super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)

    def initialize_kv_cache(self, kv_cache_config: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, **kwargs)
        # In the place of the base class's configuration; and not in the first step, as the base class does: what is
        # refused is refused before there are requests.
        is_profiling = kwargs.get("is_profiling", False)
        self._omni_prefix_cache_cfg = None if is_profiling else self._stage_cache_sizes(self.kv_cache_config)
        self._ensure_omni_prefix_cache()

    def _ensure_omni_prefix_cache(self) -> None:
        if self.omni_prefix_cache is not None:  # of a KV cache that was initialized before
            self.omni_prefix_cache.shutdown()
            self.omni_prefix_cache = None
        config, self._omni_prefix_cache_cfg = self._omni_prefix_cache_cfg, None
        if config is None or not self._holds_mirror():
            return
        store = self._row_store(config)
        cache = RunnerStageCache(config, self.input_batch, store)
        self._require_room(store)
        cache.register_policy(self._omni_cache_policy)
        self.omni_prefix_cache = cache
        logger.info(
            "Stage cache: mirrors %d KV blocks of %d tokens in %s.",
            config.num_blocks, config.block_size, type(store).__name__,
        )  # fmt: skip

    def _prefix_cache_step_begin(self, scheduler_output: Any) -> None:
        super()._prefix_cache_step_begin(scheduler_output)
        if self._failed_requests:
            # What they handed on before they failed is not to be sent when they finish.
            ended = self._failed_requests & set(scheduler_output.finished_req_ids)
            pending = getattr(self, "_pending_full_payload_send", {})  # of a stage with a connector
            for req_id in ended:
                pending.pop(req_id, None)
            self._failed_requests -= ended

    def _build_omni_model_runner_output_from_snapshot(
        self, *, prefix_cache_step_id: int | None = None, **snapshot: Any
    ) -> Any:
        output = super()._build_omni_model_runner_output_from_snapshot(
            prefix_cache_step_id=prefix_cache_step_id, **snapshot
        )
        if prefix_cache_step_id is not None:
            failures = self.omni_prefix_cache.take_failures(prefix_cache_step_id)
            if failures:
                self._failed_requests |= failures.keys()
                attach_failures(output, failures)
        return output

    def _stage_cache_sizes(self, kv_cache_config: Any) -> PrefixCacheConfig | None:
        own = NeuronCacheConfig.from_additional_config(self.vllm_config.additional_config).stage_cache
        return stage_prefix_cache_config(
            kv_cache_config=kv_cache_config,
            cache_config=self.cache_config,
            kv_transfer_config=self.vllm_config.kv_transfer_config,
            scheduler_config=self.scheduler_config,
            model_config=self.model_config,
            is_pooling_model=self.is_pooling_model,
            speculative_config=self.speculative_config,
            host_bytes=own.host_bytes,
            device_bytes=own.device_bytes,
        )

    def _holds_mirror(self) -> bool:
        pipeline, tensor_rank = get_pp_group(), get_tp_group().rank_in_group
        if getattr(self.get_model(), "has_postprocess", False):
            # It takes the rows of the whole prompt, and what it makes of them goes into the next forward of each rank.
            tensor_rank = 0
        return holds_mirror(
            pipeline_rank=pipeline.rank_in_group, pipeline_size=pipeline.world_size, tensor_rank=tensor_rank
        )

    def _row_store(self, config: PrefixCacheConfig) -> RowStore:
        own = NeuronCacheConfig.from_additional_config(self.vllm_config.additional_config)
        if own.stage_cache.store == "host":
            return HostRowStore(config)
        from vllm_neuron_cache.stage_cache import DeviceRowStore

        lane = make_lane(own.lane, own.kernel)
        return DeviceRowStore(config, device=self.device, lane=lane, max_read_rows=self.max_model_len)

    def _require_room(self, store: RowStore) -> None:
        """Hidden states come up in the first step. Without room for them every hit would fail."""
        policy = self._omni_cache_policy
        if policy.needs_full_hidden_states:
            dtype = str(self.dtype).removeprefix("torch.")
            hidden = KeySpec(HIDDEN_KEY, (self.model_config.get_hidden_size(),), dtype)
            memory = store.memory([*policy.specs.values(), policy.specs.get(HIDDEN_KEY, hidden)])
            check_memory(memory, getattr(store.config, store.limit_name), store.limit_name)


_composed: dict[type, type] = {}


def compose(base: type) -> type:
    """`base` with the mixin over it; the same class every time. Raises `ConfigurationError` for a runner that has no
    cache to be replaced."""
    if issubclass(base, StageCacheRunnerMixin):
        return base
    if not issubclass(base, PrefixCacheRunnerMixin):
        raise ConfigurationError(
            f"{OWN_NAMESPACE}.stage_cache works with vLLM-Omni's V1 model runners, and this stage has a "
            f"{base.__name__}. Choose V1 (use_v2_model_runner: false), or remove the key."
        )
    if base not in _composed:
        _composed[base] = type(f"StageCache{base.__name__}", (StageCacheRunnerMixin, base), {"__module__": __name__})
    return _composed[base]
