"""The interface that every lane has."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from vllm_neuron_cache.config import require_kernel
from vllm_neuron_cache.errors import GraphRecompiledError, GraphRuleError, GraphViolation
from vllm_neuron_cache.graphs.check import alias_violations
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names, flatten


class Lowered(NamedTuple):
    """A graph in one bucket, as a lane made it."""

    call: Callable[..., Any]
    """Takes the arguments of `spec.fn`, and mutates those that the spec declares."""
    aliases: tuple[str, ...]
    """Flattened names of the arguments that it updates in place, as the lowered form itself says, in their order."""


class Lane(abc.ABC):
    """OPEN -> SEALED: lowers graphs, and after `seal` refuses to."""

    name: ClassVar[str]

    def __init__(self, kernel: str = "compiler") -> None:
        """Raises `ConfigurationError` if the kernels are missing, or do not run in this lane."""
        require_kernel(kernel, self.name)
        if kernel == "nki":
            # Not at the top: where nki is installed it takes a while to load, and nothing else needs it.
            from vllm_neuron_cache.kernels.dialect import require_nki

            require_nki()
        self.kernel = kernel
        """What moves rows in the graphs that it is given, one of `config.KERNELS`."""
        self.num_compiled = 0
        """Compilations so far."""
        self.num_from_cache = 0
        """Those of them that a cache on disk had the result of, where the compiler tells."""
        self.num_recompiles_refused = 0
        """Calls, after warm-up, that would have needed another compilation. Each of them raised."""
        self._sealed = False

    def lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Callable[..., Any]:
        """A callable of `spec.fn`'s arguments for one bucket, compiled here and now where the lane compiles.

        `example_args` have the shapes, dtypes and layouts of every later call, which are the spec's; whether they are
        mutated is up to the lane. Raises `GraphRecompiledError` after `seal`, and `GraphRuleError` if they are others
        than the spec's, or the lowered graph updates other arguments than the spec declares.
        """
        if self._sealed:
            self.num_recompiles_refused += 1
            raise GraphRecompiledError(f"graph {spec.name}, bucket {bucket}, was to be compiled after warm-up")
        _require_signature(spec, bucket, example_args)
        lowered = self._lower(spec, bucket, example_args)
        violations = alias_violations(lowered.aliases, spec.mutated_names(example_args))
        if violations:
            raise GraphRuleError(f"{spec.name}, bucket {bucket}, in lane {self.name}", violations)
        return lowered.call

    @abc.abstractmethod
    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered: ...

    def seal(self) -> None:
        """Ends warm-up: nothing is compiled from here on."""
        self._sealed = True


class CompiledGraph:
    """A compiled graph that refuses arguments other than those it was compiled for."""

    def __init__(
        self, lane: Lane, name: str, kernel: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]
    ) -> None:
        """`kernel` takes the flattened arguments as a list, which it may empty. `tensors` are the example ones."""
        self._lane = lane
        self._name = name
        self._kernel = kernel
        self._signatures = [_signature(tensor) for tensor in tensors]

    def __call__(self, *args: Any) -> Any:
        tensors = list(flatten(args))
        if len(tensors) != len(self._signatures):
            self._refuse(tensors)
        for tensor, known in zip(tensors, self._signatures):
            if (
                tensor.shape != known.shape
                or tensor.stride() != known.stride
                or tensor.dtype is not known.dtype
                or tensor.device != known.device
            ):
                self._refuse(tensors)
        return self._kernel(tensors)

    def _refuse(self, tensors: list[torch.Tensor]) -> NoReturn:
        self._lane.num_recompiles_refused += 1
        differing = [
            f"{given} instead of {known}"
            for given, known in zip(map(_signature, tensors), self._signatures)
            if given != known
        ]
        raise GraphRecompiledError(
            f"graph {self._name}: compiled for {len(self._signatures)} tensors and called with {len(tensors)}"
            f"{', of which some differ: ' + '; '.join(differing) if differing else ''}. Nothing compiles after warm-up."
        )


class _Signature(NamedTuple):
    """What a compiled graph takes for granted about one tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


def _signature(tensor: torch.Tensor) -> _Signature:
    return _Signature(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _require_signature(spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> None:
    """What was checked for the spec's shapes says nothing of others."""
    expected = spec.meta_args(bucket)
    names = flat_names(spec.fn, expected)
    given = dict(zip(flat_names(spec.fn, example_args), flatten(example_args), strict=True))
    violations = [
        GraphViolation(
            "signature",
            name,
            f"is {list(given[name].shape)} {given[name].dtype}, the spec has {list(tensor.shape)} {tensor.dtype}",
        )
        for name, tensor in zip(names, flatten(expected), strict=True)
        if name in given and (given[name].shape, given[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    violations += [
        GraphViolation("signature", name, "is missing, or not in the spec") for name in set(names) ^ given.keys()
    ]
    if violations:
        raise GraphRuleError(f"{spec.name}, bucket {bucket}", violations)
