"""Workers without a model: they follow the scheduler's steps and keep the books that a device would keep."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_neuron_cache.encoder_cache.item import num_dense_blocks
from vllm_neuron_cache.encoder_cache.report import ReportBuilder, RequestFailure, WorkerEntry, WorkerEpochs
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.table import EntryTable
from vllm_neuron_cache.errors import SimulationError
from vllm_neuron_cache.integrations.vllm.metadata import attach_report

TOKEN = 7
"""What every sampled token is."""


@dataclass(slots=True)
class _WorkerRequest:
    """What a worker knows of a request."""

    features: list[MultiModalFeatureSpec]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int = 0


class _Read(NamedTuple):
    """Rows of an item that a request reads in a step."""

    request_id: str
    feature: MultiModalFeatureSpec
    first_row: int
    last_row: int


class SimulatedWorker(ABC):
    """Follows requests as vLLM's V1 runner does, and samples a token whenever a request's known tokens are computed.

    What becomes of encoder outputs is left to subclasses. `execute` is the only method that changes anything.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _WorkerRequest] = {}
        self.num_encoded = 0
        """Items that the encoder ran on."""
        self.num_encoded_tokens = 0
        """Token rows of those."""

    def execute(self, step: Any) -> ModelRunnerOutput:
        """Does what a `SchedulerOutput` says. Raises `SimulationError` for what a real worker could not do."""
        for request_id in step.finished_req_ids:
            self._requests.pop(request_id, None)
        self._follow(step)
        self._take_in_requests(step)
        for request_id, input_ids in step.scheduled_encoder_inputs.items():
            for input_id in input_ids:
                feature = self._requests[request_id].features[input_id]
                self.num_encoded += 1
                self.num_encoded_tokens += feature.mm_position.get_num_embeds()
                self._encode(feature)
        for read in self._reads(step):
            self._read(read)
        return self._sample(step)

    def _take_in_requests(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            self._requests[new.req_id] = _WorkerRequest(
                new.mm_features, len(new.prompt_token_ids), new.num_computed_tokens
            )
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self._requests[request_id]
            request.num_computed_tokens = cached.num_computed_tokens[index]
            num_output_tokens = cached.num_output_tokens[index]
            if request_id in cached.resumed_req_ids or num_output_tokens < request.num_output_tokens:
                request.num_output_tokens = num_output_tokens

    def _reads(self, step: Any) -> Iterator[_Read]:
        for request_id, length in step.num_scheduled_tokens.items():
            request = self._requests[request_id]
            if not request.features:
                continue
            begin = request.num_computed_tokens
            low, high = get_mm_features_in_window(request.features, start=begin, end=begin + length)
            for feature in request.features[low:high]:
                position = feature.mm_position
                first = max(begin - position.offset, 0)
                last = min(begin + length - position.offset, position.length)
                first_row, last_row = position.get_embeds_indices_in_range(first, last)
                if first_row < last_row:
                    yield _Read(request_id, feature, first_row, last_row)

    def _sample(self, step: Any) -> ModelRunnerOutput:
        if not step.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        request_ids = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in request_ids:
            request = self._requests[request_id]
            num_known = request.num_prompt_tokens + request.num_output_tokens
            if request.num_computed_tokens + step.num_scheduled_tokens[request_id] < num_known:
                sampled.append([])
                continue
            request.num_output_tokens += 1
            sampled.append([TOKEN])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )

    @abstractmethod
    def _follow(self, step: Any) -> None:
        """Takes over what the step says of the cache."""

    @abstractmethod
    def _encode(self, feature: MultiModalFeatureSpec) -> None:
        """Keeps an encoder output."""

    @abstractmethod
    def _read(self, read: _Read) -> None:
        """Reads rows of an item. Raises `SimulationError` if they are not there."""


