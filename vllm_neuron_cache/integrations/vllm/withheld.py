"""Hands data to the workers that vLLM kept back, when it is needed after all."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.request import Request

from vllm_neuron_cache.integrations.vllm.metadata import RestoredInput


class WithheldInputs:
    """Items that a worker knows without their data.

    vLLM does not send the pixels of an item that lies in a request's KV prefix hit, because no encoder run can be
    scheduled for it. That holds until the request is put back to its beginning and its KV blocks are not found again:
    by a preemption, a reset of the prefix cache, or because they were wrong.
    """

    def __init__(self) -> None:
        self._input_ids: dict[str, set[int]] = {}

    def follow(self, scheduler_output: Any, requests: Mapping[str, Request]) -> None:
        """Notes what a step keeps back, and adds to its metadata what it encodes without having been sent before.
        Mutates the scheduler's output."""
        for request_id in scheduler_output.finished_req_ids:
            self._input_ids.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.mm_features is not requests[new.req_id].mm_features:
                whole = requests[new.req_id].mm_features
                withheld = {i for i, (sent, kept) in enumerate(zip(new.mm_features, whole)) if sent is not kept}
                if withheld:
                    self._input_ids[new.req_id] = withheld
        if not self._input_ids:
            return
        restored = []
        for request_id, input_ids in scheduler_output.scheduled_encoder_inputs.items():
            withheld = self._input_ids.get(request_id, set())
            for input_id in withheld.intersection(input_ids):
                withheld.remove(input_id)
                restored.append(RestoredInput(request_id, input_id, requests[request_id].mm_features[input_id]))
        if restored:
            scheduler_output.ec_manager_metadata = scheduler_output.ec_manager_metadata._replace(
                restored=tuple(restored)
            )
