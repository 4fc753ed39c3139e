"""The stage cache: what a model runner calls in each step."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_neuron_cache.errors import IntegrityError, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.assembly import Assembly, SavedStep
from vllm_neuron_cache.stage_cache.controller import OmniPrefixCacheController, Threading
from vllm_neuron_cache.stage_cache.counters import StageCacheCounters, StageCacheGauges
from vllm_neuron_cache.stage_cache.delivery import DeliveryTracker
from vllm_neuron_cache.stage_cache.interface import PrefixCacheConfig, StageCacheOutputs
from vllm_neuron_cache.stage_cache.ownership import BlockOwnership
from vllm_neuron_cache.stage_cache.policy import ModelCachePolicy
from vllm_neuron_cache.stage_cache.reads import HitRead
from vllm_neuron_cache.stage_cache.sorting import OutputSorter, SortedOutputs
from vllm_neuron_cache.stage_cache.view import FullAttentionGroupView, StepLayout
from vllm_neuron_cache.stage_cache.writes import StepWrite

if TYPE_CHECKING:
    from vllm_neuron_cache.stage_cache.row_store import RowStore, StagedRows

logger = logging.getLogger("vllm.neuron_cache")


class OmniPrefixCacheManager:
    """Keeps a stage's outputs by the slots of its KV blocks, and gives each request every row once.

    `register_policy` comes first. Then, in every step, on the engine's thread: `new_step_starts` before the runner
    updates its states, `save_outputs` after the forward; and later, in any thread and any order, `materialize` or
    `discard_step`, once for every id that `save_outputs` gave.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        view: FullAttentionGroupView,
        *,
        store: "RowStore | None" = None,
        inline: bool | None = None,
        threads: type[Threading] | Threading = Threading,
    ) -> None:
        """
        Args:
            store: where rows are kept; host memory if it is None.
            inline: without threads, in the calls themselves. None asks the store.
        """
        if view.block_size != config.block_size:
            raise OmniPrefixCacheUnmatchError(
                f"the view has blocks of {view.block_size} slots and the configuration of {config.block_size}"
            )
        if store is None:
            from vllm_neuron_cache.stage_cache.row_store import HostRowStore

            store = HostRowStore(config)
        self.config = config
        self.counters = StageCacheCounters()
        self._view = view
        self._store = store
        self._ownership = BlockOwnership(config.num_blocks, config.block_size)
        self._tracker = DeliveryTracker()
        self._cond = threads.condition()
        self._controller = OmniPrefixCacheController(
            store,
            config,
            self._ownership,
            self.counters,
            self._cond,
            inline=store.prefers_inline if inline is None else inline,
            threads=threads,
        )
        self._sorter = OutputSorter(ModelCachePolicy(), store)
        self._step = 0
        self._saved_step = 0
        self._num_scheduled: dict[str, int] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._early_reads: dict[str, HitRead] = {}
        # Reads of blocks that have a new tenant; each log's next write comes after them.
        self._threatened: dict[str, list[HitRead]] = {"immediate": [], "deferred": []}
        self._saved: dict[int, SavedStep] = {}

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """Takes what the model says of its outputs, and allocates what it declares.

        Raises `ConfigurationError` if that is more than the configuration allows, with nothing allocated, and
        `OmniPrefixCacheUnmatchError` after the first step.
        """
        with self._cond:
            self._check_open()
        if self._step:
            raise OmniPrefixCacheUnmatchError("register_policy comes before the first step; it is too late now")
        self._sorter = OutputSorter(policy, self._store)
        with self._cond:
            for key in self._store.specs:
                self._ownership.open_key(key)
        for key in self._store.memory():
            logger.info(
                "stage cache: %s takes %.1f MiB (%.1f MiB of it staging)",
                key.name, key.total_bytes / 2**20, key.staging_bytes / 2**20,
            )  # fmt: skip

    def new_step_starts(self, scheduler_output: Any) -> None:
        """Takes in one of vLLM's `SchedulerOutput`s: who is new, who comes back, which blocks have new tenants.

        Raises `OmniPrefixCacheUnmatchError` for a hit that ends within a block.
        """
        with self._cond:
            self._check_open()
            self._step += 1
            for read in self._early_reads.values():  # the last step was not saved
                self._controller.cancel_read(read)
            self._early_reads = {}
            finished = scheduler_output.finished_req_ids
            for req_id in finished:
                self._tracker.finish(req_id)
                self._num_prompt_tokens.pop(req_id, None)
            if finished:
                self._controller.queue_deferred(self._step - 1)
            restarts: list[tuple[str, int, list[int]]] = []
            new_blocks = self._new_requests(scheduler_output.scheduled_new_reqs, restarts)
            new_blocks += self._known_requests(getattr(scheduler_output, "scheduled_cached_reqs", None), restarts)
            self._tracker.speculate(getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or ())
            if new_blocks:
                self._protect(self._ownership.begin_tenancy(new_blocks, self._step))
            self._num_scheduled = dict(scheduler_output.num_scheduled_tokens)
            for req_id, num_computed, block_ids in restarts:
                self._plan_early(req_id, num_computed, block_ids)
        self._controller.run_queued()

    def save_outputs(
        self,
        hidden_states: Any,
        mm_outputs: dict[str, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        """Takes the step's outputs, which may be overwritten as soon as it returns.

        Args:
            hidden_states: `[num_tokens_unpadded or more, hidden]`, in the batch's order, or None.
            mm_outputs: key -> tensor with a row per token, padded or not, or any other value.

        Returns:
            The step's id, to be used once. Mutates the store and everything that is known of its blocks.

        Raises `OmniPrefixCacheStagingTimeoutError` if earlier ids are not used, and `OmniPrefixCacheUnmatchError` if
        the batch is not the announced step's. What is wrong with a single key fails whoever needs it, later.
        """
        layout = self._view.step_layout(self._num_scheduled)
        self._check_step(layout, num_tokens_unpadded)
        outputs = self._sorter.sort(hidden_states, mm_outputs or {}, num_tokens_unpadded, num_tokens_padded)
        deferred_bytes = sum(rows[:num_tokens_unpadded].nbytes for rows in outputs.deferred.values())
        if deferred_bytes:
            self._controller.reserve_deferred(deferred_bytes)
        slot = self._controller.claim_slot(lambda: sorted(self._saved))
        saved = False
        try:
            sources = self._stage(slot, outputs, layout, num_tokens_unpadded)
            with self._cond:
                self._check_open()
                self._record(slot, outputs, layout, sources, deferred_bytes)
                saved = True
        finally:
            if not saved:
                with self._cond:
                    self._controller.release_slot(slot)
        self._controller.run_queued()
        return self._step

    def materialize(self, step_id: int, req_ids: Sequence[str]) -> StageCacheOutputs:
        """What requests of a saved step hand on: rows of earlier steps that were not handed on yet, then the step's.

        Uses the step id up. `req_ids` are some or all of the step's requests; what the others would have got is gone.
        Any thread.

        Raises `OmniPrefixCacheUnmatchError` for an id that is not there and for requests of another step, with nothing
        used up; and if rows of some requests are not to be had, with those requests and the outputs of the others.
        """
        req_ids = list(dict.fromkeys(req_ids))
        with self._cond:
            step = self._take(step_id, req_ids)
        assembly = Assembly(step_id=step_id, step=step)
        try:
            for req_id in req_ids:
                read = step.reads.get(req_id)
                if read is not None:
                    try:
                        self._controller.finish_read(read)
                    except OmniPrefixCacheUnmatchError as error:
                        assembly.failures[req_id] = str(error)
            return assembly.build(req_ids)
        finally:
            with self._cond:
                for read in step.reads.values():
                    self._controller.cancel_read(read)
                self._controller.release_slot(step.slot)
                self._count(assembly.counts)

    def discard_step(self, step_id: int) -> None:
        """Uses a step id up without its outputs. The rows stay in the cache. Any thread."""
        with self._cond:
            step = self._take(step_id, ())
            self._controller.release_slot(step.slot)

    def shutdown(self) -> None:
        """Ends the threads and refuses every later call. May be called twice."""
        self._controller.shutdown()

    def gauges(self) -> StageCacheGauges:
        with self._cond:
            return StageCacheGauges(
                queued_writes=self._controller.num_queued_writes,
                deferred_writes=self._controller.num_deferred_writes,
                deferred_bytes=self._controller.deferred_bytes,
                pending_reads=self._controller.num_pending_reads,
                unused_steps=len(self._saved),
            )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if two records of the same thing differ."""
        with self._cond:
            self._ownership.check_integrity()
            self._tracker.check_integrity()
            self._controller.check_integrity()
            if not set(self._store.specs) - self._sorter.not_rows >= set(self._ownership.keys):
                raise IntegrityError(f"keys {sorted(self._ownership.keys)} are not those of the store")

    # Under the lock ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._controller.closed:
            raise OmniPrefixCacheUnmatchError("the stage cache was shut down")

    def _new_requests(self, requests: Iterable[Any], restarts: list[tuple[str, int, list[int]]]) -> list[int]:
        """Blocks that belong to new requests alone. A request that is live comes here too, when the next chunk of it
        arrives or, with vLLM's newer runner, when it was preempted."""
        block_size = self.config.block_size
        new_blocks: list[int] = []
        for request in requests:
            num_computed = request.num_computed_tokens
            if num_computed % block_size and request.req_id not in self._tracker:
                raise OmniPrefixCacheUnmatchError(
                    f"request {request.req_id} has a hit of {num_computed} tokens, which is not a whole number of "
                    f"blocks of {block_size}"
                )
            self._admit(request)
            block_ids = _one_group(request.block_ids, request.req_id)
            new_blocks += block_ids[-(-num_computed // block_size) :]
            restarts.append((request.req_id, num_computed, block_ids))
        return new_blocks

    def _admit(self, request: Any) -> None:
        if request.req_id in self._tracker:
            token_ids = getattr(request, "prefill_token_ids", None)
            # Without them it is its next chunk, which follows what counts of what was computed.
            num_tokens = request.num_computed_tokens + 1 if token_ids is None else len(token_ids)
            self._tracker.restart(request.req_id, num_tokens)
        else:
            self._tracker.admit(request.req_id)
        self._num_prompt_tokens[request.req_id] = len(getattr(request, "prompt_token_ids", None) or ())

    def _restart(self, req_id: str, num_output_tokens: int) -> None:
        num_prompt_tokens = self._num_prompt_tokens.get(req_id)
        self._tracker.restart(req_id, num_prompt_tokens + num_output_tokens if num_prompt_tokens else None)

    def _known_requests(self, requests: Any, restarts: list[tuple[str, int, list[int]]]) -> list[int]:
        """Blocks that requests which go on have got, or those that were preempted and are resumed."""
        new_blocks: list[int] = []
        if requests is None:
            return new_blocks
        resumed = requests.resumed_req_ids
        if not resumed:
            for req_id, groups in zip(requests.req_ids, requests.new_block_ids):
                if groups is not None:
                    new_blocks += _one_group(groups, req_id)
            return new_blocks
        for index, (req_id, groups) in enumerate(zip(requests.req_ids, requests.new_block_ids)):
            block_ids = [] if groups is None else _one_group(groups, req_id)
            if req_id in resumed:
                num_computed = requests.num_computed_tokens[index]
                self._restart(req_id, requests.num_output_tokens[index])
                restarts.append((req_id, num_computed, block_ids))
                block_ids = block_ids[-(-num_computed // self.config.block_size) :]
            new_blocks += block_ids
        return new_blocks

    def _protect(self, block_ids: np.ndarray) -> None:
        if not len(block_ids):
            return
        reads = self._controller.reads_of(block_ids)
        for kind, before in self._threatened.items():
            self._threatened[kind] = [read for read in before if not read.has_ended] + reads
        for read in reads:
            if not read.is_threatened:
                read.is_threatened = True
                self.counters.rows_copied_on_write += read.num_hit * len(read.keys)

    def _plan_early(self, req_id: str, num_computed: int, block_ids: list[int]) -> None:
        """Plans the read of a hit before the forward, so that it can be copied meanwhile, if all its rows are known to
        the cache already. Those of a hit on blocks that this step computes are not."""
        first = self._tracker.delivered(req_id)
        if self._controller.inline or first >= num_computed:
            return
        columns = slice(first // self.config.block_size, -(-num_computed // self.config.block_size))
        read = self._read(
            req_id, first, num_computed, np.array(block_ids[columns], dtype=np.int64), self._num_scheduled[req_id]
        )
        if read.keys and all(read.is_complete(key) for key in self._ownership.keys):
            self._controller.plan_read(read)
            self._early_reads[req_id] = read

    def _read(self, req_id: str, first: int, stop: int, block_ids: np.ndarray, num_new: int) -> HitRead:
        return HitRead(
            req_id=req_id,
            first=first,
            stop=stop,
            block_ids=block_ids,
            epochs=self._ownership.block_epoch[block_ids],
            block_size=self.config.block_size,
            present={key: self._ownership.num_present(key, block_ids) for key in self._ownership.keys},
            num_new=num_new,
            needs_step=int(self._ownership.last_write[block_ids].max()),
        )

    def _record(
        self,
        slot: int,
        outputs: SortedOutputs,
        layout: StepLayout,
        sources: "dict[str, StagedRows]",
        deferred_bytes: int,
    ) -> None:
        blocks, num_rows = layout.block_ids, len(layout.slots)
        # First, since it refuses a batch that was not announced: no rows are recorded that nobody writes.
        firsts = self._tracker.plan(layout.req_ids, layout.starts, layout.counts)
        for key in self._sorter.not_rows:
            self._ownership.close_key(key)
        kept = [key for key in (*outputs.immediate, *outputs.deferred) if key in sources]
        for key in kept:
            self._ownership.open_key(key)
        self._ownership.record_write(kept, blocks, layout.block_offsets, layout.block_rows, self._step)
        epochs = self._ownership.block_epoch[blocks]
        lost = [*outputs.uncached, *(key for key in outputs.broken if key in self._ownership.keys)]
        if lost:
            self._controller.lose(lost, blocks, epochs, num_rows)
        row_starts = layout.row_stops - layout.counts
        reads: dict[str, HitRead] = {}
        if firsts is not layout.starts:  # not while everybody decodes
            reads = self._plan_reads(layout, firsts)
            row_starts += np.clip(firsts - layout.starts, 0, layout.counts)
        self._saved[self._step] = SavedStep(
            slot=slot,
            req_ids=layout.req_ids,
            row_starts=row_starts,
            row_stops=layout.row_stops,
            reads=reads,
            sources=sources,
            leftover=outputs.leftover,
            broken=outputs.broken,
            refused=self._sorter.refused,
        )
        for kind, keys in (("immediate", outputs.immediate), ("deferred", outputs.deferred)):
            keys = [key for key in keys if key in sources]
            if not keys:
                continue
            write = StepWrite(
                step=self._step,
                keys=keys,
                staged=sources[keys[0]],
                block_ids=blocks,
                epochs=epochs,
                num_rows=num_rows,
                after=self._threatened[kind],
                num_bytes=deferred_bytes if kind == "deferred" else 0,
            )
            self._threatened[kind] = []
            if kind == "deferred":
                self._controller.submit_deferred(write)
            else:
                self._controller.submit(write, slot)
        self._saved_step = self._step

    def _plan_reads(self, layout: StepLayout, firsts: np.ndarray) -> dict[str, HitRead]:
        reads: dict[str, HitRead] = {}
        early_reads, self._early_reads = self._early_reads, {}
        for index in np.flatnonzero((firsts < layout.starts) & (layout.counts > 0)).tolist():
            req_id, first, stop = layout.req_ids[index], int(firsts[index]), int(layout.starts[index])
            read = early_reads.pop(req_id, None)
            if read is None or (read.first, read.stop, read.num_new) != (first, stop, int(layout.counts[index])):
                if read is not None:
                    self._controller.cancel_read(read)
                block_ids = self._view.block_ids(index, first, stop)
                read = self._read(req_id, first, stop, block_ids, int(layout.counts[index]))
                self._controller.plan_read(read)
            reads[req_id] = read
        for read in early_reads.values():
            self._controller.cancel_read(read)
        return reads

    def _take(self, step_id: int, req_ids: Sequence[str]) -> SavedStep:
        """Uses a step id up. Reads of requests that are not among `req_ids` are not copied."""
        self._check_open()
        step = self._saved.get(step_id)
        if step is None:
            known = "is used already" if 0 < step_id <= self._saved_step else "was never given"
            raise OmniPrefixCacheUnmatchError(
                f"step id {step_id} {known}; each one that save_outputs returns is used once. Unused are "
                f"{sorted(self._saved)}"
            )
        known_ids = set(step.req_ids)
        unknown = [req_id for req_id in req_ids if req_id not in known_ids]
        if unknown:
            raise OmniPrefixCacheUnmatchError(
                f"requests {unknown[:8]} are not of step {step_id}; give those of the batch as it was saved",
                request_ids=unknown,
            )
        del self._saved[step_id]
        for req_id in step.reads.keys() - set(req_ids):
            self._controller.cancel_read(step.reads[req_id])
        return step

    def _count(self, counts: StageCacheCounters) -> None:
        for counter in fields(counts):
            setattr(self.counters, counter.name, getattr(self.counters, counter.name) + getattr(counts, counter.name))

    # Without the lock ----------------------------------------------------------------------------------------------

    def _check_step(self, layout: StepLayout, num_rows: int) -> None:
        if self._saved_step >= self._step:
            raise OmniPrefixCacheUnmatchError(
                f"step {self._step} was saved already; call new_step_starts before each save_outputs"
            )
        if len(layout.slots) != num_rows:
            raise OmniPrefixCacheUnmatchError(
                f"the step has {num_rows} tokens and the batch {len(layout.slots)} slots for them; the batch and the "
                "scheduler's output are of different steps"
            )

    def _stage(self, slot: int, outputs: SortedOutputs, layout: StepLayout, num_rows: int) -> "dict[str, StagedRows]":
        """Copies away what the next forward overwrites. What fails is broken, and costs its keys alone."""
        sources: dict[str, StagedRows] = {}
        if self._store.writes_at_stage:
            for read in self._threatened["immediate"]:
                self._controller.finish_read(read)
        for tensors, take in (
            (outputs.immediate, lambda rows: self._store.stage(slot, rows, num_rows, layout.slots)),
            (outputs.deferred, lambda rows: self._store.hold(rows, num_rows, layout.slots)),
            (outputs.uncached, lambda rows: self._store.keep(rows, num_rows)),
        ):
            if not tensors:
                continue
            try:
                staged = take(tensors)
            except Exception as error:
                logger.error("stage cache: rows of %s cannot be saved: %s", ", ".join(tensors), error)
                outputs.broken.update(dict.fromkeys(tensors, f"its rows could not be saved: {error}"))
            else:
                sources |= dict.fromkeys(tensors, staged)
        for key, value in outputs.leftover.items():
            outputs.leftover[key] = self._store.copy_to_host(value)
        return sources


def _one_group(groups: Sequence[Any], req_id: str) -> list[int]:
    """The block ids of the one KV group that there is."""
    if len(groups) != 1:
        raise OmniPrefixCacheUnmatchError(
            f"request {req_id} has blocks of {len(groups)} KV groups, and the stage cache mirrors exactly one"
        )
    return list(groups[0])
