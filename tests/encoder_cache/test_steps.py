"""The journal: numbered passes, changes carried until acknowledged, resets, and its integrity check."""

import pytest

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.steps import Allocation, EncoderCacheStep, StepDelta, StepJournal
from vllm_neuron_cache.errors import IntegrityError, StepProtocolError


def item(key, *tokens_per_block):
    return EncoderBlockPool(9).reserve(key, ItemLayout(tokens_per_block or (4,)), reference="r", step=1)


def close_with_allocation(journal, key):
    journal.record_allocation(item(key))
    return journal.close_step()


def numbers(step):
    return [delta.seq for delta in step.deltas]


def test_the_first_pass_is_number_one_and_carries_nothing():
    journal = StepJournal()
    assert (journal.open_seq, journal.num_in_flight) == (1, 0)
    assert journal.close_step() == EncoderCacheStep(seq=1, acknowledged=0, epoch=0, deltas=())
    assert (journal.open_seq, journal.num_in_flight) == (2, 1)
    journal.check_integrity()


def test_a_change_is_carried_as_the_pool_recorded_it():
    pool, journal = EncoderBlockPool(9), StepJournal()
    first = pool.reserve("a", ItemLayout((4, 2)), reference="r", step=1)
    second = pool.reserve("b", ItemLayout((3,)), reference="r", step=1)
    journal.record_eviction(first)
    journal.record_allocation(second)
    journal.record_allocation(first)
    (delta,) = journal.close_step().deltas
    allocated = (Allocation("b", 2, (2,), (3,)), Allocation("a", 1, (0, 1), (4, 2)))
    assert delta == StepDelta(seq=1, epoch=0, freed=(("a", 1),), allocated=allocated)


def test_a_pass_carries_every_change_that_was_not_acknowledged_oldest_first():
    journal = StepJournal()
    close_with_allocation(journal, "a")
    journal.close_step()
    step = close_with_allocation(journal, "b")
    assert (step.seq, step.acknowledged) == (3, 0)
    assert [(delta.seq, delta.allocated[0].key) for delta in step.deltas] == [(1, "a"), (3, "b")]


def test_a_change_is_in_the_delta_of_its_own_pass_only():
    journal = StepJournal()
    journal.record_eviction(item("a"))
    journal.close_step()
    journal.record_eviction(item("b"))
    assert [[key for key, _ in delta.freed] for delta in journal.close_step().deltas] == [["a"], ["b"]]
    assert numbers(journal.close_step()) == [1, 2]


def test_what_was_acknowledged_is_not_carried_any_more():
    journal = StepJournal()
    for key in "abcd":
        close_with_allocation(journal, key)
    journal.acknowledge(2)
    step = journal.close_step()
    assert (step.acknowledged, numbers(step)) == (2, [3, 4])
    journal.acknowledge(5)
    assert journal.close_step() == EncoderCacheStep(6, 5, 0, ())
    journal.check_integrity()


def test_an_acknowledgement_between_changes_drops_the_older_ones_only():
    journal = StepJournal()
    close_with_allocation(journal, "a")
    journal.close_step()
    close_with_allocation(journal, "b")
    journal.acknowledge(2)
    assert numbers(journal.close_step()) == [3]


@pytest.mark.parametrize("older", [2, 1, 0, -1])
def test_an_older_acknowledgement_changes_nothing(older):
    journal = StepJournal()
    for key in "abc":
        close_with_allocation(journal, key)
    journal.acknowledge(2)
    journal.acknowledge(older)
    journal.check_integrity()
    assert journal.num_in_flight == 1
    step = journal.close_step()
    assert (step.acknowledged, numbers(step)) == (2, [3])


def test_an_acknowledgement_of_a_pass_never_closed_is_refused_and_changes_nothing():
    journal = StepJournal()
    close_with_allocation(journal, "a")
    with pytest.raises(StepProtocolError, match="step 2 was acknowledged, and the last step scheduled is 1"):
        journal.acknowledge(2)
    step = journal.close_step()
    assert (step.acknowledged, numbers(step)) == (0, [1])


def test_in_flight_counts_passes_closed_and_not_acknowledged():
    journal = StepJournal()
    counts = []
    for acknowledged in (0, 0, 1, 3, 3, 6):
        journal.close_step()
        journal.acknowledge(acknowledged)
        counts.append(journal.num_in_flight)
    assert counts == [1, 2, 2, 1, 2, 0]


def test_metadata_already_sent_does_not_change():
    journal = StepJournal()
    step = close_with_allocation(journal, "a")
    copy = EncoderCacheStep(*step)
    close_with_allocation(journal, "b")
    journal.acknowledge(2)
    journal.record_reset()
    assert step == copy and numbers(step) == [1]


def test_a_reset_voids_what_was_recorded_and_raises_the_epoch():
    journal = StepJournal()
    close_with_allocation(journal, "a")
    journal.record_allocation(item("b"))
    journal.record_eviction(item("c"))
    journal.record_reset()
    journal.check_integrity()
    assert journal.close_step() == EncoderCacheStep(seq=2, acknowledged=0, epoch=1, deltas=())


def test_numbers_go_on_over_a_reset():
    journal = StepJournal()
    journal.close_step()
    journal.close_step()
    journal.acknowledge(1)
    journal.record_reset()
    assert (journal.open_seq, journal.num_in_flight) == (3, 1)
    step = close_with_allocation(journal, "a")
    assert (step.seq, step.acknowledged, step.epoch, numbers(step)) == (3, 1, 1, [3])
    assert step.deltas[0].epoch == 1


def test_the_epoch_stays_until_the_next_reset():
    journal = StepJournal()
    journal.record_reset()
    epochs = [journal.close_step().epoch, journal.close_step().epoch]
    journal.record_reset()
    journal.record_reset()
    assert [*epochs, journal.close_step().epoch] == [1, 1, 3]


def three_changes():
    """Passes 1 to 4 closed, 1 acknowledged; 2, 3 and 4 changed something."""
    journal = StepJournal()
    journal.close_step()
    for key in "abc":
        close_with_allocation(journal, key)
    journal.acknowledge(1)
    journal.check_integrity()
    return journal


def changes_out_of_order(journal):
    journal._unacknowledged.reverse()


def change_recorded_twice(journal):
    journal._unacknowledged.append(journal._unacknowledged[-1])


def acknowledged_change_kept(journal):
    journal._acknowledged = 2


def change_of_a_pass_not_closed(journal):
    journal._seq = 3


def change_of_an_older_epoch(journal):
    journal._epoch = 1


CORRUPTIONS = [
    (changes_out_of_order, ["[4, 3, 2]"]),
    (change_recorded_twice, ["[2, 3, 4, 4]"]),
    (acknowledged_change_kept, ["[2, 3, 4]", "acknowledged 2"]),
    (change_of_a_pass_not_closed, ["[2, 3, 4]", "last 3"]),
    (change_of_an_older_epoch, ["epoch 1", "epoch=0"]),
]


@pytest.mark.parametrize("corrupt, sides", CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_check_integrity_notices_and_prints_both_sides(corrupt, sides):
    journal = three_changes()
    corrupt(journal)
    with pytest.raises(IntegrityError) as caught:
        journal.check_integrity()
    for side in sides:
        assert side in str(caught.value)