class BlockWorker(SimulatedWorker):
    """A worker of this cache: the real entry table, and a buffer in which every row says whose it is.

    A read that would get another item's row, an unwritten one, or none, is a `SimulationError`, unless the item was one
    that `fails` names: then the request is reported, as the real runner does.
    """

    def __init__(self, geometry: CacheGeometry, fails: Callable[[str], bool] = lambda key: False) -> None:
        """`fails` is asked for every item that the encoder runs on, by its key."""
        super().__init__()
        self.table = EntryTable(geometry.num_item_blocks, geometry.block_size)
        self._report = ReportBuilder()
        self._fails = fails
        # Per buffer row: number of the item written there, and which of its rows it is.
        self._owner = np.zeros(geometry.num_item_blocks * geometry.block_size, dtype=np.int64)
        self._row = np.zeros_like(self._owner)
        self._numbers: dict[str, int] = {}

    def entries(self) -> list[WorkerEntry]:
        """What the scheduler's `check_integrity` compares with its pool."""
        return [WorkerEntry(e.key, e.generation, e.block_ids, e.written) for e in self.table.entries()]

    @property
    def epochs(self) -> WorkerEpochs:
        return self._report.epochs

    def lose_rows(self) -> None:
        """Drops every entry unasked, as a worker that slept."""
        self.table.clear()
        self._report.note_rows_lost()

    def execute(self, step: Any) -> ModelRunnerOutput:
        output = super().execute(step)
        report = self._report.take()
        if report is not None:
            if output is EMPTY_MODEL_RUNNER_OUTPUT:
                output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            attach_report(output, report)
        return output

    def _follow(self, step: Any) -> None:
        self._report.start_step(step.ec_manager_metadata.worker_epochs)
        self.table.apply(step.ec_manager_metadata.step)

    def _encode(self, feature: MultiModalFeatureSpec) -> None:
        entry = self.table.get(feature.identifier)
        if self._fails(feature.identifier):
            if entry is not None:
                self.table.mark_failed(entry, "planted")
            self._report.fail_item(feature.identifier)
            return
        if entry is None:
            if self._report.scheduler_is_behind:
                return
            raise SimulationError(f"{feature.identifier} is encoded and has no blocks")
        number = self._numbers.setdefault(feature.identifier, len(self._numbers) + 1)
        self._owner[entry.rows] = number
        self._row[entry.rows] = np.arange(entry.num_tokens)
        self.table.mark_written(entry)

    def _read(self, read: _Read) -> None:
        key, num_rows = read.feature.identifier, read.feature.mm_position.get_num_embeds()
        entry = self.table.get(key)
        if entry is None or not entry.written:
            failed = entry is not None and entry.failure is not None
            if not failed and not self._report.scheduler_is_behind:
                raise SimulationError(
                    f"{read.request_id} reads {key}, which is {'unwritten' if entry else 'not there'}"
                )
            position = self._requests[read.request_id].num_computed_tokens
            self._report.fail_request(RequestFailure(read.request_id, f"{key} failed", position, recompute=not failed))
            return
        rows = entry.rows[read.first_row : read.last_row]
        expected = np.arange(read.first_row, read.last_row)
        intact = (self._owner[rows] == self._numbers[key]).all() and (self._row[rows] == expected).all()
        if entry.num_tokens != num_rows or len(rows) != len(expected) or not intact:
            raise SimulationError(
                f"{read.request_id} reads rows {read.first_row} to {read.last_row} of {key} ({num_rows} rows) and gets "
                f"rows {self._row[rows].tolist()} of items {set(self._owner[rows].tolist())}"
            )


class StockWorker(SimulatedWorker):
    """A worker under vLLM's own manager, which counts tokens, over a device that has blocks.

    `num_overflows` counts the items for which the device had no block left although the scheduler had admitted them.
    A real device would have ended the engine, or left the item out; here the item gets its rows all the same.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__()
        self.num_overflows = 0
        self._geometry = geometry
        self._num_blocks: dict[str, int] = {}

    def _follow(self, step: Any) -> None:
        for key in step.free_encoder_mm_hashes:
            self._num_blocks.pop(key, None)

    def _encode(self, feature: MultiModalFeatureSpec) -> None:
        num_blocks = num_dense_blocks(feature.mm_position.get_num_embeds(), self._geometry.block_size)
        self._num_blocks[feature.identifier] = num_blocks
        if sum(self._num_blocks.values()) > self._geometry.num_item_blocks:
            self.num_overflows += 1

    def _read(self, read: _Read) -> None:
        if read.feature.identifier not in self._num_blocks:
            raise SimulationError(f"{read.request_id} reads {read.feature.identifier}, which is not there")
