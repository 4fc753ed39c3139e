"""The stage cache in the form that vLLM-Omni's runner takes its outputs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.integrations.vllm_omni.leftovers import share_of, split_outputs
from vllm_neuron_cache.stage_cache import (
    FullAttentionGroupView,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    StageCacheOutputs,
)
from vllm_neuron_cache.stage_cache.row_store import RowStore


class _Step(NamedTuple):
    """What is needed of a saved step beside its rows."""

    req_ids: Sequence[str]
    num_scheduled: Mapping[str, int]
    sizes: tuple[int, int]
    leftovers: Mapping[str, Any]
    hidden: torch.Tensor | None
    """`[0, hidden]`."""

    def spans(self) -> dict[str, slice]:
        """Where the tokens of each request are in the step."""
        spans, stop = {}, 0
        for req_id in self.req_ids:
            start, stop = stop, stop + self.num_scheduled.get(req_id, 0)
            spans[req_id] = slice(start, stop)
        return spans


class RunnerStageCache(OmniPrefixCacheManager):
    """Takes the place of vLLM-Omni's manager in its runner, which expects two things more of it: every key for every
    request of the step, and its own way of dealing out what has no row per token.

    A request whose rows are not to be had does not raise: it gets zeros of the usual shape, and `take_failures` names
    it. Whoever calls `materialize` has to ask.
    """

    def __init__(self, config: PrefixCacheConfig, input_batch: Any, store: RowStore) -> None:
        """`input_batch` is the runner's. Raises `OmniPrefixCacheUnmatchError` for a layout that slots do not mirror."""
        super().__init__(config, FullAttentionGroupView(input_batch, config.block_size), store=store)
        self._input_batch = input_batch
        self._policy = ModelCachePolicy()
        self._scheduled: Mapping[str, int] = {}
        self._steps: dict[int, _Step] = {}
        self._failures: dict[int, dict[str, str]] = {}

    def register_policy(self, policy: ModelCachePolicy) -> None:
        super().register_policy(policy)
        self._policy = policy

    def new_step_starts(self, scheduler_output: Any) -> None:
        super().new_step_starts(scheduler_output)
        self._scheduled = dict(scheduler_output.num_scheduled_tokens)

    def save_outputs(
        self,
        hidden_states: torch.Tensor | None,
        mm_outputs: dict[str, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        sizes = (num_tokens_unpadded, num_tokens_padded)
        rows, leftovers = split_outputs(self._policy, mm_outputs or {}, sizes)
        step_id = super().save_outputs(
            hidden_states, rows, num_tokens_unpadded=num_tokens_unpadded, num_tokens_padded=num_tokens_padded
        )
        self._steps[step_id] = _Step(
            # Copies of both: the batch is the next step's before this one's outputs are built.
            req_ids=list(self._input_batch.req_ids),
            num_scheduled=self._scheduled,
            sizes=sizes,
            leftovers={key: self._store.copy_to_host(value) for key, value in leftovers.items()},
            hidden=None
            if hidden_states is None
            else torch.empty(0, *hidden_states.shape[1:], dtype=hidden_states.dtype),
        )
        return step_id

    def materialize(self, step_id: int, req_ids: Sequence[str]) -> StageCacheOutputs:
        try:
            outputs = super().materialize(step_id, req_ids)
        except OmniPrefixCacheUnmatchError as error:
            if error.outputs is None:  # the call was wrong, and nothing is used up
                raise
            outputs = error.outputs
            name = type(error).__name__
            self._failures[step_id] = {req_id: f"{name}: {reason}" for req_id, reason in error.reasons.items()}
        return self._complete(outputs, self._steps.pop(step_id), req_ids)

    def discard_step(self, step_id: int) -> None:
        super().discard_step(step_id)
        del self._steps[step_id]

    def take_failures(self, step_id: int) -> Mapping[str, str]:
        """Requests of a materialized step whose rows were not to be had, and what their clients are told. Once."""
        return self._failures.pop(step_id, {})

    def _complete(self, outputs: StageCacheOutputs, step: _Step, req_ids: Sequence[str]) -> StageCacheOutputs:
        hidden, mm_outputs = outputs
        if hidden is not None and len(hidden) < len(req_ids):
            hidden |= {
                req_id: step.hidden.new_zeros(step.num_scheduled.get(req_id, 0), *step.hidden.shape[1:])
                for req_id in req_ids
                if req_id not in hidden
            }
        complete = {}
        for key, values in mm_outputs.items():
            if values:  # else all requests have failed
                empty = next(iter(values.values()))[:0]
                complete[key] = {req_id: values[req_id] if req_id in values else empty.clone() for req_id in req_ids}
        spans = step.spans() if step.leftovers else {}
        for key, value in step.leftovers.items():
            complete[key] = {req_id: share_of(value, spans[req_id], step.sizes) for req_id in req_ids}
        return StageCacheOutputs(hidden, complete)
