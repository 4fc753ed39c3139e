"""The block pool: states, order, refusals, and what `check_integrity` notices."""

import copy
import dataclasses

import pytest
from pools import assert_both_sides_are_printed, evictable, layout, reserve, resident

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.pool import NOBODY, EncoderBlockPool, ItemState
from vllm_neuron_cache.errors import PoolExhaustedError


def counts(pool):
    pool.check_integrity()
    return pool.num_free_blocks, pool.num_evictable_blocks, pool.num_used_blocks


def snapshot(pool):
    return copy.deepcopy(vars(pool) | {name: vars(vars(pool)[name]) for name in ("_held", "_leases", "_policy")})


# States --------------------------------------------------------------------------------------------------------


def test_a_new_pool_is_free():
    pool = EncoderBlockPool(3)
    assert counts(pool) == (3, 0, 0)
    assert pool.items() == [] and pool.get("a") is None and pool.peak_used_blocks == 0


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_for_items_is_refused(num_blocks):
    with pytest.raises(ValueError, match=str(num_blocks)):
        EncoderBlockPool(num_blocks)


def test_a_reservation_records_everything_about_the_item():
    pool = EncoderBlockPool(5)
    item = pool.reserve("a", ItemLayout((4, 2)), reference="r1", step=7)
    assert pool.get("a") is item and pool.items() == [item]
    assert (item.key, item.layout, item.block_ids, item.reserved_in) == ("a", ItemLayout((4, 2)), (0, 1), 7)
    assert (item.state, item.references, item.generation) == (ItemState.RESERVED, {"r1"}, 1)
    assert counts(pool) == (3, 0, 2)


def test_an_item_becomes_resident_when_its_own_step_is_acknowledged_and_not_before():
    pool = EncoderBlockPool(2)
    item = reserve(pool, "a", step=5)
    pool.acknowledge(4)
    assert item.state is ItemState.RESERVED
    pool.acknowledge(5)
    assert item.state is ItemState.RESIDENT
    assert counts(pool) == (1, 0, 1)


def test_one_acknowledgement_covers_every_step_up_to_it():
    pool = EncoderBlockPool(4)
    items = [reserve(pool, key, step=step) for key, step in (("a", 1), ("b", 2), ("c", 2), ("d", 4))]
    pool.acknowledge(3)
    assert [item.state for item in items] == [ItemState.RESIDENT] * 3 + [ItemState.RESERVED]
    pool.acknowledge(9)
    assert items[-1].state is ItemState.RESIDENT


def test_the_last_reference_makes_a_written_item_evictable():
    pool = EncoderBlockPool(2)
    item = resident(pool, "a", 2, reference="r1")
    pool.refer("a", "r2")
    pool.release("a", "r1")
    assert item.state is ItemState.RESIDENT and counts(pool) == (0, 0, 2)
    pool.release("a", "r2")
    assert item.state is ItemState.EVICTABLE and counts(pool) == (0, 2, 2)


def test_a_hit_brings_an_evictable_item_back_with_its_blocks():
    pool = EncoderBlockPool(2)
    item = evictable(pool, "a", 2)
    assert pool.refer("a", "r2") is True
    assert pool.get("a") is item
    assert (item.state, item.references, item.block_ids) == (ItemState.RESIDENT, {"r2"}, (0, 1))
    assert counts(pool) == (0, 0, 2)
    assert not pool.can_reserve(1)


def test_an_unwritten_item_without_references_stays_until_its_step_is_acknowledged():
    pool = EncoderBlockPool(1)
    item = reserve(pool, "a", reference="r")
    pool.release("a", "r")
    assert item.state is ItemState.RESERVED and not pool.can_reserve(1)
    with pytest.raises(PoolExhaustedError):
        pool.make_room(1)
    pool.acknowledge(1)
    assert item.state is ItemState.EVICTABLE and counts(pool) == (0, 1, 1)


def test_a_hit_on_an_unwritten_item_without_references_keeps_it():
    pool = EncoderBlockPool(1)
    item = reserve(pool, "a", reference="r1")
    pool.release("a", "r1")
    assert pool.refer("a", "r2") is True
    assert item.state is ItemState.RESERVED
    pool.acknowledge(1)
    assert item.state is ItemState.RESIDENT and counts(pool) == (0, 0, 1)


def test_a_reference_counts_once_however_often_it_is_taken():
    pool = EncoderBlockPool(1)
    item = resident(pool, "a", reference="r")
    assert [pool.refer("a", "r") for _ in range(50)] == [False] * 50
    assert counts(pool) == (0, 0, 1)
    pool.release("a", "r")
    assert item.state is ItemState.EVICTABLE


