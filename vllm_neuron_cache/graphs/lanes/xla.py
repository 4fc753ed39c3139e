"""XLA on CPU: whether a compiler of the accelerator's kind updates arguments in place. Needs jax and torchax."""

import contextlib
import hashlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.errors import ConfigurationError, GraphRuleError, GraphViolation
from vllm_neuron_cache.graphs.aliases import alias_chains
from vllm_neuron_cache.graphs.functional import mutated_positions, return_new_values
from vllm_neuron_cache.graphs.lanes.base import CompiledGraph, Lane, Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names, flatten, unflatten
from vllm_neuron_cache.graphs.tracing import trace_graph

aten = torch.ops.aten

_MOVES = {
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_copy.default,
    aten.index_put.default,
    aten.index_select.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.view.default,
}
"""Operators that carry the bits of an element to another place and do not look at them."""

_HLO_TYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "s32",
    torch.int16: "s16",
    torch.int8: "s8",
    torch.uint8: "u8",
    torch.bool: "pred",
}

_ALIGNMENT_BYTES = 512
"""XLA starts every temporary buffer at a multiple of 64 bytes; our graphs have fewer than eight."""

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class AliasProof(NamedTuple):
    """What XLA made of one graph's mutations. In place means all of it together; see `violations`."""

    graph: str
    """Name and bucket."""
    mutated: dict[str, int]
    """Bytes of each argument that the spec declares mutated, by flattened name, in the order of the arguments."""
    aliases: dict[str, int]
    """Arguments that StableHLO marks with `tf.aliasing_output`, and the number of that output. New values of the
    mutated arguments come out first, in the order of the arguments."""
    alias_bytes: int
    """Bytes of the arguments that the compiled graph shares with its outputs."""
    temp_bytes: int
    """Bytes that it allocates while it runs."""
    temp_limit: int
    """What it may allocate: less than the smallest mutated argument, or else what the spec says that its computation
    takes, or twice the rows it moves and its indices. A merge holds its rows as it gathered them and once more apart by
    level, which for a full step is more than its targets."""
    whole_buffer_copies: tuple[str, ...]
    """Copies in it, outside of its fusions, of the shape and dtype of a mutated argument."""
    stable_pointers: bool
    """Whether a run left every new value at the address of the argument."""
    moved_as_bits: bool
    """Whether mutated arguments of bfloat16 were lowered as int16, see `XlaLane`."""
    stablehlo_sha256: str

    @property
    def expected_bytes(self) -> int:
        return sum(self.mutated.values())

    @property
    def violations(self) -> list[GraphViolation]:
        """Why the claim that the graph works in place does not hold; empty if it does."""
        found = list(self._wrong_aliases())
        if self.alias_bytes != self.expected_bytes:
            found.append(f"{self.alias_bytes} bytes are aliased, {self.expected_bytes} are mutated")
        found += [f"compiled to a copy of a whole argument: {copy}" for copy in self.whole_buffer_copies]
        if self.mutated and self.temp_bytes > self.temp_limit:
            found.append(f"allocates {self.temp_bytes} bytes, of which {self.temp_limit} would be enough")
        if not self.stable_pointers:
            found.append("a run left a new value at another address than its argument's")
        return [GraphViolation("alias_proof", self.graph, text) for text in found]

    def require(self) -> None:
        """Raises `GraphRuleError` with all `violations`, if there are any."""
        if self.violations:
            raise GraphRuleError(self.graph, self.violations)

    def _wrong_aliases(self) -> Iterator[str]:
        expected = {name: output for output, name in enumerate(self.mutated)}
        for name, output in expected.items():
            if name not in self.aliases:
                yield f"{name} is mutated and has no alias entry"
            elif self.aliases[name] != output:
                yield f"{name} is aliased to output {self.aliases[name]}, and its new value is output {output}"
        for name in self.aliases.keys() - expected.keys():
            yield f"{name} has an alias entry and is not mutated"


