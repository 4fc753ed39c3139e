"""What the cache takes is planned, refused where it is too much, and counted."""

import pytest
import torch
from conftest import eager_lane
from scripted import HIDDEN, WIDTH, Turn, assert_rows, branch, hidden_rows, key_rows, make_stage, text

from vllm_neuron_cache.errors import ConfigurationError, OmniPrefixCacheUnmatchError
from vllm_neuron_cache.simulation.stage_schedule import ScheduledBatch, ScheduleShape
from vllm_neuron_cache.stage_cache import (
    HIDDEN_KEY,
    DeviceRowStore,
    FullAttentionGroupView,
    HostRowStore,
    KeySpec,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
)
from vllm_neuron_cache.stage_cache.counters import StageCacheCounters
from vllm_neuron_cache.stage_cache.policy import KeyMemory, check_memory, plan_memory

A, B, C = text(1), text(2), text(3)
HIDDEN_SPEC = KeySpec(HIDDEN_KEY, (HIDDEN,), "int64")
KEY_SPEC = KeySpec("k", (WIDTH,), "int64")
DECLARED = ModelCachePolicy(keys=(HIDDEN_SPEC, KEY_SPEC))
HIDDEN_BYTES, KEY_BYTES = HIDDEN * 8, WIDTH * 8

CONFIG = PrefixCacheConfig(num_blocks=10, block_size=4, staging_depth=3, staging_capacity_tokens=7)


def in_form(form, **limits):
    """Stage options of ten blocks and their limit."""
    name = "device_bytes" if form == "device" else "host_bytes"
    sizes = {"num_blocks": 10, "staging_depth": 3, "staging_capacity_tokens": 20}
    return sizes | ({name: limits["limit"]} if "limit" in limits else {})


def bytes_of(form, row_bytes):
    return 11 * 4 * row_bytes if form == "device" else (10 * 4 + 3 * 20) * row_bytes


# The plan -------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_key_in_the_pool_and_in_staging():
    specs = [KeySpec("a", (2048,), "bfloat16"), KeySpec("b", (), "int64"), KeySpec("c", (2, 3), "float32")]
    plan = plan_memory(CONFIG, specs, staged=True)
    assert plan == (
        KeyMemory("a", 40 * 4096, 21 * 4096),
        KeyMemory("b", 40 * 8, 21 * 8),
        KeyMemory("c", 40 * 24, 21 * 24),
    )
    assert [key.total_bytes for key in plan] == [61 * 4096, 61 * 8, 61 * 24]
    assert all(key.staging_bytes == 0 for key in plan_memory(CONFIG, specs, staged=False))


def test_the_thinker_of_the_reference_takes_what_is_measured_there():
    config = PrefixCacheConfig(num_blocks=15092, block_size=16, staging_depth=1, staging_capacity_tokens=1)
    (plan,) = plan_memory(config, [KeySpec(HIDDEN_KEY, (2048,), "bfloat16")], staged=False)
    assert round(plan.total_bytes / 2**30, 2) == 0.92


def test_a_limit_is_kept_to_the_byte():
    plan = plan_memory(CONFIG, [KeySpec("a", (1,), "float32"), KeySpec("b", (1,), "int8")], staged=True)
    check_memory(plan, None, "host_bytes")
    check_memory(plan, 61 * 5, "host_bytes")
    with pytest.raises(ConfigurationError) as caught:
        check_memory(plan, 61 * 5 - 1, "host_bytes")
    message = str(caught.value)
    assert "take 305 bytes (a 244, b 61) and host_bytes allows 304" in message
    assert "Raise host_bytes, or lower the number of KV blocks" in message


def test_a_store_says_what_it_takes(make, form):
    stage = make(policy=DECLARED, **in_form(form))
    taken = stage.manager._store.memory()
    assert {key.name: key.total_bytes for key in taken} == {
        HIDDEN_KEY: bytes_of(form, HIDDEN_BYTES),
        "k": bytes_of(form, KEY_BYTES),
    }
    assert all((key.staging_bytes == 0) == (form == "device") for key in taken)
    assert dict(stage.manager._store.specs) == {HIDDEN_KEY: HIDDEN_SPEC, "k": KEY_SPEC}


def test_declared_keys_are_allocated_at_start_up(make, form):
    stage = make(policy=DECLARED, **in_form(form))
    store = stage.manager._store

    def places():
        if form == "device":
            return {key: (store.pool(key).data_ptr(), store.pool(key).nbytes) for key in store.specs}
        return {key: (rows.ctypes.data, rows.nbytes) for key, rows in store._pool._rows.items()}

    before = places()
    slots = 44 if form == "device" else 40
    assert {key: size for key, (_, size) in before.items()} == {
        HIDDEN_KEY: slots * HIDDEN_BYTES,
        "k": slots * KEY_BYTES,
    }
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    assert places() == before


