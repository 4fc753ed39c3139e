"""What the device can take, checked on the host before a kernel is called."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.spec import BufferShape

PARTITIONS = 128
"""Rows of a tile."""
SBUF_PARTITION_BYTES = 192 * 1024
"""Of the smallest core: 24 MiB in 128 partitions. Trainium2 and Trainium3 have more."""
MAX_CHUNK_BYTES = 47 * 1024
"""Bytes of a row that a tile holds: four tiles in flight, and 4 KiB a partition for indices."""
MAX_TENSOR_BYTES = 4 * 1024**3
"""Reach of a 32-bit byte offset:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.scalar_load.html"""
SENTINEL = -1
"""As a destination: nowhere. The device skips what is out of bounds."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_tensor(name: str, num_rows: int, width: int, dtype: torch.dtype) -> None:
    """Raises `ConfigurationError` for a tensor `[num_rows, width]` that a kernel cannot index."""
    if dtype not in DTYPES:
        raise ConfigurationError(f'{name} is {dtype}: a kernel takes {DTYPES}; choose kernel "compiler"')
    num_bytes = num_rows * width * dtype.itemsize
    if num_bytes > MAX_TENSOR_BYTES:
        raise ConfigurationError(
            f"{name} has {num_bytes} bytes ({num_rows} rows of {width} {dtype}), and an int32 index reaches "
            f'{MAX_TENSOR_BYTES}: make the cache smaller or choose kernel "compiler"'
        )


def row_chunk(width: int, dtype: torch.dtype, chunk: int | None = None) -> int:
    """Elements of a row of `width` that one tile takes: as few equal chunks as fit, or `chunk`, checked.

    Raises `ConfigurationError` if `chunk` is not within 1 and what fits.
    """
    largest = MAX_CHUNK_BYTES // dtype.itemsize
    if chunk is None:
        return -(-width // -(-width // largest))
    if not 1 <= chunk <= largest:
        raise ConfigurationError(
            f"chunk {chunk} of {dtype} takes {chunk * dtype.itemsize} bytes of each partition, and a tile may take 1 "
            f"to {MAX_CHUNK_BYTES} ({largest} elements): choose a smaller chunk, or none"
        )
    return chunk


def check_indices(name: str, values: np.ndarray, limit: int) -> None:
    """Raises `ValueError` unless `values` is int32 `[R]` with every value 0 or more and below `limit`."""
    if values.dtype != np.int32 or values.ndim != 1:
        raise ValueError(f"{name} is {values.dtype} {list(values.shape)}: a kernel takes int32 [R]; convert it")
    if len(values) and (values.min() < 0 or values.max() >= limit):
        raise ValueError(
            f"{name} holds {values.min()} to {values.max()}, outside 0 to {limit - 1}: the lists of this step are wrong"
        )


def check_lengths(**lists: Sequence[int] | np.ndarray) -> None:
    """Raises `ValueError` unless the lists, given by name, are equally long."""
    sizes = {name: len(values) for name, values in lists.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the lists differ in length ({sizes}): they name the same rows and go together")


def repeated(rows: np.ndarray, limit: int) -> np.ndarray:
    """For each of `rows` (int32 `[R]`, sentinels allowed): the place in the list that writes the same row first, or its
    own place. Two writes of one row by one copy have no order on the device."""
    places = np.arange(len(rows), dtype=np.int32)
    live = rows >= 0
    first = np.full(limit, len(rows), dtype=np.int32)
    np.minimum.at(first, rows[live], places[live])
    return np.where(live, first[np.where(live, rows, 0)], places)


def check_distinct(name: str, rows: np.ndarray, limit: int) -> None:
    """Raises `ValueError` if a row is written twice."""
    again = np.flatnonzero(repeated(rows, limit) != np.arange(len(rows), dtype=np.int32))
    if len(again):
        raise ValueError(f"{name} names row {rows[again[0]]} twice (of {len(rows)}): each row can be written once")


def column(rows: np.ndarray) -> np.ndarray:
    """int32 `[R, 1]`, one index for each partition of a tile."""
    return np.ascontiguousarray(rows, dtype=np.int32).reshape(-1, 1)


def check_buffer(name: str, buffer: BufferShape) -> None:
    """`check_tensor` of the flattened `buffer`."""
    check_tensor(name, buffer.num_rows, buffer.fat_dim, buffer.dtype)
