"""Random schedules: no request is ever handed a wrong row, whatever happens to it and to its blocks."""

import pytest

from vllm_neuron_cache.bench.stage_driver import drive, drive_random, random_shape
from vllm_neuron_cache.errors import NeuronCacheError, WrongRowsError
from vllm_neuron_cache.graphs.lanes import EagerLane, InductorLane
from vllm_neuron_cache.simulation.stage_schedule import ScheduleShape
from vllm_neuron_cache.stage_cache import DeviceRowStore, ModelCachePolicy, OmniPrefixCacheManager
from vllm_neuron_cache.stage_cache.controller import OmniPrefixCacheController
from vllm_neuron_cache.stage_cache.delivery import DeliveryTracker
from vllm_neuron_cache.stage_cache.ownership import BlockOwnership
from vllm_neuron_cache.stage_cache.writes import WriteLog

SEEDS = 2_000
"""`bench stage-cache` runs five times as many."""
DEFERRED = ModelCachePolicy(deferred_keys=frozenset({"k"}))


def in_host(config, view):
    return OmniPrefixCacheManager(config, view, inline=True)


def in_threads(config, view):
    return OmniPrefixCacheManager(config, view, inline=False)


def on_device(lane):
    def make(config, view):
        store = DeviceRowStore(config, device="cpu", lane=lane, max_read_rows=128)
        return OmniPrefixCacheManager(config, view, store=store)

    return make


@pytest.mark.slow
def test_random_schedules_hand_on_every_row_once_and_right():
    hits = copied = absent = 0
    for seed in range(SEEDS):
        manager, num_hits = drive_random(seed, in_host)
        hits += num_hits
        copied += manager.counters.rows_copied_on_write
        absent += manager.counters.rows_absent
    # What the schedules are for did happen.
    assert hits > SEEDS and copied > SEEDS // 100
    assert absent == 0


@pytest.mark.slow
def test_random_schedules_with_threads():
    for seed in range(300):
        drive_random(seed, in_threads)


@pytest.mark.slow
def test_random_schedules_on_the_device():
    for seed in range(100):
        drive_random(seed, on_device(EagerLane()))


@pytest.mark.slow
def test_the_compiled_graphs_of_the_device_store_in_a_schedule():
    shape = ScheduleShape(
        num_requests=40, prompt_tokens=60, shared_tokens=48, decode_tokens=1, families=2, num_blocks=16, max_running=4,
        step_tokens=64, vary=True, preempt_chance=0.05, abort_chance=0.2,
    )  # fmt: skip
    manager, num_hits = drive(shape, 1, on_device(InductorLane()), delay=2)
    assert num_hits > 5 and manager.counters.rows_copied_on_write > 0


def test_little_room_for_deferred_rows_changes_nothing():
    for seed in range(40):
        manager, _ = drive(random_shape(seed), seed, in_host, delay=2, policy=DEFERRED, gpu_staging_bytes=64)
        assert manager.gauges().deferred_bytes <= 64


# The tests tested: each fault is found within a few schedules --------------------------------------------------------


def keeps_the_old_tenants_rows(monkeypatch):
    monkeypatch.setattr(BlockOwnership, "begin_tenancy", lambda self, block_ids, step: self.block_epoch[:0])


def overwrites_rows_that_a_read_waits_for(monkeypatch):
    monkeypatch.setattr(OmniPrefixCacheController, "reads_of", lambda self, block_ids: [])


def hands_on_rows_twice(monkeypatch):
    monkeypatch.setattr(DeliveryTracker, "plan", lambda self, req_ids, starts, counts: starts.copy())


def forgets_that_a_request_was_preempted(monkeypatch):
    monkeypatch.setattr(DeliveryTracker, "restart", lambda self, req_id, num_tokens=None: None)


def never_goes_back_after_drafts(monkeypatch):
    plan = DeliveryTracker.plan

    def stays(self, req_ids, starts, counts):
        self._next_position[:] = 0
        return plan(self, req_ids, starts, counts)

    monkeypatch.setattr(DeliveryTracker, "plan", stays)


def reads_before_the_rows_are_written(monkeypatch):
    monkeypatch.setattr(OmniPrefixCacheController, "_await_writes", lambda self, step: None)


def runs_deferred_writes_in_the_wrong_order(monkeypatch):
    append = WriteLog.append

    def at_the_front(self, write):
        append(self, write)
        self._writes.rotate(1)

    monkeypatch.setattr(WriteLog, "append", at_the_front)


def counts_rows_behind_a_gap(monkeypatch):
    num_present = BlockOwnership.num_present

    def one_more(self, key, block_ids):
        return (num_present(self, key, block_ids) - 1).clip(0)

    monkeypatch.setattr(BlockOwnership, "num_present", one_more)


FAULTS = [
    keeps_the_old_tenants_rows,
    overwrites_rows_that_a_read_waits_for,
    hands_on_rows_twice,
    forgets_that_a_request_was_preempted,
    never_goes_back_after_drafts,
    reads_before_the_rows_are_written,
    runs_deferred_writes_in_the_wrong_order,
    counts_rows_behind_a_gap,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises((WrongRowsError, NeuronCacheError)):
        for seed in range(400):
            drive_random(seed, in_host)