def test_refer_says_whether_the_reference_is_new():
    pool = EncoderBlockPool(1)
    reserve(pool, "a", reference="r1")
    assert (pool.refer("a", "r1"), pool.refer("a", "r2"), pool.refer("a", "r2")) == (False, True, False)


def test_an_item_that_is_not_there_cannot_be_referred_to():
    with pytest.raises(KeyError):
        EncoderBlockPool(1).refer("a", "r")


def test_releasing_again_and_again_frees_nothing_twice():
    pool = EncoderBlockPool(3)
    resident(pool, "a", 2)
    for _ in range(10):
        pool.release("a", "r")
        assert counts(pool) == (1, 2, 2)
    for _ in range(10):
        pool.release("nobody has this", "r")
        pool.release("a", "nobody")
        assert counts(pool) == (1, 2, 2)


def test_an_unknown_reference_does_not_end_an_item_that_others_read():
    pool = EncoderBlockPool(1)
    item = resident(pool, "a", reference="r1")
    pool.release("a", "r2")
    assert (item.state, item.references) == (ItemState.RESIDENT, {"r1"})


def test_an_item_freed_in_the_step_it_was_allocated_leaves_no_trace_once_evicted():
    pool = EncoderBlockPool(2)
    reserve(pool, "a", 2)
    pool.release("a", "r")
    pool.acknowledge(1)
    pool.make_room(2)
    assert counts(pool) == (2, 0, 0) and pool.items() == []


def test_acknowledging_again_changes_nothing():
    pool = EncoderBlockPool(3)
    evictable(pool, "a")
    resident(pool, "b")
    reserve(pool, "c", step=2)
    before = snapshot(pool)
    pool.acknowledge(1)
    pool.acknowledge(0)
    assert snapshot(pool) == before


# Room ----------------------------------------------------------------------------------------------------------


def test_blocks_are_handed_out_first_in_first_out():
    pool = EncoderBlockPool(4)
    assert evictable(pool, "a", 2).block_ids == (0, 1)
    assert evictable(pool, "b").block_ids == (2,)
    pool.make_room(4)
    assert reserve(pool, "c").block_ids == (3,)  # never used yet, so it comes before those that came back
    assert reserve(pool, "d", 3).block_ids == (0, 1, 2)


def test_items_are_evicted_in_the_order_in_which_they_lost_their_last_reference():
    pool = EncoderBlockPool(4)
    for key in "abcd":
        resident(pool, key)
    for key in "cabd":
        pool.release(key, "r")
    pool.refer("a", "r2")
    pool.release("a", "r2")  # used again, so it goes to the end
    assert [item.key for item in pool.make_room(3)] == ["c", "b", "d"]
    assert [item.key for item in pool.items()] == ["a"]


def test_only_as_much_is_evicted_as_is_needed():
    pool = EncoderBlockPool(5)
    for key in "abc":
        evictable(pool, key)
    assert pool.make_room(2) == []
    assert [item.key for item in pool.make_room(3)] == ["a"]
    assert counts(pool) == (3, 2, 2)
    assert pool.make_room(0) == []


def test_an_evicted_item_is_gone_and_is_handed_back_as_it_was():
    pool = EncoderBlockPool(2)
    item = evictable(pool, "a", 2)
    assert pool.make_room(1) == [item]
    assert pool.get("a") is None and pool.items() == []
    assert (item.key, item.generation, item.block_ids) == ("a", 1, (0, 1))
    assert counts(pool) == (2, 0, 0)


def test_an_item_evicted_and_allocated_again_has_a_new_generation():
    pool = EncoderBlockPool(2)
    first = evictable(pool, "a", 2)
    assert pool.make_room(1) == [first]
    second = reserve(pool, "a", step=2)
    assert pool.get("a") is second
    assert second.generation > first.generation
    pool.check_integrity()


def test_room_that_cannot_be_made_is_refused_with_the_counts_and_nothing_is_evicted():
    pool = EncoderBlockPool(6)
    resident(pool, "a", 3)
    evictable(pool, "b", 2)
    before = snapshot(pool)
    with pytest.raises(PoolExhaustedError, match="4 blocks wanted; 1 are free and 2 evictable, of 6"):
        pool.make_room(4)
    assert snapshot(pool) == before
    assert [item.key for item in pool.make_room(3)] == ["b"]