class XlaLane(Lane):
    """Compiles AOTAutograd's graph through StableHLO, mutated arguments donated, and keeps the proof of every graph.

    It proves and is slow: each call copies the mutated arguments into jax's memory and their new values back.

    XLA's CPU backend computes bfloat16 in float32 and copies whole buffers for it, which a device does not. A graph
    that only moves rows takes bfloat16 as int16 instead, and one that computes takes the arguments it scatters into as
    int16, and the rows for them by their bits: the same results, bit for bit. Where a graph does anything else with
    such an argument, results are right and the proof fails.

    XLA sees the graph after functionalization, so a plain view of an argument is written in place here; that no view
    is mutated is a rule of `graphs.check`. Torch's one name for a device of another maker (PrivateUse1) goes to torchax
    for the rest of the process.
    """

    name = "xla"

    def __init__(self, kernel: str = "compiler", *, strict: bool = True) -> None:
        """`strict` refuses to lower a graph whose proof fails; without it the proof is kept all the same."""
        super().__init__(kernel)
        self._jax, self._torchax = _import_compiler()
        self._strict = strict
        self._device = self._jax.devices("cpu")[0]
        self.proofs: dict[tuple[str, int], AliasProof] = {}
        """By name of the spec and bucket, also of those that `lower` then refused."""

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        name = f"{spec.name}, bucket {bucket}"
        names = flat_names(spec.fn, example_args)
        tensors = list(flatten(example_args))
        _refuse_64_bits(name, names, tensors)
        graph = trace_graph(spec.name, spec.fn, example_args)
        as_bits: tuple[int, ...] = ()
        if torch.bfloat16 in {tensor.dtype for tensor in tensors}:
            if _only_moves(graph.graph):
                as_bits = tuple(range(len(tensors)))
                moved = unflatten([_bits(tensor) for tensor in tensors], example_args)
                graph = trace_graph(spec.name, spec.fn, moved)
            else:
                as_bits = _scatter_bits(graph, self._bits_of)
        moved = [_bits(tensor) if at in as_bits else tensor for at, tensor in enumerate(tensors)]
        mutated = mutated_positions(graph.graph)
        donated = self._donated(graph.graph)
        return_new_values(graph)

        lowered = self._to_stablehlo(graph, moved, donated)
        text = lowered.as_text()
        aliases = {names[argument]: output for argument, output in _aliasing_outputs(text).items()}
        compiled = lowered.compile()
        self.num_compiled += 1
        kernel = _Kernel(self._jax, self._device, compiled, mutated, donated, as_bits)

        declared = spec.mutated_names(example_args)
        sizes = {name: tensor.nbytes for name, tensor in zip(names, tensors)}
        index_bytes = sum(size for name, size in sizes.items() if name in spec.index_limits)
        row_bytes = (2 * spec.bytes_per_row + spec.work_bytes) * bucket + index_bytes + _ALIGNMENT_BYTES
        memory = compiled.memory_analysis()
        self.proofs[spec.name, bucket] = AliasProof(
            graph=name,
            mutated={name: sizes.get(name, 0) for name in declared},
            aliases=aliases,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            temp_limit=max(min((sizes.get(name, 0) for name in declared), default=0) - 1, row_bytes),
            whole_buffer_copies=_copies(compiled.as_text(), [moved[at] for at in mutated]),
            stable_pointers=kernel.run(tensors).stable_pointers,
            moved_as_bits=bool(as_bits),
            stablehlo_sha256=hashlib.sha256(text.encode()).hexdigest(),
        )
        if self._strict and set(aliases) == set(declared):  # of another set `lower` itself has to say
            self.proofs[spec.name, bucket].require()
        return Lowered(CompiledGraph(self, name, kernel, tensors), tuple(aliases))

    def _bits_of(self, rows: Any) -> Any:
        # torchax takes aten.view for a reshape, also the one that looks at bits.
        return self._torchax.interop.call_jax(lambda array: array.view("int16"), rows)

    def _donated(self, graph: torch.fx.Graph) -> tuple[int, ...]:
        """Positions of the arguments whose memory the outputs may take; a test that lies about it shows the proof."""
        return mutated_positions(graph)

    def _to_stablehlo(self, graph: torch.fx.GraphModule, tensors: list[torch.Tensor], donated: tuple[int, ...]) -> Any:
        def fn(*arrays: Any) -> Any:
            return self._torchax.interop.call_torch(graph.forward, *arrays)

        dtype_of = self._torchax.ops.mappings.t2j_dtype
        sharding = self._jax.sharding.SingleDeviceSharding(self._device)
        shapes = [
            self._jax.ShapeDtypeStruct(tuple(tensor.shape), dtype_of(tensor.dtype), sharding=sharding)
            for tensor in tensors
        ]
        with warnings.catch_warnings():
            # An argument that was donated in vain has no alias entry, and that is looked at.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            # keep_unused: arguments keep their numbers.
            return self._jax.jit(fn, donate_argnums=donated, keep_unused=True).lower(*shapes)


