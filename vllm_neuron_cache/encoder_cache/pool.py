"""Who has which block of the encoder cache, and in which state."""

import enum
import math
import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from vllm_neuron_cache.encoder_cache.eviction import EvictionPolicy, LeastRecentlyUsed
from vllm_neuron_cache.encoder_cache.holds import HeldItems, Hold, Leases
from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.metrics import BlocksByState, PoolHistograms
from vllm_neuron_cache.errors import IntegrityError, PoolExhaustedError

NOBODY: Set[str] = frozenset()
"""References of an item without any. A set of its own for each of 100,000 idle items would be most of their memory."""


class ItemState(enum.Enum):
    """State of an item. A block that belongs to no item is FREE."""

    RESERVED = "reserved"
    """Blocks are assigned; the step that writes them has not been acknowledged."""
    RESIDENT = "resident"
    """Written, and at least one request refers to it or one reader has a lease on it."""
    EVICTABLE = "evictable"
    """Written, and nobody needs it. It stays until room is needed."""
    HELD = "held"
    """Given up, but someone outside the engine may still read its blocks, so that they are not FREE yet."""


@dataclass(kw_only=True, slots=True)
class PoolItem:
    """An item's record. Changed only by the pool that made it; everyone else reads."""

    key: str
    generation: int
    """Different for every reservation of the pool's lifetime, so that a stale block table is recognised."""
    layout: ItemLayout
    block_ids: tuple[int, ...]
    state: ItemState
    num_tokens: int
    """Of the layout, which would have to count them."""
    reserved_in: int
    """Sequence number of the step whose encoder run writes the item."""
    references: Set[str] = NOBODY
    """Ids of the requests that will still read the item."""
    leases: dict[str, float] = field(default_factory=dict)
    """Readers outside the process, and when the lease of each runs out, in seconds of the pool's clock."""
    hold: Hold | None = None
    """Of a HELD item; None in every other state."""
    modality: str = ""
    """For whoever counts; the pool does not mind."""
    num_uses: int = 1
    """Requests that have referred to the item since it was reserved."""
    reserved_at: float | None = None
    """Seconds of the pool's clock; None for an item that the histograms leave out."""
    idle_since: float = 0.0
    """When the item became EVICTABLE last, in seconds of the pool's clock, if it is in the histograms."""


