"""What a graph is, apart from how it is lowered."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_neuron_cache.kernels.operators import KernelOperator


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """One graph, defined once.

    `fn` takes tensors and tuples of tensors and obeys the rules of `graphs.check`: static shapes for every bucket,
    whole arguments mutated and never through a view, nothing returned that it mutates, int32 indices in range.
    """

    name: str
    fn: Callable[..., Any]
    mutates: tuple[str, ...]
    """Arguments of `fn` that it changes in place; on the device they are input-output aliases."""
    buckets: tuple[int, ...]
    """Sizes that the graph is compiled for, ascending."""
    bytes_per_row: int
    """Bytes that one more row in the bucket moves, once read and once written."""
    example_args: Callable[[int], tuple[Any, ...]]
    """Arguments for a bucket, of the shapes and dtypes of every call. It allocates on torch's default device: under
    `torch.device("meta")` nothing at all."""
    index_limits: Mapping[str, int] = field(default_factory=dict)
    """For each argument that holds indices (flattened name, see `flat_names`): its values are 0 or more and below
    this. The host that makes them keeps to it; that the graph then stays in range is for the checker."""
    opaque: frozenset[str] = frozenset()
    """Operators outside of torch's own that the graph calls, without overload ("namespace.name"). What they do inside
    is theirs: rules and alias proof leave them out, and not what is around them."""
    kernel_fn: Callable[[Callable[["KernelOperator"], Callable[..., None]]], Callable[..., Any]] | None = None
    """Of a graph that calls kernels: makes `fn` anew, with whatever a lane has in the place of each operator."""
    work_bytes: int = 0
    """Bytes that one more row in the bucket takes while the graph computes, at most; 0 for one that only moves rows."""

    def meta_args(self, bucket: int) -> tuple[Any, ...]:
        """`example_args` without memory."""
        with torch.device("meta"):
            return self.example_args(bucket)

    def mutated_names(self, args: tuple[Any, ...]) -> tuple[str, ...]:
        """`mutates` by the names of single tensors, in the order of the arguments; last, as it is, a name that is no
        argument's."""
        unknown = (name for name in self.mutates if name not in inspect.signature(self.fn).parameters)
        return (*(name for name in flat_names(self.fn, args) if name.split("[")[0] in self.mutates), *unknown)


class BufferShape(NamedTuple):
    """Shape and dtype of the encoder cache's buffer."""

    num_blocks: int
    block_size: int
    fat_dim: int
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def row_bytes(self) -> int:
        return self.fat_dim * self.dtype.itemsize

    def example(self) -> torch.Tensor:
        return torch.zeros(self.num_blocks, self.block_size, self.fat_dim, dtype=self.dtype)


def flatten(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors of a graph's arguments, one after the other."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from arg
        else:
            yield arg


def unflatten(tensors: Sequence[torch.Tensor], example_args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inverse of `flatten`: `tensors` grouped as in `example_args`."""
    remaining = iter(tensors)
    return tuple(
        tuple(next(remaining) for _ in arg) if isinstance(arg, tuple) else next(remaining) for arg in example_args
    )


def flat_names(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, ...]:
    """A name for each tensor in `flatten(args)`: that of `fn`'s parameter, with `[i]` for the members of a tuple."""
    names: list[str] = []
    for name, arg in zip(inspect.signature(fn).parameters, args, strict=True):
        names += [f"{name}[{index}]" for index in range(len(arg))] if isinstance(arg, tuple) else [name]
    return tuple(names)


def doubling_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """`smallest`, twice that, and so on up to the first that is at least `largest`.

    A doubling ladder wastes less than half of a bucket and keeps the number of graphs logarithmic.
    """
    buckets = [smallest]
    while buckets[-1] < largest:
        buckets.append(buckets[-1] * 2)
    return tuple(buckets)


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`. Raises `ValueError` if none does."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{size} does not fit a bucket of {list(buckets)}")


def split_by_buckets(size: int, buckets: Sequence[int]) -> list[int]:
    """Buckets that `size` fills exactly, largest first, then the rest, which is less than the smallest bucket."""
    parts: list[int] = []
    for bucket in reversed(buckets):
        times, size = divmod(size, bucket)
        parts += [bucket] * times
    return [*parts, size] if size else parts
