"""The reference: the function itself, uncompiled."""

from collections.abc import Callable
from typing import Any

from vllm_neuron_cache.graphs.aliases import mutated_names
from vllm_neuron_cache.graphs.lanes.base import Lane, Lowered
from vllm_neuron_cache.graphs.spec import GraphSpec, flat_names
from vllm_neuron_cache.graphs.tracing import trace_graph


class EagerLane(Lane):
    """Numerics and bounds, without a compiler."""

    name = "eager"

    def __init__(self, kernel: str = "compiler") -> None:
        super().__init__(kernel)
        self._aliases: dict[Callable[..., Any], tuple[str, ...]] = {}

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        # The same for every bucket, and tracing takes tens of milliseconds.
        if spec.fn not in self._aliases:
            graph = trace_graph(spec.name, spec.fn, spec.meta_args(bucket))
            self._aliases[spec.fn] = mutated_names(graph.graph, flat_names(spec.fn, example_args))
        return Lowered(spec.fn, self._aliases[spec.fn])
