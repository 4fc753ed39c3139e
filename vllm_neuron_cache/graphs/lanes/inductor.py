"""torch.compile's inductor, ahead of time: the default on CPU."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
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

    Graphs are traced with `make_fx` and compiled at once, so no Dynamo frame, and no guard, stands between a call and
    its kernel (9 µs a launch instead of 26). What guards would have noticed is checked against the example arguments:
    a call of another signature raises instead of compiling.
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
            artifact = compile_fx(make_fx(flat_fn, tracing_mode="fake")(*tensors), tensors)
            # compile_fx finishes its work in the first call.
            artifact(*tensors)
        self.num_compiled += 1
        return _Artifact(self, f"{spec.name}, bucket {bucket}", artifact, tensors)


class _Signature(NamedTuple):
    """What a compiled artifact takes for granted about one tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Artifact:
    """A compiled graph that refuses arguments other than those it was compiled for."""

    def __init__(
        self, lane: InductorLane, name: str, artifact: Callable[..., Any], tensors: list[torch.Tensor]
    ) -> None:
        self._lane = lane
        self._name = name
        self._artifact = artifact
        self._signatures = [_signature(tensor) for tensor in tensors]

    def __call__(self, *args: Any) -> Any:
        tensors = tuple(_flatten(args))
        if len(tensors) != len(self._signatures):
            self._refuse(tensors)
        for tensor, known in zip(tensors, self._signatures):
            if tensor.shape != known.shape or tensor.stride() != known.stride or tensor.dtype is not known.dtype:
                self._refuse(tensors)
        return self._artifact(*tensors)

    def _refuse(self, tensors: tuple[torch.Tensor, ...]) -> NoReturn:
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
