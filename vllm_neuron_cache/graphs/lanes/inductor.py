"""torch.compile's inductor, ahead of time: the default on CPU."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_neuron_cache.errors import ConfigurationError, GraphRecompiledError
from vllm_neuron_cache.graphs.lanes.base import Lane
from vllm_neuron_cache.graphs.spec import GraphSpec

SINGLE_THREAD_BYTES = 4 << 20
"""Up to here a graph runs on the calling thread: waking others takes longer than they save. On two cores the merge of
256 rows of 2 KiB took 45 µs alone and 135 to 290 µs with a second thread."""


class InductorLane(Lane):
    """One compiled artifact per bucket, called directly.

    Graphs are traced with `make_fx` and compiled at once, so neither Dynamo's guards nor wrappers stand between a call
    and its kernel: a launch takes 3 µs instead of 22, caches warm. What guards would have noticed is checked against
    the example arguments: a call of another signature raises instead of compiling.
    """

    name = "inductor"

    def __init__(self) -> None:
        super().__init__()
        if not compiler_available():
            raise ConfigurationError(
                "lane 'inductor' compiles C++ and there is no C++ compiler here. Install one (apt-get install g++), or "
                "set vllm_neuron_cache.lane to 'eager', which is slower."
            )

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Callable[..., Any]:
        structure = [len(arg) if isinstance(arg, tuple) else None for arg in example_args]

        def flat_fn(*tensors: torch.Tensor) -> Any:
            return spec.fn(*_unflatten(tensors, structure))

        tensors = list(_flatten(example_args))
        options = {"cpp.threads": 1} if spec.bytes_per_row * bucket <= SINGLE_THREAD_BYTES else {}
        with inductor_config.patch(options):
            kernel = _compile(make_fx(flat_fn, tracing_mode="fake")(*tensors), tensors)
        self.num_compiled += 1
        return _Artifact(self, f"{spec.name}, bucket {bucket}", kernel, tensors)


def _compile(graph: torch.fx.GraphModule, tensors: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], Any]:
    """Inductor's generated function, which takes the graph's inputs as a list that it empties.

    compile_fx puts wrappers around it that serve gradients, views and caller-owned outputs; a graph of ours has none
    of these and takes its inputs in the traced order, so they are left out: called once in a step, with cold caches,
    they take several times longer than the small kernels.
    """
    kernels: list[Callable[[list[torch.Tensor]], Any]] = []

    def keep_kernel(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_fx_inner(*args, **kwargs)
        kernels.append(compiled.current_callable)
        return compiled

    # That cache would return the wrapped result of an earlier process without compiling, and keep nothing.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        # compile_fx finishes its work in the first call.
        compile_fx(graph, tensors, inner_compile=keep_kernel)(*tensors)
    (kernel,) = kernels
    return kernel


class _Signature(NamedTuple):
    """What a compiled artifact takes for granted about one tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Artifact:
    """A compiled graph that refuses arguments other than those it was compiled for."""

    def __init__(
        self, lane: InductorLane, name: str, kernel: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]
    ) -> None:
        self._lane = lane
        self._name = name
        self._kernel = kernel
        self._signatures = [_signature(tensor) for tensor in tensors]

    def __call__(self, *args: Any) -> Any:
        tensors = list(_flatten(args))
        if len(tensors) != len(self._signatures):
            self._refuse(tensors)
        for tensor, known in zip(tensors, self._signatures):
            if tensor.shape != known.shape or tensor.stride() != known.stride or tensor.dtype is not known.dtype:
                self._refuse(tensors)
        return self._kernel(tensors)

    def _refuse(self, tensors: list[torch.Tensor]) -> NoReturn:
        self._lane.num_recompiles_refused += 1
        differing = [
            f"{tuple(given.shape)} {given.dtype} instead of {tuple(known.shape)} {known.dtype}"
            for given, known in zip(map(_signature, tensors), self._signatures)
            if given != known
        ]
        raise GraphRecompiledError(
            f"graph {self._name}: compiled for {len(self._signatures)} tensors and called with {len(tensors)}"
            f"{', of which some differ: ' + '; '.join(differing) if differing else ''}. Nothing compiles after warm-up."
        )


def compiler_available() -> bool:
    """Whether inductor finds the C++ compiler that it needs on CPU."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def _signature(tensor: torch.Tensor) -> _Signature:
    return _Signature(tensor.shape, tensor.stride(), tensor.dtype)


def _flatten(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from arg
        else:
            yield arg


def _unflatten(tensors: tuple[torch.Tensor, ...], structure: list[int | None]) -> Iterator[Any]:
    """Inverse of `_flatten`: `structure` has the length of each tuple, None for a tensor."""
    position = 0
    for length in structure:
        if length is None:
            yield tensors[position]
            position += 1
        else:
            yield tuple(tensors[position : position + length])
            position += length
