"""A graph in all its buckets, ready to call."""

from collections.abc import Callable
from typing import Any

from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import GraphSpec, bucket_for


class BucketedGraph:
    """COLD -> WARM: one callable per bucket of a spec, lowered by one lane in `warm_up`."""

    def __init__(self, spec: GraphSpec, lane: Lane) -> None:
        self.spec = spec
        self._lane = lane
        self._callables: dict[int, Callable[..., Any]] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        return self.spec.buckets

    def bucket_for(self, size: int) -> int:
        """The smallest bucket that holds `size`. Raises `ValueError` if none does."""
        return bucket_for(size, self.spec.buckets)

    def warm_up(self, example_args: Callable[[int], tuple[Any, ...]]) -> None:
        """Lowers every bucket and runs it once, on arguments whose mutation does no harm."""
        for bucket in self.spec.buckets:
            args = example_args(bucket)
            self._callables[bucket] = self._lane.lower(self.spec, bucket, args)
            self.run(bucket, *args)

    def run(self, bucket: int, *args: Any) -> Any:
        """Runs the graph of `bucket`, after `warm_up`. Mutates the arguments that the spec declares.

        Raises `GraphRecompiledError` for arguments that the lane did not compile for.
        """
        return self._callables[bucket](*args)
