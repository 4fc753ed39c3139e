"""A graph in all its buckets, ready to call."""

from collections.abc import Callable
from typing import Any

from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import GraphSpec, bucket_for


class BucketedGraph:
    """One callable per bucket of a spec, lowered by one lane."""

    def __init__(self, spec: GraphSpec, lane: Lane) -> None:
        self.spec = spec
        self._callables = {bucket: lane.lower(spec, bucket) for bucket in spec.buckets}

    @property
    def buckets(self) -> tuple[int, ...]:
        return self.spec.buckets

    def bucket_for(self, size: int) -> int:
        return bucket_for(size, self.spec.buckets)

    def run(self, bucket: int, *args: Any) -> None:
        """Runs the graph of `bucket`. Mutates the arguments that the spec declares."""
        self._callables[bucket](*args)

    def warm_up(self, example_args: Callable[[int], tuple[Any, ...]]) -> None:
        """Runs every bucket once, on arguments whose mutation does no harm."""
        for bucket in self.spec.buckets:
            self.run(bucket, *example_args(bucket))
