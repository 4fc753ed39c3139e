"""The lanes for AWS's compilers, against stand-ins of its packages: what exactly is handed over.

That the real packages do the same is for test_neuron_device.py.
"""

import inspect
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from lane_contract import (
    DTYPE,
    FAT,
    SETS,
    check_neuron,
    check_neuronx_trace,
    check_numerics,
    check_nxd_builder,
    check_refusals,
    copy_of,
    random_args,
    refill,
    specs,
)
from torch._dynamo.exc import FailOnRecompileLimitHit
from vendor_stand_ins import package

from vllm_neuron_cache.errors import ConfigurationError, GraphRecompiledError, GraphRuleError
from vllm_neuron_cache.graphs import functional
from vllm_neuron_cache.graphs.lanes import Lane, neuron, neuronx_trace, nxd_builder
from vllm_neuron_cache.graphs.lanes.neuron import NeuronLane
from vllm_neuron_cache.graphs.lanes.neuronx_trace import NeuronxTraceLane
from vllm_neuron_cache.graphs.lanes.nxd_builder import NxdBuilderLane


class Contract:
    """A lane, its stand-in and the check of everything above."""

    def __init__(self, module: ModuleType, lane: type[Lane], check: Callable[..., None], stand_in: Any) -> None:
        self.module, self.lane, self.stand_in = module, lane, stand_in
        self._check = check

    def check(self, lane: type[Lane] | None = None, graphs: str = "compiler") -> None:
        self._check(lane or self.lane, self.stand_in, graphs)


LANES = ("neuron", "neuronx_trace", "nxd_builder")


def contract_of(lane: str, request: pytest.FixtureRequest) -> Contract:
    module, lane_class, check, stand_in = {
        "neuron": (neuron, NeuronLane, check_neuron, "torch_compile"),
        "neuronx_trace": (neuronx_trace, NeuronxTraceLane, check_neuronx_trace, "torch_neuronx"),
        "nxd_builder": (nxd_builder, NxdBuilderLane, check_nxd_builder, "model_builder"),
    }[lane]
    return Contract(module, lane_class, check, request.getfixturevalue(stand_in))


@pytest.fixture(params=LANES)
def contract(request):
    return contract_of(request.param, request)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("graphs", SETS)
def test_exactly_this_is_handed_over_for_every_graph_in_every_bucket(contract, graphs, request):
    assert contract.lane.name == contract.module.__name__.rsplit(".", 1)[1]
    if graphs == "nki":
        request.getfixturevalue("nki_kernels")
    contract.check(graphs=graphs)


def test_lowering_works_in_inference_mode_as_a_worker_does_it(contract):
    with torch.inference_mode():
        lane = contract.lane()
        for spec in specs():
            args = copy_of(spec.example_args(2))
            check_numerics(spec, 2, lane.lower(spec, 2, args), args)


@torch.inference_mode()
def test_rows_may_be_a_part_of_an_encoders_output(contract):
    lane, spec = contract.lane(), specs()[0]
    args = copy_of(spec.example_args(2))
    call = lane.lower(spec, 2, args)
    lane.seal()
    output = torch.arange(8 * FAT).view(8, FAT).to(DTYPE)
    values = random_args(spec, 2)
    refill(args, values)
    for first in (0, 3, 6):
        part = (args[0], output[first : first + 2], *args[2:])
        expected_buffer = args[0].clone()
        spec.fn(expected_buffer, *part[1:])
        call(*part)
        assert torch.equal(args[0], expected_buffer)
    assert lane.num_recompiles_refused == 0


def test_a_sealed_lane_lowers_nothing_and_still_calls(contract):
    lane, spec = contract.lane(), specs()[0]
    args = copy_of(spec.example_args(2))
    call = lane.lower(spec, 2, args)
    lane.seal()
    with pytest.raises(GraphRecompiledError, match="after warm-up"):
        lane.lower(spec, 3, spec.example_args(3))
    check_refusals(spec, 2, call, args, lane)
    check_numerics(spec, 2, call, args)
    assert (lane.num_compiled, lane.num_recompiles_refused) == (1, 3)


@pytest.mark.parametrize("mutates", [(), ("generations",), ("mm_hash_tags", "generations", "stamps")])
def test_a_wrong_alias_map_is_refused(contract, mutates):
    spec = replace(specs()[1], mutates=mutates)
    with pytest.raises(GraphRuleError, match="alias_map"):
        contract.lane().lower(spec, 2, copy_of(spec.example_args(2)))


