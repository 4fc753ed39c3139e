"""Scheduler and workers together, with steps that come late, twice, or never, and resets in between."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_neuron_cache.encoder_cache.item import ItemLayout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool, ItemState
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.encoder_cache.table import EntryTable
from vllm_neuron_cache.errors import StepProtocolError

BLOCK_SIZE = 4

keys = st.sampled_from("abcdef")
requests = st.sampled_from(["r1", "r2"])
layouts = st.lists(st.integers(1, BLOCK_SIZE), min_size=1, max_size=3).map(lambda tokens: ItemLayout(tuple(tokens)))


def pool_contents(pool):
    return {item.key: (item.generation, item.block_ids, item.layout.tokens_per_block) for item in pool.items()}


def table_contents(table):
    return {entry.key: (entry.generation, entry.block_ids, entry.tokens_per_block) for entry in table.entries()}


class Worker:
    """A worker's table, and what the test knows of it."""

    def __init__(self, num_blocks):
        self.table = EntryTable(num_blocks, BLOCK_SIZE)
        self.applied = 0
        self.complete_from_epoch = 0
        """Epoch from which on the table is a full copy: a worker that emptied its table has gaps until then."""
        self.written: set[tuple[str, int]] = set()

    def flags(self):
        return {(entry.key, entry.generation): entry.written for entry in self.table.entries()}


class ProtocolMachine(RuleBasedStateMachine):
    """One pool and journal, one or two tables.

    A pass is acknowledged only when every worker has applied it or a later one, which is the one promise that the
    protocol needs from the engine. All else is arbitrary.
    """

    @initialize(num_blocks=st.integers(1, 6), num_workers=st.integers(1, 2))
    def start(self, num_blocks, num_workers):
        self.num_blocks = num_blocks
        self.pool = EncoderBlockPool(num_blocks)
        self.journal = StepJournal()
        self.workers = [Worker(num_blocks) for _ in range(num_workers)]
        self.steps = []
        self.contents_at = {0: {}}  # step -> what the pool held when it was closed
        self.acknowledged = 0
        self.epoch = 0

    # Scheduler -------------------------------------------------------------------------------------------------

    @rule(key=keys, layout=layouts, request=requests)
    def schedule_item(self, key, layout, request):
        if self.pool.get(key) is not None:
            self.pool.refer(key, request)
            return
        if not self.pool.can_reserve(layout.num_blocks):
            return
        for item in self.pool.make_room(layout.num_blocks):
            self.journal.record_eviction(item)
        item = self.pool.reserve(key, layout, reference=request, step=self.journal.open_seq)
        self.journal.record_allocation(item)

    @rule(request=requests)
    def end_request(self, request):
        for item in self.pool.items():
            self.pool.release(item.key, request)

    @rule()
    def close_pass(self):
        step = self.journal.close_step()
        assert step.seq == len(self.steps) + 1 and step.epoch == self.epoch
        assert all(step.acknowledged < delta.seq <= step.seq for delta in step.deltas)
        self.steps.append(step)
        self.contents_at[step.seq] = pool_contents(self.pool)

    @rule(workers_too=st.booleans())
    def reset(self, workers_too):
        self.pool.clear()
        self.journal.record_reset()
        self.epoch += 1
        if workers_too:
            for worker in self.workers:
                worker.table.clear()
                worker.complete_from_epoch = self.epoch
                worker.written.clear()

    @rule(data=st.data())
    def acknowledge(self, data):
        """Late, again, or an older one: whatever every worker has applied."""
        seq = data.draw(st.integers(0, min(worker.applied for worker in self.workers)), label="acknowledged step")
        self.journal.acknowledge(seq)
        self.pool.acknowledge(seq)
        self.acknowledged = max(self.acknowledged, seq)

    @rule(ahead=st.integers(1, 3))
    def acknowledgement_of_an_open_pass_is_refused(self, ahead):
        with pytest.raises(StepProtocolError):
            self.journal.acknowledge(len(self.steps) + ahead)

    # Workers ---------------------------------------------------------------------------------------------------

    def deliver(self, worker, step):
        """Applies a step; one never delivered before a later one is a step that was dropped."""
        before, flags = table_contents(worker.table), worker.flags()
        worker.table.apply(step)
        if step.seq <= worker.applied:
            assert table_contents(worker.table) == before and worker.flags() == flags
            return
        worker.applied = step.seq
        if step.epoch >= worker.complete_from_epoch:
            assert table_contents(worker.table) == self.contents_at[step.seq]
        worker.written &= set(worker.flags())

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def deliver_any(self, data):
        worker = data.draw(st.sampled_from(self.workers))
        self.deliver(worker, data.draw(st.sampled_from(self.steps), label="delivered step"))

    @precondition(lambda self: self.steps)
    @rule(twice=st.booleans())
    def deliver_newest_to_all(self, twice):
        for worker in self.workers:
            for _ in range(1 + twice):
                self.deliver(worker, self.steps[-1])
        assert len({tuple(sorted(worker.flags())) for worker in self.workers}) == 1 or any(
            worker.complete_from_epoch > self.steps[-1].epoch for worker in self.workers
        )

    @rule(data=st.data())
    def write(self, data):
        worker = data.draw(st.sampled_from(self.workers))
        entries = worker.table.entries()
        if entries:
            entry = data.draw(st.sampled_from(entries))
            worker.table.mark_written(entry)
            worker.written.add((entry.key, entry.generation))

    @precondition(lambda self: any(step.acknowledged for step in self.steps))
    @rule()
    def a_worker_that_missed_acknowledged_steps_refuses(self):
        late = EntryTable(self.num_blocks, BLOCK_SIZE)
        step = next(step for step in reversed(self.steps) if step.acknowledged)
        with pytest.raises(StepProtocolError):
            late.apply(step)
        assert late.entries() == []

    # After every operation -------------------------------------------------------------------------------------

    @invariant()
    def everyone_agrees_with_itself(self):
        self.pool.check_integrity()
        self.journal.check_integrity()
        for worker in self.workers:
            worker.table.check_integrity()

    @invariant()
    def a_worker_that_has_the_newest_step_equals_the_pool_as_it_was_sent(self):
        for worker in self.workers:
            newest = self.steps and worker.applied == len(self.steps) and self.epoch == self.steps[-1].epoch
            if newest and self.epoch >= worker.complete_from_epoch:
                assert table_contents(worker.table) == self.contents_at[worker.applied]

    @invariant()
    def exactly_what_was_marked_is_written(self):
        for worker in self.workers:
            assert {entry for entry, written in worker.flags().items() if written} == worker.written

    @invariant()
    def nothing_unacknowledged_is_given_away(self):
        assert self.journal.num_in_flight == len(self.steps) - self.acknowledged
        for item in self.pool.items():
            assert (item.state is ItemState.RESERVED) == (item.reserved_in > self.acknowledged)