@pytest.mark.parametrize("num_blocks, possible", [(0, True), (1, True), (2, True), (3, True), (4, False), (7, False)])
def test_can_reserve_counts_free_and_evictable_blocks_and_changes_nothing(num_blocks, possible):
    pool = EncoderBlockPool(7)
    resident(pool, "a", 3)
    evictable(pool, "b", 2)
    reserve(pool, "c", 1, step=2)
    before = snapshot(pool)
    assert pool.can_reserve(num_blocks) is possible
    assert snapshot(pool) == before


def test_a_reservation_without_room_is_refused_with_its_sizes_and_changes_nothing():
    pool = EncoderBlockPool(3)
    evictable(pool, "a", 2)  # evictable blocks are no room until `make_room` has evicted
    before = snapshot(pool)
    with pytest.raises(PoolExhaustedError, match=r"'b' needs 2 blocks \(8 rows\) and 1 are free, of 3"):
        reserve(pool, "b", 2)
    assert snapshot(pool) == before


def test_a_key_that_is_there_is_not_reserved_twice():
    pool = EncoderBlockPool(3)
    evictable(pool, "a")
    before = snapshot(pool)
    with pytest.raises(ValueError, match="'a' has blocks already, generation 1"):
        reserve(pool, "a")
    assert snapshot(pool) == before


def test_an_item_of_no_rows_takes_no_block():
    pool = EncoderBlockPool(1)
    evictable(pool, "empty", 0)
    resident(pool, "a")
    assert counts(pool) == (0, 0, 1)
    pool.release("a", "r")
    assert [item.key for item in pool.make_room(1)] == ["empty", "a"]


def test_a_hundred_small_images_pass_through_a_pool_of_sixteen_blocks():
    pool = EncoderBlockPool(16)
    for step in range(1, 103):
        assert pool.can_reserve(1)
        pool.make_room(1)
        reserve(pool, f"image {step}", step=step)
        pool.acknowledge(step)
        pool.release(f"image {step}", "r")
        pool.check_integrity()
    assert [item.key for item in pool.items()] == [f"image {step}" for step in range(87, 103)]


def test_the_peak_is_the_most_blocks_ever_in_use():
    pool = EncoderBlockPool(5)
    evictable(pool, "a", 3)
    assert pool.peak_used_blocks == 3
    pool.make_room(5)
    resident(pool, "b", 1)
    assert pool.peak_used_blocks == 3
    resident(pool, "c", 3)
    assert pool.peak_used_blocks == 4
    pool.clear()
    assert pool.peak_used_blocks == 4


# Reset and repetition ------------------------------------------------------------------------------------------


def test_clear_forgets_every_item_in_every_state():
    pool = EncoderBlockPool(6)
    evictable(pool, "a", 2)
    resident(pool, "b")
    reserve(pool, "c", step=2)
    pool.clear()
    assert counts(pool) == (6, 0, 0)
    assert pool.items() == [] and pool.get("a") is None
    assert reserve(pool, "d", 6).block_ids == (0, 1, 2, 3, 4, 5)


def test_generations_go_on_over_a_clear():
    pool = EncoderBlockPool(2)
    before = {reserve(pool, key).generation for key in "ab"}
    pool.clear()
    assert reserve(pool, "a").generation > max(before)


def test_an_acknowledgement_from_before_a_clear_does_not_reach_what_came_after():
    pool = EncoderBlockPool(1)
    reserve(pool, "a", step=3)
    pool.clear()
    item = reserve(pool, "a", step=5)
    pool.acknowledge(4)
    assert item.state is ItemState.RESERVED
    pool.acknowledge(5)
    assert item.state is ItemState.RESIDENT
    pool.check_integrity()


def test_a_release_from_before_a_clear_is_no_error():
    pool = EncoderBlockPool(1)
    reserve(pool, "a")
    pool.clear()
    pool.release("a", "r")
    assert counts(pool) == (1, 0, 0)


def test_every_reservation_has_a_generation_of_its_own():
    pool = EncoderBlockPool(3)
    generations = [evictable(pool, str(n)).generation for n in range(3)]
    pool.make_room(3)
    generations += [evictable(pool, str(n)).generation for n in range(3)]
    assert generations == sorted(set(generations)) and len(generations) == 6


def test_the_same_calls_give_the_same_block_ids():
    def run():
        pool = EncoderBlockPool(7)
        given_out = []
        for step in range(1, 60):
            size = step * 5 % 4 + 1
            if pool.can_reserve(size):
                pool.make_room(size)
                given_out.append(reserve(pool, str(step), size, step=step).block_ids)
            pool.acknowledge(step - 1)
            if step % 2:
                pool.release(str(step - 1), "r")
                pool.release(str(step - 2), "r")
        return given_out

    assert run() == run()
    assert len(run()) > 10


