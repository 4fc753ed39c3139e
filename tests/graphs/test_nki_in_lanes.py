"""Kernel "nki": the cache's own runtime with kernels in its graphs, against the same runtime with the compiler's.

The kernels run under the NumPy stand-in. What the lanes hand over of such a graph is test_neuron_lanes.py's, that a
device does the same test_neuron_device.py's.
"""

import inspect
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from lane_contract import NKI_OPERATORS, check_neuron
from runtime_pair import CPU, DTYPE, LEVELS, SIZES, TOKENS, WIDTH, check_against_the_compiler, make_runtime
from vendor_stand_ins import on_xla, package

from vllm_neuron_cache.acceptance.device_checks import NUM_IMAGES, check_device
from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.errors import ConfigurationError, GraphRuleError
from vllm_neuron_cache.graphs import catalog, kernel_calls
from vllm_neuron_cache.graphs.check import check_spec
from vllm_neuron_cache.graphs.deployment import plan_deployment
from vllm_neuron_cache.graphs.lanes import EagerLane, make_lane, neuron
from vllm_neuron_cache.graphs.lanes.neuron import NeuronLane
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.kernels import dialect, indices, operators
from vllm_neuron_cache.kernels.block_scatter import block_scatter_args
from vllm_neuron_cache.kernels.gather_merge import gather_merge_args
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.source_rows import SourceRows


class KernelLane(EagerLane):
    """Runs a graph's function with the kernels in it, and compiles nothing, which takes longer than all else here."""

    name = "neuron"


# The choice ------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_compilers_graphs(nki_kernels):
    runtime = check_against_the_compiler(KernelLane("nki"))
    assert [graph.spec.name for graph in runtime.graphs] == ["encoder_write_nki", "encoder_stamp", "merge_rows_nki"]
    assert nki_kernels["block_scatter"] >= len(catalog.WRITE_BUCKETS) + 2 * len(SIZES)
    assert nki_kernels["gather_merge"] >= (1 + LEVELS) * 2 * len(SIZES)


def test_rows_are_those_of_the_compilers_graphs_in_the_native_lane(torch_compile, nki_kernels):
    lane = NeuronLane("nki")
    runtime = check_against_the_compiler(lane)
    assert lane.num_compiled == sum(len(graph.buckets) for graph in runtime.graphs)
    assert torch_compile.operators == NKI_OPERATORS
    assert min(nki_kernels.values()) > 0


def test_warm_up_runs_the_kernels_in_every_bucket_and_writes_nothing(nki_kernels):
    with torch.inference_mode():
        runtime = make_runtime(KernelLane("nki"))
    write, _, merge = runtime.graphs
    assert nki_kernels == {
        "block_scatter": len(write.buckets),
        "gather_merge": (1 + LEVELS) * len(merge.buckets),
    }
    assert not runtime.blocks.buffer.any() and not runtime.targets.hidden.any()


def test_a_model_that_merges_by_itself_still_writes_by_the_kernel(nki_kernels):
    with torch.inference_mode():
        runtime = make_runtime(KernelLane("nki"), targets=SourceRows(TOKENS, CPU))
    assert [graph.spec.name for graph in runtime.graphs] == ["encoder_write_nki", "encoder_stamp"]


def test_the_kernels_graphs_keep_the_rules_and_declare_what_they_change():
    specs = catalog.encoder_cache_specs(
        BufferShape(24, 16, WIDTH * (1 + LEVELS), DTYPE), "nki", num_levels=LEVELS, max_step_tokens=TOKENS
    )
    aliases = {spec.name: list(check_spec(spec, spec.buckets[0]).aliases) for spec in specs}
    assert aliases["encoder_write_nki"] == ["buffer"]
    assert aliases["merge_rows_nki"] == ["hidden", "deepstack[0]", "deepstack[1]"]


