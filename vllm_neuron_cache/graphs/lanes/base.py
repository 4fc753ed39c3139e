"""The interface that every lane has."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from vllm_neuron_cache.graphs.spec import GraphSpec


class Lane(abc.ABC):
    """OPEN -> SEALED: lowers graphs, and after `seal` refuses to compile anything more."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.num_compiled = 0
        """Compilations so far."""
        self.num_recompiles_refused = 0
        """Compilations that were asked for after `seal`."""
        self._sealed = False

    @abc.abstractmethod
    def lower(self, spec: GraphSpec, bucket: int) -> Callable[..., Any]:
        """A callable of `spec.fn`'s arguments for one bucket. It may compile at its first call, so warm it up."""

    @property
    def sealed(self) -> bool:
        return self._sealed

    def seal(self) -> None:
        """Ends warm-up: whatever would compile from here on raises `GraphRecompiledError` instead."""
        self._sealed = True
