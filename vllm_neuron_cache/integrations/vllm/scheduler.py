"""The scheduler's part of the protocol, composed over whichever scheduler vLLM would have used."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.request import RequestStatus

from vllm_neuron_cache.encoder_cache.report import WorkerEpochs
from vllm_neuron_cache.integrations.vllm.failures import Departures, FailureHandler
from vllm_neuron_cache.integrations.vllm.identity import give_cache_keys
from vllm_neuron_cache.integrations.vllm.metadata import report_of
from vllm_neuron_cache.integrations.vllm.withheld import WithheldInputs

BASE_SCHEDULER_KEY = "scheduler_cls"
"""In `ec_manager_config.manager_config`: the scheduler class to compose over, if it is not vLLM's own choice."""


class BlockSchedulerMixin:
    """Closes every scheduling pass, acknowledges every step to the `BlockEncoderCacheManager`, and ends requests that
    the workers could not serve.

    It decides nothing else about requests; synchronous, asynchronous and third-party schedulers keep their behaviour.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Only now, in the process of the engine core: it imports this module.
        from vllm_neuron_cache.integrations.vllm.engine_core import install

        install()
        super().__init__(*args, **kwargs)
        lora = self.vllm_config.lora_config
        self._tower_takes_adapters = bool(getattr(lora, "enable_tower_connector_lora", False))
        self._withheld = WithheldInputs()
        self._departures = Departures(self.kv_cache_manager)
        self._failures = FailureHandler(self, self._departures)

    def add_request(self, request: Any) -> None:
        self._give_cache_keys(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.encoder_cache_manager.end_pass(output.num_scheduled_tokens, output.scheduled_encoder_inputs)
        self._withheld.follow(output, self.requests)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        manager = self.encoder_cache_manager
        seq = scheduler_output.ec_manager_metadata.step.seq
        # Before the base class, which frees inputs: what the step wrote may then be evictable at once.
        manager.acknowledge(scheduler_output.ec_manager_metadata)
        report = report_of(model_runner_output)
        if report is None:
            failed = ()
        else:
            self.follow_workers([report.epochs])
            failed = self._failures.handle(report, seq)
        self._departures.acknowledge(seq)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if failed:
            self._failures.add_outputs(outputs, failed)
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        # Iterated twice.
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = list(request_ids)
        self._note_departures(self.requests if request_ids is None else request_ids)
        return super().finish_requests(request_ids, finished_status)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._note_departures(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def follow_workers(self, epochs: Sequence[WorkerEpochs]) -> None:
        """Empties the pool if the workers have dropped their rows, and gives new keys after a change of weights.

        A request that has been scheduled keeps its keys, which its workers know, until it ends.
        """
        # Ranks execute the same calls; one that is behind for now would be asked again by the next step's output.
        newest = max(epochs)
        known = self.encoder_cache_manager.worker_epochs
        if newest <= known:  # a step that was in flight tells of the time before
            return
        self.encoder_cache_manager.follow_workers(newest)
        if newest.weights != known.weights:
            for request in self.requests.values():
                if not request.num_computed_tokens and not request.num_preemptions:
                    self._give_cache_keys(request)

    def _give_cache_keys(self, request: Any) -> None:
        if request.mm_features:
            give_cache_keys(
                request,
                tower_takes_adapters=self._tower_takes_adapters,
                weights_epoch=self.encoder_cache_manager.worker_epochs.weights,
            )

    def _note_departures(self, request_ids: str | Iterable[str]) -> None:
        seq = self.encoder_cache_manager.last_step_in_flight
        if seq is not None:
            for request_id in (request_ids,) if isinstance(request_ids, str) else request_ids:
                if request_id in self.requests:
                    self._departures.note(self.requests[request_id], seq)


_composed: dict[type, type] = {}


def compose(base: type) -> type:
    """`base` with the mixin over it; the same class every time."""
    if issubclass(base, BlockSchedulerMixin):
        return base
    if base not in _composed:
        _composed[base] = type(f"Block{base.__name__}", (BlockSchedulerMixin, base), {"__module__": __name__})
    return _composed[base]


def block_scheduler(*, vllm_config: VllmConfig, **kwargs: Any) -> Any:
    """What `--scheduler-cls` names: vLLM calls it like a class and gets a scheduler.

    A function and not a class, because the base is known only now: vLLM's synchronous or asynchronous scheduler, or
    the one under `BASE_SCHEDULER_KEY`.
    """
    base_path = vllm_config.ec_manager_config.manager_config.get(BASE_SCHEDULER_KEY)
    if base_path is not None:
        base = resolve_obj_by_qualname(base_path)
    elif vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as base
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as base
    return compose(base)(vllm_config=vllm_config, **kwargs)


def acknowledges_steps(scheduler_cls: Callable[..., Any]) -> bool:
    """Whether a scheduler made by `scheduler_cls` drives a `BlockEncoderCacheManager`."""
    if scheduler_cls is block_scheduler:
        return True
    return isinstance(scheduler_cls, type) and issubclass(scheduler_cls, BlockSchedulerMixin)
