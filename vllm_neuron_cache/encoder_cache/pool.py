"""Who has which block of the encoder cache, and in which state."""

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.errors import IntegrityError, PoolExhaustedError


class ItemState(enum.Enum):
    """State of an item. A block that belongs to no item is FREE."""

    RESERVED = "reserved"
    """Blocks are assigned; the step that writes them has not been acknowledged."""
    RESIDENT = "resident"
    """Written, and at least one request refers to it."""
    EVICTABLE = "evictable"
    """Written, and no request refers to it. It stays until room is needed."""


@dataclass(kw_only=True, slots=True)
class PoolItem:
    """An item's record. Changed only by the pool that made it; everyone else reads."""

    key: str
    generation: int
    """Different for every reservation of the pool's lifetime, so that a stale block table is recognised."""
    layout: ItemLayout
    block_ids: tuple[int, ...]
    state: ItemState
    reserved_in: int
    """Sequence number of the step whose encoder run writes the item."""
    references: set[str] = field(default_factory=set)
    """Ids of the requests that will still read the item."""


class EncoderBlockPool:
    """FREE -> RESERVED -> RESIDENT <-> EVICTABLE -> FREE: the allocator of the encoder cache.

    Blocks are handed out first-in first-out, and items are evicted in the order in which they became EVICTABLE (least
    recently used first), which is the order of vLLM's own manager. No clock and no randomness: the same calls give
    the same block ids.

    An item becomes EVICTABLE when it loses its last reference, but not before the step that writes it is acknowledged:
    until then a worker may still be writing.

    All changes go through `reserve`, `roll_back`, `refer`, `release`, `make_room`, `evict`, `acknowledge` and `clear`.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` is the number of blocks that items can own, without the scratch block."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block for items, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free_blocks: deque[int] = deque(range(num_blocks))
        self._items: dict[str, PoolItem] = {}
        self._evictable: OrderedDict[str, PoolItem] = OrderedDict()
        self._num_evictable_blocks = 0
        self._unacknowledged: deque[PoolItem] = deque()
        self._last_generation = 0
        self.peak_used_blocks = 0

    # Reading ---------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def num_evictable_blocks(self) -> int:
        return self._num_evictable_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold an item, in whatever state."""
        return self.num_blocks - len(self._free_blocks)

    def get(self, key: str) -> PoolItem | None:
        return self._items.get(key)

    def items(self) -> list[PoolItem]:
        return list(self._items.values())

    def can_reserve(self, num_blocks: int) -> bool:
        """Whether `num_blocks` are free or can be made free by evicting. Changes nothing."""
        return num_blocks <= len(self._free_blocks) + self._num_evictable_blocks

    # Changing --------------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int) -> list[PoolItem]:
        """Evicts until `num_blocks` are free, and returns the evicted items, oldest first.

        Raises `PoolExhaustedError`, having evicted nothing, when that is impossible.
        """
        if not self.can_reserve(num_blocks):
            raise PoolExhaustedError(
                f"{num_blocks} blocks wanted; {len(self._free_blocks)} are free and {self._num_evictable_blocks} "
                f"evictable, of {self.num_blocks}"
            )
        evicted = []
        while len(self._free_blocks) < num_blocks:
            evicted.append(self.evict(next(iter(self._evictable))))
        return evicted

    def evict(self, key: str) -> PoolItem:
        """Frees the blocks of an EVICTABLE item and returns it. Raises `KeyError` for any other."""
        item = self._evictable.pop(key)
        self._num_evictable_blocks -= len(item.block_ids)
        self._forget(item)
        return item

    def reserve(self, key: str, layout: ItemLayout, *, reference: str, step: int) -> PoolItem:
        """Assigns free blocks to a new item, referred to by `reference` and written in `step`.

        Raises `PoolExhaustedError` without room (call `make_room` first), `ValueError` for a key that is there already
        or a step before one that was named already.
        """
        if key in self._items:
            raise ValueError(f"item {key!r} has blocks already, generation {self._items[key].generation}")
        if self._unacknowledged and step < self._unacknowledged[-1].reserved_in:
            raise ValueError(f"item {key!r} is for step {step}, after step {self._unacknowledged[-1].reserved_in}")
        if layout.num_blocks > len(self._free_blocks):
            raise PoolExhaustedError(
                f"item {key!r} needs {layout.num_blocks} blocks ({layout.num_tokens} rows) and "
                f"{len(self._free_blocks)} are free, of {self.num_blocks}"
            )
        self._last_generation += 1
        item = PoolItem(
            key=key,
            generation=self._last_generation,
            layout=layout,
            block_ids=tuple(self._free_blocks.popleft() for _ in range(layout.num_blocks)),
            state=ItemState.RESERVED,
            reserved_in=step,
            references={reference},
        )
        self._items[key] = item
        self._unacknowledged.append(item)
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)
        return item

    def roll_back(self, key: str) -> PoolItem:
        """Undoes the reservation of an item that no worker will write and nobody refers to. Returns the item.

        Raises `ValueError` for an item in another state.
        """
        item = self._items[key]
        if item.state is not ItemState.RESERVED or item.references:
            raise ValueError(f"item {key!r} is {item.state.value} and {item.references or 'nobody'} refer to it")
        self._unacknowledged.remove(item)
        self._forget(item)
        return item

    def refer(self, key: str, reference: str) -> bool:
        """Adds a reference to an item that is there. Returns whether the reference is new."""
        item = self._items[key]
        if reference in item.references:
            return False
        item.references.add(reference)
        if item.state is ItemState.EVICTABLE:
            del self._evictable[key]
            self._num_evictable_blocks -= len(item.block_ids)
            item.state = ItemState.RESIDENT
        return True

    def release(self, key: str, reference: str) -> None:
        """Drops a reference. An item or reference that is not there is no error: a reset may have been faster."""
        item = self._items.get(key)
        if item is None or reference not in item.references:
            return
        item.references.discard(reference)
        if not item.references and item.state is ItemState.RESIDENT:
            self._make_evictable(item)

    def acknowledge(self, step: int) -> None:
        """Notes that the workers finished every step up to `step`: what those steps reserved is written."""
        while self._unacknowledged and self._unacknowledged[0].reserved_in <= step:
            item = self._unacknowledged.popleft()
            if self._items.get(item.key) is not item:  # the pool was cleared meanwhile
                continue
            if item.references:
                item.state = ItemState.RESIDENT
            else:
                self._make_evictable(item)

    def clear(self) -> None:
        """Forgets every item. Generations go on, so that nothing from before can pass for something after."""
        self._items.clear()
        self._evictable.clear()
        self._num_evictable_blocks = 0
        self._unacknowledged.clear()
        self._free_blocks = deque(range(self.num_blocks))

    def _forget(self, item: PoolItem) -> None:
        del self._items[item.key]
        self._free_blocks.extend(item.block_ids)

    def _make_evictable(self, item: PoolItem) -> None:
        item.state = ItemState.EVICTABLE
        self._evictable[item.key] = item
        self._num_evictable_blocks += len(item.block_ids)

    # Invariants ------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises `IntegrityError`, with both sides, if two records of the pool disagree. Changes nothing."""
        owned = [block for item in self._items.values() for block in item.block_ids]
        everywhere = sorted(owned + list(self._free_blocks))
        if everywhere != list(range(self.num_blocks)):
            raise IntegrityError(f"blocks in items and free: {everywhere}; the pool has 0 to {self.num_blocks - 1}")
        if self.peak_used_blocks < self.num_used_blocks:
            raise IntegrityError(f"{self.num_used_blocks} blocks are used; the peak is {self.peak_used_blocks}")
        evictable = {key: item for key, item in self._items.items() if item.state is ItemState.EVICTABLE}
        if evictable != dict(self._evictable):
            raise IntegrityError(f"items in state evictable: {list(evictable)}; to be evicted: {list(self._evictable)}")
        num_evictable = sum(len(item.block_ids) for item in self._evictable.values())
        if num_evictable != self._num_evictable_blocks:
            raise IntegrityError(f"evictable blocks: {num_evictable} in items, {self._num_evictable_blocks} counted")
        reserved = {key for key, item in self._items.items() if item.state is ItemState.RESERVED}
        awaited = {item.key for item in self._unacknowledged if self._items.get(item.key) is item}
        if reserved != awaited:
            raise IntegrityError(f"items in state reserved: {reserved}; awaiting acknowledgement: {awaited}")
        generations = sorted(item.generation for item in self._items.values())
        if generations != sorted(set(generations)) or not all(0 < g <= self._last_generation for g in generations):
            raise IntegrityError(f"generations {generations}, of {self._last_generation} handed out")
        for key, item in self._items.items():
            if key != item.key or len(item.block_ids) != item.layout.num_blocks:
                raise IntegrityError(f"item {key!r} is recorded as {item}")
            if (item.state is ItemState.RESIDENT) and not item.references:
                raise IntegrityError(f"item {key!r} is resident and nobody refers to it")
            if (item.state is ItemState.EVICTABLE) and item.references:
                raise IntegrityError(f"item {key!r} is evictable and {item.references} refer to it")
