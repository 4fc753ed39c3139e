"""vLLM's scheduler with a simulated worker: what it shows, ten thousand random runs, and what those would catch."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

from fuzz import Run

from vllm_neuron_cache.encoder_cache import item as item_module
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.errors import IntegrityError, NeuronCacheError, SimulationError
from vllm_neuron_cache.integrations.vllm.failures import FailureHandler
from vllm_neuron_cache.integrations.vllm.manager import BlockEncoderCacheManager
from vllm_neuron_cache.integrations.vllm.simulation.engine import (
    SimulatedEngine,
    SimulatedEngineConfig,
    play,
    vllm_request,
)
from vllm_neuron_cache.integrations.vllm.simulation.hits import simulate_hits
from vllm_neuron_cache.simulation.trace import TraceItem, TraceRequest, one_item_requests, repeating_items

pytestmark = pytest.mark.vllm

NUM_RUNS = 10_000
RUNS_PER_TEST = 500


def engine(num_item_blocks=16, block_size=16, *, largest=300, **config):
    geometry = CacheGeometry(num_item_blocks + 1, block_size, 512)
    return SimulatedEngine(SimulatedEngineConfig(geometry=geometry, largest_item_tokens=largest, **config))


def ended_with_tokens(simulated, requests):
    return [
        (simulated.finish_reasons.get(r.request_id), len(simulated.outputs[r.request_id])) == ("length", r.max_tokens)
        for r in requests
    ]


# What it shows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("stock", [True, False], ids=["stock", "blocks"])
def test_every_request_of_a_trace_ends_with_its_tokens(stock, depth):
    simulated = engine(stock=stock, asynchronous=depth > 1)
    requests = one_item_requests(repeating_items((80, 117, 256), 60, reuse=0.5, seed=1), max_tokens=5)
    assert play(simulated, requests, depth=depth) == 0
    assert all(ended_with_tokens(simulated, requests))
    simulated.check_integrity()


def test_the_same_trace_gives_the_same_steps():
    def hits():
        simulated = engine()
        play(simulated, one_item_requests(repeating_items((80, 117), 80, reuse=0.6, seed=2)))
        return simulated.manager.stats.hits, simulated.manager.stats.evictions, simulated.worker.num_encoded

    assert hits() == hits()


def test_with_blocks_of_one_row_it_decides_as_stock_does():
    """Equal capacity, counted in the same unit: as many items are encoded, of whatever kind the trace is."""
    for seed in range(5):
        requests = one_item_requests(repeating_items((5, 40, 90), 80, reuse=0.6, seed=seed), max_tokens=3)
        encoded = []
        for stock in (True, False):
            simulated = engine(512, 1, largest=90, stock=stock)
            play(simulated, requests)
            encoded.append(simulated.worker.num_encoded)
        assert encoded[0] == encoded[1]


def test_stock_admits_more_than_the_device_has_and_blocks_do_not():
    images = [TraceItem(f"small-{n}", 80) for n in range(102)]
    requests = [
        TraceRequest(f"r-{n}", 0, tuple(images[n : n + 17]), (2,) * (len(images[n : n + 17]) + 1))
        for n in range(0, 102, 17)
    ]
    stock = engine(16, 512, stock=True, max_num_batched_tokens=8192, num_kv_blocks=10_000)
    play(stock, requests)
    assert stock.worker.num_overflows == 102 - 16
    blocks = engine(16, 512, max_num_batched_tokens=8192, num_kv_blocks=10_000)
    # A prompt of 17 such images cannot have them all there at once, and ends all the same.
    assert play(blocks, requests) == 0 and all(ended_with_tokens(blocks, requests))


def test_the_ninth_distinct_video():
    """Eight videos of four blocks each fill 32; vLLM's budget of 16384 tokens lets a ninth through."""
    requests = [TraceRequest(f"r-{n}", 0, (TraceItem(f"clip-{n}", 1568, "video"),), (2, 2), 3) for n in range(9)]
    for stock in (True, False):
        simulated = engine(32, 512, largest=1568, stock=stock, max_num_batched_tokens=16384)
        assert play(simulated, requests) == 0
        if stock:
            assert simulated.worker.num_overflows == 1
    assert all(ended_with_tokens(simulated, requests)) and simulated.manager.stats.of("video").misses == 9


def test_an_item_that_can_never_fit_stands_still_in_stock_and_is_not_let_in_here():
    """The front end refuses it; were it let in, the simulator would say so."""
    simulated = engine(2, 16)
    request = TraceRequest("r", 0, (TraceItem("large", 33),), (1, 1))
    assert play(simulated, [request], patience=7) == 7
    assert "r" not in simulated.finish_reasons
    assert simulated.manager.stats.of("image").waits == 1


def test_a_video_lies_by_frames():
    simulated = engine(9, 16)
    play(simulated, [TraceRequest("r", 0, (TraceItem("v", 36, "video", (12, 12, 12)),), (1, 1))])
    assert simulated.manager.pool.get("v").layout.num_tokens == 36


