"""What goes wrong stays small: failed copies, slots that nobody frees, calls out of order, an end in the middle."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import eager_lane
from scripted import MAX_RUNNING, WIDTH, Turn, assert_rows, branch, hidden_rows, key_rows, make_stage, text

from vllm_neuron_cache.errors import OmniPrefixCacheStagingTimeoutError, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.stage_cache import DeviceRowStore, HostRowStore, ModelCachePolicy
from vllm_neuron_cache.stage_cache.row_store import StagedRows

A, B, C, D = text(1), text(2), text(3), text(4)
DEFERRED = ModelCachePolicy(deferred_keys=frozenset({"k"}))
ROW_BYTES = WIDTH * 8


class Faults:
    """Which calls of a store fail or wait. `writes` are those of the next `stage` or `hold`."""

    def __init__(self):
        self.calls = {"stage": 0, "hold": 0, "write": 0, "arrive": 0, "read": 0, "rows": 0, "leftover": 0}
        self.kinds = {"stage", "hold"}
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def fail(self, call, times=1, kinds=("stage", "hold")):
        self.calls[call] = times
        self.kinds = set(kinds)

    def check(self, call, kind=None):
        if self.calls[call] and (kind is None or kind in self.kinds):
            self.calls[call] -= 1
            raise OSError(f"{call} broke")

    def wait(self):
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(20)


class FaultyRows(StagedRows):
    def __init__(self, inner, faults, kind):
        self.inner, self.faults, self.kind = inner, faults, kind

    def arrive(self):
        self.faults.check("arrive", self.kind)
        self.inner.arrive()

    def write(self):
        self.faults.wait()
        self.faults.check("write", self.kind)
        self.inner.write()

    def rows(self, key):
        self.faults.check("rows", self.kind)
        return self.inner.rows(key)


def faulty_store(form, faults):
    class FaultyStore(DeviceRowStore if form == "device" else HostRowStore):
        def stage(self, slot, tensors, num_rows, slots):
            faults.check("stage")
            return FaultyRows(super().stage(slot, tensors, num_rows, slots), faults, "stage")

        def hold(self, tensors, num_rows, slots):
            faults.check("hold")
            if form == "device":
                return FaultyRows(super().stage(0, tensors, num_rows, slots), faults, "hold")
            return FaultyRows(super().hold(tensors, num_rows, slots), faults, "hold")

        def read(self, key, slots, absent, num_new):
            faults.check("read")
            return super().read(key, slots, absent, num_new)

        def copy_to_host(self, value):
            faults.check("leftover")
            return super().copy_to_host(value)

    if form == "device":
        return lambda config: FaultyStore(config, device="cpu", lane=eager_lane(), max_read_rows=16)
    return FaultyStore


@pytest.fixture
def faults():
    faults = Faults()
    yield faults
    faults.gate.set()


@pytest.fixture
def make_faulty(make, form, faults):
    def make_in_form(**options):
        return make(faulty_store(form, faults), **options)

    return make_in_form


# Writes and reads that fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "arrive"])
def test_a_failed_write_costs_its_rows_and_nobody_else(make_faulty, faults, call):
    stage = make_faulty()
    stage.run(Turn("o", D, 0, 4, [9]))
    stage.settle()
    faults.fail(call)
    # Whoever computed the rows has them.
    assert_rows(stage.run(Turn("a", A, 0, 8, [1, 2]), Turn("c", C, 0, 4, [4])), "a", A[:8])
    stage.settle()
    b, d, e = branch(A, 8, 12), branch(D, 4, 13), branch(C, 4, 14)
    step = stage.step(Turn("b", b, 8, 2, [1, 2, 3]), Turn("d", d, 4, 3, [9, 5]), Turn("e", e, 4, 1, [4, 6]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match="lost when their write failed") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("b", "e")
    assert set(caught.value.outputs.hidden_states) == {"d"}
    assert_rows(caught.value.outputs, "d", d[:7])
    # The rows after the lost ones are no hit either, and the next tenant's are.
    stage.run(Turn("n", B, 0, 12, [1, 2, 3]), finished=["a", "b", "c", "e"])
    f = branch(B, 12, 15)
    assert_rows(stage.run(Turn("f", f, 12, 1, [1, 2, 3, 7])), "f", f[:13])
    assert stage.counters.rows_lost == 12 * 2


def test_a_block_whose_first_rows_were_lost_stays_lost_for_its_tenant(make_faulty, faults):
    stage = make_faulty()
    faults.fail("write")
    stage.run(Turn("a", A, 0, 2, [1]))
    stage.settle()
    stage.run(Turn("a", A, 2, 6, [1, 2]))
    b = branch(A, 4, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="lost"):
        stage.run(Turn("b", b, 4, 1, [1, 3]))


def test_a_failed_write_fails_a_hit_of_the_same_step(make_faulty, faults):
    stage = make_faulty()
    faults.fail("write")
    b = branch(A, 8, 2)
    step = stage.step(Turn("a", A, 0, 9, [1, 2, 3]), Turn("b", b, 8, 1, [1, 2, 4]), Turn("c", C, 0, 1, [5]))
    with pytest.raises(OmniPrefixCacheUnmatchError) as caught:
        stage.take(step)
    assert caught.value.request_ids == ("b",)
    assert_rows(caught.value.outputs, "a", A[:9])
    assert_rows(caught.value.outputs, "c", C[:1])


def test_a_failed_write_does_not_touch_rows_of_other_tenants_that_are_read_late(make_faulty, faults):
    stage = make_faulty()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    stage.settle()
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]))
    faults.fail("write")
    stage.run(Turn("n", C, 0, 8, [1, 2]), finished=["a"])
    stage.settle()
    assert_rows(stage.take(step), "b", b[:9])


def test_a_write_that_fails_after_its_blocks_went_to_others_costs_them_nothing(faults):
    stage = make_stage(faulty_store("host", faults), inline=False)
    faults.gate.clear()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    assert faults.waiting.wait(10)
    stage.run(Turn("n", C, 0, 8, [1, 2]), finished=["a"])
    faults.fail("write")
    faults.gate.set()
    stage.settle()
    assert stage.counters.rows_lost == 16
    b = branch(C, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [1, 2, 3])), "b", b[:9])
    stage.close()


@pytest.mark.parametrize(("kind", "lost"), [("stage", "__hidden_states__"), ("hold", "k")])
def test_a_failed_write_costs_the_keys_it_had(make_faulty, faults, kind, lost):
    stage = make_faulty(policy=DEFERRED)
    faults.fail("write", kinds=[kind])
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match=f"request b: {lost}: .*positions 0 to 7 were lost") as caught:
        stage.run(Turn("b", b, 8, 1, [1, 2, 3]))
    assert caught.value.outputs.hidden_states == {}
    assert stage.counters.rows_lost == 8


def test_a_failed_read_fails_its_request_and_nobody_else(make_faulty, faults):
    stage = make_faulty()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b, d = branch(A, 8, 2), branch(A, 8, 4)
    faults.fail("read")
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]), Turn("d", d, 8, 1, [1, 2, 4]), Turn("c", C, 0, 1, [5]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match="could not be copied: read broke") as caught:
        stage.take(step)
    (failed,) = caught.value.request_ids
    assert failed in "bd"
    good, rows = ("d", d) if failed == "b" else ("b", b)
    assert_rows(caught.value.outputs, good, rows[:9])
    assert_rows(caught.value.outputs, "c", C[:1])
    e = branch(A, 8, 5)
    assert_rows(stage.run(Turn("e", e, 8, 1, [1, 2, 6]), finished=[failed]), "e", e[:9])


def test_rows_that_cannot_be_saved_fail_their_step_and_no_other(make_faulty, faults):
    stage = make_faulty()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    faults.fail("stage")
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 4, [1, 2, 3]), Turn("c", C, 0, 1, [4]), mm={"note": "n"})
    with pytest.raises(OmniPrefixCacheUnmatchError, match="could not be saved: stage broke") as caught:
        stage.take(step)
    assert set(caught.value.request_ids) == {"b", "c"}
    assert not any(caught.value.outputs.mm_outputs.values())
    d, e = branch(A, 8, 5), branch(b, 12, 6)
    assert_rows(stage.run(Turn("d", d, 8, 1, [1, 2, 5]), finished=["b"]), "d", d[:9])
    with pytest.raises(OmniPrefixCacheUnmatchError, match="lost"):
        stage.run(Turn("e", e, 12, 1, [1, 2, 3, 6]))


def test_deferred_rows_that_cannot_be_saved_cost_their_keys(make_faulty, faults):
    stage = make_faulty(policy=DEFERRED)
    faults.fail("hold")
    with pytest.raises(OmniPrefixCacheUnmatchError, match="request a: k: its rows could not be saved: hold broke"):
        stage.run(Turn("a", A, 0, 4, [1]))
    assert stage.manager.gauges().deferred_writes == stage.manager.gauges().deferred_bytes == 0
    b = branch(A, 4, 2)
    outputs = stage.run(Turn("b", b, 4, 1, [1, 2]), finished=["a"])
    # The key was not open before, so that there is nothing to be lost: its rows are absent.
    assert outputs.hidden_states["b"].tolist() == hidden_rows(b[:5])
    assert outputs.mm_outputs["k"]["b"].tolist() == [[0, 0]] * 4 + key_rows(b[4:5])


def test_rows_that_do_not_reach_the_host_fail_who_needs_them(make_faulty, faults):
    stage = make_faulty()
    step = stage.step(Turn("a", A, 0, 4, [1]), mm={"note": "n"})
    stage.settle()
    faults.fail("rows", times=2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="did not reach the host: rows broke") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("a",)
    assert_rows(stage.run(Turn("c", C, 0, 4, [2]), finished=["a"]), "c", C[:4])


def test_a_step_larger_than_a_staging_slot_fails_and_no_other(make):
    stage = make(staging_capacity_tokens=8)
    step = stage.step(Turn("a", A, 0, 9, [1, 2, 3]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match="9 rows and a staging slot holds 8; set") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("a",)
    assert_rows(stage.run(Turn("b", B, 0, 8, [4, 5]), finished=["a"]), "b", B[:8])


def test_a_save_that_fails_gives_its_slot_back(make_faulty, faults):
    """What is passed through cannot be copied: the step is not saved, and may be saved again."""
    stage = make_faulty(staging_depth=1)
    turn = Turn("a", A, 0, 4, [1])
    stage.announce(turn)
    for _ in range(3):
        faults.fail("leftover")
        with pytest.raises(OSError, match="leftover broke"):
            stage.save(turn, mm={"note": "n"})
        stage.manager.check_integrity()
    assert_rows(stage.take(stage.save(turn, mm={"note": "n"})), "a", A[:4])
    b = branch(A, 4, 2)
    assert_rows(stage.run(Turn("b", b, 4, 1, [1, 2])), "b", b[:5])


def test_several_failures_at_once_are_all_told(make_faulty, faults):
    stage = make_faulty()
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"request b: .*request e: .*outputs") as caught:
        stage.run(Turn("b", B, 8, 1, [1, 2, 3]), Turn("c", C, 0, 1, [4]), Turn("e", D, 4, 1, [5, 6]))
    assert caught.value.request_ids == ("b", "e")
    assert stage.counters.requests_failed == 2


# Staging slots --------------------------------------------------------------------------------------------------------


def test_a_save_waits_no_longer_than_it_should_and_says_whom_for(make):
    stage = make(staging_depth=2, staging_claim_timeout_s=0.05)
    first = stage.step(Turn("a", A, 0, 1, [1]))
    second = stage.step(Turn("a", A, 1, 1, [1]))
    stage.settle()
    turn = Turn("a", A, 2, 1, [1])
    stage.announce(turn)
    began = time.monotonic()
    with pytest.raises(OmniPrefixCacheStagingTimeoutError) as caught:
        stage.save(turn)
    assert 0.05 <= time.monotonic() - began < 10
    message = str(caught.value)
    assert "no staging slot of 2 came free in 0.05 s" in message
    assert f"steps [{first}, {second}] were saved and not used" in message
    assert "0 writes are not done" in message
    assert "materialize or discard_step" in message and "staging_depth" in message
    assert stage.counters.staging_waits == 1
    # Nothing was lost by it: the step can be saved when a slot is free.
    assert_rows(stage.take(second), "a", A[1:2])
    assert_rows(stage.take(stage.save(turn)), "a", A[2:3])
    assert_rows(stage.take(first), "a", A[0:1])


@pytest.mark.parametrize("use", ["take", "discard"])
def test_a_save_that_waits_gets_the_slot_of_a_step_that_is_used(make, use):
    stage = make(staging_depth=1)
    step = stage.step(Turn("a", A, 0, 1, [1]))

    def free():
        time.sleep(0.05)
        stage.take(step) if use == "take" else stage.manager.discard_step(step)

    thread = threading.Thread(target=free)
    thread.start()
    assert_rows(stage.run(Turn("a", A, 1, 1, [1])), "a", A[1:2])
    thread.join()
    assert stage.counters.staging_waits == 1


def test_a_slot_is_not_free_before_its_rows_are_written(faults):
    """The step was used; its write waits, and the next save would overwrite its rows."""
    stage = make_stage(
        faulty_store("host", faults), inline=False, staging_depth=1, staging_claim_timeout_s=0.5, max_blocks=4
    )
    faults.gate.clear()
    stage.run(Turn("a", A, 0, 4, [1]))
    assert faults.waiting.wait(10)
    turn = Turn("a", A, 4, 4, [1, 2])
    stage.announce(turn)
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"steps \[\] were saved .* 1 writes are not done"):
        stage.save(turn)
    faults.gate.set()
    stage.settle()
    stage.take(stage.save(turn))
    stage.settle()
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [1, 2, 3])), "b", b[:9])
    stage.close()


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_as_many_unused_steps_as_there_are_slots(make, depth):
    stage = make(staging_depth=depth)
    steps = [stage.step(Turn("a", A, start, 1, [1, 2])) for start in range(depth)]
    assert stage.manager.gauges().unused_steps == depth
    for start in reversed(range(depth)):
        assert_rows(stage.take(steps[start]), "a", A[start : start + 1])
    assert stage.counters.staging_waits == 0


def test_steps_without_rows_hold_a_slot_too(make):
    stage = make(staging_depth=1, staging_claim_timeout_s=0)
    step = stage.step(Turn("a", A, 0, 1, [1]), hidden=None, keys=(), mm={"note": 1})
    turn = Turn("a", A, 1, 1, [1])
    stage.announce(turn)
    with pytest.raises(OmniPrefixCacheStagingTimeoutError):
        stage.save(turn)
    stage.manager.discard_step(step)
    stage.take(stage.save(turn))


def test_a_reader_waits_no_longer_than_it_should_and_says_what_for(faults):
    stage = make_stage(faulty_store("host", faults), inline=False, staging_claim_timeout_s=0.5)
    faults.gate.clear()
    stage.run(Turn("a", A, 0, 4, [1]))
    assert faults.waiting.wait(10)
    b = branch(A, 4, 2)
    step = stage.step(Turn("b", b, 4, 1, [1, 2]), Turn("c", C, 0, 1, [3]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"did not end in 0.5 s \(step 1 is HOST_READY\)") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("b",)
    assert_rows(caught.value.outputs, "c", C[:1])
    faults.gate.set()
    stage.settle()
    d = branch(A, 4, 4)
    assert_rows(stage.run(Turn("d", d, 4, 1, [1, 5]), finished=["b"]), "d", d[:5])
    stage.close()


def test_nothing_is_locked_while_rows_are_written(faults):
    stage = make_stage(faulty_store("host", faults), inline=False, staging_depth=4)
    faults.gate.clear()
    stage.run(Turn("a", A, 0, 4, [1]))
    assert faults.waiting.wait(10)
    assert stage.manager.gauges().queued_writes == 1
    assert_rows(stage.run(Turn("c", C, 0, 4, [2])), "c", C[:4])
    stage.manager.discard_step(stage.step(Turn("c", C, 4, 1, [2, 3])))
    assert stage.manager.gauges().queued_writes == 3
    stage.manager.check_integrity()
    faults.gate.set()
    stage.settle()
    assert stage.manager.gauges().queued_writes == 0
    stage.close()


# The budget of deferred rows ------------------------------------------------------------------------------------------


def test_deferred_rows_wait_until_a_request_ends(make):
    stage = make(policy=DEFERRED)
    stage.run(Turn("a", A, 0, 4, [1]), Turn("c", C, 0, 2, [2]))
    stage.run(Turn("a", A, 4, 1, [1, 3]), Turn("c", C, 2, 1, [2]))
    gauges = stage.manager.gauges()
    assert (gauges.deferred_writes, gauges.deferred_bytes) == (2, 8 * ROW_BYTES)
    stage.run(Turn("c", C, 3, 1, [2]), finished=["a"])
    stage.wait(lambda: stage.manager._controller.num_deferred_writes == 1)
    gauges = stage.manager.gauges()
    assert (gauges.deferred_writes, gauges.deferred_bytes) == (1, ROW_BYTES)


def test_the_budget_of_deferred_rows_is_kept_in_the_middle_of_a_request(make):
    stage = make(policy=DEFERRED, gpu_staging_bytes=8 * ROW_BYTES)
    held = []
    for start, count in ((0, 4), (4, 4), (8, 1), (9, 7), (16, 12), (28, 1)):
        stage.run(Turn("a", A, start, count, range(1, 2 + (start + count - 1) // 4)))
        gauges = stage.manager.gauges()
        held.append((gauges.deferred_writes, gauges.deferred_bytes // ROW_BYTES))
    # As many rows as there is room for: exactly eight fit. A step of twelve has nobody beside it.
    assert held == [(1, 4), (2, 8), (2, 5), (2, 8), (1, 12), (1, 1)]
    b = branch(A, 28, 2)
    assert_rows(stage.run(Turn("b", b, 28, 1, [*range(1, 8), 20])), "b", b[:29])


def test_no_budget_at_all(make):
    stage = make(policy=DEFERRED, gpu_staging_bytes=0)
    for start in range(3):
        stage.run(Turn("a", A, start, 1, [1]))
        assert stage.manager.gauges().deferred_writes == 1
    assert_rows(stage.run(Turn("a", A, 3, 1, [1])), "a", A[3:4])
    b = branch(A, 4, 2)
    assert_rows(stage.run(Turn("b", b, 4, 1, [1, 2])), "b", b[:5])


def test_a_hit_writes_the_deferred_rows_that_it_needs_and_no_more(make):
    stage = make(policy=DEFERRED)
    stage.run(Turn("a", A, 0, 4, [1]))
    stage.run(Turn("c", C, 0, 4, [2]))
    b = branch(A, 4, 2)
    step = stage.step(Turn("b", b, 4, 1, [1, 3]))
    assert_rows(stage.take(step), "b", b[:5])
    assert stage.manager.gauges().deferred_writes == 2


# Calls out of order ---------------------------------------------------------------------------------------------------


def test_a_step_id_is_used_once(make):
    stage = make()
    step = stage.step(Turn("a", A, 0, 4, [1]))
    stage.take(step)
    for use in (lambda: stage.take(step), lambda: stage.manager.discard_step(step)):
        with pytest.raises(OmniPrefixCacheUnmatchError, match=rf"step id {step} is used already.*Unused are \[\]"):
            use()
    step = stage.step(Turn("a", A, 4, 1, [1, 2]))
    stage.manager.discard_step(step)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="used already"):
        stage.take(step)


@pytest.mark.parametrize("step_id", [0, -1, 99])
def test_a_step_id_that_was_never_given(make, step_id):
    stage = make()
    step = stage.step(Turn("a", A, 0, 4, [1]))
    for use in (lambda: stage.manager.materialize(step_id, ["a"]), lambda: stage.manager.discard_step(step_id)):
        with pytest.raises(OmniPrefixCacheUnmatchError, match=rf"step id {step_id} was never given.*Unused are \[1\]"):
            use()
    assert_rows(stage.take(step), "a", A[:4])


def test_a_step_that_was_announced_and_not_saved_has_no_id(make):
    stage = make()
    stage.announce(Turn("a", A, 0, 4, [1]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match="never given"):
        stage.manager.materialize(1, ["a"])


def test_requests_of_another_step_use_nothing_up(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"requests \['a', 'x'\] are not of step 2") as caught:
        stage.take(step, "b", "a", "x")
    assert caught.value.request_ids == ("a", "x")
    assert_rows(stage.take(step), "b", b[:9])


def test_some_of_the_requests_of_a_step(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b, d = branch(A, 8, 2), branch(A, 8, 4)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]), Turn("d", d, 8, 2, [1, 2, 4]), Turn("c", C, 0, 3, [5]))
    outputs = stage.take(step, "c", "d")
    assert set(outputs.hidden_states) == set(outputs.mm_outputs["k"]) == {"c", "d"}
    assert_rows(outputs, "d", d[:10])
    assert_rows(outputs, "c", C[:3])
    # What the others would have got is gone, and they go on.
    outputs = stage.run(Turn("b", b, 9, 1, [1, 2, 3]))
    assert_rows(outputs, "b", b[9:10])
    stage.wait(lambda: not stage.manager._controller.num_pending_reads)
    assert stage.manager.gauges().pending_reads == 0


def test_nobody_of_a_step(make):
    stage = make()
    step = stage.step(Turn("a", A, 0, 4, [1]))
    outputs = stage.manager.materialize(step, [])
    assert outputs.hidden_states == {} and outputs.mm_outputs == {}
    with pytest.raises(OmniPrefixCacheUnmatchError, match="used already"):
        stage.take(step)


def test_a_request_named_twice_is_handed_its_rows_once(make):
    stage = make()
    step = stage.step(Turn("a", A, 0, 4, [1]))
    assert_rows(stage.take(step, "a", "a"), "a", A[:4])
    assert stage.counters.rows_computed == 8


def test_the_policy_comes_before_the_first_step(make):
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match="register_policy comes before the first step"):
        stage.manager.register_policy(ModelCachePolicy())


def test_a_save_without_a_new_step(make):
    stage = make()
    with pytest.raises(OmniPrefixCacheUnmatchError, match="new_step_starts before each save_outputs"):
        stage.save()
    turn = Turn("a", A, 0, 4, [1])
    step = stage.step(turn)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="step 1 was saved already"):
        stage.save(turn)
    assert_rows(stage.take(step), "a", A[:4])


def test_a_batch_of_another_step(make):
    stage = make()
    turn = Turn("a", A, 0, 4, [1])
    stage.announce(turn)
    rows = torch.zeros(5, 3, dtype=torch.int64)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="5 tokens and the batch 4 slots"):
        stage.manager.save_outputs(rows, {}, num_tokens_unpadded=5, num_tokens_padded=5)
    assert_rows(stage.take(stage.save(turn)), "a", A[:4])


def test_a_request_that_nobody_announced(make):
    """It is in the batch from before. The step is not saved, and leaves no rows that are not there."""
    stage = make()
    stage.occupy(1, name=9)
    turn = Turn("a", A, 0, 4, [1])
    stage.announce(turn, finished=[stage.ended])
    stage.batch.load(SimpleNamespace(req_ids=["a", "ghost"], starts=[0, 3], block_tables=[[1], [2]]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match="request ghost is in the batch and no new_step_starts"):
        stage.save(turn)
    stage.manager.check_integrity()
    b = branch(A, 4, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="never saved") as caught:
        stage.run(Turn("b", b, 4, 1, [1, 3]), Turn("c", C, 0, 1, [4]))
    assert caught.value.request_ids == ("b",)


def test_a_request_goes_on_that_nobody_knows(make):
    stage = make()
    stage.tables["a"] = [1]
    stage.prompts["a"] = 4
    with pytest.raises(OmniPrefixCacheUnmatchError, match="request a is in the batch and no new_step_starts"):
        stage.announce(Turn("a", A, 4, 1, [1, 2], resumed=True))


def test_a_hit_that_ends_within_a_block(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"hit of 6 tokens, .*whole number of blocks of 4"):
        stage.announce(Turn("b", B, 6, 1, [1, 2]))


@pytest.mark.parametrize("way", [{}, {"resumed": True}])
def test_blocks_of_several_groups(make, way):
    stage = make()
    stage.run(Turn("a", A, 0, 4, [1]))
    groups = ([2], [3])
    new = SimpleNamespace(req_id="b", num_computed_tokens=0, block_ids=groups, prompt_token_ids=[0])
    known = SimpleNamespace(
        req_ids=["a"] if way else [],
        resumed_req_ids={"a"} if way else set(),
        new_block_ids=[groups],
        num_computed_tokens=[0],
        num_output_tokens=[0],
    )
    with pytest.raises(OmniPrefixCacheUnmatchError, match="blocks of 2 KV groups, and the stage cache mirrors exactly"):
        stage.manager.new_step_starts(
            SimpleNamespace(
                scheduled_new_reqs=[] if way else [new],
                scheduled_cached_reqs=known,
                finished_req_ids=set(),
                num_scheduled_tokens={"a": 1, "b": 1},
            )
        )


def test_rows_beyond_the_block_table(make):
    stage = make(max_blocks=4)
    width = stage.batch.table.shape[1]
    turn = Turn("a", A, 0, 4, [1])
    stage.run(turn)
    start = 4 * width
    for count in (1, 3):
        stage.announce(Turn("a", A, 4, count, [1, 2]))
        stage.batch.load(SimpleNamespace(req_ids=["a"], starts=[start], block_tables=[[1, 2]]))
        with pytest.raises(
            OmniPrefixCacheUnmatchError, match=rf"request a computes rows in block {width} .*has {width}"
        ):
            stage.save(Turn("a", text(1, 99), start, count, [1]))


def test_a_scheduler_output_without_the_optional_parts(make):
    """Of vLLM's newer runner, or another's."""
    stage = make()
    new = SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=[[1]])
    stage.manager.new_step_starts(
        SimpleNamespace(scheduled_new_reqs=[new], finished_req_ids=(), num_scheduled_tokens={"a": 4})
    )
    turn = Turn("a", A, 0, 4, [1])
    stage.batch.load(SimpleNamespace(req_ids=["a"], starts=[0], block_tables=[[1]]))
    assert_rows(stage.take(stage.save(turn)), "a", A[:4])


# The end --------------------------------------------------------------------------------------------------------------


def cache_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stage-cache")]


def test_after_the_end_every_call_is_refused(make):
    stage = make()
    step = stage.step(Turn("a", A, 0, 4, [1]))
    stage.announce(Turn("a", A, 4, 1, [1, 2]))
    stage.manager.shutdown()
    stage.manager.shutdown()
    calls = [
        lambda: stage.manager.materialize(step, ["a"]),
        lambda: stage.manager.discard_step(step),
        lambda: stage.save(Turn("a", A, 4, 1, [1, 2])),
        lambda: stage.announce(Turn("a", A, 5, 1, [1, 2])),
    ]
    for call in calls:
        with pytest.raises(OmniPrefixCacheUnmatchError, match="was shut down"):
            call()
    stage.manager.gauges()


def test_after_the_end_no_policy_is_taken(make):
    stage = make()
    stage.manager.shutdown()
    with pytest.raises(OmniPrefixCacheUnmatchError, match="was shut down"):
        stage.manager.register_policy(ModelCachePolicy(keys=[("k", (2,), "int64")]))
    assert not stage.manager._store.specs


def test_the_end_with_work_in_flight(faults):
    before = set(cache_threads())
    stage = make_stage(faulty_store("host", faults), inline=False, policy=DEFERRED)
    mine = set(cache_threads()) - before
    assert {thread.name for thread in mine} == {"stage-cache-committer", "stage-cache-prefetcher"}
    assert all(thread.daemon for thread in mine)
    faults.gate.clear()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    assert faults.waiting.wait(10)
    b = branch(A, 8, 2)
    stage.step(Turn("b", b, 8, 1, [1, 2, 3]))
    assert stage.manager.gauges().queued_writes == 2 and stage.manager.gauges().pending_reads == 1
    threading.Timer(0.05, faults.gate.set).start()
    began = time.monotonic()
    stage.manager.shutdown()
    assert time.monotonic() - began < 10
    assert not any(thread.is_alive() for thread in mine)


def test_the_end_while_somebody_waits(faults):
    """A consumer that waits for a write is told, and does not wait for ever."""
    stage = make_stage(faulty_store("host", faults), inline=False)
    faults.gate.clear()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    assert faults.waiting.wait(10)
    step = stage.step(Turn("b", branch(A, 8, 2), 8, 1, [1, 2, 3]))
    told = []

    def consume():
        try:
            stage.take(step)
        except OmniPrefixCacheUnmatchError as error:
            told.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    deadline = time.monotonic() + 10
    while stage.manager.gauges().unused_steps and time.monotonic() < deadline:
        time.sleep(0.001)
    threading.Timer(0.05, faults.gate.set).start()
    stage.manager.shutdown()
    consumer.join(10)
    assert not consumer.is_alive()
    assert len(told) <= 1 and all(error.request_ids == ("b",) for error in told)


def test_an_end_right_away_leaves_no_thread(make):
    before = len(cache_threads())
    for _ in range(5):
        make().manager.shutdown()
    assert len(cache_threads()) == before


def test_as_many_requests_as_the_batch_holds(make):
    stage = make(num_blocks=MAX_RUNNING * 2)
    turns = [Turn(f"r{index}", text(index + 1), 0, 4, [index]) for index in range(MAX_RUNNING)]
    outputs = stage.run(*turns)
    for turn in turns:
        assert_rows(outputs, turn.req_id, turn.rows)