# Integrity -----------------------------------------------------------------------------------------------------


def mixed_pool():
    """One item of every state: a (evictable, blocks 0 1), b (resident, block 2), c (reserved, block 3); 4 5 free."""
    pool = EncoderBlockPool(6)
    evictable(pool, "a", 2)
    resident(pool, "b", reference="r1")
    reserve(pool, "c", step=2)
    pool.check_integrity()
    return pool


def block_leaked(pool):
    pool._free_blocks.pop()


def block_free_twice(pool):
    pool._free_blocks.append(4)


def block_free_and_owned(pool):
    pool._free_blocks[0] = 2


def block_owned_twice(pool):
    pool.get("c").block_ids = (2,)


def block_outside_the_pool(pool):
    pool.get("c").block_ids = (6,)


def evictable_item_missing_from_the_order(pool):
    del pool._policy._items[pool.get("a").generation]


def resident_item_in_the_order(pool):
    pool._policy.add(pool.get("b"))


def state_changed_without_the_order(pool):
    pool.get("a").state = ItemState.RESIDENT


def evictable_blocks_miscounted(pool):
    pool._policy.num_blocks -= 1


def reserved_item_not_awaited(pool):
    pool._unacknowledged.clear()


def awaited_item_not_reserved(pool):
    pool._unacknowledged.append(pool.get("b"))


def item_under_another_key(pool):
    pool.get("b").key = "z"


def layout_of_another_size(pool):
    pool.get("b").layout = layout(3)


def resident_item_without_references(pool):
    pool.get("b").references = NOBODY


def evictable_item_with_references(pool):
    pool.get("a").references = {"r9"}


def generation_from_the_future(pool):
    pool.get("b").generation = 99


def generation_given_twice(pool):
    pool.get("b").generation = pool.get("a").generation


def another_object_in_the_order(pool):
    item = pool.get("a")
    pool._policy._items[item.generation] = dataclasses.replace(item, block_ids=(0, 0))


def token_rows_miscounted(pool):
    pool._num_tokens -= 1


def peak_below_what_is_used(pool):
    pool.peak_used_blocks = 0


CORRUPTIONS = [
    (block_leaked, ["[0, 1, 2, 3, 4]", "0 to 5"]),
    (block_free_twice, ["[0, 1, 2, 3, 4, 4, 5]", "0 to 5"]),
    (block_free_and_owned, ["[0, 1, 2, 2, 3, 5]", "0 to 5"]),
    (block_owned_twice, ["[0, 1, 2, 2, 4, 5]", "0 to 5"]),
    (block_outside_the_pool, ["[0, 1, 2, 4, 5, 6]", "0 to 5"]),
    (evictable_item_missing_from_the_order, ["['a']", "[]"]),
    (resident_item_in_the_order, ["state evictable: ['a']", "'b'"]),
    (state_changed_without_the_order, ["state evictable: []", "['a']"]),
    (evictable_blocks_miscounted, ["2 in items", "1 counted"]),
    (reserved_item_not_awaited, ["{'c'}", "set()"]),
    (awaited_item_not_reserved, ["state reserved: {'c'}", "'b'"]),
    (item_under_another_key, ["'b'", "'z'"]),
    (layout_of_another_size, ["'b'", "(4, 4, 4)", "(2,)"]),
    (resident_item_without_references, ["'b'", "resident"]),
    (evictable_item_with_references, ["'a'", "evictable", "r9"]),
    (generation_from_the_future, ["99", "of 3"]),
    (generation_given_twice, ["[1, 1, 3]"]),
    (another_object_in_the_order, ["state evictable: ['a']", "to be evicted: ['a']"]),
    (token_rows_miscounted, ["token rows: 16 in items", "15 counted"]),
    (peak_below_what_is_used, ["blocks are used", "peak is 0"]),
]


@pytest.mark.parametrize("corrupt, sides", CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_check_integrity_notices_and_prints_both_sides(corrupt, sides):
    pool = mixed_pool()
    corrupt(pool)
    assert_both_sides_are_printed(pool, sides)


def test_reserving_for_an_earlier_step_than_before_is_refused():
    pool = EncoderBlockPool(4)
    pool.reserve("a", layout(1), reference="r1", step=5)
    with pytest.raises(ValueError, match=r"item 'b' is for step 2, after step 5"):
        pool.reserve("b", layout(1), reference="r1", step=2)
    pool.check_integrity()


def test_check_integrity_changes_nothing():
    pool = mixed_pool()
    before = snapshot(pool)
    pool.check_integrity()
    assert snapshot(pool) == before
