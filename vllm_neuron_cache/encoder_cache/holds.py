"""What keeps blocks from being used again when readers do not follow the engine's order: holds and leases.

The records here belong to the pool, which alone changes an item's state and frees its blocks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm_neuron_cache.errors import IntegrityError

if TYPE_CHECKING:
    from vllm_neuron_cache.encoder_cache.pool import PoolItem


class Hold(NamedTuple):
    """What the blocks of a HELD item wait for, beside the leases on it."""

    since: float
    """When the item was given up, in seconds of the pool's clock."""
    last_step: int
    """Sequence number of the last step that may read the item; 0 if none was in flight."""


class HeldItems:
    """The HELD items of a pool, in the order in which they were given up.

    They are kept by generation: one that has lost its key may stand beside a new item of the same key.
    """

    def __init__(self, min_hold_ms: int) -> None:
        if min_hold_ms < 0:
            raise ValueError(f"blocks are held for at least 0 ms, not {min_hold_ms}")
        self.min_hold_s = min_hold_ms / 1000
        self.num_blocks = 0
        self._items: dict[int, PoolItem] = {}
        self._last_acknowledged = 0

    def __iter__(self) -> "Iterator[PoolItem]":
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: "PoolItem", hold: Hold) -> None:
        item.hold = hold
        self._items[item.generation] = item
        self.num_blocks += len(item.block_ids)

    def remove(self, item: "PoolItem") -> None:
        del self._items[item.generation]
        self.num_blocks -= len(item.block_ids)

    def acknowledge(self, step: int) -> None:
        """Notes that no step up to `step` reads any longer. An older number than before changes nothing."""
        self._last_acknowledged = max(self._last_acknowledged, step)

    def is_over(self, item: "PoolItem", now: float) -> bool:
        """Whether nobody can still read the blocks of a HELD item. Leases that ran out must have been ended."""
        if item.leases or not self.min_hold_s:
            return not item.leases
        return item.hold.last_step <= self._last_acknowledged and item.hold.since + self.min_hold_s <= now

    def check_integrity(self, held: "list[PoolItem]") -> None:
        """Raises `IntegrityError` unless `held`, the items in state HELD, are those kept here. Changes nothing."""
        in_state = {item.generation: item for item in held}
        if in_state != self._items:
            raise IntegrityError(f"generations in state held: {list(in_state)}; kept as held: {list(self._items)}")
        num_blocks = sum(len(item.block_ids) for item in held)
        if num_blocks != self.num_blocks:
            raise IntegrityError(f"held blocks: {num_blocks} in items, {self.num_blocks} counted")


class Leases:
    """The items of a pool that readers outside the process have leases on, the longest leased first."""

    def __init__(self) -> None:
        self._items: dict[int, PoolItem] = {}

    def __iter__(self) -> "Iterator[PoolItem]":
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def grant(self, item: "PoolItem", holder: str, end: float) -> None:
        """Adds a lease, or extends the one that `holder` has. Never shortens it."""
        item.leases[holder] = max(end, item.leases.get(holder, end))
        self._items[item.generation] = item

    def end(self, key: str, generation: int, holder: str) -> "PoolItem | None":
        """Ends a lease, if it is there. Returns the item if that was the last lease on it."""
        item = self._items.get(generation)
        # A reader may name a generation of a process that is gone, whose numbers were given again.
        if item is None or item.key != key or item.leases.pop(holder, None) is None or item.leases:
            return None
        return self._items.pop(generation)

    def end_overdue(self, now: float) -> "list[PoolItem]":
        """Ends the leases that ran out. Returns the items that have none any longer."""
        overdue = [
            (item.key, item.generation, holder) for item in self for holder, end in item.leases.items() if end <= now
        ]
        return [item for item in (self.end(*lease) for lease in overdue) if item is not None]

    def check_integrity(self, leased: "list[PoolItem]") -> None:
        """Raises `IntegrityError` unless `leased`, the items with leases, are those kept here. Changes nothing."""
        with_leases = {item.generation: item for item in leased}
        if with_leases != self._items:
            raise IntegrityError(f"generations with leases: {list(with_leases)}; kept: {list(self._items)}")
