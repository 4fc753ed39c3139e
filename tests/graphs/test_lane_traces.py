"""A worker's random run in every lane: the same rows to the bit, and nothing compiled after warm-up."""

from importlib.util import find_spec

import pytest
import torch

from vllm_neuron_cache.bench.lane_traces import GEOMETRY, bench_lanes, random_trace, run_trace
from vllm_neuron_cache.config import LANES
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available

NUM_STEPS = 500


@pytest.fixture(scope="module")
def trace():
    return random_trace(NUM_STEPS)


@pytest.fixture(scope="module")
def reference(trace):
    return run_trace("eager", trace)


def test_the_trace_has_what_a_worker_meets(trace):
    sizes = {num_tokens for step in trace for _, num_tokens in step.written}
    assert min(sizes) < GEOMETRY.block_size and max(sizes) > 7 * GEOMETRY.block_size
    assert sum(len(delta.freed) for step in trace for delta in step.step.deltas) > 100
    assert sum(len(step.windows) for step in trace) > 500
    assert any(not step.windows for step in trace)
    assert any(window.first_row for step in trace for window in step.windows)


@pytest.mark.parametrize("lane", ["check", "inductor"])
def test_nothing_compiles_after_warm_up_and_rows_are_those_of_eager(lane, trace, reference):
    if lane == "inductor" and not compiler_available():
        pytest.skip("inductor needs a C++ compiler, and there is none")
    run = run_trace(lane, trace)
    assert run.graphs_compiled > 0 and run.recompiles_after_warmup == 0
    assert all(torch.equal(rows, others) for rows, others in zip(run.rows, reference.rows, strict=True))


@pytest.mark.xla
@pytest.mark.skipif(find_spec("jax") is None, reason="needs jax and torchax; scripts/xla_env runs these")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xla_compiles_nothing_after_warm_up_and_has_the_rows_of_eager(trace, dtype):
    from vllm_neuron_cache.graphs.lanes.xla import count_compilations

    reference = run_trace("eager", trace, dtype)
    counts = []
    with count_compilations() as compilations:
        run = run_trace("xla", trace, dtype, warmed_up=lambda: counts.append(compilations.count))
        counts.append(compilations.count)
    before, after = counts
    assert before >= run.graphs_compiled > 0  # XLA compiles the conversion of arguments, too
    assert before == after and run.recompiles_after_warmup == 0
    assert all(torch.equal(rows, others) for rows, others in zip(run.rows, reference.rows, strict=True))


def test_the_comparison_can_fail(reference):
    other = run_trace("eager", random_trace(20, seed=1))
    assert not all(torch.equal(rows, others) for rows, others in zip(other.rows, reference.rows))


def test_the_report_names_every_lane():
    result = bench_lanes(num_steps=5)
    assert set(result) == set(LANES)
    for name, lane in result.items():
        if "missing" in lane:
            assert f"lane '{name}'" in lane["missing"]
        else:
            assert (lane["steps"], lane["recompiles_after_warmup"], lane["equals_eager"]) == (5, 0, True)
    assert result["eager"]["graphs_compiled"] == 0 and result["check"]["graphs_compiled"] > 0
