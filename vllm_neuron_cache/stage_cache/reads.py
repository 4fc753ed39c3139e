"""Rows of a hit on their way to a consumer."""

import enum
from collections.abc import Mapping, Set
from typing import Any

import numpy as np


class ReadState(enum.Enum):
    """State of a read."""

    PLANNED = "planned"
    """Its blocks keep their rows until it has copied them."""
    COPYING = "copying"
    """One thread has it."""
    DONE = "done"
    CANCELLED = "cancelled"
    """Nobody wants the rows any longer."""


class HitRead:
    """The rows of one request that a step hands on and did not compute: positions `[first, stop)`.

    PLANNED -> COPYING -> DONE, or CANCELLED. Fields above `state` do not change; the rest are the controller's, which
    changes them under the manager's lock.
    """

    def __init__(
        self,
        *,
        req_id: str,
        first: int,
        stop: int,
        block_ids: np.ndarray,
        epochs: np.ndarray,
        block_size: int,
        present: Mapping[str, np.ndarray],
        num_new: int,
        needs_step: int,
    ) -> None:
        """
        Args:
            block_ids: int64 `[B]`, the blocks of the positions, in order.
            epochs: int64 `[B]`, of the tenants whose rows are meant.
            present: for each key, int32 `[B]`, rows that the tenants wrote (`BlockOwnership.num_present`).
            num_new: rows that the step itself computes and hands on after these.
            needs_step: the last step that wrote into one of the blocks.
        """
        self.req_id = req_id
        self.first = first
        self.stop = stop
        self.block_ids = block_ids
        self.epochs = epochs
        self.num_new = num_new
        self.needs_step = needs_step
        self._block_size = block_size
        self._present = {key: rows for key, rows in present.items() if rows.any()}

        self.state = ReadState.PLANNED
        self.is_threatened = False
        """Whether a block of its got a new tenant before its rows were copied."""
        self.lost = {key for key, rows in self._present.items() if (rows < 0).any()}
        """Keys of which a failed write lost rows that this read needs."""
        self.is_wanted = True
        """Whether somebody is still to hand the rows on."""
        self.rows: dict[str, Any] = {}
        """Key -> host tensor `[num_hit + num_new, *feature]`, whose first rows are the hit's; set when DONE."""
        self.error: Exception | None = None
        """Why the rows could not be copied; set when DONE."""

    @property
    def has_ended(self) -> bool:
        return self.state in (ReadState.DONE, ReadState.CANCELLED)

    @property
    def num_hit(self) -> int:
        return self.stop - self.first

    @property
    def keys(self) -> Set[str]:
        """Keys that have at least one row here."""
        return self._present.keys()

    @property
    def slots(self) -> np.ndarray:
        """int64 `[num_hit]`, of the positions in order."""
        columns, offsets = self._places()
        return self.block_ids[columns] * self._block_size + offsets

    def is_complete(self, key: str) -> bool:
        """Whether the tenants wrote every row of `key`."""
        present = self._present.get(key)
        if present is None:
            return False
        last = (self.stop - 1) % self._block_size + 1
        return bool((present[:-1] == self._block_size).all() and present[-1] >= last)

    def absent(self, key: str) -> np.ndarray | None:
        """Which rows the tenants never wrote; bool `[num_hit]`. None if they wrote all of them."""
        if self.is_complete(key):
            return None
        if key not in self._present:
            return np.ones(self.num_hit, dtype=bool)
        columns, offsets = self._places()
        return offsets >= self._present[key][columns]

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """For each position, which of `block_ids` has it, and where."""
        positions = np.arange(self.first, self.stop)
        return positions // self._block_size - self.first // self._block_size, positions % self._block_size