def test_a_reference_stands_for_the_kernel_on_a_cpu():
    """So that graphs can be traced, checked and compared without NKI."""
    spec = catalog.write_spec(BufferShape(5, 4, 24, DTYPE), "nki")
    buffer, rows = torch.zeros(5, 4, 24, dtype=DTYPE), torch.ones(64, 24, dtype=DTYPE)
    row_ids = torch.full((64, 1), -1, dtype=torch.int32)
    row_ids[3] = 7
    spec.fn(buffer, rows, row_ids)
    assert buffer[1, 3].eq(1).all() and buffer.sum() == 24


def test_tiles_and_columns_are_those_that_the_host_functions_say():
    buffer = BufferShape(3, 4, 3 * 30000, DTYPE)
    handed = []

    def called(spec):
        spec.kernel_fn(lambda operator: lambda *args: handed.append(args))(*spec.meta_args(64))
        return [arguments[-1] for arguments in handed]

    ids, rows = np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)
    scatter = block_scatter_args(buffer, ids, rows, scratch_block=2)
    assert called(catalog.write_spec(buffer, "nki")) == [scatter.chunk] and scatter.chunk < buffer.fat_dim
    handed.clear()
    merge = gather_merge_args(buffer, ids, rows, num_levels=LEVELS, dummy_row=64)
    assert called(catalog.merge_spec(buffer, "nki", num_levels=LEVELS, max_step_tokens=64)) == [merge.chunk] * 3
    assert tuple(arguments[-2] for arguments in handed) == merge.columns


def test_the_acceptance_run_measures_the_kernels(nki_kernels, checkpoint):
    config = NeuronCacheConfig.from_additional_config({"vllm_neuron_cache": {"kernel": "nki", "lane": "neuron"}})
    deployment = plan_deployment(load_model_shape(checkpoint), config, max_num_batched_tokens=8192)
    checks = check_device(deployment, KernelLane("nki"), CPU, rounds=1, limit_ms=1e6)
    assert [check.text for check in checks if not check.passed] == []
    assert nki_kernels["block_scatter"] > 2 * NUM_IMAGES and nki_kernels["gather_merge"] > 4


# What is refused at start-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["eager", "check", "inductor", "xla"])
def test_a_lane_of_the_cpu_takes_no_kernel(lane):
    with pytest.raises(ConfigurationError, match=rf"kernel is 'nki'.*the lane is '{lane}'.*neuronx_trace.*'compiler'"):
        make_lane(lane, "nki")


def test_missing_nki_is_named_with_its_source(torch_compile, monkeypatch):
    monkeypatch.setattr(dialect, "missing", "No module named 'nki'")
    with pytest.raises(ConfigurationError, match=r"Neuron SDK's package nki.*No module named.*AWS's package index"):
        make_lane("neuron", "nki")
    make_lane("neuron")


def test_a_torch_neuronx_without_operators_of_kernels_is_named(torch_compile, monkeypatch):
    monkeypatch.setattr(dialect, "missing", "")
    monkeypatch.setitem(sys.modules, "torch_neuronx", package("torch_neuronx"))
    with pytest.raises(ConfigurationError, match=r"torch_neuronx\.nki_op for kernel 'nki'.*to 'compiler'"):
        make_lane("neuron", "nki")
    make_lane("neuron")


@pytest.mark.parametrize(
    ("buffer", "max_step_tokens", "words"),
    [
        (BufferShape(5, 4, 24, torch.int32), 64, "buffer is torch.int32"),
        (BufferShape(2**20, 128, 24, DTYPE), 64, "buffer has 6442450944 bytes"),
        (BufferShape(5, 4, 24, DTYPE), 2**28, "target of the merge has 4294967312 bytes"),
    ],
)
def test_what_a_kernel_cannot_index_is_refused_before_anything_is_allocated(buffer, max_step_tokens, words):
    with pytest.raises(ConfigurationError, match=words):
        catalog.encoder_cache_specs(buffer, "nki", num_levels=2, max_step_tokens=max_step_tokens)


# A fault between the cache and the kernel is found ----------------------------------------------------------------


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is in {module.__name__} {source.count(old)} times"
    members = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), members.__dict__)
    return members


