"""Worker side: which entries exist and in which buffer rows, as told by the scheduler."""

from dataclasses import dataclass

import numpy as np

from vllm_neuron_cache.encoder_cache.item import buffer_rows
from vllm_neuron_cache.encoder_cache.steps import Allocation, EncoderCacheStep
from vllm_neuron_cache.errors import IntegrityError, StepProtocolError


@dataclass(kw_only=True, slots=True)
class Entry:
    """What the cache stores for one item. Changed by `EntryTable.mark_written` and `mark_failed` only."""

    key: str
    generation: int
    block_ids: tuple[int, ...]
    tokens_per_block: tuple[int, ...]
    rows: np.ndarray
    """int32 `[num_tokens]`: row of the flattened buffer for each token of the item."""
    written: bool = False
    failure: str | None = None
    """Why the item has no rows and will not get any: the message of an `EncoderOutputError`."""

    @property
    def num_tokens(self) -> int:
        return len(self.rows)


class EntryTable:
    """ABSENT -> ALLOCATED -> WRITTEN or FAILED: a copy of the scheduler's decisions, one per worker rank.

    The table decides nothing. Ranks that apply the same steps have equal tables.
    """

    def __init__(self, num_item_blocks: int, block_size: int) -> None:
        self._num_item_blocks = num_item_blocks
        self._block_size = block_size
        self._entries: dict[str, Entry] = {}
        self._applied = 0
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def apply(self, step: EncoderCacheStep) -> None:
        """Brings the table up to `step`. Applying a step again changes nothing.

        Raises `StepProtocolError`, changing nothing, if a step in between was never seen.
        """
        if step.seq <= self._applied:
            return
        if step.acknowledged > self._applied:
            raise StepProtocolError(
                f"step {step.seq} holds the changes after step {step.acknowledged}, and this worker has applied only "
                f"step {self._applied}: steps {self._applied + 1} to {step.acknowledged} are missing"
            )
        if step.epoch != self._epoch:
            self._entries.clear()
            self._epoch = step.epoch
        for delta in step.deltas:
            if delta.seq <= self._applied:
                continue
            for key, generation in delta.freed:
                entry = self._entries.get(key)
                if entry is not None and entry.generation == generation:
                    del self._entries[key]
            for allocation in delta.allocated:
                self._entries[allocation.key] = self._entry(allocation)
        self._applied = step.seq

    def mark_written(self, entry: Entry) -> None:
        entry.written = True

    def mark_failed(self, entry: Entry, failure: str) -> None:
        """The entry stays, unreadable, until the scheduler frees it."""
        entry.written = False
        entry.failure = failure

    def clear(self) -> None:
        """Drops every entry. The steps go on where they were."""
        self._entries.clear()

    def _entry(self, allocation: Allocation) -> Entry:
        return Entry(
            key=allocation.key,
            generation=allocation.generation,
            block_ids=allocation.block_ids,
            tokens_per_block=allocation.tokens_per_block,
            rows=buffer_rows(allocation.block_ids, allocation.tokens_per_block, self._block_size),
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if a block belongs to two entries or is outside the buffer, or if an
        entry's rows are not those of its blocks. Changes nothing."""
        owner: dict[int, str] = {}
        for key, entry in self._entries.items():
            if key != entry.key:
                raise IntegrityError(f"the entry of {key!r} is recorded as that of {entry.key!r}")
            for block in entry.block_ids:
                if block in owner:
                    raise IntegrityError(f"block {block} belongs to {owner[block]!r} and to {key!r}")
                if not 0 <= block < self._num_item_blocks:
                    raise IntegrityError(f"{key!r} has block {block}; items own 0 to {self._num_item_blocks - 1}")
                owner[block] = key
            if entry.written and entry.failure is not None:
                raise IntegrityError(f"{key!r} is written and failed: {entry.failure}")
            counts = entry.tokens_per_block
            if len(counts) != len(entry.block_ids) or max(counts, default=0) > self._block_size:
                raise IntegrityError(f"{key!r} has {counts} rows in blocks {entry.block_ids} of {self._block_size}")
            rows = buffer_rows(entry.block_ids, counts, self._block_size)
            if not np.array_equal(entry.rows, rows):
                raise IntegrityError(f"{key!r} has rows {entry.rows}; its blocks and layout give {rows}")
