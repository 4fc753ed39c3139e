"""The scheduler's answer to a worker's report: who ends, who is computed again, and what is forgotten."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import vllm.v1.engine as engine
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from vllm_neuron_cache.encoder_cache.report import RequestFailure, StepReport

logger = init_logger("vllm.neuron_cache")

BlockIds = Sequence[Sequence[int]]
"""Ids of a request's KV blocks, by KV cache group, in the order of its tokens."""


class Departure(NamedTuple):
    """A request that gave its KV blocks back while steps with it were in flight."""

    request: Request
    block_ids: BlockIds
    hashes: dict[int, Any]
    """What each block was to be found by in the prefix cache; None for one that is not full."""
    seq: int
    """The last step that may have had the request in it."""


class Departures:
    """Remembers who had which KV blocks, until the steps in flight have come back and nothing bad was told of them."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._departures: dict[str, Departure] = {}

    def note(self, request: Request, seq: int) -> None:
        if request.status is RequestStatus.RUNNING:
            block_ids = self._kv_cache_manager.get_block_ids(request.request_id)
            hashes = {block_id: self._hash(block_id) for ids in block_ids for block_id in ids}
            self._departures[request.request_id] = Departure(request, block_ids, hashes, seq)

    def get(self, request_id: str) -> Departure | None:
        return self._departures.get(request_id)

    def all(self) -> list[Departure]:
        return list(self._departures.values())

    def block_ids(self, departure: Departure) -> BlockIds:
        """The blocks that a departed request had, with the null block for those that are no longer what they were.

        A block that was given to somebody else since is found by another hash, or by none.
        """
        null = self._kv_cache_manager.block_pool.null_block.block_id

        def is_same(block_id: int) -> bool:
            return departure.hashes[block_id] is not None and departure.hashes[block_id] == self._hash(block_id)

        return [[block_id if is_same(block_id) else null for block_id in ids] for ids in departure.block_ids]

    def settle(self, request_id: str) -> None:
        """Its blocks are dealt with. The request itself is remembered until its last step has come back."""
        departure = self._departures.get(request_id)
        if departure is not None:
            self._departures[request_id] = departure._replace(block_ids=[() for _ in departure.block_ids])

    def _hash(self, block_id: int) -> Any:
        return self._kv_cache_manager.block_pool.blocks[block_id].block_hash

    def acknowledge(self, seq: int) -> None:
        """Forgets those whose last step has come back."""
        if self._departures:
            self._departures = {key: value for key, value in self._departures.items() if value.seq > seq}


class FailureHandler:
    """Acts on the reports of workers. Mutates the scheduler, its KV cache and its encoder cache manager.

    KV rows computed from a wrong embedding must not be found again, whoever computed them: a later request with the
    same prompt would silently be wrong. So the KV blocks of a failed request leave the prefix cache, from the first
    wrong position on, and a request that had found them there already is computed again from its beginning.
    """

    def __init__(self, scheduler: Any, departures: Departures) -> None:
        self._scheduler = scheduler
        self._departures = departures

    def handle(self, report: StepReport, seq: int) -> list[tuple[Request, str]]:
        """Ends the requests that the report of step `seq` names, and returns them with what their clients are told.

        Call it before the scheduler takes in the step's output, so that none of it reaches them.
        """
        scheduler = self._scheduler
        failed: list[tuple[Request, str]] = []
        again: dict[str, Request] = {}
        bad_blocks: set[int] = set()
        for failure in report.failed_requests:
            request = self._owner(failure)
            bad_blocks.update(self._blocks_of(failure, request))
            self._departures.settle(failure.request_id)
            if request is None or request.is_finished():
                continue
            if failure.recompute:
                again[request.request_id] = request
            else:
                failed.append((request, failure.text))
        if bad_blocks:
            handled = again.keys() | {request.request_id for request, _ in failed}
            again |= self._sharers(bad_blocks, handled)

        scheduler.finish_requests([request.request_id for request, _ in failed], RequestStatus.FINISHED_ERROR)
        for request, text in failed:
            self._departures.settle(request.request_id)
            logger.warning("Encoder cache: request %s failed: %s", request.request_id, text)
        for request in again.values():
            self._compute_again(request)
        scheduler.kv_cache_manager.evict_blocks(bad_blocks)
        for key in report.failed_items:
            scheduler.encoder_cache_manager.invalidate(key, seq, scheduler.requests)
        return failed

    @staticmethod
    def add_outputs(outputs: dict[int, Any], failed: Sequence[tuple[Request, str]]) -> None:
        """Adds an error for each failed request to what goes to the front ends. Mutates `outputs`."""
        for request, text in failed:
            # Looked up now: vLLM-Omni puts classes of its own under these names.
            for_client = outputs.setdefault(request.client_index, engine.EngineCoreOutputs())
            for_client.outputs.append(
                engine.EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=text,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )

    def _owner(self, failure: RequestFailure) -> Request | None:
        """The request that the failure is about, if it has not left. An id may have been given to another since."""
        request = self._scheduler.requests.get(failure.request_id)
        departure = self._departures.get(failure.request_id)
        if departure is not None and departure.request is not request:
            return None
        return request

    def _blocks_of(self, failure: RequestFailure, request: Request | None) -> Iterator[int]:
        if request is not None and request.status is RequestStatus.RUNNING:
            block_ids = self._scheduler.kv_cache_manager.get_block_ids(failure.request_id)
            yield from self._blocks_from(block_ids, failure.first_position)
        departure = self._departures.get(failure.request_id)
        if departure is not None:
            yield from self._blocks_from(self._departures.block_ids(departure), failure.first_position)

    def _sharers(self, bad_blocks: set[int], handled: set[str]) -> dict[str, Request]:
        """Requests that have bad blocks of another, to be computed again. Adds what they computed on top of them to
        `bad_blocks`, until nobody else has any of those."""
        sharers: dict[str, Request] = {}
        kv_cache_manager = self._scheduler.kv_cache_manager
        candidates = [
            (request, kv_cache_manager.get_block_ids(request.request_id))
            for request in self._scheduler.running
            if request.request_id not in handled
        ]
        candidates += [
            (departure.request, self._departures.block_ids(departure)) for departure in self._departures.all()
        ]
        found = True
        while found:
            found = False
            for request, block_ids in candidates:
                position = self._first_position(block_ids, bad_blocks)
                if position is None:
                    continue
                more = set(self._blocks_from(block_ids, position)) - bad_blocks
                found = found or bool(more)
                bad_blocks |= more
                if not request.is_finished():
                    sharers[request.request_id] = request
        return sharers

    def _compute_again(self, request: Request) -> None:
        """Puts a request back to the beginning; what the steps in flight return for it is dropped."""
        scheduler = self._scheduler
        if request.status is RequestStatus.RUNNING:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            # It may be scheduled in the very next pass: the worker has to start it anew.
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        elif request.num_stale_output_tokens:  # preempted already
            request.drop_stale_output = True

    def _block_sizes(self) -> list[int]:
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return [group.kv_cache_spec.block_size for group in groups]

    def _blocks_from(self, block_ids: BlockIds, position: int) -> Iterator[int]:
        # Every request has the null block where a sliding window has passed.
        null = self._scheduler.kv_cache_manager.block_pool.null_block.block_id
        for ids, block_size in zip(block_ids, self._block_sizes(), strict=True):
            yield from (block_id for block_id in ids[position // block_size :] if block_id != null)

    def _first_position(self, block_ids: BlockIds, bad_blocks: set[int]) -> int | None:
        """Token position at which the first bad block begins."""
        positions = [
            index * block_size
            for ids, block_size in zip(block_ids, self._block_sizes(), strict=True)
            for index, block_id in enumerate(ids)
            if block_id in bad_blocks
        ]
        return min(positions, default=None)
