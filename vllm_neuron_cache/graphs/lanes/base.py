"""The interface that every lane has."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from vllm_neuron_cache.errors import GraphRecompiledError
from vllm_neuron_cache.graphs.spec import GraphSpec


class Lane(abc.ABC):
    """OPEN -> SEALED: lowers graphs, and after `seal` refuses to."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.num_compiled = 0
        """Compilations so far."""
        self.num_recompiles_refused = 0
        """Calls, after warm-up, that would have needed another compilation. Each of them raised."""
        self._sealed = False

    def lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Callable[..., Any]:
        """A callable of `spec.fn`'s arguments for one bucket, compiled here and now where the lane compiles.

        `example_args` have the shapes, dtypes and layouts of every later call; whether they are mutated is up to the
        lane. Raises `GraphRecompiledError` after `seal`.
        """
        if self._sealed:
            self.num_recompiles_refused += 1
            raise GraphRecompiledError(f"graph {spec.name}, bucket {bucket}, was to be compiled after warm-up")
        return self._lower(spec, bucket, example_args)

    @abc.abstractmethod
    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Callable[..., Any]: ...

    def seal(self) -> None:
        """Ends warm-up: nothing is compiled from here on."""
        self._sealed = True
