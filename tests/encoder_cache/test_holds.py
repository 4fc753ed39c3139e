"""Blocks that readers outside the engine may still read: holds, leases, invalidation."""

import dataclasses
import itertools

import pytest
from pools import assert_both_sides_are_printed, evictable, reserve, resident

from vllm_neuron_cache.encoder_cache.holds import Hold
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool, ItemState
from vllm_neuron_cache.errors import PoolExhaustedError

HOLD_S = 0.125


@dataclasses.dataclass
class Clock:
    """Tells the seconds that it is told. Multiples of 1/1024 are exact in floats."""

    now: float = 64.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make_pool(num_blocks, clock, *, min_hold_ms=125):
    return EncoderBlockPool(num_blocks, min_hold_ms=min_hold_ms, clock=clock)


def counts(pool):
    """Blocks that are free, evictable, held."""
    pool.check_integrity()
    return pool.num_free_blocks, pool.num_evictable_blocks, pool.num_held_blocks


# Hold time -----------------------------------------------------------------------------------------------------


def test_an_evicted_item_is_held_and_keeps_key_and_blocks(clock):
    pool = make_pool(3, clock)
    item = evictable(pool, "a", 2)
    assert pool.make_room(3, last_step=7) == []
    assert (item.state, item.hold, item.block_ids) == (ItemState.HELD, Hold(64.0, 7), (0, 1))
    assert pool.get("a") is item and pool.items() == [item]
    assert counts(pool) == (1, 0, 2) and pool.num_used_blocks == 2


def test_a_negative_hold_time_is_refused():
    with pytest.raises(ValueError, match="at least 0 ms, not -1"):
        EncoderBlockPool(1, min_hold_ms=-1)


def test_the_hold_ends_at_its_millisecond_and_not_before():
    clock = Clock(0.0)
    pool = make_pool(1, clock, min_hold_ms=100)
    item = evictable(pool, "a")
    pool.evict("a")
    clock.now = 0.099
    assert pool.reclaim() == [] and counts(pool) == (0, 0, 1)
    clock.now = 0.1
    assert pool.reclaim() == [item] and counts(pool) == (1, 0, 0)
    assert pool.get("a") is None and pool.reclaim() == []


def test_without_a_hold_time_blocks_are_free_at_once_whatever_is_in_flight(clock):
    pool = make_pool(2, clock, min_hold_ms=0)
    first, second = evictable(pool, "a"), evictable(pool, "b")
    assert pool.evict("a", last_step=9) is first and counts(pool) == (1, 1, 0)
    assert first.state is not ItemState.HELD
    assert pool.make_room(2, last_step=9) == [second] and counts(pool) == (2, 0, 0)
    assert pool.reclaim() == []


def test_without_a_hold_time_and_leases_the_clock_decides_nothing():
    pool = EncoderBlockPool(2, clock=itertools.repeat(float("nan")).__next__)
    evictable(pool, "a", 2)
    assert not pool.can_reserve(3)
    assert [item.key for item in pool.make_room(2)] == ["a"]
    assert pool.reclaim() == []


def test_the_pool_tells_the_time_by_itself():
    pool = EncoderBlockPool(1, min_hold_ms=600_000)
    evictable(pool, "a")
    pool.evict("a")
    assert pool.reclaim() == [] and counts(pool) == (0, 0, 1)


# Acknowledgement -----------------------------------------------------------------------------------------------