FAULTS = {
    "a level's columns one level off": (kernel_calls, "level * width, chunk", "(level + 1) % 3 * width, chunk"),
    "every level the first": (kernel_calls, "level * width, chunk", "0, chunk"),
    "the hidden state alone": (kernel_calls, "enumerate((hidden, *deepstack))", "enumerate((hidden,))"),
    "pairs swapped in the graph": (
        kernel_calls,
        "buffer, src_rows, dst_rows, level",
        "buffer, dst_rows, src_rows, level",
    ),
    "examples that write one row many times": (kernel_calls, "(length, 1), SENTINEL,", "(length, 1), 0,"),
    "places of the launch before": (indices, "self._row_ids[:bucket] = args.row_ids", "pass"),
    "places of another bucket": (
        indices,
        "return self._columns.send(bucket)\n\n\nclass",
        "return self._columns.send(64)\n\n\nclass",
    ),
    "padding taken for rows": (indices, "scratch_block=self._scratch_block\n", "scratch_block=-1\n"),
    "sources of the step before": (indices, "self._columns_on_host[0, :bucket] = args.src_rows", "pass"),
    "destinations of the step before": (indices, "self._columns_on_host[1, :bucket] = args.dst_rows", "pass"),
    "pairs swapped on the host": (
        indices,
        "tuple(self._columns_on_host), buckets",
        "tuple(self._columns_on_host[::-1]), buckets",
    ),
    "the dummy row taken for a row": (indices, "dummy_row=self._dummy_row,", "dummy_row=self._dummy_row + 1,"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, nki_kernels, monkeypatch):
    module, old, new = FAULTS[fault]
    faulty = mutant(module, old, new)
    for name in ("encoder_write_nki_spec", "merge_rows_nki_spec", "ScatterIndices", "MergeIndices"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(faulty, name))
    from nki_stand_in import StandInError

    with pytest.raises((AssertionError, GraphRuleError, StandInError, ValueError)):
        if fault == "examples that write one row many times":
            spec = catalog.write_spec(BufferShape(5, 4, 24, DTYPE), "nki")
            spec.fn(*spec.example_args(64))
        check_against_the_compiler(KernelLane("nki"))


@pytest.mark.parametrize("name", ["BLOCK_SCATTER", "GATHER_MERGE"])
def test_a_new_value_that_the_older_stack_drops_is_found(name, nki_kernels):
    operator = getattr(operators, name)
    operator.plain.register_kernel("cpu", on_xla(operator.call))
    with pytest.raises(AssertionError):
        check_against_the_compiler(KernelLane("nki"))


@pytest.mark.parametrize("name", ["BLOCK_SCATTER", "GATHER_MERGE"])
@pytest.mark.parametrize("fault", ["another argument mutated", "not called", "no kernel in the place of the operator"])
def test_a_planted_fault_in_what_the_native_stack_gets_is_found(fault, name, torch_compile, nki_kernels, monkeypatch):
    operator = getattr(operators, name)
    if fault == "another argument mutated":
        wrong = operator._replace(mutates="buffer" if name == "GATHER_MERGE" else "rows")
        monkeypatch.setattr(kernel_calls, name, wrong)
    elif fault == "not called":
        parameters = inspect.signature(operator.call)

        def nothing(*_: object) -> None: ...

        nothing.__signature__ = parameters
        monkeypatch.setattr(kernel_calls, name, operator._replace(call=nothing))
    else:
        made = neuron._nki_operator
        monkeypatch.setattr(neuron, "_nki_operator", lambda given: given.plain if given is operator else made(given))
    with pytest.raises((AssertionError, RuntimeError)):
        check_neuron(NeuronLane, torch_compile, "nki")


def test_the_checks_above_pass_without_a_fault(torch_compile, nki_kernels):
    check_neuron(NeuronLane, torch_compile, "nki")
    check_against_the_compiler(KernelLane("nki"))
