"""The lanes for AWS's compilers, against stand-ins of its packages: what exactly is handed over.

Each stand-in has the documented signatures, so that a wrong or missing argument raises TypeError, keeps what it is
given, refuses what the documentation refuses, and computes on the CPU. That the real packages do the same is for
test_neuron_device.py.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from vllm_neuron_cache.errors import ConfigurationError, GraphRecompiledError, GraphRuleError
from vllm_neuron_cache.graphs import functional
from vllm_neuron_cache.graphs.catalog import merge_spec, stamp_spec, write_spec
from vllm_neuron_cache.graphs.lanes import Lane, neuron, neuronx_trace, nxd_builder
from vllm_neuron_cache.graphs.lanes.neuron import NeuronLane
from vllm_neuron_cache.graphs.lanes.neuronx_trace import NeuronxTraceLane
from vllm_neuron_cache.graphs.lanes.nxd_builder import NxdBuilderLane
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flat_names, flatten, unflatten

BLOCKS, BLOCK_SIZE, WIDTH, LEVELS, TOKENS = 5, 4, 8, 2, 16
FAT = WIDTH * (1 + LEVELS)
DTYPE = torch.bfloat16
BUFFER = BufferShape(BLOCKS, BLOCK_SIZE, FAT, DTYPE)
BUCKETS = (2, 3)

# What every lane has to hand over, written down and not derived from the code that does.
MUTATED = {
    "encoder_write": ("buffer",),
    "encoder_stamp": ("mm_hash_tags", "generations"),
    "merge_rows": ("hidden", "deepstack[0]", "deepstack[1]"),
}
INPUTS = {
    "encoder_write": ("rows", "block_ids", "block_rows"),
    "encoder_stamp": ("block_ids", "tags", "stamps"),
    "merge_rows": ("buffer", "src_rows", "dst_rows"),
}


def expected(graph: str, bucket: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every argument, in their order."""
    rows, ints, target = (BLOCKS, BLOCK_SIZE, FAT), torch.int32, ((TOKENS + 1, WIDTH), DTYPE)
    return {
        "encoder_write": {
            "buffer": (rows, DTYPE),
            "rows": ((bucket, FAT), DTYPE),
            "block_ids": ((bucket,), ints),
            "block_rows": ((bucket,), ints),
        },
        "encoder_stamp": {
            "mm_hash_tags": ((BLOCKS, 2), ints),
            "generations": ((BLOCKS,), ints),
            "block_ids": ((bucket,), ints),
            "tags": ((bucket, 2), ints),
            "stamps": ((bucket,), ints),
        },
        "merge_rows": {
            "hidden": target,
            "deepstack[0]": target,
            "deepstack[1]": target,
            "buffer": (rows, DTYPE),
            "src_rows": ((bucket,), ints),
            "dst_rows": ((bucket,), ints),
        },
    }[graph]


def specs() -> tuple[GraphSpec, ...]:
    found = write_spec(BUFFER), stamp_spec(BUFFER), merge_spec(BUFFER, num_levels=LEVELS, max_step_tokens=TOKENS)
    return tuple(replace(spec, buckets=BUCKETS) for spec in found)


def random_args(spec: GraphSpec, bucket: int, seed: int = 0) -> tuple[Any, ...]:
    """Targets are all different: which of two writes to one place wins is the compiler's choice."""
    generator = torch.Generator().manual_seed(seed)
    example = spec.example_args(bucket)
    values: list[torch.Tensor] = []
    for name, tensor in zip(flat_names(spec.fn, example), flatten(example)):
        if name == "block_rows":
            value = torch.arange(bucket) % BLOCK_SIZE
        elif name == "block_ids" and spec.name == "encoder_write":
            value = torch.arange(bucket) // BLOCK_SIZE
        elif name in spec.index_limits:
            value = torch.randperm(spec.index_limits[name], generator=generator)[: tensor.numel()]
        else:
            value = torch.randint(-1000, 1000, tensor.shape, generator=generator)
        values.append(value.view(tensor.shape).to(tensor.dtype))
    return unflatten(values, example)


def copy_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return unflatten([tensor.clone() for tensor in flatten(args)], args)


