"""The reference: the function itself, uncompiled."""

from collections.abc import Callable
from typing import Any

from vllm_neuron_cache.graphs.lanes.base import Lane
from vllm_neuron_cache.graphs.spec import GraphSpec


class EagerLane(Lane):
    """Numerics and bounds, without a compiler."""

    name = "eager"

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Callable[..., Any]:
        return spec.fn