def test_what_a_function_returns_comes_back(contract):
    def write_and_read(buffer, rows, block_ids, block_rows):
        buffer.index_put_((block_ids, block_rows), rows)
        return rows + 1, block_ids * 2

    spec = replace(specs()[0], fn=write_and_read)
    args = copy_of(spec.example_args(2))
    call = contract.lane().lower(spec, 2, args)
    refill(args, random_args(spec, 2))
    results = call(*args)
    assert torch.equal(results[0], args[1] + 1) and torch.equal(results[1], args[2] * 2)
    assert len(results) == 2


def test_the_native_lane_compiles_on_its_device_and_takes_no_argument_from_another(torch_compile, monkeypatch):
    assert NeuronLane.__dict__["device"] == "cpu" and inspect.getsource(NeuronLane).count('ClassVar[str] = "neuron"')
    monkeypatch.setattr(NeuronLane, "device", "meta")
    lane, spec = NeuronLane(), specs()[0]
    call = lane.lower(spec, 2, spec.example_args(2))
    call(*spec.meta_args(2))
    with pytest.raises(GraphRecompiledError, match=r"on cpu instead of .* on meta"):
        call(*spec.example_args(2))
    assert (lane.num_recompiles_refused, len(torch_compile.graphs)) == (1, 1)


def test_an_error_of_the_device_is_not_taken_for_a_recompilation(torch_compile, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("out of device memory")

    lane, spec = NeuronLane(), specs()[0]
    compiled = iter([lambda *_: None, fail])
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *args: next(compiled)(*args))
    call = lane.lower(spec, 2, spec.example_args(2))
    with pytest.raises(RuntimeError, match="out of device memory"):
        call(*spec.example_args(2))
    assert lane.num_recompiles_refused == 0


