"""Whose rows are in which block, for every key."""

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_neuron_cache.errors import IntegrityError

LOST = -1
"""In place of a number of rows: there were rows, and a failed write lost them."""


class BlockOwnership:
    """A block has one tenant at a time; rows under it belong to that tenant or are absent.

    For every key, a block's rows are ABSENT (never written by this tenant), PARTIAL (its first rows), FULL, or LOST.
    vLLM hands a block to a new tenant without a word to whoever reads its rows: `begin_tenancy` makes all that the old
    tenant wrote absent, under every key, in one assignment, and no key has to be visited.

    Not thread-safe: the manager calls it under its lock.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_epoch = np.zeros(num_blocks, dtype=np.int64)
        """The step in which a block's present tenant got it."""
        self.last_write = np.full(num_blocks, -1, dtype=np.int64)
        """The step that wrote into a block last, under any key; -1 is none."""
        self.num_readers = np.zeros(num_blocks, dtype=np.int32)
        """Reads that were planned and have not copied their rows yet."""
        self._stride = block_size + 2
        self._marks: dict[str, np.ndarray] = {}
        """For each key and block, `epoch * stride + rows` of whoever wrote there last: one number, so that a step takes
        one comparison. Marks of older epochs are two or more below those of the present one; `LOST` is between."""

    @property
    def keys(self) -> Iterable[str]:
        return self._marks.keys()

    def open_key(self, key: str) -> None:
        """All blocks are ABSENT for a new key. Mutates nothing for one that is open."""
        if key not in self._marks:
            self._marks[key] = np.full(self.num_blocks, -self._stride, dtype=np.int64)

    def close_key(self, key: str) -> None:
        """Forgets a key that turned out to have no row per token."""
        self._marks.pop(key, None)

    def begin_tenancy(self, block_ids: Sequence[int], step: int) -> np.ndarray:
        """Blocks get a new tenant in `step`: their rows are absent from now on, for every key.

        Returns those of them that planned reads still have to copy; the caller sees to it that they do before new rows
        land there.
        """
        blocks = np.asarray(block_ids, dtype=np.int64)
        self.block_epoch[blocks] = step
        return blocks[self.num_readers[blocks] > 0]

    def record_write(
        self, keys: Iterable[str], block_ids: np.ndarray, offsets: np.ndarray, num_rows: np.ndarray, step: int
    ) -> None:
        """Rows `[offset, offset + num_rows)` of each block now belong to its tenant, for each of `keys`.

        A block fills from its first row on. Rows after a gap (a key that was not emitted for the rows between) stay
        absent, and so do the rows behind a write that goes back (speculation that was rolled back).

        Args:
            block_ids, offsets, num_rows: int64 `[S]`; a block is named once.
        """
        starts = self.block_epoch[block_ids] * self._stride + offsets
        stops = starts + num_rows
        is_first = offsets == 0
        self.last_write[block_ids] = step
        for key in keys:
            marks = self._marks[key]
            follows = (marks[block_ids] >= starts) | is_first
            if follows.all():
                marks[block_ids] = stops
            else:
                marks[block_ids[follows]] = stops[follows]

    def lose(self, keys: Iterable[str], block_ids: np.ndarray, epochs: np.ndarray) -> None:
        """A write into blocks failed. Those that have the same tenant as then (`epochs`) are LOST until the next."""
        still = self.block_epoch[block_ids] == epochs
        for key in keys:
            if key in self._marks:
                self._marks[key][block_ids[still]] = epochs[still] * self._stride + LOST

    def num_present(self, key: str, block_ids: np.ndarray) -> np.ndarray:
        """Rows of `key` that each block's tenant has written, from the first on; `LOST` where a write failed.
        int64 `[len(block_ids)]`."""
        rows = self._marks[key][block_ids] - self.block_epoch[block_ids] * self._stride
        return np.where(rows < LOST, 0, rows)

    def add_reader(self, block_ids: np.ndarray) -> None:
        """`block_ids` names a block once."""
        self.num_readers[block_ids] += 1

    def remove_reader(self, block_ids: np.ndarray) -> None:
        self.num_readers[block_ids] -= 1

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if a count is out of range, or rows are from a tenant that is yet to come."""
        if (self.num_readers < 0).any():
            raise IntegrityError(f"blocks {np.flatnonzero(self.num_readers < 0).tolist()} have fewer than no readers")
        for key, marks in self._marks.items():
            rows = marks - self.block_epoch * self._stride
            wrong = rows > self.block_size
            if wrong.any():
                raise IntegrityError(
                    f"key {key}: blocks {np.flatnonzero(wrong).tolist()} have {rows[wrong].tolist()} rows, of "
                    f"{self.block_size} at most, or some of a tenant that is yet to come"
                )