class EncoderBlockPool:
    """FREE -> RESERVED -> RESIDENT <-> EVICTABLE (-> HELD) -> FREE: the allocator of the encoder cache.

    Blocks are handed out first-in first-out, and items are evicted in the order of the policy: least recently used
    first, as vLLM's own manager does, unless another is given. No randomness, and no clock but the one it is given: the
    same calls at the same times give the same block ids.

    An item becomes EVICTABLE when it loses its last reference, but not before the step that writes it is acknowledged:
    until then a worker may still be writing.

    Readers outside the engine do not follow its order. A lease keeps an item for one of them until it ends or runs out.
    For those that read without one, an item that was evicted or invalidated is HELD before its blocks are FREE, until
    `min_hold_ms` have passed, every step that may read it is acknowledged, and nobody has a lease on it. With
    `min_hold_ms` 0 only leases hold: all other readers are in the engine, whose order makes reuse safe.

    An evicted item keeps key and rows as long as it is HELD, and a hit brings it back. An invalidated one has lost its
    key: only its blocks wait.

    All changes go through `reserve`, `roll_back`, `refer`, `release`, `lease`, `end_lease`, `make_room`, `evict`,
    `invalidate`, `reclaim`, `acknowledge` and `clear`.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        min_hold_ms: int = 0,
        clock: Callable[[], float] = time.monotonic,
        policy: EvictionPolicy | None = None,
        sample_every: int = 1,
    ) -> None:
        """`num_blocks` is the number of blocks that items can own, without the scratch block. `clock` tells seconds.
        The `policy` is the pool's own from now on; None makes a `LeastRecentlyUsed`. One reservation in `sample_every`
        goes into the histograms."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block for items, not {num_blocks}")
        self.num_blocks = num_blocks
        self._clock = clock
        self._free_blocks: deque[int] = deque(range(num_blocks))
        self._items: dict[str, PoolItem] = {}
        self._policy = policy or LeastRecentlyUsed()
        self._unacknowledged: deque[PoolItem] = deque()
        self._held = HeldItems(min_hold_ms)
        self._leases = Leases()
        self._last_generation = 0
        self._num_tokens = 0
        self._sample_every = sample_every
        self.histograms = PoolHistograms()
        self.peak_used_blocks = 0

    # Reading ---------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def num_evictable_blocks(self) -> int:
        return self._policy.num_blocks

    @property
    def num_held_blocks(self) -> int:
        return self._held.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold an item, in whatever state."""
        return self.num_blocks - len(self._free_blocks)

    @property
    def num_items(self) -> int:
        """Items that `get` finds."""
        return len(self._items)

    @property
    def num_tokens(self) -> int:
        """Token rows in the blocks that hold an item, in whatever state."""
        return self._num_tokens

    def blocks_by_state(self) -> BlocksByState:
        """How many blocks are in which state."""
        num_reserved = sum(len(item.block_ids) for item in self._items.values() if item.state is ItemState.RESERVED)
        num_others = len(self._free_blocks) + num_reserved + self._policy.num_blocks + self._held.num_blocks
        return BlocksByState(
            free=len(self._free_blocks),
            reserved=num_reserved,
            resident=self.num_blocks - num_others,
            evictable=self._policy.num_blocks,
            held=self._held.num_blocks,
        )

    def get(self, key: str) -> PoolItem | None:
        """The item of that key, in any state; a HELD one is there until its blocks are free."""
        return self._items.get(key)

    def items(self) -> list[PoolItem]:
        """All that `get` finds."""
        return list(self._items.values())

    def can_reserve(self, num_blocks: int) -> bool:
        """Whether `num_blocks` are free, or will be by evicting and waiting for holds to be over. Changes nothing.

        Blocks of an item that a request refers to or a reader has a lease on do not count; a lease that ran out does
        not matter.
        """
        num_ready = len(self._free_blocks) + self._policy.num_blocks
        if num_blocks <= num_ready or not (self._held or self._leases):
            return num_blocks <= num_ready
        now = self._clock()
        for item in {item.generation: item for item in (*self._held, *self._leases)}.values():
            if not item.references and all(end <= now for end in item.leases.values()):
                num_ready += len(item.block_ids)
        return num_blocks <= num_ready

    # Changing --------------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int, *, last_step: int = 0) -> list[PoolItem]:
        """Reclaims, then evicts until `num_blocks` are free, or are when holds are over. For `last_step` see `evict`.

        Returns the evicted items, oldest first, whose blocks became free in this call. While holds last that can be too
        few, as `num_free_blocks` tells: call again later. Blocks that are being waited for are counted, so that waiting
        evicts no more items.

        Raises `PoolExhaustedError`, having changed nothing, when `can_reserve` says that it is impossible.
        """
        if not self.can_reserve(num_blocks):
            raise PoolExhaustedError(
                f"{num_blocks} blocks wanted; {len(self._free_blocks)} are free and {self._policy.num_blocks} "
                f"evictable, of {self.num_blocks}; {self._held.num_blocks} are held, {len(self._leases)} items leased"
            )
        freed = self.reclaim()
        num_awaited = sum(len(item.block_ids) for item in self._held if not item.leases)
        num_missing = num_blocks - len(self._free_blocks) - num_awaited
        while num_missing > 0:
            item = self._policy.evict()
            self._give_up(item, last_step)
            num_missing -= len(item.block_ids)
            if item.state is not ItemState.HELD:
                freed.append(item)
        return freed

    def evict(self, key: str, *, last_step: int = 0) -> PoolItem:
        """Gives up an EVICTABLE item and returns it: HELD if the pool has a hold time, otherwise with its blocks free.

        `last_step` is the number of the last step that may read the item, 0 if nothing is in flight. Raises `KeyError`
        for an item in another state.
        """
        item = self._items[key]
        self._policy.remove(item)
        self._give_up(item, last_step)
        return item

    def invalidate(self, key: str, *, last_step: int = 0) -> PoolItem:
        """Forgets an item whose rows nobody may find any longer, and returns it. For `last_step` see `evict`.

        The key can be reserved again at once. The blocks are free, or HELD while something guards them; no hit brings
        the item back. Raises `KeyError` for a key that is not there, `ValueError` while the item is RESERVED or a
        request refers to it.
        """
        item = self._items[key]
        if item.state is ItemState.RESERVED or item.references:
            raise ValueError(f"item {key!r} is {item.state.value} and {item.references or 'nobody'} refer to it")
        now = self._clock()
        self._end_leases(now)
        if item.state is ItemState.EVICTABLE:
            self._keep(item)
        if item.state is ItemState.RESIDENT:
            self._hold(item, Hold(now, last_step))
        del self._items[key]
        if self._held.is_over(item, now):
            self._held.remove(item)
            self._free(item)
        return item

    def reclaim(self) -> list[PoolItem]:
        """Ends the leases that ran out, and frees the blocks of HELD items that nothing guards any longer.

        Returns the evicted items that are gone now. Items that were invalidated or cleared are not among them: they
        were gone before.
        """
        if not self._held and not self._leases:
            return []
        now = self._clock()
        self._end_leases(now)
        evicted = []
        for item in [item for item in self._held if self._held.is_over(item, now)]:
            self._held.remove(item)
            if self._items.get(item.key) is item:
                self._forget_evicted(item)
                evicted.append(item)
            else:
                self._free(item)
        return evicted

    def reserve(self, key: str, layout: ItemLayout, *, reference: str, step: int, modality: str = "") -> PoolItem:
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
        num_tokens = layout.num_tokens
        take = self._free_blocks.popleft
        item = PoolItem(
            key=key,
            generation=self._last_generation,
            layout=layout,
            block_ids=tuple([take() for _ in range(layout.num_blocks)]),
            state=ItemState.RESERVED,
            num_tokens=num_tokens,
            reserved_in=step,
            references={reference},
            modality=modality,
        )
        if self._last_generation % self._sample_every == 0:
            item.reserved_at = self._clock()
        self._items[key] = item
        self._unacknowledged.append(item)
        self._num_tokens += num_tokens
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_blocks - len(self._free_blocks))
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
        """Adds a reference to an item that is there; a HELD one is RESIDENT again. Returns whether it is a new one.

        Raises `KeyError` for a key that is not there.
        """
        item = self._items[key]
        if reference in item.references:
            return False
        if item.references:
            item.references.add(reference)
        else:
            item.references = {reference}
        item.num_uses += 1
        if item.state is ItemState.EVICTABLE:
            self._keep(item)
        elif item.state is ItemState.HELD:
            self._held.remove(item)
            item.state, item.hold = ItemState.RESIDENT, None
        else:
            return True
        if item.reserved_at is not None:
            self.histograms.reuse_gap.observe(self._clock() - item.idle_since)
        return True

    def release(self, key: str, reference: str) -> None:
        """Drops a reference. An item or reference that is not there is no error: a reset may have been faster."""
        item = self._items.get(key)
        if item is None or reference not in item.references:
            return
        if len(item.references) > 1:
            item.references.discard(reference)
        else:
            item.references = NOBODY
            self._let_go(item)

    def lease(self, key: str, generation: int, holder: str, duration_s: float) -> bool:
        """Keeps an item for a reader outside the process, for `duration_s` seconds from now or until `end_lease`.

        A lease again by the same `holder` extends its first, and never shortens it. A HELD item stays HELD, for as long
        as the lease lasts. Returns False, having changed nothing, if there is no item of that key and generation or it
        is not written yet. Raises `ValueError` for a duration that is not positive and finite.
        """
        if not 0 < duration_s < math.inf:
            raise ValueError(f"a lease on item {key!r} lasts {duration_s} s; give more than 0 and an end")
        item = self._items.get(key)
        if item is None or item.generation != generation or item.state is ItemState.RESERVED:
            return False
        self._leases.grant(item, holder, self._clock() + duration_s)
        if item.state is ItemState.EVICTABLE:
            self._keep(item)
        return True

    def end_lease(self, key: str, generation: int, holder: str) -> None:
        """Ends a lease, also one on an item that has lost its key. A lease that is not there is no error."""
        item = self._leases.end(key, generation, holder)
        if item is not None:
            self._let_go(item)

    def acknowledge(self, step: int) -> None:
        """Notes that the workers finished every step up to `step`: what those steps reserved is written."""
        if self._held.min_hold_s:
            self._held.acknowledge(step)
        while self._unacknowledged and self._unacknowledged[0].reserved_in <= step:
            item = self._unacknowledged.popleft()
            if self._items.get(item.key) is not item:  # the pool was cleared meanwhile
                continue
            item.state = ItemState.RESIDENT
            self._let_go(item)

    def clear(self, *, last_step: int = 0) -> None:
        """Forgets every item. Generations go on, so that nothing from before can pass for something after.

        Blocks of written items are HELD while something guards them, as after `invalidate`; all others are free at
        once. For `last_step` see `evict`.
        """
        now = self._clock()
        self._end_leases(now)
        for item in self._items.values():
            if item.state in (ItemState.RESIDENT, ItemState.EVICTABLE):
                item.references = NOBODY
                self._hold(item, Hold(now, last_step))
        self._items.clear()
        self._policy.clear()
        self._unacknowledged.clear()
        for item in [item for item in self._held if self._held.is_over(item, now)]:
            self._held.remove(item)
        self._num_tokens = sum(item.num_tokens for item in self._held)
        held = {block for item in self._held for block in item.block_ids}
        self._free_blocks = deque(block for block in range(self.num_blocks) if block not in held)

    # States ----------------------------------------------------------------------------------------------------

    def _give_up(self, item: PoolItem, last_step: int) -> None:
        """EVICTABLE -> HELD or FREE; the policy has let go of the item."""
        if self._held.min_hold_s:
            self._hold(item, Hold(self._clock(), last_step))
        else:
            self._forget_evicted(item)

    def _forget_evicted(self, item: PoolItem) -> None:
        if item.reserved_at is not None:
            now = self._clock()
            self.histograms.lifetime.observe(now - item.reserved_at)
            self.histograms.idle_before_eviction.observe(now - item.idle_since)
        self._forget(item)

    def _forget(self, item: PoolItem) -> None:
        del self._items[item.key]
        self._free(item)

    def _free(self, item: PoolItem) -> None:
        self._free_blocks.extend(item.block_ids)
        self._num_tokens -= item.num_tokens

    def _keep(self, item: PoolItem) -> None:
        """EVICTABLE -> RESIDENT."""
        self._policy.remove(item)
        item.state = ItemState.RESIDENT

    def _let_go(self, item: PoolItem) -> None:
        """RESIDENT -> EVICTABLE, if nobody needs the item any longer."""
        if item.state is ItemState.RESIDENT and not item.references and not item.leases:
            item.state = ItemState.EVICTABLE
            if item.reserved_at is not None:
                item.idle_since = self._clock()
            self._policy.add(item)

    def _hold(self, item: PoolItem, hold: Hold) -> None:
        item.state = ItemState.HELD
        self._held.add(item, hold)

    def _end_leases(self, now: float) -> None:
        for item in self._leases.end_overdue(now):
            self._let_go(item)

    # Invariants ------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises `IntegrityError`, with both sides, if two records of the pool disagree. Changes nothing."""
        keyless = [item for item in self._held if self._items.get(item.key) is not item]
        items = [*self._items.values(), *keyless]
        everywhere = sorted([block for item in items for block in item.block_ids] + list(self._free_blocks))
        if everywhere != list(range(self.num_blocks)):
            raise IntegrityError(f"blocks in items and free: {everywhere}; the pool has 0 to {self.num_blocks - 1}")
        if self.peak_used_blocks < self.num_used_blocks:
            raise IntegrityError(f"{self.num_used_blocks} blocks are used; the peak is {self.peak_used_blocks}")
        self._check_lists(items)
        generations = sorted(item.generation for item in items)
        if generations != sorted(set(generations)) or not all(0 < g <= self._last_generation for g in generations):
            raise IntegrityError(f"generations {generations}, of {self._last_generation} handed out")
        for key, item in [*self._items.items(), *((item.key, item) for item in keyless)]:
            layout = item.layout
            if key != item.key or (len(item.block_ids), item.num_tokens) != (layout.num_blocks, layout.num_tokens):
                raise IntegrityError(f"item {key!r} is recorded as {item}")
            _check_item(item)
        num_tokens = sum(item.layout.num_tokens for item in items)
        if num_tokens != self._num_tokens:
            raise IntegrityError(f"token rows: {num_tokens} in items, {self._num_tokens} counted")

    def _check_lists(self, items: list[PoolItem]) -> None:
        self._policy.check_integrity([item for item in items if item.state is ItemState.EVICTABLE])
        reserved = {item.key for item in items if item.state is ItemState.RESERVED}
        awaited = {item.key for item in self._unacknowledged if self._items.get(item.key) is item}
        if reserved != awaited:
            raise IntegrityError(f"items in state reserved: {reserved}; awaiting acknowledgement: {awaited}")
        self._held.check_integrity([item for item in items if item.state is ItemState.HELD])
        self._leases.check_integrity([item for item in items if item.leases])


def _check_item(item: PoolItem) -> None:
    """Raises `IntegrityError` if the state of an item does not follow from who needs it."""
    needed = bool(item.references or item.leases)
    if item.state is ItemState.RESIDENT and not needed:
        raise IntegrityError(f"item {item.key!r} is resident and nobody refers to it")
    if item.state is ItemState.EVICTABLE and needed:
        raise IntegrityError(f"item {item.key!r} is evictable and {item.references or item.leases} refer to it")
    if item.state is ItemState.RESERVED and item.leases:
        raise IntegrityError(f"item {item.key!r} is reserved and {item.leases} are leases on it")
    if item.state is ItemState.HELD and item.references:
        raise IntegrityError(f"item {item.key!r} is held and {item.references} refer to it")
    if (item.state is ItemState.HELD) != (item.hold is not None):
        raise IntegrityError(f"item {item.key!r} is {item.state.value} and its hold is {item.hold}")