def test_start_up_says_what_each_key_takes(logged):
    policy = ModelCachePolicy(keys=[("k", (1024,), "float32")])
    stage = make_stage(policy=policy, num_blocks=128, block_size=16, staging_capacity_tokens=64)
    assert logged == ["stage cache: k takes 9.0 MiB (1.0 MiB of it staging)"]
    stage.close()


# Caps -----------------------------------------------------------------------------------------------------------------


def test_declared_keys_that_do_not_fit_are_refused_before_anything_is_allocated(form):
    total = bytes_of(form, HIDDEN_BYTES + KEY_BYTES)
    name = "device_bytes" if form == "device" else "host_bytes"
    config = PrefixCacheConfig(
        num_blocks=10, block_size=4, staging_depth=3, staging_capacity_tokens=20, **{name: total - 1}
    )
    if form == "device":
        store = DeviceRowStore(config, device="cpu", lane=eager_lane(), max_read_rows=16)
    else:
        store = HostRowStore(config)
    allocated = []
    allocate = store._allocate
    store._allocate = lambda spec: (allocated.append(spec), allocate(spec))
    batch = ScheduledBatch(ScheduleShape(block_size=4, max_running=2, prompt_tokens=8))
    view = FullAttentionGroupView(batch, 4)
    manager = OmniPrefixCacheManager(config, view, store=store, inline=True)
    with pytest.raises(ConfigurationError, match=rf"take {total:,} bytes .*{name} allows {total - 1:,}"):
        manager.register_policy(DECLARED)
    assert allocated == [] and dict(store.specs) == {}
    # A smaller policy is taken after it.
    manager.register_policy(ModelCachePolicy(keys=(KEY_SPEC,)))
    assert [spec.name for spec in allocated] == ["k"]
    manager.shutdown()


def test_declared_keys_that_fit_to_the_byte(make, form):
    limit = bytes_of(form, HIDDEN_BYTES + KEY_BYTES)
    stage = make(policy=DECLARED, **in_form(form, limit=limit))
    assert_rows(stage.run(Turn("a", A, 0, 8, [1, 2])), "a", A[:8])


def test_a_cap_of_the_other_memory_is_no_cap(make, form):
    name = "host_bytes" if form == "device" else "device_bytes"
    stage = make(policy=DECLARED, num_blocks=10, staging_capacity_tokens=20, **{name: 0})
    assert_rows(stage.run(Turn("a", A, 0, 8, [1, 2])), "a", A[:8])


def test_a_discovered_key_that_does_not_fit_is_handed_on_and_not_cached(make, form, logged):
    """Who misses has the rows. A hit that needs them is an error for it alone; where the step has none it has none."""
    stage = make(**in_form(form, limit=bytes_of(form, HIDDEN_BYTES)))
    assert_rows(stage.run(Turn("a", A, 0, 8, [1, 2])), "a", A[:8])
    (message,) = logged
    assert message.startswith("stage cache: k is not cached") and "allows" in message
    logged.clear()
    b, d = branch(A, 8, 2), branch(A, 8, 4)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]), Turn("c", C, 0, 2, [4]))
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"request b: k: .*are not cached: .*allows") as caught:
        stage.take(step)
    assert caught.value.request_ids == ("b",)
    assert_rows(caught.value.outputs, "c", C[:2])
    outputs = stage.run(Turn("d", d, 8, 1, [1, 2, 5]), keys=())
    assert outputs.hidden_states["d"].tolist() == hidden_rows(d[:9]) and outputs.mm_outputs == {}
    assert not any("is not cached" in message for message in logged), "said once"
    assert set(stage.manager._store.specs) == {HIDDEN_KEY}
    stage.manager.check_integrity()


def test_hidden_states_that_do_not_fit(make, form):
    stage = make(**in_form(form, limit=bytes_of(form, KEY_BYTES)))
    assert_rows(stage.run(Turn("a", A, 0, 8, [1, 2])), "a", A[:8])
    b = branch(A, 8, 2)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="request b: __hidden_states__") as caught:
        stage.run(Turn("b", b, 8, 1, [1, 2, 3]), Turn("c", C, 0, 2, [4]))
    assert caught.value.request_ids == ("b",)
    assert_rows(caught.value.outputs, "c", C[:2])


def test_the_order_of_keys_in_a_step_decides_who_fits(make, form):
    stage = make(**in_form(form, limit=bytes_of(form, HIDDEN_BYTES + KEY_BYTES)))
    extra = torch.zeros(8, WIDTH, dtype=torch.int64)
    outputs = stage.run(Turn("a", A, 0, 8, [1, 2]), mm={"late": extra})
    assert outputs.mm_outputs["late"]["a"].tolist() == extra.tolist()
    assert set(stage.manager._store.specs) == {HIDDEN_KEY, "k"}
    b = branch(A, 8, 2)
    assert_rows(stage.run(Turn("b", b, 8, 1, [1, 2, 3])), "b", b[:9])


# Counters -------------------------------------------------------------------------------------------------------------


def counted(stage, **expected):
    stage.settle()
    assert stage.counters == StageCacheCounters(**expected)


def test_nothing_is_counted_before_anything_happens(make):
    stage = make()
    counted(stage)
    assert stage.manager.gauges() == (0, 0, 0, 0, 0)


