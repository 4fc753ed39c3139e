"""The worker's table: follows steps, refuses gaps, keeps what is written, and its integrity check."""

import numpy as np
import pytest

from vllm_neuron_cache.encoder_cache.steps import Allocation, EncoderCacheStep, StepDelta
from vllm_neuron_cache.encoder_cache.table import EntryTable
from vllm_neuron_cache.errors import IntegrityError, StepProtocolError

A1 = Allocation("a", 1, (0, 1), (4, 2))
A2 = Allocation("a", 2, (5,), (3,))
B2 = Allocation("b", 2, (3,), (1,))
C3 = Allocation("c", 3, (1,), (4,))


def delta(seq, *allocated, freed=(), epoch=0):
    return StepDelta(seq, epoch, tuple(freed), allocated)


def step(seq, *deltas, acknowledged=0, epoch=0):
    return EncoderCacheStep(seq, acknowledged, epoch, deltas)


def contents(table):
    table.check_integrity()
    return {
        entry.key: (entry.generation, entry.block_ids, entry.tokens_per_block, entry.rows.tolist(), entry.written)
        for entry in table.entries()
    }


def table_with(*allocated):
    table = EntryTable(6, 4)
    table.apply(step(1, delta(1, *allocated)))
    return table


def test_a_new_table_is_empty():
    table = EntryTable(6, 4)
    assert len(table) == 0 and table.entries() == [] and table.get("a") is None
    table.check_integrity()


def test_an_allocation_becomes_an_unwritten_entry_with_its_rows():
    table = table_with(A1, B2)
    assert contents(table) == {
        "a": (1, (0, 1), (4, 2), [0, 1, 2, 3, 4, 5], False),
        "b": (2, (3,), (1,), [12], False),
    }
    assert len(table) == 2
    assert table.get("a").num_tokens == 6 and table.get("a").rows.dtype == np.int32
    assert table.get("a") in table.entries()


def test_rows_skip_what_a_block_does_not_hold():
    table = table_with(Allocation("v", 1, (5, 2), (3, 4)))
    assert table.get("v").rows.tolist() == [20, 21, 22, 8, 9, 10, 11]


def test_an_eviction_removes_the_entry():
    table = table_with(A1, B2)
    table.apply(step(2, delta(2, freed=[("a", 1)])))
    assert set(contents(table)) == {"b"}


def test_blocks_freed_in_a_pass_can_be_allocated_in_it():
    table = table_with(A1, B2)
    table.apply(step(2, delta(2, C3, freed=[("a", 1)])))
    assert set(contents(table)) == {"b", "c"}


def test_an_item_evicted_and_allocated_again_in_one_pass_is_there_and_unwritten():
    table = table_with(A1)
    table.mark_written(table.get("a"))
    table.apply(step(2, delta(2, A2, freed=[("a", 1)])))
    assert contents(table) == {"a": (2, (5,), (3,), [20, 21, 22], False)}


def test_freeing_an_older_generation_leaves_the_newer_one():
    table = table_with(A2)
    table.apply(step(2, delta(2, freed=[("a", 1), ("never there", 7)])))
    assert set(contents(table)) == {"a"}


def test_one_step_brings_every_missed_change_in_order():
    table = EntryTable(6, 4)
    table.apply(step(3, delta(1, A1), delta(2, B2), delta(3, C3, freed=[("a", 1)])))
    assert set(contents(table)) == {"b", "c"}


def test_applying_a_step_again_changes_nothing():
    table = table_with(A1, B2)
    table.mark_written(table.get("a"))
    entry, before = table.get("a"), contents(table)
    table.apply(step(1, delta(1, A1, B2)))
    assert contents(table) == before and table.get("a") is entry


def test_a_change_carried_again_by_a_later_step_keeps_what_was_written():
    table = table_with(A1)
    table.mark_written(table.get("a"))
    entry = table.get("a")
    table.apply(step(2, delta(1, A1), delta(2, B2)))
    assert table.get("a") is entry and entry.written
    assert set(contents(table)) == {"a", "b"}


def test_an_older_step_that_comes_late_changes_nothing():
    table = table_with(A1)
    table.apply(step(3, delta(1, A1), delta(3, freed=[("a", 1)])))
    table.apply(step(2, delta(1, A1), delta(2, B2)))
    assert contents(table) == {}


def test_a_step_without_changes_moves_the_table_on():
    table = table_with(A1)
    table.apply(step(5))
    table.apply(step(6, delta(6, B2), acknowledged=5))
    assert set(contents(table)) == {"a", "b"}