def test_blocks_wait_for_the_last_step_that_may_read_them(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.evict("a", last_step=5)
    clock.now += 3600
    assert pool.reclaim() == []
    pool.acknowledge(4)
    assert pool.reclaim() == [] and counts(pool) == (0, 0, 1)
    pool.acknowledge(5)
    assert pool.reclaim() == [item] and counts(pool) == (1, 0, 0)


def test_an_acknowledgement_does_not_shorten_the_hold(clock):
    pool = make_pool(1, clock)
    evictable(pool, "a")
    pool.evict("a", last_step=5)
    pool.acknowledge(5)
    assert pool.reclaim() == []
    clock.now += HOLD_S
    assert pool.reclaim() != []


def test_a_step_acknowledged_before_the_eviction_is_not_waited_for(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.acknowledge(8)
    pool.acknowledge(2)  # late; 8 stands
    pool.evict("a", last_step=8)
    clock.now += HOLD_S
    assert pool.reclaim() == [item]


def test_a_later_pass_acknowledges_the_empty_step_that_an_idle_engine_kept(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    assert pool.make_room(1, last_step=2) == []
    for step in range(3, 9):  # each pass asks again, with itself as the last step; the first question counts
        assert pool.make_room(1, last_step=step) == []
    clock.now += HOLD_S
    pool.acknowledge(3)  # of 8
    assert pool.make_room(1, last_step=9) == [item]


# A hit on what is held -----------------------------------------------------------------------------------------


def test_a_hit_on_a_held_item_brings_it_back_in_the_same_generation(clock):
    pool = make_pool(2, clock)
    item = evictable(pool, "a", 2)
    generation = item.generation
    pool.evict("a", last_step=5)
    assert pool.refer("a", "r2") is True
    assert pool.get("a") is item
    assert (item.state, item.generation, item.block_ids) == (ItemState.RESIDENT, generation, (0, 1))
    assert (item.hold, item.references) == (None, {"r2"})
    assert counts(pool) == (0, 0, 0)
    clock.now += 3600
    pool.acknowledge(5)
    assert pool.reclaim() == [] and counts(pool) == (0, 0, 0)
    pool.release("a", "r2")
    assert counts(pool) == (0, 2, 0)


def test_a_hit_comes_in_time_until_the_blocks_are_given_back(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.evict("a")
    clock.now += 3600  # the hold is over, but nobody has reclaimed
    pool.refer("a", "r2")
    assert pool.reclaim() == [] and item.state is ItemState.RESIDENT


def test_an_item_that_came_back_is_held_afresh_when_it_is_evicted_again(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.evict("a", last_step=1)
    pool.refer("a", "r2")
    pool.release("a", "r2")
    clock.now += HOLD_S
    pool.evict("a", last_step=3)
    assert item.hold == Hold(64.0 + HOLD_S, 3)
    assert pool.reclaim() == []


def test_a_held_key_is_not_reserved_again(clock):
    pool = make_pool(2, clock)
    evictable(pool, "a")
    pool.evict("a")
    with pytest.raises(ValueError, match="'a' has blocks already"):
        reserve(pool, "a")


# Room ----------------------------------------------------------------------------------------------------------


def test_waiting_for_a_hold_evicts_no_more(clock):
    pool = make_pool(4, clock)
    items = [evictable(pool, key) for key in "abcd"]
    for _ in range(10):
        assert pool.can_reserve(2)
        assert pool.make_room(2) == []
        assert counts(pool) == (0, 2, 2)
    clock.now += HOLD_S
    assert pool.make_room(2) == items[:2]
    assert counts(pool) == (2, 2, 0)


def test_more_room_than_is_awaited_evicts_only_the_difference(clock):
    pool = make_pool(5, clock)
    for key in "abcd":
        evictable(pool, key)
    assert pool.make_room(2) == [] and counts(pool) == (1, 3, 1)
    assert pool.make_room(4) == [] and counts(pool) == (1, 1, 3)
    clock.now += HOLD_S
    assert [item.key for item in pool.make_room(4)] == ["a", "b", "c"]


def test_held_blocks_can_be_reserved_once_the_hold_is_over_and_not_before(clock):
    pool = make_pool(2, clock)
    evictable(pool, "a", 2)
    pool.make_room(1)
    assert pool.can_reserve(2)
    with pytest.raises(PoolExhaustedError):
        reserve(pool, "b")
    clock.now += HOLD_S
    pool.make_room(2)
    assert reserve(pool, "b", 2).block_ids == (0, 1)
    pool.check_integrity()


def test_room_that_no_waiting_makes_is_refused_and_nothing_is_evicted_or_reclaimed(clock):
    pool = make_pool(4, clock)
    resident(pool, "a")
    evictable(pool, "b")
    evictable(pool, "c")
    pool.evict("b")
    clock.now += HOLD_S
    assert not pool.can_reserve(4)
    with pytest.raises(PoolExhaustedError, match="4 blocks wanted; 1 are free and 1 evictable, of 4; 1 are held"):
        pool.make_room(4)
    assert counts(pool) == (1, 1, 1)  # an item freed here would never be told


def test_the_peak_counts_held_blocks(clock):
    pool = make_pool(3, clock)
    evictable(pool, "a", 2)
    pool.evict("a")
    reserve(pool, "b")
    assert pool.peak_used_blocks == 3
    pool.check_integrity()


# Leases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_hold_ms", [0, 125])
def test_a_consumer_that_dies_while_reading_gives_its_block_back_when_its_lease_runs_out(clock, min_hold_ms):
    pool = make_pool(1, clock, min_hold_ms=min_hold_ms)
    item = evictable(pool, "a")
    assert pool.lease("a", item.generation, "consumer", 2.0)
    assert (item.state, item.leases) == (ItemState.RESIDENT, {"consumer": 66.0})
    assert counts(pool) == (0, 0, 0)
    clock.now += 2 - 1 / 1024
    assert not pool.can_reserve(1)
    with pytest.raises(PoolExhaustedError):
        pool.make_room(1)
    clock.now += 1 / 1024
    assert pool.can_reserve(1)
    freed = pool.make_room(1)
    clock.now += HOLD_S
    assert freed + pool.reclaim() == [item]
    assert counts(pool) == (1, 0, 0)


def test_a_lease_that_ran_out_makes_the_item_evictable_when_the_pool_looks(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.lease("a", item.generation, "h", 1)
    clock.now += 1
    assert item.state is ItemState.RESIDENT
    assert pool.reclaim() == []
    assert item.state is ItemState.EVICTABLE and counts(pool) == (0, 1, 0)


def test_a_lease_that_is_ended_makes_the_item_evictable_as_the_last_to_go(clock):
    pool = make_pool(2, clock, min_hold_ms=0)
    first = evictable(pool, "a")
    evictable(pool, "b")
    pool.lease("a", first.generation, "h", 1)
    pool.end_lease("a", first.generation, "h")
    assert counts(pool) == (0, 2, 0)
    assert [item.key for item in pool.make_room(2)] == ["b", "a"]


def test_leases_that_ran_out_make_items_evictable_in_the_order_in_which_they_were_granted(clock):
    pool = make_pool(3, clock, min_hold_ms=0)
    items = {key: evictable(pool, key) for key in "abc"}
    for key, duration in (("b", 3), ("c", 1), ("a", 2)):
        pool.lease(key, items[key].generation, "h", duration)
    clock.now += 3
    assert [item.key for item in pool.make_room(3)] == ["b", "c", "a"]


def test_a_renewed_lease_lasts_from_its_renewal_and_is_never_shortened(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.lease("a", item.generation, "h", 2)
    clock.now += 1
    assert pool.lease("a", item.generation, "h", 2)
    assert item.leases == {"h": 67.0}
    assert pool.lease("a", item.generation, "h", 0.5)
    assert item.leases == {"h": 67.0}
    clock.now += 1.5
    assert not pool.can_reserve(1)
    clock.now += 0.5
    assert pool.can_reserve(1)


def test_an_item_waits_for_the_last_of_two_holders(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.lease("a", item.generation, "h1", 1)
    pool.lease("a", item.generation, "h2", 2)
    clock.now += 1
    assert pool.reclaim() == [] and item.leases == {"h2": 66.0}
    assert item.state is ItemState.RESIDENT and not pool.can_reserve(1)
    pool.end_lease("a", item.generation, "h1")  # which ran out
    assert item.state is ItemState.RESIDENT
    pool.end_lease("a", item.generation, "h2")
    assert item.state is ItemState.EVICTABLE and counts(pool) == (0, 1, 0)


def test_a_lease_outlasts_the_requests(clock):
    pool = make_pool(1, clock)
    item = resident(pool, "a")
    pool.lease("a", item.generation, "h", 1)
    pool.release("a", "r")
    assert item.state is ItemState.RESIDENT and not pool.can_reserve(1)
    pool.end_lease("a", item.generation, "h")
    assert item.state is ItemState.EVICTABLE


def test_a_request_outlasts_the_lease(clock):
    pool = make_pool(1, clock)
    item = resident(pool, "a")
    pool.lease("a", item.generation, "h", 1)
    clock.now += 1
    pool.reclaim()
    assert (item.state, item.leases, item.references) == (ItemState.RESIDENT, {}, {"r"})
    assert not pool.can_reserve(1)
    pool.check_integrity()


def test_an_item_that_a_request_reads_is_no_room_when_the_lease_on_it_ran_out(clock):
    pool = make_pool(1, clock)
    item = resident(pool, "a")
    pool.lease("a", item.generation, "h", 1)
    clock.now += 1
    assert not pool.can_reserve(1)
    with pytest.raises(PoolExhaustedError):
        pool.make_room(1)


def test_blocks_held_and_leased_are_counted_once(clock):
    pool = make_pool(2, clock)
    item = evictable(pool, "a")
    resident(pool, "b")
    pool.evict("a")
    pool.lease("a", item.generation, "h", 1)
    clock.now += 1
    assert pool.can_reserve(1) and not pool.can_reserve(2)


def test_what_is_gone_or_of_another_generation_or_not_written_has_no_lease(clock):
    pool = make_pool(2, clock, min_hold_ms=0)
    item = reserve(pool, "a")
    assert not pool.lease("a", item.generation, "h", 1)  # not written
    pool.acknowledge(1)
    assert not pool.lease("a", item.generation + 1, "h", 1)
    assert not pool.lease("b", item.generation, "h", 1)
    assert item.leases == {} and counts(pool) == (1, 0, 0)
    assert pool.lease("a", item.generation, "h", 1)
    pool.release("a", "r")
    pool.end_lease("a", item.generation, "h")
    pool.evict("a")
    assert not pool.lease("a", item.generation, "h", 1)
    again = resident(pool, "a")
    assert not pool.lease("a", item.generation, "h", 1)
    assert pool.lease("a", again.generation, "h", 1)
    pool.check_integrity()


@pytest.mark.parametrize("duration_s", [0, -1.0, float("inf"), float("nan")])
def test_a_lease_without_a_length_or_an_end_is_refused(clock, duration_s):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    with pytest.raises(ValueError, match=f"'a' lasts {duration_s} s"):
        pool.lease("a", item.generation, "h", duration_s)
    assert item.leases == {} and counts(pool) == (0, 1, 0)


def test_ending_a_lease_that_is_not_there_changes_nothing(clock):
    pool = make_pool(2, clock)
    item = evictable(pool, "a")
    pool.lease("a", item.generation, "h", 1)
    pool.end_lease("a", item.generation, "another")
    pool.end_lease("a", item.generation + 1, "h")
    pool.end_lease("b", item.generation, "h")
    pool.end_lease("nobody has this", 77, "h")
    assert item.leases == {"h": 65.0} and item.state is ItemState.RESIDENT
    for _ in range(3):
        pool.end_lease("a", item.generation, "h")
        assert counts(pool) == (1, 1, 0)


def test_a_lease_on_a_held_item_keeps_it_held_and_a_hit_still_brings_it_back(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.evict("a")
    assert pool.lease("a", item.generation, "h", 2)
    clock.now += 1
    assert pool.reclaim() == [] and item.state is ItemState.HELD
    assert not pool.can_reserve(1)
    pool.refer("a", "r2")
    pool.release("a", "r2")
    assert item.state is ItemState.RESIDENT
    pool.end_lease("a", item.generation, "h")
    assert item.state is ItemState.EVICTABLE and counts(pool) == (0, 1, 0)


def test_the_blocks_of_a_held_item_are_free_when_the_lease_on_it_is_over(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.evict("a")
    pool.lease("a", item.generation, "h", 2)
    clock.now += 1
    pool.end_lease("a", item.generation, "h")
    assert pool.can_reserve(1)
    assert pool.make_room(1) == [item] and counts(pool) == (1, 0, 0)


def test_held_blocks_under_a_lease_are_not_waited_for_while_others_can_be_evicted(clock):
    pool = make_pool(2, clock)
    first, second = evictable(pool, "a"), evictable(pool, "b")
    pool.evict("a")
    pool.lease("a", first.generation, "h", 3600)
    assert pool.make_room(1) == [] and second.state is ItemState.HELD
    clock.now += HOLD_S
    assert pool.make_room(1) == [second] and counts(pool) == (1, 0, 1)


# Invalidation --------------------------------------------------------------------------------------------------


def test_without_holds_and_leases_the_blocks_of_an_invalidated_item_are_free_at_once(clock):
    pool = make_pool(2, clock, min_hold_ms=0)
    item = evictable(pool, "a", 2)
    assert pool.invalidate("a", last_step=9) is item
    assert pool.get("a") is None and pool.items() == [] and counts(pool) == (2, 0, 0)
    assert pool.reclaim() == []


def test_an_invalidated_key_is_reserved_again_while_the_old_blocks_are_held(clock):
    pool = make_pool(3, clock)
    old = evictable(pool, "a")
    pool.invalidate("a", last_step=2)
    assert (old.state, old.hold) == (ItemState.HELD, Hold(64.0, 2))
    assert pool.get("a") is None and counts(pool) == (2, 0, 1)
    new = reserve(pool, "a", 2, step=3)
    assert pool.get("a") is new and new.generation > old.generation
    assert not set(new.block_ids) & set(old.block_ids)
    assert counts(pool) == (0, 0, 1)
    clock.now += HOLD_S
    assert pool.reclaim() == [] and counts(pool) == (0, 0, 1)
    pool.acknowledge(2)
    assert pool.reclaim() == []  # workers were told when it was invalidated
    assert counts(pool) == (1, 0, 0) and pool.get("a") is new


def test_nothing_brings_an_invalidated_item_back(clock):
    pool = make_pool(2, clock)
    item = evictable(pool, "a")
    pool.invalidate("a")
    with pytest.raises(KeyError):
        pool.refer("a", "r")
    assert not pool.lease("a", item.generation, "h", 1)
    with pytest.raises(KeyError):
        pool.evict("a")
    with pytest.raises(KeyError):
        pool.invalidate("a")
    assert counts(pool) == (1, 0, 1)


@pytest.mark.parametrize("min_hold_ms", [0, 125])
def test_the_blocks_of_an_invalidated_item_wait_for_its_readers(clock, min_hold_ms):
    pool = make_pool(2, clock, min_hold_ms=min_hold_ms)
    item = evictable(pool, "a")
    pool.lease("a", item.generation, "h1", 1)
    pool.lease("a", item.generation, "h2", 2)
    pool.invalidate("a")
    reserve(pool, "a")
    assert item.state is ItemState.HELD and counts(pool) == (0, 0, 1)
    pool.end_lease("a", item.generation, "h1")
    clock.now += 1
    assert pool.reclaim() == [] and counts(pool) == (0, 0, 1)
    clock.now += 1
    assert pool.can_reserve(1)
    assert pool.make_room(1) == [] and counts(pool) == (1, 0, 0)


def test_a_reader_of_an_invalidated_item_can_end_its_lease(clock):
    pool = make_pool(1, clock, min_hold_ms=0)
    item = evictable(pool, "a")
    pool.lease("a", item.generation, "h", 3600)
    pool.invalidate("a", last_step=9)  # without a hold time steps guard nothing
    pool.end_lease("a", item.generation, "h")
    assert pool.make_room(1) == [] and counts(pool) == (1, 0, 0)


def test_a_lease_that_ran_out_does_not_hold_an_invalidated_item(clock):
    pool = make_pool(1, clock, min_hold_ms=0)
    item = evictable(pool, "a")
    pool.lease("a", item.generation, "h", 1)
    clock.now += 1
    pool.invalidate("a")
    assert counts(pool) == (1, 0, 0)


def test_a_held_item_that_is_invalidated_waits_for_the_rest_of_its_hold(clock):
    pool = make_pool(1, clock)
    item = evictable(pool, "a")
    pool.evict("a", last_step=1)
    clock.now += HOLD_S / 2
    pool.invalidate("a", last_step=9)
    assert item.hold == Hold(64.0, 1) and pool.get("a") is None and counts(pool) == (0, 0, 1)
    clock.now += HOLD_S / 2
    assert pool.reclaim() == [] and counts(pool) == (1, 0, 0)


def test_a_held_item_whose_hold_is_over_is_free_when_it_is_invalidated(clock):
    pool = make_pool(1, clock)
    evictable(pool, "a")
    pool.evict("a")
    clock.now += HOLD_S
    pool.invalidate("a")
    assert counts(pool) == (1, 0, 0)


def test_what_is_not_written_or_is_referred_to_cannot_be_invalidated(clock):
    pool = make_pool(2, clock)
    item = reserve(pool, "a")
    pool.release("a", "r")
    with pytest.raises(ValueError, match="'a' is reserved"):
        pool.invalidate("a")
    pool.refer("a", "r9")
    pool.acknowledge(1)
    pool.lease("a", item.generation, "h", 1)
    with pytest.raises(ValueError, match=r"'a' is resident and \{'r9'\}"):
        pool.invalidate("a")
    with pytest.raises(KeyError):
        pool.invalidate("b")
    assert pool.get("a") is item and counts(pool) == (1, 0, 0)


# Reset ---------------------------------------------------------------------------------------------------------


def test_clear_holds_what_readers_lease_and_frees_the_rest(clock):
    pool = make_pool(5, clock, min_hold_ms=0)
    leased = resident(pool, "a")
    evictable(pool, "b")
    resident(pool, "c")
    reserve(pool, "d", step=2)
    pool.lease("a", leased.generation, "h", 2)
    pool.clear(last_step=9)
    assert (leased.state, leased.references) == (ItemState.HELD, set())
    assert pool.items() == [] and counts(pool) == (4, 0, 1)
    with pytest.raises(KeyError):
        pool.refer("a", "r")
    assert reserve(pool, "a", 2, step=3).block_ids == (1, 2)  # not block 0
    clock.now += 2
    assert pool.reclaim() == [] and counts(pool) == (3, 0, 0)


def test_clear_starts_the_hold_of_everything_written(clock):
    pool = make_pool(4, clock)
    evictable(pool, "a")
    resident(pool, "b")
    reserve(pool, "c", step=2)
    pool.clear(last_step=2)
    assert pool.items() == [] and counts(pool) == (2, 0, 2)
    clock.now += HOLD_S
    pool.reclaim()
    assert counts(pool) == (2, 0, 2)
    pool.acknowledge(2)
    assert pool.reclaim() == [] and counts(pool) == (4, 0, 0)


def test_clear_leaves_a_hold_as_it_was_and_takes_its_key(clock):
    pool = make_pool(2, clock)
    item = evictable(pool, "a")
    pool.evict("a")
    clock.now += HOLD_S / 2
    pool.clear(last_step=9)
    assert item.hold == Hold(64.0, 0) and pool.get("a") is None and counts(pool) == (1, 0, 1)
    clock.now += HOLD_S / 2
    assert pool.reclaim() == [] and counts(pool) == (2, 0, 0)


def test_clear_frees_at_once_what_is_guarded_no_longer(clock):
    pool = make_pool(2, clock, min_hold_ms=0)
    first, second = evictable(pool, "a"), evictable(pool, "b")
    pool.lease("a", first.generation, "h", 1)
    pool.lease("b", second.generation, "h", 1)
    pool.invalidate("a")
    clock.now += 1
    pool.clear()
    assert counts(pool) == (2, 0, 0)


def test_a_second_clear_keeps_what_the_first_one_held(clock):
    pool = make_pool(2, clock)
    evictable(pool, "a")
    pool.clear()
    pool.clear()
    assert counts(pool) == (1, 0, 1)


# Integrity -----------------------------------------------------------------------------------------------------


def mixed_pool():
    """a: held with key, block 0. b: resident by a lease, block 1. c: held without key and leased, block 2. 3 free."""
    pool = make_pool(4, Clock())
    for key in "abc":
        item = evictable(pool, key)
        if key != "a":
            pool.lease(key, item.generation, "h", 1)
    pool.evict("a")
    pool.invalidate("c")
    pool.check_integrity()
    return pool


def held_item_not_kept(pool):
    del pool._held._items[1]


def held_block_free_too(pool):
    pool._free_blocks.append(2)


def held_item_without_key_forgotten(pool):
    del pool._held._items[3]


def held_blocks_miscounted(pool):
    pool._held.num_blocks += 1


def kept_item_in_another_state(pool):
    pool.get("a").state = ItemState.RESIDENT


def resident_item_kept_as_held(pool):
    pool._held._items[2] = pool.get("b")


def reference_to_a_held_item(pool):
    pool.get("a").references = {"r9"}


def reference_to_an_item_without_key(pool):
    pool._held._items[3].references = {"r9"}


def held_item_without_a_hold(pool):
    pool.get("a").hold = None


def hold_of_an_item_that_is_not_held(pool):
    pool.get("b").hold = Hold(1.0, 0)


def lease_not_kept(pool):
    pool.get("a").leases["h9"] = 99.0


def lease_on_an_item_that_is_gone(pool):
    pool._leases._items[9] = dataclasses.replace(pool.get("b"), generation=9)


def lease_kept_after_it_ended(pool):
    pool._held._items[3].leases.clear()


def evictable_item_with_a_lease(pool):
    item = pool.get("b")
    item.state = ItemState.EVICTABLE
    pool._policy.add(item)


def reserved_item_with_a_lease(pool):
    item = pool.get("b")
    item.state = ItemState.RESERVED
    pool._unacknowledged.append(item)


def generation_of_a_held_item_given_twice(pool):
    pool.get("b").generation = 3
    del pool._leases._items[2]
    pool._leases._items[3] = pool._held._items[3]


CORRUPTIONS = [
    (held_item_not_kept, ["held: [1, 3]", "held: [3]"]),
    (held_block_free_too, ["[0, 1, 2, 2, 3]", "0 to 3"]),
    (held_item_without_key_forgotten, ["[0, 1, 3]", "0 to 3"]),
    (held_blocks_miscounted, ["held blocks: 2 in items", "3 counted"]),
    (kept_item_in_another_state, ["state held: [3]", "kept as held: [1, 3]"]),
    (resident_item_kept_as_held, ["state held: [1, 3]", "kept as held: [1, 3, 2]"]),
    (reference_to_a_held_item, ["'a'", "held", "r9"]),
    (reference_to_an_item_without_key, ["'c'", "held", "r9"]),
    (held_item_without_a_hold, ["'a'", "held", "None"]),
    (hold_of_an_item_that_is_not_held, ["'b'", "resident", "Hold(since=1.0"]),
    (lease_not_kept, ["leases: [1, 2, 3]", "kept: [2, 3]"]),
    (lease_on_an_item_that_is_gone, ["leases: [2, 3]", "kept: [2, 3, 9]"]),
    (lease_kept_after_it_ended, ["leases: [2]", "kept: [2, 3]"]),
    (evictable_item_with_a_lease, ["'b'", "evictable", "'h'"]),
    (reserved_item_with_a_lease, ["'b'", "reserved", "'h'"]),
    (generation_of_a_held_item_given_twice, ["[1, 3, 3]", "of 3"]),
]


@pytest.mark.parametrize("corrupt, sides", CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_check_integrity_notices_and_prints_both_sides(corrupt, sides):
    pool = mixed_pool()
    corrupt(pool)
    assert_both_sides_are_printed(pool, sides)
