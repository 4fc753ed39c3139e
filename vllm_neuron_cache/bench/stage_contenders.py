"""Who takes part in the stage cache's benchmark: the product, and straight-line code."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from vllm_neuron_cache.simulation.stage_schedule import ScheduledBatch, ScheduledStep
from vllm_neuron_cache.stage_cache import (
    FullAttentionGroupView,
    KeySpec,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixBlockPool,
    PrefixCacheConfig,
)
from vllm_neuron_cache.stage_cache.interface import HIDDEN_KEY
from vllm_neuron_cache.stage_cache.row_store import as_rows

MM_KEY = "hidden_states.layer_24"
"""The immediate key beside the hidden states; a name of Qwen3-Omni's thinker."""


class Cache(Protocol):
    """A contender. Ids and outputs are its own; `rows` gives the outputs one form."""

    def new_step(self, step: ScheduledStep) -> None: ...
    def save(self, hidden: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> Any: ...
    def materialize(self, step_id: Any, req_ids: list[str]) -> Any: ...
    def close(self) -> None: ...


NUM_VALUES = 8191
"""Different rows that contents are mapped to. A prime, so that neighbours do not collide."""


class Rows:
    """Contents as rows of bfloat16, `[num, hidden_size]`, for the hidden states and for the key beside them."""

    def __init__(self, hidden_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (2, NUM_VALUES, hidden_size)
        self._tables = torch.randint(-32000, 32000, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)

    def of(self, contents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.from_numpy(np.asarray(contents, dtype=np.int64) * 2_654_435_761 % (1 << 32) % NUM_VALUES)
        hidden, rows = self._tables[:, indices]
        return hidden, rows


class ManagerCache:
    """A cache of the names that vLLM-Omni's manager has, in `_manager`, as a runner calls it."""

    _manager: Any

    def new_step(self, step: ScheduledStep) -> None:
        self._manager.new_step_starts(step.scheduler_output)

    def save(self, hidden: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> int:
        return self._manager.save_outputs(
            hidden, {MM_KEY: rows}, num_tokens_unpadded=num_tokens, num_tokens_padded=num_tokens
        )

    def materialize(self, step_id: int, req_ids: list[str]) -> Any:
        outputs = self._manager.materialize(step_id, req_ids)
        return outputs.hidden_states, outputs.mm_outputs[MM_KEY]

    def close(self) -> None:
        self._manager.shutdown()


class OurCache(ManagerCache):
    """The product."""

    def __init__(self, config: PrefixCacheConfig, batch: ScheduledBatch, keys: Sequence[KeySpec]) -> None:
        self._manager = OmniPrefixCacheManager(config, FullAttentionGroupView(batch, config.block_size))
        self._manager.register_policy(ModelCachePolicy(keys=tuple(keys)))


class StraightLine:
    """What the rows need and nothing else: one copy and one scatter per key and step, one gather per hit. No order of
    writes and reads, no failure, no protection of rows whose block is given away."""

    def __init__(self, config: PrefixCacheConfig, batch: ScheduledBatch, keys: Sequence[KeySpec]) -> None:
        self._batch = batch
        self._block_size = config.block_size
        self._pools = PrefixBlockPool(config)
        self._specs = {key.name: key for key in keys}
        for key in keys:
            self._pools.open_key(key)

    def new_step(self, step: ScheduledStep) -> None:
        self._step = step
        self._hits = {
            request.req_id: (request.num_computed_tokens, request.block_ids[0])
            for request in step.scheduler_output.scheduled_new_reqs
            if request.num_computed_tokens
        }

    def save(self, hidden: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> Any:
        counts = np.fromiter(self._step.scheduler_output.num_scheduled_tokens.values(), dtype=np.int64)
        starts = self._batch.num_computed_tokens_cpu[: len(counts)]
        stops = np.cumsum(counts)
        requests = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(num_tokens) - np.repeat(stops - counts, counts) + np.repeat(starts, counts)
        blocks = self._batch.table[requests, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        copies = {}
        for key, tensor in ((HIDDEN_KEY, hidden), (MM_KEY, rows)):
            copies[key] = tensor.clone()
            self._pools.write(key, slots, as_rows(copies[key]))
        spans = dict(zip(self._step.req_ids, zip((stops - counts).tolist(), stops.tolist())))
        return spans, copies, self._hits

    def materialize(self, step_id: Any, req_ids: list[str]) -> Any:
        spans, copies, hits = step_id
        outputs = []
        for key, copy in copies.items():
            by_request = {}
            for req_id in req_ids:
                first, stop = spans[req_id]
                num_hit, block_ids = hits.get(req_id, (0, []))
                if not num_hit:
                    by_request[req_id] = copy[first:stop].clone()
                    continue
                out = copy.new_empty((num_hit + stop - first, copy.shape[1]))
                positions = np.arange(num_hit)
                blocks = np.asarray(block_ids, dtype=np.int64)
                slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
                self._pools.read(key, slots, as_rows(out)[:num_hit])
                out[num_hit:] = copy[first:stop]
                by_request[req_id] = out
            outputs.append(by_request)
        return tuple(outputs)

    def close(self) -> None:
        pass