TestProtocolMachine = ProtocolMachine.TestCase


def test_a_dropped_pass_reaches_the_worker_with_the_next_one():
    pool, journal, table = EncoderBlockPool(2), StepJournal(), EntryTable(2, BLOCK_SIZE)
    journal.record_allocation(pool.reserve("a", ItemLayout((4, 1)), reference="r", step=journal.open_seq))
    journal.close_step()  # never delivered
    table.apply(journal.close_step())
    assert table_contents(table) == pool_contents(pool) == {"a": (1, (0, 1), (4, 1))}


def test_an_item_evicted_and_scheduled_again_in_one_pass_is_read_from_its_new_rows():
    pool, journal, table = EncoderBlockPool(2), StepJournal(), EntryTable(2, BLOCK_SIZE)

    def allocate(key, num_blocks):
        for item in pool.make_room(num_blocks):
            journal.record_eviction(item)
        layout = ItemLayout((BLOCK_SIZE,) * num_blocks)
        journal.record_allocation(pool.reserve(key, layout, reference="r", step=journal.open_seq))

    allocate("a", 1)
    table.apply(journal.close_step())
    table.mark_written(table.get("a"))
    journal.acknowledge(1)
    pool.acknowledge(1)
    pool.release("a", "r")

    for item in pool.make_room(2):  # `a` goes for an item that is then not scheduled after all
        journal.record_eviction(item)
    allocate("b", 1)
    allocate("a", 1)
    table.apply(journal.close_step())
    table.check_integrity()
    assert table_contents(table) == pool_contents(pool)
    assert (table.get("a").generation, table.get("a").written) == (3, False)