class _Run(NamedTuple):
    outputs: list[Any]
    """jax arrays: the new values of the mutated arguments, then what the graph returns."""
    stable_pointers: bool


@dataclass(frozen=True)
class _Kernel:
    """A compiled graph, for torch tensors."""

    jax: Any
    device: Any
    compiled: Any
    mutated: tuple[int, ...]
    donated: tuple[int, ...]
    as_bits: tuple[int, ...]
    """Positions of the arguments that are lowered as int16 where they are bfloat16."""

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        outputs = self.run(tensors).outputs
        for at, output in zip(self.mutated, outputs):
            _bits(tensors[at]).copy_(_bits(torch.from_dlpack(output)))
        returned = [None if output is None else torch.from_dlpack(output) for output in outputs[len(self.mutated) :]]
        return returned if any(output is not None for output in returned) else None

    def run(self, tensors: list[torch.Tensor]) -> _Run:
        """One run, which changes none of the tensors."""
        arrays = [
            self.to_jax(tensor, donated=at in self.donated, as_bits=at in self.as_bits)
            for at, tensor in enumerate(tensors)
        ]
        before = [arrays[at].unsafe_buffer_pointer() for at in self.mutated]
        outputs = list(self.compiled(*arrays))
        after = [output.unsafe_buffer_pointer() for output in outputs[: len(self.mutated)]]
        self.jax.block_until_ready(outputs)
        return _Run(outputs, before == after)

    def to_jax(self, tensor: torch.Tensor, *, donated: bool, as_bits: bool) -> Any:
        """The tensor's memory as an array, or a copy of it where the graph may write there."""
        array = _bits(tensor.detach()).numpy()
        if tensor.dtype is torch.bfloat16 and not as_bits:
            array = array.view(self.jax.numpy.bfloat16)
        if donated:
            # Not device_put, which lends numpy's memory whatever it is told, and XLA copies what it does not own.
            with self.jax.default_device(self.device):
                return self.jax.numpy.array(array, copy=True)
        return self.jax.device_put(array, self.device)


class CompileCount:
    """How often XLA has compiled anything, see `count_compilations`."""

    def __init__(self) -> None:
        self.count = 0

    def _on_event(self, event: str, duration: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


@contextlib.contextmanager
def count_compilations() -> Iterator[CompileCount]:
    """Counts the compilations of XLA in this process, whoever asks for them, until the end of the block."""
    from jax import monitoring

    compilations = CompileCount()
    monitoring.register_event_duration_secs_listener(compilations._on_event)
    try:
        yield compilations
    finally:
        monitoring.unregister_event_duration_listener(compilations._on_event)


# The compiler. --------------------------------------------------------------------------------------------------


def _import_compiler() -> tuple[Any, Any]:
    first = "torchax" not in sys.modules
    try:
        import jax

        with _dropped_overloads():
            import torchax
            import torchax.interop

            torchax.default_env()  # names the rest of its operators
        if first:
            _register_device()
    except ImportError as error:
        raise ConfigurationError(
            f"lane 'xla' needs jax and torchax ({error}). Run the command through scripts/xla_env, which makes an "
            "environment that has them, or pip install 'vllm-neuron-cache[xla]'."
        ) from error
    return jax, torchax


@contextlib.contextmanager
def _dropped_overloads() -> Iterator[None]:
    """Lets torchax 0.0.13 be imported on torch 2.13, which no longer has the overloads for named dimensions.

    torchax names them as keys of its tables and nothing else, so that anything does in their place.
    """
    packet = torch._ops.OpOverloadPacket
    find = packet.__getattr__

    def find_or_stand_in(self: Any, key: str) -> Any:
        try:
            return find(self, key)
        except AttributeError:
            if "dimname" in key.lower() or "names" in key:
                return (str(self), key)
            raise

    packet.__getattr__ = find_or_stand_in
    try:
        yield
    finally:
        packet.__getattr__ = find


def _register_device() -> None:
    """Tells torch that the device torchax names has no streams and no generators of its own.

    torchax does not, and Dynamo, which asks every device that has a name, would then fail in the whole process.
    """
    from torch.utils.backend_registration import _DummyDeviceGuard, _DummyPrivateUse1Hook

    torch._C._acc.register_python_privateuseone_hook(_DummyPrivateUse1Hook())
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())


