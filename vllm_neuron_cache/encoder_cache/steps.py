"""The protocol between the scheduler, which decides, and the workers, which follow.

Every scheduling pass has a sequence number. Its metadata carries the changes of that pass and of every earlier pass
whose output has not come back, so that a worker that missed the metadata of one catches up with the next. Applying a
change twice is harmless; a gap is an error.
"""

from typing import NamedTuple

from vllm_neuron_cache.encoder_cache.pool import PoolItem
from vllm_neuron_cache.errors import IntegrityError, StepProtocolError


class Allocation(NamedTuple):
    """Blocks that a pass assigned to an item, and how its rows lie in them."""

    key: str
    generation: int
    block_ids: tuple[int, ...]
    tokens_per_block: tuple[int, ...]


class StepDelta(NamedTuple):
    """What one pass changed: first `freed` is applied, then `allocated`."""

    seq: int
    epoch: int
    """Raised by a reset: everything of an earlier epoch is gone."""
    freed: tuple[tuple[str, int], ...]
    """(key, generation) of evicted items."""
    allocated: tuple[Allocation, ...]


class EncoderCacheStep(NamedTuple):
    """The metadata of one pass: all changes after step `acknowledged`, up to and including step `seq`."""

    seq: int
    acknowledged: int
    epoch: int
    deltas: tuple[StepDelta, ...]
    """Passes that changed something, oldest first. A pass that changed nothing has none."""


class StepJournal:
    """Scheduler side: numbers the passes and keeps their changes until they are acknowledged.

    `record_*` note a change in the pass that is being made, `close_step` ends it, `acknowledge` forgets.
    """

    def __init__(self) -> None:
        self._seq = 0
        self._acknowledged = 0
        self._epoch = 0
        self._freed: list[tuple[str, int]] = []
        self._allocated: list[Allocation] = []
        self._unacknowledged: list[StepDelta] = []

    @property
    def open_seq(self) -> int:
        """Sequence number of the pass that is being made."""
        return self._seq + 1

    @property
    def num_in_flight(self) -> int:
        """Passes closed and not acknowledged."""
        return self._seq - self._acknowledged

    def record_allocation(self, item: PoolItem) -> None:
        self._allocated.append(Allocation(item.key, item.generation, item.block_ids, item.layout.tokens_per_block))

    def record_eviction(self, item: PoolItem) -> None:
        self._freed.append((item.key, item.generation))

    def record_reset(self) -> None:
        """Everything recorded so far is void, also on the workers."""
        self._epoch += 1
        self._freed.clear()
        self._allocated.clear()
        self._unacknowledged.clear()

    def close_step(self) -> EncoderCacheStep:
        """Ends the pass and returns its metadata. Call once per scheduling pass."""
        self._seq += 1
        if self._freed or self._allocated:
            self._unacknowledged.append(StepDelta(self._seq, self._epoch, tuple(self._freed), tuple(self._allocated)))
            self._freed.clear()
            self._allocated.clear()
        return EncoderCacheStep(self._seq, self._acknowledged, self._epoch, tuple(self._unacknowledged))

    def acknowledge(self, seq: int) -> None:
        """Notes that the workers have executed every pass up to `seq`. An older number than before changes nothing.

        Raises `StepProtocolError` for a pass that was never closed.
        """
        if seq > self._seq:
            raise StepProtocolError(f"step {seq} was acknowledged, and the last step scheduled is {self._seq}")
        if seq > self._acknowledged:
            self._acknowledged = seq
        if self._unacknowledged and self._unacknowledged[0].seq <= seq:
            self._unacknowledged = [delta for delta in self._unacknowledged if delta.seq > seq]

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the numbers are out of order. Changes nothing."""
        numbers = [delta.seq for delta in self._unacknowledged]
        if numbers != sorted(set(numbers)) or any(not self._acknowledged < seq <= self._seq for seq in numbers):
            raise IntegrityError(f"unacknowledged steps {numbers}; acknowledged {self._acknowledged}, last {self._seq}")
        if any(delta.epoch != self._epoch for delta in self._unacknowledged):
            raise IntegrityError(f"a change from before a reset is kept; epoch {self._epoch}: {self._unacknowledged}")
