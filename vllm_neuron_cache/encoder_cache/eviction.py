"""Which item goes first when room is needed."""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm_neuron_cache.errors import IntegrityError

if TYPE_CHECKING:
    from vllm_neuron_cache.encoder_cache.pool import PoolItem


class EvictionPolicy(ABC):
    """The EVICTABLE items of a pool, and the order in which they go.

    All changes go through `add`, `remove`, `evict` and `clear`. The same calls give the same order.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        """Blocks of the items here."""

    @abstractmethod
    def __iter__(self) -> "Iterator[PoolItem]":
        """The items, the next to go first. Changes nothing."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, item: "PoolItem") -> None:
        """Takes in an item that nobody needs any longer."""

    @abstractmethod
    def remove(self, item: "PoolItem") -> None:
        """Lets go of an item that is needed again, or given up for another reason. Raises `KeyError` if it is not
        here."""

    @abstractmethod
    def evict(self) -> "PoolItem":
        """Removes the next item to go, and returns it. Raises `KeyError` if there is none."""

    @abstractmethod
    def clear(self) -> None:
        """Lets go of every item."""

    def check_integrity(self, evictable: "list[PoolItem]") -> None:
        """Raises `IntegrityError` unless `evictable`, the items in that state, are those kept here. Changes nothing."""
        here = {item.generation: item for item in self}
        in_state = {item.generation: item for item in evictable}
        if here != in_state or len(self) != len(in_state):
            raise IntegrityError(
                f"items in state evictable: {[item.key for item in in_state.values()]}; to be evicted: "
                f"{[item.key for item in here.values()]}"
            )
        num_blocks = sum(len(item.block_ids) for item in evictable)
        if num_blocks != self.num_blocks:
            raise IntegrityError(f"evictable blocks: {num_blocks} in items, {self.num_blocks} counted")


class LeastRecentlyUsed(EvictionPolicy):
    """In the order in which items were needed last, as vLLM's own manager."""

    def __init__(self) -> None:
        super().__init__()
        self._items: OrderedDict[int, PoolItem] = OrderedDict()

    def __iter__(self) -> "Iterator[PoolItem]":
        return iter(tuple(self._items.values()))

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: "PoolItem") -> None:
        self._items[item.generation] = item
        self.num_blocks += len(item.block_ids)

    def remove(self, item: "PoolItem") -> None:
        del self._items[item.generation]
        self.num_blocks -= len(item.block_ids)

    def evict(self) -> "PoolItem":
        _, item = self._items.popitem(last=False)
        self.num_blocks -= len(item.block_ids)
        return item

    def clear(self) -> None:
        self._items.clear()
        self.num_blocks = 0


class GreedyDualSizeFrequency(EvictionPolicy):
    """By what an item's blocks are worth: how often it was used, times what encoding it again costs, per block.

    Source: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP
    Laboratories, 1998. An item's priority is `inflation + uses * cost / blocks`, and `inflation` is the priority of the
    item that was evicted last, so that what was worth much long ago gives way in the end. The cost is counted in token
    rows, in which an encoder's time is close to linear. Among equals the least recently used goes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inflation = 0.0
        self._order = count()
        # (priority, order, item), as a heap. An entry is stale unless it is its item's own in `_entries`.
        self._heap: list[tuple[float, int, PoolItem]] = []
        self._entries: dict[int, tuple[float, int, PoolItem]] = {}

    def __iter__(self) -> "Iterator[PoolItem]":
        return (item for _, _, item in sorted(self._entries.values(), key=lambda entry: entry[:2]))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, item: "PoolItem") -> None:
        num_blocks = len(item.block_ids)
        priority = self._inflation + item.num_uses * item.num_tokens / num_blocks
        entry = priority, next(self._order), item
        self._entries[item.generation] = entry
        heapq.heappush(self._heap, entry)
        self.num_blocks += num_blocks

    def remove(self, item: "PoolItem") -> None:
        del self._entries[item.generation]
        self.num_blocks -= len(item.block_ids)
        if len(self._heap) > 2 * len(self._entries) + 64:  # mostly stale
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def evict(self) -> "PoolItem":
        if not self._entries:
            raise KeyError("nothing to evict")
        while True:
            entry = heapq.heappop(self._heap)
            priority, _, item = entry
            if self._entries.get(item.generation) is entry:
                break
        self._inflation = priority
        del self._entries[item.generation]
        self.num_blocks -= len(item.block_ids)
        return item

    def clear(self) -> None:
        self._inflation = 0.0
        self._heap.clear()
        self._entries.clear()
        self.num_blocks = 0


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {"lru": LeastRecentlyUsed, "gdsf": GreedyDualSizeFrequency}
)
"""By the names of the configuration key `eviction`."""
