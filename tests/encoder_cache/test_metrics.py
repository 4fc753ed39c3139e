"""What the pool counts, on a clock of the test's own."""

import pytest
from pools import evictable, reserve, resident

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.metrics import TIME_BOUNDS_S, BlocksByState, CacheCounters, Histogram
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def bucket_of(histogram: Histogram) -> float:
    """Upper bound of the only bucket with something in it."""
    (index,) = [index for index, count in enumerate(histogram.counts) if count]
    assert histogram.num_observed == 1
    return TIME_BOUNDS_S[index]


def test_a_histogram_counts_up_to_and_including_its_bounds():
    histogram = Histogram()
    for duration in (0.0, 0.001, 0.0011, 10_000, 10_001):
        histogram.observe(duration)
    assert histogram.counts[0] == 2 and histogram.counts[1] == 1
    assert histogram.counts[-2:] == [1, 1]
    assert histogram.total_s == pytest.approx(20_001.0021)


def test_bounds_rise():
    assert list(TIME_BOUNDS_S) == sorted(set(TIME_BOUNDS_S))


def test_lifetime_and_idle_time_end_with_the_eviction(clock):
    pool = EncoderBlockPool(1, clock=clock)
    resident(pool, "a")
    clock.now += 3
    pool.release("a", "r")
    clock.now += 40
    pool.make_room(1)
    assert (pool.histograms.lifetime.total_s, pool.histograms.idle_before_eviction.total_s) == (43, 40)
    assert bucket_of(pool.histograms.lifetime) == 50


def test_a_held_item_lives_until_its_blocks_are_free(clock):
    pool = EncoderBlockPool(1, min_hold_ms=1000, clock=clock)
    evictable(pool, "a")
    pool.evict("a")
    assert pool.histograms.lifetime.num_observed == 0
    clock.now += 2
    pool.reclaim()
    assert pool.histograms.lifetime.total_s == pool.histograms.idle_before_eviction.total_s == 2


def test_what_is_not_evicted_has_no_lifetime(clock):
    pool = EncoderBlockPool(3, clock=clock)
    evictable(pool, "invalidated"), resident(pool, "reset")
    pool.invalidate("invalidated")
    rolled_back = reserve(pool, "rolled back", step=2)
    rolled_back.references = frozenset()
    pool.roll_back("rolled back")
    pool.clear()
    assert pool.histograms.lifetime.num_observed == pool.histograms.idle_before_eviction.num_observed == 0


@pytest.mark.parametrize("min_hold_ms", [0, 10_000])
def test_a_reuse_gap_is_the_time_in_which_nobody_needed_the_item(clock, min_hold_ms):
    pool = EncoderBlockPool(1, min_hold_ms=min_hold_ms, clock=clock)
    evictable(pool, "a")
    clock.now += 2
    if min_hold_ms:
        pool.evict("a")
        clock.now += 5
    pool.refer("a", "r2")
    assert pool.histograms.reuse_gap.total_s == (7 if min_hold_ms else 2)
    clock.now += 1
    pool.refer("a", "r3")  # needed all the time
    assert pool.histograms.reuse_gap.num_observed == 1


def test_only_a_sample_of_the_items_is_timed(clock):
    pool = EncoderBlockPool(1, clock=clock, sample_every=3)
    for number in range(9):
        evictable(pool, str(number))
        pool.refer(str(number), "r2"), pool.release(str(number), "r2")
        pool.evict(str(number))
    counts = pool.histograms.lifetime, pool.histograms.idle_before_eviction, pool.histograms.reuse_gap
    assert [histogram.num_observed for histogram in counts] == [3, 3, 3]


def test_every_block_is_in_one_state(clock):
    pool = EncoderBlockPool(16, min_hold_ms=1000, clock=clock)
    evictable(pool, "evictable", 2), resident(pool, "resident", 3), evictable(pool, "held", 4)
    pool.evict("held")
    reserve(pool, "reserved", 5, step=2)
    assert pool.blocks_by_state() == BlocksByState(free=2, reserved=5, resident=3, evictable=2, held=4)
    pool.invalidate("evictable")
    assert pool.blocks_by_state() == BlocksByState(free=2, reserved=5, resident=3, evictable=0, held=6)
    assert sum(pool.blocks_by_state()) == pool.num_blocks


def test_token_rows_follow_the_blocks_of_items(clock):
    pool = EncoderBlockPool(4, min_hold_ms=1000, clock=clock)
    pool.reserve("a", ItemLayout((4, 1)), reference="r", step=1)
    assert pool.num_tokens == 5
    pool.acknowledge(1)
    pool.release("a", "r")
    pool.evict("a")
    assert pool.num_tokens == 5
    clock.now += 2
    pool.reclaim()
    assert pool.num_tokens == 0


def test_sums_are_over_modalities():
    counters = CacheCounters()
    counters.of("image").hits += 2
    counters.of("audio").hits += 1
    counters.of("audio").misses += 4
    counters.of("video").refusals += 1
    assert (counters.hits, counters.misses, counters.queries, counters.refusals) == (3, 4, 7, 1)
    assert counters.of("audio").queries == 5 and set(counters.by_modality) == {"image", "audio", "video"}
    assert counters.evictions == counters.invalidations == counters.waits == 0
