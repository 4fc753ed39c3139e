"""Puts together what a step hands on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.counters import StageCacheCounters
from vllm_neuron_cache.stage_cache.interface import HIDDEN_KEY, StageCacheOutputs
from vllm_neuron_cache.stage_cache.reads import HitRead
from vllm_neuron_cache.stage_cache.values import map_tensors

if TYPE_CHECKING:
    from vllm_neuron_cache.stage_cache.row_store import StagedRows


@dataclass(kw_only=True, slots=True)
class SavedStep:
    """A step between save and use. Nothing in it changes, but that its reads get their rows."""

    slot: int
    """Of the staging buffers."""
    req_ids: Sequence[str]
    """Of the batch, in its order."""
    row_starts: np.ndarray
    """int64 `[R]`, the first row that each request hands on, within the batch."""
    row_stops: np.ndarray
    reads: Mapping[str, HitRead]
    """For each request with rows from before the step."""
    sources: Mapping[str, "StagedRows"]
    """For each key with a row per token that the step computed."""
    leftover: Mapping[str, Any]
    broken: Mapping[str, str]
    """Key -> why no request can have it."""
    refused: Mapping[str, str]
    """Key -> why the cache has no rows of earlier steps."""


@dataclass(kw_only=True, slots=True)
class Assembly:
    """The outputs of one step for some of its requests, and who cannot have theirs."""

    step_id: int
    step: SavedStep
    failures: dict[str, str] = field(default_factory=dict)
    """Request id -> what is wrong with its rows."""
    counts: StageCacheCounters = field(default_factory=StageCacheCounters)
    """Of this step alone."""

    def build(self, req_ids: list[str]) -> StageCacheOutputs:
        """Copies the rows of `req_ids`, whose reads have ended. Outputs share no memory with the cache, nor with one
        another. Raises `OmniPrefixCacheUnmatchError` with the outputs of the others if some have failed."""
        hidden = None
        mm_outputs: dict[str, dict[str, Any]] = {}
        index_of = {req_id: index for index, req_id in enumerate(self.step.req_ids)}
        for key in self._keys(req_ids):
            outputs = self._rows_of(key, req_ids, index_of)
            if key == HIDDEN_KEY:
                hidden = outputs
            elif outputs:
                mm_outputs[key] = outputs
        for key, value in self.step.leftover.items():
            mm_outputs[key] = {req_id: map_tensors(value, lambda tensor: tensor.clone()) for req_id in req_ids}
        if self.failures:
            for outputs in (hidden or {}, *mm_outputs.values()):
                for req_id in self.failures:
                    outputs.pop(req_id, None)
            self.counts.requests_failed += len(self.failures)
            text = "; ".join(f"request {req_id}: {reason}" for req_id, reason in self.failures.items())
            raise OmniPrefixCacheUnmatchError(
                f"step {self.step_id} cannot hand on all rows: {text}. End these requests; the others' rows are in "
                "`outputs`",
                reasons=self.failures,
                outputs=StageCacheOutputs(hidden, mm_outputs),
            )
        return StageCacheOutputs(hidden, mm_outputs)

    def _keys(self, req_ids: Iterable[str]) -> list[str]:
        keys = {*self.step.sources, *self.step.broken}
        for req_id in req_ids:
            read = self.step.reads.get(req_id)
            if read is not None:
                keys |= read.keys | read.lost
        return sorted(keys)

    def _rows_of(self, key: str, req_ids: list[str], index_of: Mapping[str, int]) -> dict[str, Any]:
        reason = self.step.broken.get(key)
        source = self.step.sources.get(key)
        rows = None
        if reason is None and source is not None:
            try:
                rows = source.rows(key)
            except Exception as error:
                reason = f"the rows did not reach the host: {error}"
        if reason is not None:
            self.failures |= {req_id: f"{key}: {reason}" for req_id in req_ids}
            return {}
        outputs = {}
        for req_id in req_ids:
            if req_id in self.failures:
                continue
            index = index_of[req_id]
            new = None if rows is None else rows[self.step.row_starts[index] : self.step.row_stops[index]]
            read = self.step.reads.get(req_id)
            if read is None:
                if new is not None:
                    outputs[req_id] = new.clone()
                    self.counts.rows_computed += len(new)
                continue
            reason = self._unreadable(key, read, new)
            if reason is not None:
                self.failures.setdefault(req_id, f"{key}: {reason}")
            elif key in read.rows or new is not None:
                outputs[req_id] = self._joined(key, read, new)
        return outputs

    def _unreadable(self, key: str, read: HitRead, new: Any) -> str | None:
        hit = f"rows of positions {read.first} to {read.stop - 1}"
        if read.error is not None:
            return f"{hit} could not be copied: {read.error}"
        if key in read.lost:
            return f"{hit} were lost when their write failed"
        if key == HIDDEN_KEY and not read.is_complete(key):
            return f"{hit} are a KV hit and were never saved"
        if new is not None and key in self.step.refused:
            return f"{hit} are not cached: {self.step.refused[key]}"
        kept = read.rows.get(key)
        if kept is not None and new is not None and (kept.dtype, kept.shape[1:]) != (new.dtype, new.shape[1:]):
            return (
                f"{hit} are {list(kept.shape[1:])} {kept.dtype}, and the step computed {list(new.shape[1:])} "
                f"{new.dtype}"
            )
        return None

    def _joined(self, key: str, read: HitRead, new: Any) -> Any:
        """The rows of the hit, then the step's own."""
        out = read.rows.get(key)
        if out is None:
            out = new.new_zeros((read.num_hit + read.num_new, *new.shape[1:]))
        absent = read.absent(key)
        num_absent = 0 if absent is None else int(absent.sum())
        self.counts.rows_absent += num_absent
        self.counts.rows_from_cache += read.num_hit - num_absent
        self.counts.bytes_from_cache += (read.num_hit - num_absent) * out[0].nbytes
        if new is None:
            # The step made no rows for the key; without the cache only the steps of the hit would have.
            return out[: read.num_hit].clone() if read.num_new else out
        out[read.num_hit :] = new
        self.counts.rows_computed += len(new)
        return out