def test_a_miss_a_hit_and_bytes(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    row = HIDDEN_BYTES + KEY_BYTES
    counted(stage, rows_written=16, bytes_written=8 * row, rows_computed=16)
    b = branch(A, 8, 2)
    stage.run(Turn("b", b, 8, 3, [1, 2, 3]))
    waits = stage.counters.write_waits
    counted(
        stage,
        rows_written=22,
        bytes_written=11 * row,
        rows_computed=22,
        rows_from_cache=16,
        bytes_from_cache=8 * row,
        write_waits=waits,
    )


def test_absent_rows_are_counted_apart(make):
    stage = make()
    stage.run(Turn("a", A, 0, 6, [1, 2]))
    stage.run(Turn("a", A, 6, 2, [1, 2]), keys=())
    stage.settle()
    b = branch(A, 8, 2)
    outputs = stage.run(Turn("b", b, 8, 1, [1, 2, 3]))
    assert outputs.mm_outputs["k"]["b"].tolist() == key_rows(b[:6]) + [[0, 0]] * 2 + key_rows(b[8:9])
    stage.settle()
    counters = stage.counters
    assert (counters.rows_absent, counters.rows_from_cache, counters.rows_computed) == (2, 14, 6 + 6 + 2 + 2)
    assert counters.bytes_from_cache == 8 * HIDDEN_BYTES + 6 * KEY_BYTES


def test_rows_copied_before_they_are_overwritten_are_counted_once(make):
    """However many steps threaten them."""
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    stage.settle()
    b = branch(A, 8, 2)
    step = stage.step(Turn("b", b, 8, 1, [1, 2, 3]))
    stage.run(Turn("n", C, 0, 4, [1]), hidden=None, keys=(), finished=["a"])
    stage.run(Turn("n", C, 4, 4, [1, 2]))
    # A thread may have copied them before.
    copied = stage.counters.rows_copied_on_write
    assert copied == 16 or (copied == 0 and not stage.manager._controller.inline)
    assert_rows(stage.take(step), "b", b[:9])
    stage.run(Turn("n", C, 8, 4, [1, 2, 8]))
    assert stage.counters.rows_copied_on_write == copied


def test_rows_of_a_hit_that_is_taken_in_time_are_not_copied_early(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b = branch(A, 8, 2)
    stage.run(Turn("b", b, 8, 1, [1, 2, 3]))
    stage.run(Turn("n", C, 0, 8, [1, 2]), finished=["a"])
    stage.settle()
    assert stage.counters.rows_copied_on_write == 0


def test_rows_that_are_discarded_are_written_and_handed_to_nobody(make):
    stage = make()
    stage.manager.discard_step(stage.step(Turn("a", A, 0, 4, [1])))
    stage.settle()
    assert (stage.counters.rows_written, stage.counters.rows_computed) == (8, 0)


def test_rows_that_were_handed_on_before_are_not_counted_again(make):
    stage = make()
    stage.run(Turn("a", A, 0, 6, [1, 2]))
    stage.run(Turn("a", A, 4, 4, [1, 3], resumed=True))
    stage.settle()
    assert (stage.counters.rows_written, stage.counters.rows_computed) == (20, 12 + 4)


def test_rows_that_are_not_cached_are_not_written_and_not_lost(make, form):
    """There was no room for them; no write has failed."""
    stage = make(**in_form(form, limit=bytes_of(form, HIDDEN_BYTES)))
    for start in range(3):
        stage.run(Turn("a", A, start, 1, [1]))
    stage.settle()
    assert (stage.counters.rows_written, stage.counters.rows_lost, stage.counters.rows_computed) == (3, 0, 6)


def test_gauges_of_reads_and_steps(make):
    stage = make()
    stage.run(Turn("a", A, 0, 8, [1, 2]))
    b, d = branch(A, 8, 2), branch(A, 8, 4)
    first = stage.step(Turn("b", b, 8, 1, [1, 2, 3]), Turn("d", d, 8, 1, [1, 2, 4]))
    second = stage.step(Turn("b", b, 9, 1, [1, 2, 3]))
    gauges = stage.manager.gauges()
    assert gauges.unused_steps == 2
    assert gauges.pending_reads == 2 or not stage.manager._controller.inline
    stage.take(first, "b")
    stage.manager.discard_step(second)
    stage.settle()
    stage.wait(lambda: not stage.manager._controller.num_pending_reads)
    assert stage.manager.gauges() == (0, 0, 0, 0, 0)
    stage.manager.check_integrity()


def test_failed_requests_are_counted_once_each(make):
    stage = make()
    with pytest.raises(OmniPrefixCacheUnmatchError):
        stage.run(Turn("b", B, 8, 1, [1, 2, 3]), Turn("c", C, 4, 1, [4, 5]), Turn("a", A, 0, 1, [6]))
    assert stage.counters.requests_failed == 2
    assert stage.counters.rows_from_cache == stage.counters.rows_absent == 0
