"""Moves the rows: who waits for what, and who copies."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_neuron_cache.errors import (
    IntegrityError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
)
from vllm_neuron_cache.stage_cache.counters import StageCacheCounters
from vllm_neuron_cache.stage_cache.interface import PrefixCacheConfig, WriteState
from vllm_neuron_cache.stage_cache.ownership import BlockOwnership
from vllm_neuron_cache.stage_cache.reads import HitRead, ReadState
from vllm_neuron_cache.stage_cache.slots import StagingSlots
from vllm_neuron_cache.stage_cache.writes import StepWrite, WriteLog

if TYPE_CHECKING:
    from vllm_neuron_cache.stage_cache.row_store import RowStore

logger = logging.getLogger("vllm.neuron_cache")


class Threading:
    """What the cache needs of the machine to run beside the engine. A test gives another, which decides who runs."""

    condition = staticmethod(threading.Condition)
    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def start(target: Callable[[], None], name: str) -> Any:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


class OmniPrefixCacheController:
    """Writes in the order of the steps, and reads of hits between them.

    Whoever waits for a write that nobody runs yet runs it: with no thread at all everything happens in the calls of
    the engine and of the output builder. Threads only do it earlier.

    `cond` is the one lock of the cache. It is never held while rows are copied, a device is waited for, or memory is
    allocated. Methods that say "under the lock" are called with it held; the others take it.
    """

    def __init__(
        self,
        store: "RowStore",
        config: PrefixCacheConfig,
        ownership: BlockOwnership,
        counters: StageCacheCounters,
        cond: threading.Condition,
        *,
        inline: bool,
        threads: type[Threading] | Threading = Threading,
    ) -> None:
        """Without `inline` it starts two threads, the committer and the prefetcher."""
        self._store = store
        self._config = config
        self._ownership = ownership
        self._counters = counters
        self._cond = cond
        self._monotonic = threads.monotonic
        self.inline = inline
        self._immediate = WriteLog()
        self._deferred = WriteLog()
        self._reads: list[HitRead] = []
        self._prefetches: deque[HitRead] = deque()
        self._slots = StagingSlots(config.staging_depth)
        self._slot_of: dict[StepWrite, int] = {}
        self._closed = False
        self._threads = []
        if not inline:
            self._threads = [
                threads.start(self._commit_loop, "stage-cache-committer"),
                threads.start(self._prefetch_loop, "stage-cache-prefetcher"),
            ]

    # Under the lock ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_queued_writes(self) -> int:
        return len(self._immediate)

    @property
    def num_deferred_writes(self) -> int:
        return len(self._deferred)

    @property
    def deferred_bytes(self) -> int:
        return self._deferred.num_bytes

    @property
    def num_pending_reads(self) -> int:
        return len(self._reads)

    def plan_read(self, read: HitRead) -> None:
        """Under the lock. From now on the rows of `read` are copied before their blocks are overwritten."""
        self._ownership.add_reader(read.block_ids)
        self._reads.append(read)
        if not self.inline:
            self._prefetches.append(read)
            self._cond.notify_all()

    def cancel_read(self, read: HitRead) -> None:
        """Under the lock. Nobody wants the rows, or not any longer; one that is being copied is left to end."""
        read.is_wanted = False
        read.rows = {}  # writes that came after the read know it for as long as they are deferred
        if read.state is ReadState.PLANNED:
            self._end_read(read, ReadState.CANCELLED)

    def reads_of(self, block_ids: np.ndarray) -> list[HitRead]:
        """Under the lock. Reads that have not copied their rows of these blocks."""
        return [read for read in self._reads if np.isin(read.block_ids, block_ids).any()]

    def submit(self, write: StepWrite, slot: int) -> None:
        """Under the lock. Adds a write of rows in a staging slot, which it holds until it ends."""
        self._slots.hold(slot)
        self._slot_of[write] = slot
        self._immediate.append(write)
        self._immediate.queue_upto(write.step)
        self._cond.notify_all()

    def submit_deferred(self, write: StepWrite) -> None:
        """Under the lock. Adds a write that waits for `queue_deferred`, for a reader, or for the byte budget."""
        self._deferred.append(write)

    def queue_deferred(self, step: int) -> None:
        """Under the lock. Deferred writes of steps up to `step` may run."""
        if self._deferred.queue_upto(step):
            self._cond.notify_all()

    def release_slot(self, slot: int) -> None:
        """Under the lock. Its step was used."""
        self._slots.release(slot)
        self._cond.notify_all()

    def check_integrity(self) -> None:
        """Under the lock. Raises `IntegrityError` if counts and records differ."""
        self._immediate.check_integrity()
        self._deferred.check_integrity()
        readers = np.zeros_like(self._ownership.num_readers)
        for read in self._reads:
            readers[read.block_ids] += 1
        if (readers != self._ownership.num_readers).any():
            wrong = np.flatnonzero(readers != self._ownership.num_readers)
            raise IntegrityError(f"blocks {wrong.tolist()} count other readers than the planned reads have")
        if len(self._slot_of) != len(self._immediate):
            raise IntegrityError(f"{len(self._slot_of)} writes hold a slot and {len(self._immediate)} are there")

    # Taking the lock -----------------------------------------------------------------------------------------------

    def claim_slot(self, unused_steps: Callable[[], Sequence[int]]) -> int:
        """A free staging slot, which the caller releases when its step was used.

        Waits until one is free, running writes itself meanwhile, `staging_claim_timeout_s` at most. Raises
        `OmniPrefixCacheStagingTimeoutError` then; `unused_steps` gives the ids of the steps that hold the slots, under
        the lock.
        """
        with self._cond:
            self._check_open()
            slot = self._slots.claim()
            if slot is not None:
                return slot
            self._counters.staging_waits += 1
        claimed: list[int] = []

        def claim() -> bool:
            slot = self._slots.claim()
            if slot is not None:
                claimed.append(slot)
            return slot is not None

        def complaint() -> OmniPrefixCacheUnmatchError:
            return OmniPrefixCacheStagingTimeoutError(
                f"no staging slot of {self._config.staging_depth} came free in "
                f"{self._config.staging_claim_timeout_s} s: steps {list(unused_steps())} were saved and not used, and "
                f"{len(self._immediate)} writes are not done. Call materialize or discard_step for every step id, or "
                "raise staging_depth"
            )

        self._wait(claim, complaint)
        return claimed[0]

    def reserve_deferred(self, num_bytes: int) -> None:
        """Makes room for deferred rows of `num_bytes` on the device: the oldest are written until they fit into
        `gpu_staging_bytes`, or none is left. Waits for them."""
        with self._cond:
            step = self._deferred.oldest_over(self._config.gpu_staging_bytes - num_bytes)
            if step is None:
                return
            self.queue_deferred(step)
        self._wait(lambda: self._deferred.is_done(step), lambda: self._late(step), upto=step)

    def run_queued(self) -> None:
        """Runs what is queued, if there is no thread to do it."""
        while self.inline:
            with self._cond:
                write = self._take_queued()
            if write is None:
                return
            self._run(write)

    def finish_read(self, read: HitRead) -> None:
        """Sees to it that `read` has its rows, or an error of its own: copies them, or waits for whoever does.

        Raises `OmniPrefixCacheUnmatchError` if that takes longer than `staging_claim_timeout_s`.
        """
        with self._cond:
            mine = read.state is ReadState.PLANNED
            if mine:
                read.state = ReadState.COPYING
            elif read.state is not ReadState.COPYING:
                return
        if mine:
            self._copy(read)
        else:
            self._wait(
                lambda: read.state is not ReadState.COPYING,
                lambda: OmniPrefixCacheUnmatchError(f"the rows of request {read.req_id} are still being copied"),
                upto=read.needs_step,
            )

    def shutdown(self) -> None:
        """Ends the threads after what they are doing. Writes and reads that nobody has begun are dropped."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        for thread in self._threads:
            thread.join(timeout=self._config.staging_claim_timeout_s)
        self._threads = []

    # Inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise OmniPrefixCacheUnmatchError("the stage cache was shut down")

    def _take_queued(self, upto: float = math.inf) -> StepWrite | None:
        return self._immediate.take(upto) or self._deferred.take(upto)

    def _wait(
        self,
        is_done: Callable[[], bool],
        complaint: Callable[[], OmniPrefixCacheUnmatchError],
        *,
        upto: float = math.inf,
    ) -> None:
        """Waits until `is_done()`, running queued writes meanwhile. Both callables are called under the lock.

        Who waits for writes of steps up to `upto`, or for a read that needs those, runs no later ones: they may come
        after the very read or write that the caller has in hand, and would wait for it for ever. Whoever runs a write
        waits for reads that need earlier steps alone, so that no two wait for one another.
        """
        deadline = None
        while True:
            with self._cond:
                if is_done():
                    return
                write = self._take_queued(upto)
                if write is None:
                    self._check_open()
                    now = self._monotonic()
                    deadline = now + self._config.staging_claim_timeout_s if deadline is None else deadline
                    if now >= deadline:
                        raise complaint()
                    self._cond.wait(deadline - now)
                    continue
            self._run(write)

    def _run(self, write: StepWrite) -> None:
        """Runs a write that is COPYING. Its failure costs its rows and nothing else."""
        try:
            for read in write.after:
                self.finish_read(read)
            write.staged.arrive()
            with self._cond:
                write.move_to(WriteState.HOST_READY)
            write.staged.write()
        except Exception as error:
            logger.error(
                "stage cache: the rows of step %d for %s are lost: %s", write.step, ", ".join(write.keys), error
            )
            self._end_write(write, WriteState.FAILED)
        else:
            self._end_write(write, WriteState.WRITTEN)

    def _end_write(self, write: StepWrite, state: WriteState) -> None:
        with self._cond:
            write.move_to(state)
            if state is WriteState.FAILED:
                self.lose(write.keys, write.block_ids, write.epochs, write.num_rows)
            else:
                self._counters.rows_written += write.num_rows * len(write.keys)
                self._counters.bytes_written += write.num_rows * self._store.row_bytes(write.keys)
            slot = self._slot_of.pop(write, None)
            if slot is None:
                self._deferred.drop(write)
            else:
                self._immediate.drop(write)
                self._slots.release(slot)
            self._cond.notify_all()

    def lose(self, keys: Sequence[str], block_ids: np.ndarray, epochs: np.ndarray, num_rows: int) -> None:
        """Under the lock. Rows of these blocks and tenants are lost to later hits and to reads that wait for them."""
        keys = [key for key in keys if key in self._ownership.keys]
        self._counters.rows_lost += num_rows * len(keys)
        self._ownership.lose(keys, block_ids, epochs)
        lost = set(zip(block_ids.tolist(), epochs.tolist()))
        for read in self._reads:
            if not lost.isdisjoint(zip(read.block_ids.tolist(), read.epochs.tolist())):
                read.lost.update(keys)

    def _copy(self, read: HitRead) -> None:
        """Copies the rows of a read that is COPYING."""
        error = None
        rows: dict[str, Any] = {}
        try:
            self._await_writes(read.needs_step)
            for key in sorted(read.keys - read.lost):
                rows[key] = self._store.read(key, read.slots, read.absent(key), read.num_new)
        except Exception as failure:
            error = failure
        with self._cond:
            read.rows, read.error = rows if read.is_wanted else {}, error
            self._end_read(read, ReadState.DONE)

    def _await_writes(self, step: int) -> None:
        with self._cond:
            self.queue_deferred(step)
            if self._immediate.is_done(step) and self._deferred.is_done(step):
                return
            self._counters.write_waits += 1
        self._wait(
            lambda: self._immediate.is_done(step) and self._deferred.is_done(step),
            lambda: self._late(step),
            upto=step,
        )

    def _late(self, step: int) -> OmniPrefixCacheUnmatchError:
        heads = [log.head for log in (self._immediate, self._deferred) if not log.is_done(step)]
        stuck = ", ".join(f"step {head.step} is {head.state.name}" for head in heads if head is not None)
        return OmniPrefixCacheUnmatchError(
            f"the writes up to step {step} did not end in {self._config.staging_claim_timeout_s} s ({stuck})"
        )

    def _end_read(self, read: HitRead, state: ReadState) -> None:
        read.state = state
        self._ownership.remove_reader(read.block_ids)
        self._reads.remove(read)
        self._cond.notify_all()

    def _commit_loop(self) -> None:
        while True:
            with self._cond:
                write = None
                while not self._closed and (write := self._take_queued()) is None:
                    self._cond.wait()
            if write is None:
                return
            self._run(write)

    def _prefetch_loop(self) -> None:
        while True:
            with self._cond:
                while not self._closed and not self._prefetches:
                    self._cond.wait()
                if self._closed:
                    return
                read = self._prefetches.popleft()
            try:
                self.finish_read(read)
            except OmniPrefixCacheUnmatchError as error:
                # Whoever needs the rows waits for them again, and is told.
                logger.debug("stage cache: rows of request %s are not there yet: %s", read.req_id, error)
