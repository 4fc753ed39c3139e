"""Writes of steps, in the order of the steps."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_neuron_cache.errors import IntegrityError, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache.interface import WriteState
from vllm_neuron_cache.stage_cache.reads import HitRead

_NEXT_STATE = {
    WriteState.PENDING: WriteState.QUEUED,
    WriteState.QUEUED: WriteState.COPYING,
    WriteState.COPYING: WriteState.HOST_READY,
    WriteState.HOST_READY: WriteState.WRITTEN,
}


class StepWrite:
    """The rows of one step for some keys. PENDING -> QUEUED -> COPYING -> HOST_READY -> WRITTEN, or FAILED."""

    def __init__(
        self,
        *,
        step: int,
        keys: Sequence[str],
        staged: Any,
        block_ids: np.ndarray,
        epochs: np.ndarray,
        num_rows: int,
        after: Sequence[HitRead],
        num_bytes: int = 0,
    ) -> None:
        """
        Args:
            staged: the rows, where the row store put them.
            block_ids, epochs: int64 `[S]`, blocks that get rows and their tenants.
            after: reads that must have copied the rows of blocks which this write, or a later one, overwrites.
            num_bytes: on the device, until it is written.
        """
        self.step = step
        self.keys = keys
        self.staged = staged
        self.block_ids = block_ids
        self.epochs = epochs
        self.num_rows = num_rows
        self.after = after
        self.num_bytes = num_bytes
        self.state = WriteState.PENDING

    def move_to(self, state: WriteState) -> None:
        """Moves one step down the chain, or to FAILED. Raises `OmniPrefixCacheUnmatchError` for any other move."""
        next_state = _NEXT_STATE.get(self.state)
        if next_state is None or state not in (next_state, WriteState.FAILED):
            raise OmniPrefixCacheUnmatchError(
                f"write of step {self.step} cannot go from {self.state.name} to {state.name}"
            )
        self.state = state


class WriteLog:
    """Writes that are not finished, oldest first. They run in this order, one at a time: rows of a block's next tenant
    never land before those of the last.

    Not thread-safe: the controller calls it under the manager's lock.
    """

    def __init__(self) -> None:
        self._writes: deque[StepWrite] = deque()
        self._queued_upto = -1
        self.num_bytes = 0
        """On the device, of all writes here."""

    def __len__(self) -> int:
        return len(self._writes)

    @property
    def head(self) -> StepWrite | None:
        """The oldest write that is not finished."""
        return self._writes[0] if self._writes else None

    def append(self, write: StepWrite) -> None:
        """Adds a write of a later step than any here: PENDING, or QUEUED if its step may run already."""
        if self._writes and self._writes[-1].step >= write.step:
            raise IntegrityError(f"write of step {write.step} comes after one of step {self._writes[-1].step}")
        if write.step <= self._queued_upto:
            write.move_to(WriteState.QUEUED)
        self._writes.append(write)
        self.num_bytes += write.num_bytes

    def queue_upto(self, step: int) -> bool:
        """Writes of steps up to `step` may run. Whether any is new to that."""
        newly = False
        if step > self._queued_upto:
            self._queued_upto = step
            for write in self._writes:
                if write.step <= step and write.state is WriteState.PENDING:
                    write.move_to(WriteState.QUEUED)
                    newly = True
        return newly

    def take(self, upto: float = math.inf) -> StepWrite | None:
        """The oldest write, now COPYING, if it may run, nobody runs it, and its step is `upto` or earlier."""
        head = self.head
        if head is None or head.state is not WriteState.QUEUED or head.step > upto:
            return None
        head.move_to(WriteState.COPYING)
        return head

    def drop(self, write: StepWrite) -> None:
        """Forgets the oldest write, which has ended."""
        if self.head is not write or write.state not in (WriteState.WRITTEN, WriteState.FAILED):
            raise IntegrityError(f"write of step {write.step} is {write.state.name} and is not the oldest that ended")
        self._writes.popleft()
        self.num_bytes -= write.num_bytes

    def is_done(self, step: int) -> bool:
        """Whether no write of a step up to `step` is left."""
        return not self._writes or self._writes[0].step > step

    def oldest_over(self, limit: int) -> int | None:
        """The last of the oldest steps that must be written to bring `num_bytes` down to `limit`; None if none must."""
        over = self.num_bytes - limit
        step = None
        for write in self._writes:
            if over <= 0:
                break
            over -= write.num_bytes
            step = write.step
        return step

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if writes are out of order, or run beside one another."""
        steps = [write.step for write in self._writes]
        if steps != sorted(set(steps)):
            raise IntegrityError(f"writes of steps {steps} are not in order")
        waiting = (WriteState.PENDING, WriteState.QUEUED)
        running = [write.step for write in list(self._writes)[1:] if write.state not in waiting]
        if running:
            raise IntegrityError(f"writes of steps {running} run before their turn")
        if self.num_bytes != sum(write.num_bytes for write in self._writes):
            raise IntegrityError(f"{self.num_bytes} bytes are counted of {len(self._writes)} writes")