# The graph. -----------------------------------------------------------------------------------------------------


def _refuse_64_bits(graph: str, names: tuple[str, ...], tensors: list[torch.Tensor]) -> None:
    violations = [
        GraphViolation("int64_index", name, f"is {tensor.dtype}, and this lane has 32 bits as the device has")
        for name, tensor in zip(names, tensors)
        if tensor.dtype.itemsize > 4
    ]
    if violations:
        raise GraphRuleError(graph, violations)


def _only_moves(graph: torch.fx.Graph) -> bool:
    """Whether the graph does nothing but move what is in its arguments from one to another."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    calls = (node for node in graph.nodes if node.op == "call_function")
    return not output.all_input_nodes and all(node.target in _MOVES for node in calls)


def _scatter_bits(graph: torch.fx.GraphModule, bits_of: Callable[[Any], Any]) -> tuple[int, ...]:
    """Has the graph scatter bits of bfloat16 where it scatters such rows into an argument, and does nothing else with
    it. Returns the positions of those arguments, which it takes as int16 now. Mutates the graph."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found = []
    for chain in alias_chains(graph.graph):
        scattered = chain.reaches_target and not chain.views and not chain.other_readers
        # Neither read nor returned, before or after.
        unseen = all(len(update.users) == 1 and update.target is aten.index_put.default for update in chain.updates)
        unseen = unseen and not chain.write_back.users
        if chain.target.meta["val"].dtype is not torch.bfloat16 or not (scattered and unseen):
            continue
        for update in chain.updates:
            with graph.graph.inserting_before(update):
                bits = graph.graph.call_function(bits_of, (update.args[2],))
            update.args = (*update.args[:2], bits, *update.args[3:])
        found.append(placeholders.index(chain.target))
    graph.recompile()
    return tuple(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16, which numpy does not know, as int16."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def _aliasing_outputs(stablehlo: str) -> dict[int, int]:
    """Number of each argument of `main` that has an alias entry, and of the output in it."""
    (signature,) = re.findall(r"func\.func public @main\((.*)\) -> ", stablehlo)
    aliases: dict[int, int] = {}
    for argument in re.split(r", (?=%arg\d+:)", signature):
        number = re.match(r"%arg(\d+):", argument)
        output = re.search(r"tf\.aliasing_output = (\d+)", argument)
        if number and output:
            aliases[int(number[1])] = int(output[1])
    return aliases


def _copies(hlo: str, tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """The copies in the compiled text, outside of fusions, that have the shape and dtype of one of the tensors."""
    shapes = {f"{_HLO_TYPES[tensor.dtype]}[{','.join(map(str, tensor.shape))}]" for tensor in tensors}
    fused = False
    found: list[str] = []
    for line in hlo.splitlines():
        if line and not line[0].isspace():  # the head of a computation
            fused = "fused_computation" in line
        match = re.match(r"\s+(?:ROOT )?(%?\S+) = (\w+\[[\d,]*\])\S* copy\(", line)
        if match and not fused and match[2] in shapes:
            found.append(f"{match[1]} {match[2]}")
    return tuple(found)
