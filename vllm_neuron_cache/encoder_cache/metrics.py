"""What the encoder cache counts, on the side that decides: the scheduler's, and the front end's for refusals."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

TIME_BOUNDS_S = (*(mantissa * 10.0**exponent for exponent in range(-3, 4) for mantissa in (1, 2, 5)), 10_000.0)
"""Upper bounds of the histograms' buckets, from a millisecond to hours, in a 1-2-5 series."""


@dataclass(slots=True)
class Histogram:
    """Counts of durations in seconds. `observe` adds one; nothing is ever taken away."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS_S) + 1))
    """Of durations up to each of `TIME_BOUNDS_S`, not cumulated; the last is of longer ones."""
    total_s: float = 0.0

    @property
    def num_observed(self) -> int:
        return sum(self.counts)

    def observe(self, duration_s: float) -> None:
        self.counts[bisect_left(TIME_BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s


@dataclass(kw_only=True, slots=True)
class PoolHistograms:
    """How items live in a pool. Changed by that pool alone."""

    lifetime: Histogram = field(default_factory=Histogram)
    """From an item's reservation to its eviction."""
    idle_before_eviction: Histogram = field(default_factory=Histogram)
    """From when nobody needed an item any longer to its eviction."""
    reuse_gap: Histogram = field(default_factory=Histogram)
    """From when nobody needed an item to the next hit on it."""


@dataclass(kw_only=True, slots=True)
class ModalityCounts:
    """Of the items of one modality, since the counters were made.

    A query is a request asking for an item for the first time in its life, or again after it let go of it.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    invalidations: int = 0
    """Items whose write failed, or whose rows a worker could not find."""
    waits: int = 0
    """Items that found no room when their request could have used it. However long it waits, one counts once."""
    refusals: int = 0
    """Items of requests that were refused on arrival because the item can never fit."""

    @property
    def queries(self) -> int:
        return self.hits + self.misses


class CacheCounters:
    """`ModalityCounts` by modality, and their sums under the same names. `of` makes what is not there."""

    def __init__(self) -> None:
        self._by_modality: dict[str, ModalityCounts] = {}

    def of(self, modality: str) -> ModalityCounts:
        counts = self._by_modality.get(modality)
        if counts is None:
            counts = self._by_modality[modality] = ModalityCounts()
        return counts

    @property
    def by_modality(self) -> Mapping[str, ModalityCounts]:
        return self._by_modality

    @property
    def queries(self) -> int:
        return self.hits + self.misses

    @property
    def hits(self) -> int:
        return sum(counts.hits for counts in self._by_modality.values())

    @property
    def misses(self) -> int:
        return sum(counts.misses for counts in self._by_modality.values())

    @property
    def evictions(self) -> int:
        return sum(counts.evictions for counts in self._by_modality.values())

    @property
    def invalidations(self) -> int:
        return sum(counts.invalidations for counts in self._by_modality.values())

    @property
    def waits(self) -> int:
        return sum(counts.waits for counts in self._by_modality.values())

    @property
    def refusals(self) -> int:
        return sum(counts.refusals for counts in self._by_modality.values())


class BlocksByState(NamedTuple):
    """Blocks that items can own, each in exactly one state, at one moment."""

    free: int
    reserved: int
    resident: int
    evictable: int
    held: int


class PoolGauges(NamedTuple):
    """A pool at one moment."""

    blocks: BlocksByState
    num_items: int
    num_tokens: int
    """Token rows in the blocks that are not free."""
    padding_waste: float
    """Share of the rows of those blocks that hold nothing."""