def test_a_request_is_what_the_trace_says():
    request = vllm_request(TraceRequest("r", 0, (TraceItem("a", 5), TraceItem("v", 4, "video", (2, 2))), (3, 1, 2)))
    assert [
        (f.mm_position.offset, f.mm_position.length, f.mm_position.get_num_embeds()) for f in request.mm_features
    ] == [
        (3, 5, 5),
        (9, 5, 4),
    ]
    assert request.num_prompt_tokens == 3 + 5 + 1 + 5 + 2


# Hits ----------------------------------------------------------------------------------------------------------


def test_a_cache_that_holds_everything_finds_every_repeat():
    hits = simulate_hits(CacheGeometry(4097, 16, 512), (80,), 0.6, num_requests=400)
    assert hits.hit_rate == pytest.approx(0.6, abs=0.06)
    assert hits.encoder_tokens_saved_fraction == pytest.approx(hits.hit_rate)


def test_a_smaller_cache_finds_less_and_fine_blocks_find_more_in_the_same_bytes():
    rates = [
        simulate_hits(CacheGeometry(num_blocks, block_size, 512), (80,), 0.7, num_requests=400).hit_rate
        for num_blocks, block_size in ((5, 512), (17, 512), (17 * 32 // 4, 16), (17 * 32, 16))
    ]
    coarse_quarter, coarse, fine_quarter, fine = rates
    assert coarse_quarter < coarse < fine_quarter < fine


def test_what_is_refused_on_arrival_is_never_found():
    hits = simulate_hits(CacheGeometry(3, 16, 512), (10, 1000), 0.9, num_requests=200)
    assert 0 < hits.encoder_tokens_saved_fraction < 0.02 < hits.hit_rate < 0.6
    assert simulate_hits(CacheGeometry(3, 16, 512), (1000,), 0.9, num_requests=50) == (0, 0)


# Random runs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_RUNS, RUNS_PER_TEST))
def test_random_runs(first):
    for seed in range(first, first + RUNS_PER_TEST):
        try:
            Run(seed).play()
        except Exception as error:
            raise AssertionError(f"run {seed}: {type(error).__name__}: {error}") from error


def evictions_are_not_told(monkeypatch):
    monkeypatch.setattr(StepJournal, "record_eviction", lambda self, item: None)


def items_of_the_same_pass_are_not_counted(monkeypatch):
    monkeypatch.setattr(BlockEncoderCacheManager, "_num_pending_blocks", lambda *args: 0)


def an_item_in_use_is_evicted(monkeypatch):
    release = EncoderBlockPool.release

    def release_all(self, key, reference):
        if (item := self.get(key)) is not None:
            for other in list(item.references):
                release(self, key, other)

    monkeypatch.setattr(EncoderBlockPool, "release", release_all)


def rows_lie_one_too_far(monkeypatch):
    rows = item_module.buffer_rows
    monkeypatch.setattr(
        "vllm_neuron_cache.encoder_cache.table.buffer_rows", lambda ids, counts, size: rows(ids, counts, size) + 1
    )


def a_failed_item_is_kept(monkeypatch):
    monkeypatch.setattr(BlockEncoderCacheManager, "invalidate", lambda self, key, seq, requests: None)


def a_failed_request_goes_on(monkeypatch):
    monkeypatch.setattr(FailureHandler, "handle", lambda self, report, seq: [])


def steps_are_not_acknowledged(monkeypatch):
    monkeypatch.setattr(EncoderBlockPool, "acknowledge", lambda self, step: None)


FAULTS = [
    evictions_are_not_told,
    items_of_the_same_pass_are_not_counted,
    an_item_in_use_is_evicted,
    rows_lie_one_too_far,
    a_failed_item_is_kept,
    a_failed_request_goes_on,
    steps_are_not_acknowledged,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_random_runs_catch_a_fault_of_this_kind(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((NeuronCacheError, AssertionError, ValueError, KeyError, IndexError)):
        for seed in range(RUNS_PER_TEST):
            Run(seed).play()


def test_the_runs_do_what_they_are_for():
    """Preemptions, evictions, waits, failures, hits, dropped steps, and several steps in flight all happen."""
    seen = dict.fromkeys(("preempted", "evicted", "waited", "failed", "hit", "dropped", "ahead"), 0)
    for seed in range(RUNS_PER_TEST):
        run = Run(seed)
        preempt = run.engine.scheduler._preempt_request

        def counting(*args, preempt=preempt, **kwargs):
            seen["preempted"] += 1
            return preempt(*args, **kwargs)

        run.engine.scheduler._preempt_request = counting
        run.play()
        stats = run.engine.manager.stats
        seen["evicted"] += stats.evictions
        seen["waited"] += stats.waits
        seen["hit"] += stats.hits
        seen["failed"] += bool(run.failing)
        seen["dropped"] += run.num_dropped
        seen["ahead"] += run.depth > 1
    assert all(seen.values()), seen


def test_errors_of_the_simulator_are_ours():
    assert issubclass(SimulationError, NeuronCacheError) and issubclass(IntegrityError, NeuronCacheError)
