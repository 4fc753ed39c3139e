"""A step's index lists in the form that the kernels take, on their way from the host: columns, with the sentinel.

Each class stands where `HostArrays` of the same lists would, for the graph that calls the kernel.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_neuron_cache.graphs.host_arrays import HostArrays
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.kernels.block_scatter import block_scatter_args
from vllm_neuron_cache.kernels.gather_merge import gather_merge_args
from vllm_neuron_cache.kernels.limits import SENTINEL


class ScatterIndices:
    """Places of rows, for `block_scatter`."""

    def __init__(
        self,
        buffer: BufferShape,
        block_ids: np.ndarray,
        block_rows: np.ndarray,
        *,
        scratch_block: int,
        buckets: Sequence[int],
        device: torch.device,
    ) -> None:
        """`block_ids` and `block_rows`: int32, of the largest bucket; filled anew by the caller for every launch."""
        self._buffer = buffer
        self._block_ids, self._block_rows = block_ids, block_rows
        self._scratch_block = scratch_block
        self._row_ids = np.full((buckets[-1], 1), SENTINEL, dtype=np.int32)
        self._columns = HostArrays((self._row_ids,), buckets, device)

    def send(self, bucket: int) -> tuple[torch.Tensor, ...]:
        """int32 `[bucket, 1]`, where the graph is. Raises as `block_scatter_args` does."""
        args = block_scatter_args(
            self._buffer, self._block_ids[:bucket], self._block_rows[:bucket], scratch_block=self._scratch_block
        )
        self._row_ids[:bucket] = args.row_ids
        return self._columns.send(bucket)


class MergeIndices:
    """Pairs of rows, for `gather_merge`."""

    def __init__(
        self,
        buffer: BufferShape,
        src_rows: np.ndarray,
        dst_rows: np.ndarray,
        *,
        num_levels: int,
        dummy_row: int,
        buckets: Sequence[int],
        device: torch.device,
    ) -> None:
        """`src_rows` and `dst_rows`: int32, of the largest bucket; filled anew by the caller for every step."""
        self._buffer = buffer
        self._src_rows, self._dst_rows = src_rows, dst_rows
        self._num_levels, self._dummy_row = num_levels, dummy_row
        self._columns_on_host = np.full((2, buckets[-1], 1), SENTINEL, dtype=np.int32)
        self._columns = HostArrays(tuple(self._columns_on_host), buckets, device)

    def send(self, bucket: int) -> tuple[torch.Tensor, ...]:
        """Sources and destinations, int32 `[bucket, 1]` each, where the graph is. Raises as `gather_merge_args`
        does."""
        args = gather_merge_args(
            self._buffer,
            self._src_rows[:bucket],
            self._dst_rows[:bucket],
            num_levels=self._num_levels,
            dummy_row=self._dummy_row,
        )
        self._columns_on_host[0, :bucket] = args.src_rows
        self._columns_on_host[1, :bucket] = args.dst_rows
        return self._columns.send(bucket)