def test_two_threads_that_launch_at_once_leave_the_stance_as_it_was(torch_compile, monkeypatch):
    inside, most = [], []

    def launch(*_: Any) -> None:
        inside.append(0)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    lane, spec = NeuronLane(), specs()[0]
    monkeypatch.setattr(torch, "compile", lambda *_, **__: launch)
    call = lane.lower(spec, 2, spec.example_args(2))
    threads = [threading.Thread(target=call, args=spec.example_args(2)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 5 and max(most) == 1
    assert torch_compile.real(lambda tensor: tensor + 1, backend="eager")(torch.zeros(1)) == 1


def test_other_functions_compile_while_a_lane_is_sealed(torch_compile):
    lane, spec = NeuronLane(), specs()[0]
    args = copy_of(spec.example_args(2))
    call = lane.lower(spec, 2, args)
    lane.seal()
    call(*args)
    assert torch_compile.real(lambda tensor: tensor + 1, backend="eager")(torch.zeros(1)) == 1


def test_state_on_another_device_than_the_arguments_is_refused_at_start_up(torch_neuronx):
    spec = specs()[0]
    with pytest.raises(ConfigurationError, match="on cpu, and buffer is on meta"):
        NeuronxTraceLane().lower(spec, 2, spec.meta_args(2))


def test_without_model_parallelism_the_builder_has_one_rank(model_builder):
    model_builder.num_ranks = None
    check_nxd_builder(NxdBuilderLane, model_builder)


@pytest.mark.parametrize("lane_class", [NeuronLane, NeuronxTraceLane, NxdBuilderLane])
def test_a_missing_package_is_named_with_its_source(lane_class, monkeypatch):
    for name in ("torch_neuronx", "neuronx_distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError) as caught:
        lane_class()
    said = str(caught.value)
    assert f"lane '{lane_class.name}' needs" in said and "placeholders" in said
    assert "pip install" in said and "--extra-index-url https://pip.repos.neuron.amazonaws.com" in said
    assert "Python 3.12, 3.13 or 3.14" in said if lane_class is NeuronLane else "Python 3.10, 3.11 or 3.12" in said


def test_the_other_torch_neuronx_is_told_from_the_one_that_is_needed(torch_neuronx, monkeypatch):
    with pytest.raises(ConfigurationError, match="needs the native torch-neuronx"):
        NeuronLane()
    monkeypatch.setitem(sys.modules, "torch_neuronx", package("torch_neuronx"))
    with pytest.raises(ConfigurationError, match=r"needs torch_neuronx\.trace"):
        NeuronxTraceLane()


# A fault in a lane is found. --------------------------------------------------------------------------------------


def mutant(module: ModuleType, old: str, new: str) -> dict[str, Any]:
    """The members of a module with one piece of its text exchanged."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is in {module.__name__} {source.count(old)} times"
    members: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), members)
    return members


FAILURES = (
    AssertionError,
    FailOnRecompileLimitHit,
    GraphRuleError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    pytest.fail.Exception,
)
"""What a failing check raises; a piece of text that does not even run (SyntaxError, NameError) is no fault found."""

FAULTS = {
    "neuron": {
        "dynamic": ("fullgraph=True, dynamic=False)\n", "fullgraph=True, dynamic=True)\n"),
        "graph breaks allowed": ("fullgraph=True, dynamic=False)\n", "fullgraph=False, dynamic=False)\n"),
        "other backend": ('_own_code(spec), backend="neuron"', '_own_code(spec), backend="eager"'),
        "argument dropped": (
            "        compiled(*unflatten(tensors, example_args))\n",
            "        compiled(*unflatten(tensors, example_args)[:-1])\n",
        ),
        "bucket missing": ("        compiled(*unflatten(tensors, example_args))\n", ""),
        "bucket swapped": (
            "tensor.to(self.device) for tensor in flatten(example_args)",
            "tensor.to(self.device) for tensor in flatten(spec.example_args(spec.buckets[-1]))",
        ),
        "alias of the first argument only": ("mutated_names(graph.graph, names))", "names[:1])"),
        "alias of the wrong argument": (
            "mutated_names(graph.graph, names))",
            "mutated_names(graph.graph, names[::-1]))",
        ),
        "recompilation allowed": ("with _STANCE, torch.compiler.set_stance(_REFUSED):", "if True:"),
        "refusal not counted": ("    lane.num_recompiles_refused += 1\n", ""),
        "one code object": ("graph.__code__.replace(co_name=spec.name)", "graph.__code__"),
    },
    "neuronx_trace": {
        "alias index off by one": (
            "form.aliases.values(), strict=True",
            "[output + 1 for output in form.aliases.values()], strict=True",
        ),
        "alias indices swapped": ("form.aliases.values(), strict=True", "[*form.aliases.values()][::-1], strict=True"),
        "alias of the wrong argument": ("dict(zip(module.states,", "dict(zip(list(module.states)[::-1],"),
        "one alias missing": ("dict(zip(module.states, form.aliases.values(), strict=True))", "{module.states[0]: 0}"),
        "no aliases": (
            "                input_output_aliases=dict(zip(module.states, form.aliases.values(), strict=True)),\n",
            "",
        ),
        "argument dropped": ("tuple(form.inputs(form.example)),", "tuple(form.inputs(form.example)[:-1]),"),
        "arguments in another order": (
            "tuple(form.inputs(form.example)),",
            "tuple(form.inputs(form.example)[::-1]),",
        ),
        "bucket swapped": (
            "functional_form(spec, example_args)",
            "functional_form(spec, spec.example_args(spec.buckets[-1]))",
        ),
        "compiler arguments dropped": ("                compiler_args=COMPILER_ARGS,\n", ""),
        "other compiler arguments": ("--auto-cast=none", "--auto-cast=matmult"),
        "state left on the host": ("            self._torch_neuronx.move_trace_to_device(traced, NEURON_CORE)\n", ""),
        "other core": ("NEURON_CORE = 0", "NEURON_CORE = 1"),
        "state not shared": ("state.data = tensor", "pass"),
        "state of another argument": ("zip(aliases, states, form", "zip(aliases, states[::-1], form"),
        "moved state taken": ("tensor.data_ptr() != address", "False"),
        "call in another order": ("traced(*form.inputs(tensors))", "traced(*form.inputs(tensors)[::-1])"),
    },
    "nxd_builder": {
        "key without its bucket": ('key = f"{spec.name}_{bucket}"', "key = spec.name"),
        "key of another bucket": ('key = f"{spec.name}_{bucket}"', 'key = f"{spec.name}_{spec.buckets[0]}"'),
        "bucket missing": (
            "        model.add(key=key, trace_artifacts=traced, compilation_artifacts=compiled)\n        model.to",
            "        model.to",
        ),
        "bucket swapped": (
            "functional_form(spec, example_args)",
            "functional_form(spec, spec.example_args(spec.buckets[-1]))",
        ),
        "argument dropped": (
            "kwargs=dict(zip(form.inputs(parameters), form.inputs(form.example)))",
            "kwargs=dict(list(zip(form.inputs(parameters), form.inputs(form.example)))[1:])",
        ),
        "new value of another state": ("zip(states, results)", "zip(states, results[::-1])"),
        "new values off by one": ("zip(states, results)", "zip(states[1:], results)"),
        "state not written": ("setattr(self, state, new_value)", "pass"),
        "state of another argument": ("arguments[state] for state in states", "tensors[-1] for state in states"),
        "state not shared": ("return [dict(states), *others]", "return super().forward()"),
        "state in the checkpoint": ("persistent=False", "persistent=True"),
        "parameters kept": ("preserve_parameters=False", "preserve_parameters=True"),
        "compiler arguments dropped": (", compiler_args=COMPILER_ARGS", ""),
        "other compiler arguments": ("--auto-cast=none -O1", "-O1"),
        "key dropped": (", key=key\n            )", "\n            )"),
        "one rank": ("ranks = self._num_ranks()", "ranks = 1"),
        "other mode": ('forward_mode="ranked"', 'forward_mode="default"'),
        "never loaded": ("        model.to_neuron()\n", ""),
        "no names for the arguments": ("def forward(self, {signature})", "def forward(self, *values)"),
    },
    "functional": {
        "alias index off by one": (
            "for output, at in enumerate(self.mutated)",
            "for output, at in enumerate(self.mutated, 1)",
        ),
        "new value of another argument": ("((*new_values, *returned),)", "((*new_values[::-1], *returned),)"),
        "one new value missing": ("((*new_values, *returned),)", "((*new_values[1:], *returned),)"),
        "state taken for an input": (
            "return [tensors[at] for at in self.mutated]",
            "return [tensors[at] for at in self.mutated[:1]]",
        ),
    },
}


@pytest.mark.parametrize(
    ("lane", "fault"), [(lane, fault) for lane in LANES for fault in FAULTS[lane]], ids=lambda value: value
)
def test_a_fault_in_a_lane_fails_the_check(lane, fault, request, monkeypatch):
    contract = contract_of(lane, request)
    members = mutant(contract.module, *FAULTS[lane][fault])
    faulty = members[contract.lane.__name__]
    if lane == "neuron":
        faulty.device = "cpu"
    with pytest.raises(FAILURES):
        contract.check(faulty)


RESULT_FAULTS = {
    "neuronx_trace": {
        "new values taken for results": ("[len(results) - form.num_returned :]", "[: form.num_returned]"),
        "results dropped": ("if form.num_returned else None", "if False else None"),
    },
    "nxd_builder": {
        "new values taken for results": ("return results[len(states) :] or", "return results[: len(states)] or"),
        "results dropped": ("return [by_rank[0] for by_rank in results[: form.num_returned]] or None", "return None"),
    },
}
"""Those that show in a graph that returns something, as `prefill` does."""


@pytest.mark.parametrize(
    ("lane", "fault"), [(lane, fault) for lane, faults in RESULT_FAULTS.items() for fault in faults]
)
def test_a_fault_in_what_prefill_returns_fails_the_check(lane, fault, request):
    contract = contract_of(lane, request)
    members = mutant(contract.module, *RESULT_FAULTS[lane][fault])
    with pytest.raises(FAILURES):
        contract.check(members[contract.lane.__name__], graphs="prefill")


@pytest.mark.parametrize("lane", ["neuronx_trace", "nxd_builder"])
@pytest.mark.parametrize("fault", FAULTS["functional"])
def test_a_fault_in_the_functional_form_fails_the_check(lane, fault, request, monkeypatch):
    contract = contract_of(lane, request)
    if (lane, fault) == ("nxd_builder", "alias index off by one"):
        pytest.skip("the builder finds the aliases itself and is given no index")
    members = mutant(functional, *FAULTS["functional"][fault])
    monkeypatch.setattr(contract.module, "functional_form", members["functional_form"])
    with pytest.raises(FAILURES):
        contract.check()