@pytest.mark.parametrize("acknowledged, missing", [(2, "steps 2 to 2"), (3, "steps 2 to 3")])
def test_a_gap_is_refused_with_its_numbers_and_changes_nothing(acknowledged, missing):
    table = table_with(A1)
    before = contents(table)
    with pytest.raises(StepProtocolError, match=missing):
        table.apply(step(4, delta(4, B2, freed=[("a", 1)]), acknowledged=acknowledged, epoch=1))
    assert contents(table) == before
    table.apply(step(2, delta(2, B2), acknowledged=1))  # neither number nor epoch has moved
    assert set(contents(table)) == {"a", "b"}


def test_a_step_acknowledged_as_far_as_applied_is_no_gap():
    table = table_with(A1)
    table.apply(step(2, delta(2, B2), acknowledged=1))
    assert set(contents(table)) == {"a", "b"}


def test_a_new_epoch_empties_the_table_before_its_own_changes():
    table = table_with(A1, B2)
    table.apply(step(2, delta(2, C3, epoch=1), epoch=1))
    assert set(contents(table)) == {"c"}


def test_a_new_epoch_without_changes_empties_the_table():
    table = table_with(A1, B2)
    table.apply(step(2, epoch=1))
    assert contents(table) == {}


def test_a_step_from_before_a_reset_that_comes_late_does_not_bring_entries_back():
    table = table_with(A1)
    table.apply(step(3, delta(3, C3, epoch=1), epoch=1))
    table.apply(step(2, delta(1, A1), delta(2, B2)))
    assert set(contents(table)) == {"c"}
    table.apply(step(4, delta(3, C3, epoch=1), epoch=1))
    assert set(contents(table)) == {"c"}


def test_only_the_entry_that_is_marked_is_written():
    table = table_with(A1, B2)
    table.mark_written(table.get("b"))
    assert (table.get("a").written, table.get("b").written) == (False, True)


def test_clear_drops_every_entry_and_the_steps_go_on():
    table = table_with(A1, B2)
    table.clear()
    assert len(table) == 0
    table.apply(step(1, delta(1, A1, B2)))
    assert contents(table) == {}
    table.apply(step(2, delta(1, A1, B2), delta(2, C3)))
    assert set(contents(table)) == {"c"}


def test_two_tables_share_no_entry():
    first, second = EntryTable(6, 4), EntryTable(6, 4)
    change = step(1, delta(1, A1))
    first.apply(change)
    second.apply(change)
    first.mark_written(first.get("a"))
    assert not second.get("a").written
    assert first.get("a").rows is not second.get("a").rows


def block_of_two_entries(table):
    table.get("b").block_ids = (1,)


def block_twice_in_one_entry(table):
    table.get("a").block_ids = (0, 0)


def scratch_block(table):
    table.get("b").block_ids = (6,)


def negative_block(table):
    table.get("b").block_ids = (-1,)


def rows_of_another_length(table):
    table.get("a").rows = np.arange(5, dtype=np.int32)


def layout_of_another_length(table):
    table.get("a").tokens_per_block = (4, 3)


def rows_of_another_block(table):
    table.get("a").rows = table.get("a").rows + 8


def entry_under_another_key(table):
    table.get("a").key = "z"


def more_rows_than_a_block(table):
    table.get("a").tokens_per_block = (5, 1)


def one_block_without_a_count(table):
    table.get("a").tokens_per_block = (4,)


CORRUPTIONS = [
    (block_of_two_entries, ["block 1", "'a'", "'b'"]),
    (block_twice_in_one_entry, ["block 0", "'a'"]),
    (scratch_block, ["'b'", "block 6", "0 to 5"]),
    (negative_block, ["'b'", "block -1", "0 to 5"]),
    (rows_of_another_length, ["'a'", "[0 1 2 3 4]", "[0 1 2 3 4 5]"]),
    (layout_of_another_length, ["'a'", "[0 1 2 3 4 5]", "[0 1 2 3 4 5 6]"]),
    (rows_of_another_block, ["'a'", "10 11 12 13]"]),
    (entry_under_another_key, ["'a'", "'z'"]),
    (more_rows_than_a_block, ["'a'", "(5, 1)", "of 4"]),
    (one_block_without_a_count, ["'a'", "(4,)", "(0, 1)"]),
]


@pytest.mark.parametrize("corrupt, sides", CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_check_integrity_notices_and_prints_both_sides(corrupt, sides):
    table = table_with(A1, B2)
    corrupt(table)
    with pytest.raises(IntegrityError) as caught:
        table.check_integrity()
    for side in sides:
        assert side in str(caught.value)


def test_check_integrity_allows_every_block_that_items_can_own():
    table = table_with(Allocation("a", 1, (0, 5), (4, 4)))
    table.check_integrity()
    assert table.get("a").rows.tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
