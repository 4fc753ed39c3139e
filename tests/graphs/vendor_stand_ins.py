"""Stand-ins of AWS's packages.

Each has the documented signatures, so that a wrong or missing argument raises TypeError, keeps what it is given,
refuses what the documentation refuses, and computes on the CPU.

The package is imported where it is used: conftest.py loads this module for every test of the folder, also in the
environment of torch_xla, whose torch is older than the package's.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


def described(tensors: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


# torch.compile and its backend `neuron`. --------------------------------------------------------------------------


@dataclass
class TorchCompile:
    """Records the calls of torch.compile, and has a backend `neuron` that runs what Dynamo gives it."""

    real: Callable[..., Any]
    calls: list[dict[str, Any]] = field(default_factory=list)
    graphs: list[tuple[list[str], list[tuple[tuple[int, ...], torch.dtype]]]] = field(default_factory=list)
    """Of each compilation the operators, and the inputs."""
    operators: list[tuple[str, Any]] = field(default_factory=list)
    """What was made of kernels: name, and `mutates_args`."""

    def compile(self, model, *, fullgraph=False, dynamic=None, backend=None, mode=None, options=None, disable=False):
        self.calls.append({"fn": model, "fullgraph": fullgraph, "dynamic": dynamic, "backend": backend})
        assert not dynamic, "documented: dynamic=True is rejected"
        assert mode is None and options is None and not disable
        return self.real(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    def backend(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        operators = [str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        self.graphs.append((operators, described(example_inputs)))
        return graph.forward

    def nki_op(self, name: str, fn: Callable[..., Any] | None = None, mutates_args: Any = ()) -> Any:
        """Documented: registers a custom operator whose body calls a kernel."""
        self.operators.append((name, mutates_args))

        def register(body: Callable[..., Any]) -> Any:
            return torch.library.custom_op(name, body, mutates_args=mutates_args)

        return register if fn is None else register(fn)


_traced_lazily = ContextVar("traced lazily", default=False)
"""Whether a stand-in of torch-xla traces: a kernel then becomes part of the graph and does not run."""


_out_of_place = ContextVar("out of place", default=False)
"""Whether a kernel leaves its argument alone, as where it is called on torch-xla: what it returns is the new value."""


def on_xla(operator: Callable[..., None]) -> Callable[..., None]:
    """What an operator does on torch-xla, on the CPU."""

    def run(*args: Any) -> None:
        token = _out_of_place.set(True)
        try:
            operator(*args)
        finally:
            _out_of_place.reset(token)

    return run


@contextmanager
def lazily() -> Iterator[None]:
    token = _traced_lazily.set(True)
    try:
        yield
    finally:
        _traced_lazily.reset(token)


def package(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


@pytest.fixture
def torch_compile(monkeypatch):
    from torch._dynamo.backends import registry

    from vllm_neuron_cache.graphs.lanes import neuron

    stand_in = TorchCompile(torch.compile)
    monkeypatch.setitem(sys.modules, "torch_neuronx", package("torch_neuronx", nki_op=stand_in.nki_op))
    torch._dynamo.register_backend(lambda *args: stand_in.backend(*args), name="neuron")
    monkeypatch.setattr(torch, "compile", stand_in.compile)
    monkeypatch.setattr(neuron.NeuronLane, "device", "cpu")
    made = neuron._nki_operator
    made.cache_clear()
    yield stand_in
    made.cache_clear()
    del registry._BACKENDS["neuron"], registry._COMPILER_FNS["neuron"]


# torch_neuronx.trace ----------------------------------------------------------------------------------------------


class NeuronModule(torch.nn.Module):
    """What `torch_neuronx.trace` returns: a module that has the aliased parameters as its own."""

    def __init__(self, func, example_inputs, aliases: dict[str, int], initial) -> None:
        super().__init__()
        self._func = [func]
        self._inputs = described(example_inputs)
        self._aliases = aliases
        self.states = torch.nn.ParameterList(
            torch.nn.Parameter(state.clone(), requires_grad=False) for state in initial
        )

    def forward(self, *tensors):
        assert described(tensors) == self._inputs, "documented: a tensor of another shape results in an error"
        values = {name: state.clone() for name, state in zip(self._aliases, self.states)}
        results = torch.func.functional_call(self._func[0], values, tensors)
        for state, output in zip(self.states, self._aliases.values()):
            state.copy_(results[output])
        return results


@dataclass
class TorchNeuronx:
    calls: list[dict[str, Any]] = field(default_factory=list)
    moved: list[tuple[Any, int]] = field(default_factory=list)

    def trace(
        self,
        func,
        example_inputs,
        *_,
        input_output_aliases={},  # noqa: B006  (as documented)
        compiler_workdir=None,
        compiler_args=None,
        partitioner_config=None,
        inline_weights_to_neff=True,
        cpu_backend=False,
    ):
        if _:
            raise TypeError("documented: keyword arguments only, from the third on")
        assert isinstance(func, torch.nn.Module), "aliases are of a module's parameters"
        assert isinstance(example_inputs, tuple)
        named = {id(parameter): name for name, parameter in func.named_parameters()}
        aliases = {named[id(parameter)]: output for parameter, output in input_output_aliases.items()}
        assert all(tensor.device.type == "cpu" and not tensor.is_inference() for tensor in example_inputs)
        with lazily():
            results = func(*example_inputs)
        for parameter, output in input_output_aliases.items():
            assert described([results[output]]) == described([parameter]), "a result has another shape than its state"
        traced = NeuronModule(func, example_inputs, aliases, input_output_aliases)
        self.calls.append(
            {
                "states": described(func.parameters()),
                "inputs": described(example_inputs),
                "aliases": list(aliases.values()),
                "order": list(aliases) == [name for name, _ in func.named_parameters()],
                "results": described(results),
                "compiler_args": compiler_args,
                "others": (compiler_workdir, partitioner_config, inline_weights_to_neff, cpu_backend),
                "traced": traced,
            }
        )
        return traced

    def move_trace_to_device(self, trace, device_id):
        self.moved.append((trace, device_id))
        for state in trace.parameters():
            state.data = state.data.clone()


@pytest.fixture
def torch_neuronx(monkeypatch):
    stand_in = TorchNeuronx()
    members = {"trace": stand_in.trace, "move_trace_to_device": stand_in.move_trace_to_device}
    monkeypatch.setitem(sys.modules, "torch_neuronx", package("torch_neuronx", **members))
    return stand_in


# neuronx_distributed's ModelBuilder. ------------------------------------------------------------------------------


class StateInitializer(torch.nn.Module):
    def __init__(self, shapes, dtypes, local_ranks_size):
        super().__init__()
        self.shapes, self.dtypes, self.local_ranks_size = shapes, dtypes, local_ranks_size

    def forward(self):
        return [
            {name: torch.zeros(shape, dtype=self.dtypes[name]) for name, shape in self.shapes.items()}
            for _ in range(self.local_ranks_size)
        ]


class NxDModel(torch.nn.Module):
    """Runs the traced module, for every rank, with the states as its buffers."""

    def __init__(
        self, world_size, start_rank=None, local_ranks_size=None, state_initializer=None, layout_transformer=None
    ):
        super().__init__()
        assert start_rank is None and local_ranks_size is None and layout_transformer is None
        self.world_size, self.state_initializer = world_size, state_initializer
        self.models: dict[str, Any] = {}
        self.ranks: list[dict[str, torch.Tensor]] | None = None

    def add(self, key, trace_artifacts, compilation_artifacts):
        assert compilation_artifacts.of is trace_artifacts.hlo
        self.models[key] = trace_artifacts
        if self.state_initializer is None and trace_artifacts.states:
            shapes = {name: list(tensor.shape) for name, tensor in trace_artifacts.states.items()}
            dtypes = {name: tensor.dtype for name, tensor in trace_artifacts.states.items()}
            self.state_initializer = StateInitializer(shapes, dtypes, self.world_size)
        return self

    def to_neuron(self):
        self.ranks = self.state_initializer()
        assert len(self.ranks) == self.world_size

    def forward(self, *args, model_name=None, forward_mode="default", **kwargs):
        assert self.ranks is not None, "documented: to_neuron first"
        assert forward_mode == "ranked" and not args
        traced = self.models[model_name]
        outputs = []
        for rank in range(self.world_size):
            inputs = {name: by_rank[rank] for name, by_rank in kwargs.items()}
            assert described(inputs.values()) == described(traced.inputs[name] for name in inputs)
            for name, state in self.ranks[rank].items():
                setattr(traced.model, name, state.clone())
            result = traced.model(**inputs)
            for name, state in self.ranks[rank].items():
                state.copy_(getattr(traced.model, name))
            outputs.append(result if isinstance(result, tuple) else (result,))
        return [list(by_rank) for by_rank in zip(*outputs)]


@dataclass
class ModelBuilder:
    """`neuronx_distributed.trace.model_builder`."""

    num_ranks: int | None = 2
    """None: model parallelism is not initialised."""
    traces: list[SimpleNamespace] = field(default_factory=list)
    compilations: list[SimpleNamespace] = field(default_factory=list)
    models: list[NxDModel] = field(default_factory=list)

    def trace(self, model, args=None, kwargs=None, spmd=True, preserve_parameters=True):
        assert spmd, "documented: only True"
        parameters = inspect.signature(model.forward).parameters
        assert parameters and all(
            parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values()
        )
        assert args is None and set(kwargs) == set(parameters)
        assert all(isinstance(tensor, torch.Tensor) and not tensor.is_inference() for tensor in kwargs.values())
        buffers = dict(model.named_buffers())
        versions = {name: buffer._version for name, buffer in buffers.items()}
        persistent = set(model.state_dict())
        with lazily():
            result = model(**kwargs)
        changed = {name: getattr(model, name) for name in buffers if getattr(model, name) is not buffers[name]}
        assert all(buffers[name]._version == versions[name] for name in buffers), "documented: not in place"
        assert described(changed.values()) == described(buffers[name] for name in changed)
        traced = SimpleNamespace(
            hlo=object(),
            metaneff=object(),
            model=model,
            inputs={name: kwargs[name] for name in parameters},
            states={name: buffers[name] for name in changed},
            buffers=list(buffers),
            persistent=persistent,
            preserve_parameters=preserve_parameters,
            result=result,
        )
        for name, buffer in buffers.items():
            setattr(model, name, buffer)
        self.traces.append(traced)
        return traced

    def compile(self, hlo_module, metaneff, compiler_workdir=None, compiler_args=None, key=None):
        assert compiler_workdir is None
        compiled = SimpleNamespace(of=hlo_module, metaneff=metaneff, compiler_args=compiler_args, key=key)
        self.compilations.append(compiled)
        return compiled

    def get_tensor_model_parallel_size(self):
        assert self.num_ranks is not None, "intra_layer_model parallel group is not initialized"
        return self.num_ranks

    def new_model(self, *args, **kwargs):
        self.models.append(NxDModel(*args, **kwargs))
        return self.models[-1]


@pytest.fixture
def model_builder(monkeypatch):
    stand_in = ModelBuilder()
    state = package(
        "parallel_state",
        model_parallel_is_initialized=lambda: stand_in.num_ranks is not None,
        get_tensor_model_parallel_size=stand_in.get_tensor_model_parallel_size,
    )
    root = "neuronx_distributed"
    modules = {
        root: package(root, NxDModel=stand_in.new_model),
        f"{root}.parallel_layers": package("parallel_layers", parallel_state=state),
        f"{root}.parallel_layers.parallel_state": state,
        f"{root}.trace": package("trace"),
        f"{root}.trace.model_builder": package("model_builder", trace=stand_in.trace, compile=stand_in.compile),
        f"{root}.trace.nxd_model": package("nxd_model"),
        f"{root}.trace.nxd_model.base_nxd_model": package("base_nxd_model", StateInitializer=StateInitializer),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return stand_in


# NKI. -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nki_kernels(monkeypatch):
    """The kernels, run by the NumPy stand-in: how often each was. An operator of a graph on the CPU runs what it would
    on torch-xla, and not the reference."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "kernels"))
    from kernel_checks import stand_in_module
    from nki_stand_in import simulate

    from vllm_neuron_cache.kernels import block_scatter, dialect, gather_merge, operators

    calls: Counter[str] = Counter()

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if _traced_lazily.get():
                return args[0]
            calls[name] += 1
            if _out_of_place.get():
                args = (args[0].clone(), *args[1:])
            return simulate(kernel)(*args)

        return run

    monkeypatch.setattr(dialect, "missing", "")
    found = (
        (block_scatter, operators.BLOCK_SCATTER, operators._scatter_on_xla, operators._scatter_reference),
        (gather_merge, operators.GATHER_MERGE, operators._gather_on_xla, operators._gather_reference),
    )
    for module, operator, called, _ in found:
        name = operator.name.partition(".")[2]
        monkeypatch.setattr(module, name, counted(name, getattr(stand_in_module(name), name)))
        operator.plain.register_kernel("cpu", on_xla(called))
    yield calls
    for _, operator, _, reference in found:
        operator.plain.register_kernel("cpu", reference)
