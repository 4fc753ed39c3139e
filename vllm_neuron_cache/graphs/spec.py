"""What a graph is, apart from how it is lowered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """One graph, defined once.

    `fn` takes tensors and tuples of tensors. It has static shapes for every bucket, mutates only whole arguments,
    never through a view, and returns nothing that it mutates; indices are int32 and in range by construction.
    """

    name: str
    fn: Callable[..., Any]
    mutates: tuple[str, ...]
    """Arguments of `fn` that it changes in place; on the device they are input-output aliases."""
    buckets: tuple[int, ...]
    """Sizes that the graph is compiled for, ascending."""
    bytes_per_row: int
    """Bytes that one more row in the bucket moves, once read and once written."""


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