def refill(args: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for tensor, value in zip(flatten(args), flatten(values)):
        tensor.copy_(value)


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

    def compile(self, model, *, fullgraph=False, dynamic=None, backend=None, mode=None, options=None, disable=False):
        self.calls.append({"fn": model, "fullgraph": fullgraph, "dynamic": dynamic, "backend": backend})
        assert not dynamic, "documented: dynamic=True is rejected"
        assert mode is None and options is None and not disable
        return self.real(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    def backend(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        operators = [str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        self.graphs.append((operators, described(example_inputs)))
        return graph.forward


def package(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


@pytest.fixture
def torch_compile(monkeypatch):
    from torch._dynamo.backends import registry

    stand_in = TorchCompile(torch.compile)
    monkeypatch.setitem(sys.modules, "torch_neuronx", package("torch_neuronx"))
    torch._dynamo.register_backend(lambda *args: stand_in.backend(*args), name="neuron")
    monkeypatch.setattr(torch, "compile", stand_in.compile)
    monkeypatch.setattr(NeuronLane, "device", "cpu")
    yield stand_in
    del registry._BACKENDS["neuron"], registry._COMPILER_FNS["neuron"]


def check_neuron(lane_class: type[Lane], stand_in: TorchCompile) -> None:
    lane = lane_class()
    for spec in specs():
        for bucket in spec.buckets:
            stand_in.calls.clear()
            stand_in.graphs.clear()
            args = copy_of(spec.example_args(bucket))
            call = lane.lower(spec, bucket, args)
            (handed,) = stand_in.calls
            assert handed == {"fn": handed["fn"], "fullgraph": True, "dynamic": False, "backend": "neuron"}
            assert handed["fn"].__name__ == spec.name
            ((operators, inputs),) = stand_in.graphs
            names = flat_names(spec.fn, args)
            assert sorted(inputs, key=str) == sorted((expected(spec.name, bucket)[name] for name in names), key=str)
            assert operators.count("index_put_") == len(MUTATED[spec.name])
            check_numerics(spec, bucket, call, args)
            assert len(stand_in.graphs) == 1, "nothing compiles in a call"
            check_refusals(spec, bucket, call, args, lane)
            check_guard_refusal(spec, bucket, call, lane)
            assert len(stand_in.graphs) == 1
    assert lane.num_compiled == len(specs()) * len(BUCKETS)
    check_many_buckets(lane)


def check_many_buckets(lane: Lane) -> None:
    """More than the number of times that Dynamo recompiles one function."""
    spec = specs()[0]
    for bucket in range(1, torch._dynamo.config.recompile_limit + 3):
        args = copy_of(spec.example_args(bucket))
        check_numerics(spec, bucket, lane.lower(spec, bucket, args), args)


def check_guard_refusal(spec: GraphSpec, bucket: int, call: Callable[..., Any], lane: Lane) -> None:
    """What the signature does not show, and Dynamo would compile anew for."""
    with torch.inference_mode():
        args = copy_of(random_args(spec, bucket))
        refused_before = lane.num_recompiles_refused
        with pytest.raises(GraphRecompiledError, match="Detected recompile"):
            call(*args)
    assert lane.num_recompiles_refused == refused_before + 1


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


def check_neuronx_trace(lane_class: type[Lane], stand_in: TorchNeuronx) -> None:
    lane = lane_class()
    for spec in specs():
        for bucket in spec.buckets:
            stand_in.calls.clear()
            stand_in.moved.clear()
            args = copy_of(spec.example_args(bucket))
            call = lane.lower(spec, bucket, args)
            (handed,) = stand_in.calls
            arguments = expected(spec.name, bucket)
            states = [arguments[name] for name in MUTATED[spec.name]]
            assert handed["states"] == handed["results"] == states
            assert handed["inputs"] == [arguments[name] for name in INPUTS[spec.name]]
            assert handed["aliases"] == list(range(len(states))) and handed["order"]
            assert handed["compiler_args"] == ["--auto-cast=none"]
            assert handed["others"] == (None, None, True, False)
            assert stand_in.moved == [(handed["traced"], 0)]
            check_state_is_shared(spec, handed["traced"].parameters(), args)
            check_numerics(spec, bucket, call, args)
            check_refusals(spec, bucket, call, args, lane)
            check_moved_state_is_refused(spec, bucket, call, args, lane)
    assert lane.num_compiled == len(specs()) * len(BUCKETS)


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


def parameter(name: str) -> str:
    return name.replace("[", "_").replace("]", "")


def check_nxd_builder(lane_class: type[Lane], stand_in: ModelBuilder) -> None:
    lane = lane_class()
    for spec in specs():
        for bucket in spec.buckets:
            for kept in (stand_in.traces, stand_in.compilations, stand_in.models):
                kept.clear()
            args = copy_of(spec.example_args(bucket))
            call = lane.lower(spec, bucket, args)
            (traced,), (compiled,) = stand_in.traces, stand_in.compilations
            arguments = expected(spec.name, bucket)
            mutated = {parameter(name): arguments[name] for name in MUTATED[spec.name]}
            assert traced.buffers == list(traced.states) == list(mutated)
            assert described(traced.states.values()) == list(mutated.values())
            assert not traced.persistent and traced.preserve_parameters is False
            assert list(traced.inputs) == [parameter(name) for name in INPUTS[spec.name]]
            assert described(traced.inputs.values()) == [arguments[name] for name in INPUTS[spec.name]]
            assert described(traced.result) == [((1,), torch.int32)]
            assert (compiled.of, compiled.metaneff) == (traced.hlo, traced.metaneff)
            assert (compiled.key, compiled.compiler_args) == (f"{spec.name}_{bucket}", "--auto-cast=none -O1")
            assert [model.world_size for model in stand_in.models] == [stand_in.num_ranks or 1] * 2
            (served,) = (model for model in stand_in.models if model.ranks is not None)
            assert list(served.models) == [compiled.key]
            check_state_is_shared(spec, [served.ranks[0][name] for name in mutated], args)
            check_numerics(spec, bucket, call, args)
            check_refusals(spec, bucket, call, args, lane)
            check_moved_state_is_refused(spec, bucket, call, args, lane)
    assert lane.num_compiled == len(specs()) * len(BUCKETS)


# What holds in every lane. ----------------------------------------------------------------------------------------


def check_numerics(spec: GraphSpec, bucket: int, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Two calls on the memory that was lowered for, each compared with eager to the bit."""
    for seed in (1, 2):
        values = random_args(spec, bucket, seed)
        refill(args, values)
        spec.fn(*values)
        assert call(*args) is None
        for tensor, value in zip(flatten(args), flatten(values), strict=True):
            assert torch.equal(tensor, value)


def check_refusals(spec: GraphSpec, bucket: int, call: Callable[..., Any], args: tuple[Any, ...], lane: Lane) -> None:
    """Another bucket's arguments, and one argument less."""
    refused_before = lane.num_recompiles_refused
    before = copy_of(args)
    tensors = list(flatten(args))
    other = random_args(spec, bucket + 1)
    mixed = [
        mine if name in MUTATED[spec.name] else theirs
        for name, mine, theirs in zip(flat_names(spec.fn, args), tensors, flatten(other))
    ]
    for wrong in (unflatten(mixed, args), args[:-1]):
        with pytest.raises(GraphRecompiledError, match=f"{spec.name}, bucket {bucket}"):
            call(*wrong)
    assert lane.num_recompiles_refused == refused_before + 2
    assert all(map(torch.equal, flatten(args), flatten(before)))


def check_moved_state_is_refused(
    spec: GraphSpec, bucket: int, call: Callable[..., Any], args: tuple[Any, ...], lane: Lane
) -> None:
    for name in MUTATED[spec.name]:
        tensors = [
            tensor.clone() if name == argument else tensor
            for argument, tensor in zip(flat_names(spec.fn, args), flatten(args))
        ]
        refused_before = lane.num_recompiles_refused
        with pytest.raises(GraphRecompiledError) as caught:
            call(*unflatten(tensors, args))
        assert f"{name} is another tensor" in str(caught.value)
        assert lane.num_recompiles_refused == refused_before + 1


def check_state_is_shared(spec: GraphSpec, states: Any, args: tuple[Any, ...]) -> None:
    addresses = dict(zip(flat_names(spec.fn, args), (tensor.data_ptr() for tensor in flatten(args))))
    assert [state.data_ptr() for state in states] == [addresses[name] for name in MUTATED[spec.name]]


# The tests --------------------------------------------------------------------------------------------------------


class Contract:
    """A lane, its stand-in and the check of everything above."""

    def __init__(self, module: ModuleType, lane: type[Lane], check: Callable[..., None], stand_in: Any) -> None:
        self.module, self.lane, self.stand_in = module, lane, stand_in
        self._check = check

    def check(self, lane: type[Lane] | None = None) -> None:
        self._check(lane or self.lane, self.stand_in)


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
def test_exactly_this_is_handed_over_for_every_graph_in_every_bucket(contract):
    assert contract.lane.name == contract.module.__name__.rsplit(".", 1)[1]
    contract.check()


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
        "recompilation allowed": ("with torch.compiler.set_stance(_REFUSED):", "if True:"),
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
