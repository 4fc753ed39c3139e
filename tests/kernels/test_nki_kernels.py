"""The NKI kernels against their references and the product's own graphs, bit for bit."""

import importlib.util

import numpy as np
import pytest
import torch
from kernel_checks import (
    ALL_CASES,
    CHECKS,
    COMPACT_CASES,
    MERGE_CASES,
    SCATTER_CASES,
    Device,
    Simulator,
    StandIn,
    assert_same_bits,
)

from vllm_neuron_cache.graphs.encoder_write import encoder_write
from vllm_neuron_cache.graphs.merge import merge_rows
from vllm_neuron_cache.kernels import dialect

BACKENDS = ["stand_in", "simulator", pytest.param("device", marks=pytest.mark.neuron)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """One way to run a kernel."""
    if request.param == "stand_in":
        return StandIn()
    if dialect.missing:
        pytest.skip(f"NKI of the Neuron SDK is not installed ({dialect.missing})")
    if request.param == "simulator":
        return Simulator()
    if importlib.util.find_spec("torch_neuronx") is None:
        pytest.skip("torch_neuronx of the Neuron SDK is not installed")
    import torch_neuronx  # noqa: F401

    try:
        torch.zeros(1).to("neuron")
    except RuntimeError as error:
        pytest.skip(f"there is no Neuron device ({error})")
    return Device()


def run_case(backend, name, case):
    check, _ = CHECKS[name]
    if not isinstance(backend, StandIn) and empty(case):
        pytest.skip("a kernel is not called with no rows")
    return check(backend.modules()[name], case, backend.run)


def empty(case):
    live = case.live if hasattr(case, "live") else sum(case.coarse_tokens)
    return live + case.padding == 0


# The kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_a_kernel_equals_its_reference(backend, name, case):
    run_case(backend, name, case)


@pytest.mark.parametrize("case", SCATTER_CASES)
def test_block_scatter_equals_the_write_graph(backend, case):
    (shape, buffer, rows, block_ids, block_rows), got = run_case(backend, "block_scatter", case)
    encoder_write(buffer, rows, torch.from_numpy(block_ids), torch.from_numpy(block_rows))
    assert_same_bits(got[: shape.num_blocks - 1], buffer[: shape.num_blocks - 1])


@pytest.mark.parametrize("case", MERGE_CASES)
def test_gather_merge_equals_the_merge_graph(backend, case):
    (_, targets, buffer, src, dst), got = run_case(backend, "gather_merge", case)
    hidden, *deepstack = targets
    merge_rows(hidden, tuple(deepstack), buffer, torch.from_numpy(src), torch.from_numpy(dst))
    for result, target in zip(got, targets, strict=True):
        assert_same_bits(result[:-1], target[:-1])


@pytest.mark.parametrize("case", COMPACT_CASES)
def test_compaction_equals_the_write_graph_on_the_rows_taken_by_hand(backend, case):
    (_, buffer, _, coarse, owned), got = run_case(backend, "compact_blocks", case)
    rows = torch.cat([coarse[:0, 0], *(block[:count] for block, count in zip(coarse, case.coarse_tokens))])
    block_ids = np.repeat(owned, case.tokens_per_block).astype(np.int32)
    block_rows = np.concatenate([np.empty(0, dtype=int), *map(np.arange, case.tokens_per_block)]).astype(np.int32)
    encoder_write(buffer, rows, torch.from_numpy(block_ids), torch.from_numpy(block_rows))
    assert_same_bits(got, buffer)
