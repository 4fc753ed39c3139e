"""Whoever runs when: no order of the cache's tasks hands on a wrong row, holds the lock over a copy, or gets stuck."""

from dataclasses import fields, replace

import pytest
from interleaving import DeadlockError, Interleaving, LockHeldError, PriorityOrder, RandomOrder
from stepped_cache import Circumstances, LeftBehindError, SteppedCache, little_shape

from vllm_neuron_cache.errors import NeuronCacheError, OmniPrefixCacheStagingTimeoutError, WrongRowsError
from vllm_neuron_cache.stage_cache import DeviceRowStore, OmniPrefixCacheManager
from vllm_neuron_cache.stage_cache.controller import OmniPrefixCacheController
from vllm_neuron_cache.stage_cache.counters import StageCacheCounters
from vllm_neuron_cache.stage_cache.interface import WriteState
from vllm_neuron_cache.stage_cache.reads import HitRead, ReadState
from vllm_neuron_cache.stage_cache.slots import StagingSlots
from vllm_neuron_cache.stage_cache.writes import StepWrite, WriteLog


@pytest.fixture(autouse=True)
def _errors_that_are_meant_stay_quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.neuron_cache")


def explore(seeds, **fixed) -> StageCacheCounters:
    """Runs one order for each seed, and returns what all of them counted."""
    total = StageCacheCounters()
    for seed in seeds:
        cache = SteppedCache(Circumstances.drawn(seed, **fixed))
        cache.run()
        for field in fields(total):
            setattr(total, field.name, getattr(total, field.name) + getattr(cache.counters, field.name))
    return total


def check_that_it_mattered(total: StageCacheCounters) -> None:
    """The orders had in them what they are explored for."""
    assert total.rows_from_cache > 1000
    assert total.rows_copied_on_write > 20  # reads whose blocks were given away
    assert total.staging_waits > 20 and total.write_waits > 20


def test_orders_of_both_stores():
    check_that_it_mattered(explore(range(400)))


