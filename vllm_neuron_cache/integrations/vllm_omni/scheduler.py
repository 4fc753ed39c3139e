"""Ends the requests whose rows the stage cache could not hand on, and no others."""

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from vllm_neuron_cache.integrations.vllm.failures import FailureHandler
from vllm_neuron_cache.integrations.vllm_omni.failures import failures_of

logger = init_logger("vllm.neuron_cache")


class StageCacheSchedulerMixin:
    """Over a stage's scheduler, whichever it is."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Before the base class, so that nothing of the step reaches their clients.
        failed = self._end(failures_of(model_runner_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        ids = {request.request_id for request, _ in failed}
        for request, _ in failed:
            # vLLM-Omni calls them aborted, and the first that a client is told is what it believes.
            for_client = outputs.get(request.client_index)
            if for_client is not None:
                for_client.outputs = [output for output in for_client.outputs if output.request_id not in ids]
        FailureHandler.add_outputs(outputs, failed)
        return outputs

    def _end(self, failures: Mapping[str, str]) -> list[tuple[Request, str]]:
        failed = []
        for req_id, text in failures.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished():  # aborted meanwhile
                continue
            logger.warning("Stage cache: request %s failed: %s", req_id, text)
            if request.status is RequestStatus.RUNNING:
                # Whoever comes with the same prompt would hit the same blocks, and fail for want of the same rows.
                block_ids = self.kv_cache_manager.get_block_ids(req_id)
                self.kv_cache_manager.evict_blocks({block_id for group in block_ids for block_id in group})
            failed.append((request, text))
        if failed:
            self.finish_requests([request.request_id for request, _ in failed], RequestStatus.FINISHED_ERROR)
        return failed


_composed: dict[type, type] = {}


def compose(base: Any) -> Any:
    """`base` with the mixin over it; the same class every time. What vLLM calls to make a scheduler may be a function,
    as the encoder cache's is; then the mixin comes over what it makes."""
    if not isinstance(base, type):

        def make(**kwargs: Any) -> Any:
            scheduler = base(**kwargs)
            scheduler.__class__ = compose(type(scheduler))
            return scheduler

        return make
    if issubclass(base, StageCacheSchedulerMixin):
        return base
    if base not in _composed:
        _composed[base] = type(f"StageCache{base.__name__}", (StageCacheSchedulerMixin, base), {"__module__": __name__})
    return _composed[base]
