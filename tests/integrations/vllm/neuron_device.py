"""A `neuron` device in Python alone: CPU tensors behind torch's name for a device of another maker.

It counts what would be traffic or a launch on a Trainium: copies between host and device with their types and bytes,
and every operator that runs on device tensors outside of a compiled graph. While host reads are forbidden, reading a
device tensor raises. Registering it changes the whole process.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from vllm_neuron_cache.graphs.aliases import mutated_names
from vllm_neuron_cache.graphs.lanes.base import CompiledGraph, Lane, Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names, flatten, unflatten
from vllm_neuron_cache.graphs.tracing import trace_graph

aten = torch.ops.aten


class HostReadError(RuntimeError):
    """The host read device memory where it must not wait for the device."""


class Transfer(NamedTuple):
    dtype: str
    num_bytes: int


class Traffic:
    """What crossed the bus, and what ran eagerly, since `clear`."""

    def __init__(self) -> None:
        self.host_reads_forbidden = False
        self.clear()

    def clear(self) -> None:
        self.to_device: list[Transfer] = []
        self.to_host: list[Transfer] = []
        self.eager: list[tuple[str, str]] = []
        """Operator, and the file that it came from."""
        self.launches: list[str] = []
        """Compiled graphs that ran."""

    def read(self, tensor: torch.Tensor, how: str) -> None:
        if self.host_reads_forbidden:
            raise HostReadError(f"{how} reads {list(tensor.shape)} {tensor.dtype} of the device")
        self.to_host.append(_transfer(tensor))

    @contextmanager
    def no_host_reads(self) -> Iterator[None]:
        self.host_reads_forbidden = True
        try:
            yield
        finally:
            self.host_reads_forbidden = False


TRAFFIC = Traffic()


class NeuronTensor(torch.Tensor):
    """A CPU tensor that says it is on the device."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "NeuronTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("neuron:0"),
        )

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    def __repr__(self) -> str:  # must not read
        return f"NeuronTensor({list(self.shape)}, {self.dtype})"

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        TRAFFIC.read(self, "numpy()")
        return self.raw.numpy(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket is aten.to:  # in inference mode, which takes nothing apart before it comes here
            return func.decompose(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            TRAFFIC.read(args[0], "item()")
            return func(args[0].raw)
        if func is aten.copy_.default:
            return _copy(*args[:2])
        if func is aten._to_copy.default:
            return _to(args[0], kwargs)
        if str(kwargs.get("device", "")).startswith("neuron"):
            kwargs["device"] = torch.device("cpu")
        _refuse_host_tensors(func, args)
        if not getattr(func, "is_view", False):
            TRAFFIC.eager.append((str(func), _caller()))
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            TRAFFIC.read(args[0], str(func))
        out = func(*_raw(args), **_raw(kwargs))
        out = tree_map_only(torch.Tensor, NeuronTensor, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


class StandInLane(Lane):
    """Where a compiler for the device would be: takes device tensors alone, and a run is one launch.

    The alias map is AOTAutograd's, as in every lane; the arithmetic is the function itself.
    """

    name = "stand_in"

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        names = flat_names(spec.fn, example_args)
        graph = trace_graph(spec.name, spec.fn, spec.meta_args(bucket))

        def run(tensors: list[torch.Tensor]) -> None:
            for name, tensor in zip(names, tensors, strict=True):
                if not isinstance(tensor, NeuronTensor):
                    raise TypeError(f"graph {spec.name}: argument {name} is on {tensor.device}")
            TRAFFIC.launches.append(spec.name)
            assert spec.fn(*unflatten(_raw(tensors), example_args)) is None

        self.num_compiled += 1
        compiled = CompiledGraph(self, f"{spec.name}, bucket {bucket}", run, list(flatten(example_args)))
        return Lowered(compiled, mutated_names(graph.graph, names))


def register() -> torch.device:
    """Gives torch the device. Once in a process."""
    _setup_privateuseone_for_python_backend("neuron")
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    register.library = library  # it lasts as long as this object
    return torch.device("neuron:0")


def on_device(tensor: torch.Tensor) -> NeuronTensor:
    """The tensor as one of the device, uncounted: for what is there from the start."""
    return NeuronTensor(tensor.clone())


def _empty(size: Any, dtype: Any = None, **kwargs: Any) -> NeuronTensor:
    return NeuronTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype(), device="cpu"))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **kwargs: Any) -> NeuronTensor:
    return NeuronTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype(), device="cpu"))


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if not isinstance(target, NeuronTensor):
        TRAFFIC.read(source, "copy_()")
    elif not isinstance(source, NeuronTensor):
        TRAFFIC.to_device.append(_transfer(source))
    else:
        TRAFFIC.eager.append(("aten.copy_.default", _caller()))
    _raw(target).copy_(_raw(source))
    return target


def _to(source: NeuronTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    device = kwargs.pop("device", None)
    if device is not None and torch.device(device).type == "cpu":
        TRAFFIC.read(source, "a copy to the host")
        return aten._to_copy.default(source.raw, **kwargs)
    TRAFFIC.eager.append(("aten._to_copy.default", _caller()))
    return NeuronTensor(aten._to_copy.default(source.raw, **kwargs))


def _refuse_host_tensors(func: Any, args: Any) -> None:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, args)
    if any(not isinstance(tensor, NeuronTensor) and tensor.dim() > 0 for tensor in found):
        raise RuntimeError(f"{func}: tensors on neuron and on the host")


def _raw(tree: Any) -> Any:
    return tree_map_only(NeuronTensor, lambda tensor: tensor.raw, tree)


def _transfer(tensor: torch.Tensor) -> Transfer:
    return Transfer(str(tensor.dtype).removeprefix("torch."), tensor.nbytes)


def _caller() -> str:
    """The file of vLLM's or of this project's that the operator came from."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and ("/vllm_neuron_cache/" in path or "/vllm/" in path):
            package = "vllm_neuron_cache" if "/vllm_neuron_cache/" in path else "vllm"
            return package + path.rsplit(f"/{package}", 1)[1]
        frame = frame.f_back
    return "elsewhere"