@pytest.mark.slow
def test_thousands_of_orders():
    total = explore(range(1000, 3000))
    check_that_it_mattered(total)
    assert total.rows_lost > 500 and total.requests_failed > 50
    assert total.rows_absent == 0


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("staging_depth", [1, 2])
def test_an_engine_that_waits_for_the_builder(on_device, staging_depth):
    total = explore(range(60), on_device=on_device, staging_depth=staging_depth)
    assert total.staging_waits > 60


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_shutdown_anywhere_in_a_run_leaves_nobody_waiting(on_device):
    for point in range(0, 600, 5):
        SteppedCache(Circumstances.drawn(point // 5, on_device=on_device, ends_at_point=point)).run()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_failing_copies_cost_their_rows_and_nothing_else(on_device):
    total = explore(range(120), on_device=on_device, failure_chance=0.1, inline=False)
    assert total.rows_lost and total.requests_failed


def test_without_threads_a_builder_beside_the_engine_is_enough():
    total = explore(range(100), inline=True, num_builders=2)
    assert total.rows_from_cache > 1000


def test_a_builder_that_never_comes_ends_a_wait_for_a_staging_slot():
    cache = SteppedCache(Circumstances(shape=little_shape(2), seed=2, num_builders=0), may_time_out=True)
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"steps \[1, 2\] were saved and not used"):
        cache.run()
    assert cache.steps.now == cache.config.staging_claim_timeout_s


# The harness ---------------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_order():
    for seed in range(12):
        runs = [SteppedCache(Circumstances.drawn(seed, ends_at_point=None), keep_trace=True) for _ in range(2)]
        for cache in runs:
            cache.run()
        first, second = (cache.steps for cache in runs)
        assert first.trace == second.trace and first.digest == second.digest and len(first.trace) > 100


def test_other_seeds_give_other_orders():
    its = Circumstances(shape=little_shape(1), seed=1, deferred_keys=frozenset({"k"}))
    for make_order in (RandomOrder, PriorityOrder):
        digests = set()
        for seed in range(20):
            cache = SteppedCache(its, make_order(seed))
            cache.run()
            digests.add(cache.steps.digest)
        assert len(digests) > 15


def test_a_deadlock_names_who_waits_for_what():
    steps = Interleaving(RandomOrder(0))
    cond = steps.threads.condition()

    def holder():
        with cond:
            cond.wait()

    steps.add("first", holder)
    steps.add("second", lambda: steps.wait_until(lambda: False, "a miracle"))
    with pytest.raises(DeadlockError, match=r"(?s)first waits for a notification.*second waits for a miracle"):
        steps.run()


def test_the_clock_moves_when_nothing_else_does():
    steps = Interleaving(RandomOrder(0), may_time_out=True)
    cond = steps.threads.condition()
    heard = []

    def sleeper():
        with cond:
            heard.append((cond.wait(7.0), steps.threads.monotonic()))

    steps.add("sleeper", sleeper)
    steps.run()
    assert heard == [(False, 7.0)]


def test_a_copy_under_the_lock_ends_the_run():
    steps = Interleaving(RandomOrder(0))
    cond = steps.threads.condition()

    def copier():
        try:
            with cond:
                steps.copying("rows")
        except Exception:
            pytest.fail("the code under test must not be able to handle it")

    steps.add("copier", copier)
    with pytest.raises(LockHeldError, match="copier holds the lock at: rows"):
        steps.run()


# The tests tested: each fault is found within the budget -------------------------------------------------------------


def forgets_the_reads_that_a_write_comes_after(monkeypatch):
    init = StepWrite.__init__
    monkeypatch.setattr(StepWrite, "__init__", lambda self, *, after, **rest: init(self, after=(), **rest))


def knows_them_in_the_immediate_log_alone(monkeypatch):
    submit = OmniPrefixCacheController.submit_deferred

    def forgetful(self, write):
        write.after = ()
        submit(self, write)

    monkeypatch.setattr(OmniPrefixCacheController, "submit_deferred", forgetful)


def knows_them_in_the_deferred_log_alone(monkeypatch):
    submit = OmniPrefixCacheController.submit

    def forgetful(self, write, slot):
        write.after = ()
        submit(self, write, slot)

    monkeypatch.setattr(OmniPrefixCacheController, "submit", forgetful)


def ends_a_write_before_its_rows_are_there(monkeypatch):
    def run(self, write):
        for read in write.after:
            self.finish_read(read)
        write.staged.arrive()
        with self._cond:
            write.move_to(WriteState.HOST_READY)
        self._end_write(write, WriteState.WRITTEN)
        write.staged.write()

    monkeypatch.setattr(OmniPrefixCacheController, "_run", run)


def writes_before_the_rows_arrive(monkeypatch):
    monkeypatch.setattr("stepped_stores._Arrival.synchronize", lambda self: None)


def reads_without_waiting_for_writes(monkeypatch):
    monkeypatch.setattr(OmniPrefixCacheController, "_await_writes", lambda self, step: None)


def waits_for_the_immediate_writes_alone(monkeypatch):
    def await_writes(self, step):
        self._wait(lambda: self._immediate.is_done(step), lambda: self._late(step), upto=step)

    monkeypatch.setattr(OmniPrefixCacheController, "_await_writes", await_writes)


def releases_a_staging_slot_before_its_write_ended(monkeypatch):
    end_write = OmniPrefixCacheController._end_write

    def ends(self, write, state):
        slot = self._slot_of.get(write)
        if slot is not None:
            self._slots._holders[slot] += 1
        end_write(self, write, state)

    monkeypatch.setattr(StagingSlots, "hold", lambda self, slot: None)
    monkeypatch.setattr(OmniPrefixCacheController, "_end_write", ends)


def releases_a_staging_slot_before_its_rows_are_used(monkeypatch):
    take = OmniPrefixCacheManager._take

    def takes(self, step_id, req_ids):
        step = take(self, step_id, req_ids)
        self._controller.release_slot(step.slot)
        return replace(step, slot=None)

    release = OmniPrefixCacheController.release_slot
    monkeypatch.setattr(OmniPrefixCacheManager, "_take", takes)
    monkeypatch.setattr(
        OmniPrefixCacheController, "release_slot", lambda self, slot: None if slot is None else release(self, slot)
    )


def holds_the_lock_while_it_writes(monkeypatch):
    def run(self, write):
        for read in write.after:
            self.finish_read(read)
        write.staged.arrive()
        with self._cond:
            write.move_to(WriteState.HOST_READY)
            write.staged.write()
        self._end_write(write, WriteState.WRITTEN)

    monkeypatch.setattr(OmniPrefixCacheController, "_run", run)


def holds_the_lock_while_it_reads(monkeypatch):
    def copy(self, read):
        self._await_writes(read.needs_step)
        with self._cond:
            for key in read.keys:
                read.rows[key] = self._store.read(key, read.slots, read.absent(key), read.num_new)
            self._end_read(read, ReadState.DONE)

    monkeypatch.setattr(OmniPrefixCacheController, "_copy", copy)


def holds_the_lock_while_it_allocates(monkeypatch):
    save_outputs = OmniPrefixCacheManager.save_outputs

    def saves(self, hidden, mm, **sizes):
        with self._cond:
            self._sorter.sort(hidden, mm, sizes["num_tokens_unpadded"], sizes["num_tokens_padded"])
        return save_outputs(self, hidden, mm, **sizes)

    monkeypatch.setattr(OmniPrefixCacheManager, "save_outputs", saves)


def runs_any_write_while_it_waits_for_some(monkeypatch):
    take = WriteLog.take
    monkeypatch.setattr(WriteLog, "take", lambda self, upto: take(self))


def reads_early_what_this_step_computes(monkeypatch):
    monkeypatch.setattr(HitRead, "is_complete", lambda self, key: True)


def keeps_rows_that_were_handed_on(monkeypatch):
    cancel_read = OmniPrefixCacheController.cancel_read

    def keeps(self, read):
        rows = read.rows
        cancel_read(self, read)
        read.rows = rows

    monkeypatch.setattr(OmniPrefixCacheController, "cancel_read", keeps)


def lets_two_threads_run_a_write(monkeypatch):
    def take(self, upto=float("inf")):
        head = self.head
        if head is None or head.state not in (WriteState.QUEUED, WriteState.COPYING) or head.step > upto:
            return None
        head.state = WriteState.COPYING
        return head

    monkeypatch.setattr(WriteLog, "take", take)


def runs_writes_beside_one_another(monkeypatch):
    def take(self, upto=float("inf")):
        for write in self._writes:
            if write.state is WriteState.QUEUED and write.step <= upto:
                write.move_to(WriteState.COPYING)
                return write
        return None

    def drop(self, write):
        self._writes.remove(write)
        self.num_bytes -= write.num_bytes

    monkeypatch.setattr(WriteLog, "take", take)
    monkeypatch.setattr(WriteLog, "drop", drop)


FAULTS = [
    forgets_the_reads_that_a_write_comes_after,
    knows_them_in_the_immediate_log_alone,
    knows_them_in_the_deferred_log_alone,
    ends_a_write_before_its_rows_are_there,
    writes_before_the_rows_arrive,
    reads_without_waiting_for_writes,
    waits_for_the_immediate_writes_alone,
    releases_a_staging_slot_before_its_write_ended,
    releases_a_staging_slot_before_its_rows_are_used,
    holds_the_lock_while_it_writes,
    holds_the_lock_while_it_reads,
    holds_the_lock_while_it_allocates,
    runs_any_write_while_it_waits_for_some,
    reads_early_what_this_step_computes,
    keeps_rows_that_were_handed_on,
    lets_two_threads_run_a_write,
    runs_writes_beside_one_another,
]
FOUND_BY = (WrongRowsError, DeadlockError, LockHeldError, LeftBehindError, NeuronCacheError)
BUDGET = 2000
"""Orders within which a fault has to be found."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(FOUND_BY):
        explore(range(BUDGET), on_device=False, inline=False, failure_chance=0, ends_at_point=None)


def test_a_scatter_over_rows_that_a_read_waits_for_is_found_on_the_device(monkeypatch):
    monkeypatch.setattr(DeviceRowStore, "writes_at_stage", False)
    with pytest.raises(WrongRowsError):
        explore(range(BUDGET), on_device=True, failure_chance=0, ends_at_point=None)


@pytest.mark.parametrize("silent", ["submit", "queue_deferred", "plan_read", "release_slot", "_end_read", "_end_write"])
def test_a_notification_that_is_left_out_is_found(monkeypatch, silent):
    loud = getattr(OmniPrefixCacheController, silent)

    def quiet(self, *args):
        notify_all, self._cond.notify_all = self._cond.notify_all, lambda: None
        try:
            return loud(self, *args)
        finally:
            self._cond.notify_all = notify_all

    monkeypatch.setattr(OmniPrefixCacheController, silent, quiet)
    with pytest.raises((DeadlockError, LeftBehindError)):
        explore(range(BUDGET), on_device=False, inline=False, failure_chance=0, ends_at_point=None)


def test_a_shutdown_that_tells_nobody_is_found(monkeypatch):
    def shutdown(self):
        with self._cond:
            self._closed = True
        for thread in self._threads:
            thread.join(timeout=self._config.staging_claim_timeout_s)

    monkeypatch.setattr(OmniPrefixCacheController, "shutdown", shutdown)
    with pytest.raises(DeadlockError):
        explore(range(20), inline=False)
