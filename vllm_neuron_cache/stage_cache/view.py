"""What the stage cache sees of the model runner: which slots the rows of a step have."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError


class StepLayout(NamedTuple):
    """Where the rows of one step are, in the batch and in the KV cache. Requests are in the batch's order."""

    req_ids: Sequence[str]
    starts: np.ndarray
    """int64 `[R]`, the first position that each request computes."""
    counts: np.ndarray
    """int64 `[R]`, rows of each request."""
    row_stops: np.ndarray
    """int64 `[R]`, where the rows of each request end in the batch."""
    slots: np.ndarray
    """int64 `[rows]`, `block * block_size + offset` of every row."""
    block_ids: np.ndarray
    """int64 `[S]`, every block that gets rows, once."""
    block_offsets: np.ndarray
    """int64 `[S]`, the first row that each of them gets."""
    block_rows: np.ndarray
    """int64 `[S]`, how many."""


class FullAttentionGroupView:
    """The block table of a runner with one KV group of full attention. Reads it and never changes it.

    Slots come from the table in host memory: reading the device's slot mapping back would wait for the whole forward.
    """

    def __init__(self, input_batch: Any, block_size: int) -> None:
        """`input_batch` is vLLM's `InputBatch`.

        Raises `OmniPrefixCacheUnmatchError` if its block table is laid out in a way that slots do not mirror.
        """
        self._input_batch = input_batch
        self.block_size = block_size
        tables = getattr(input_batch.block_table, "block_tables", None)
        if tables is None or len(tables) != 1:
            found = "no" if tables is None else len(tables)
            raise OmniPrefixCacheUnmatchError(
                f"the stage cache mirrors exactly one block table and the batch has {found}; turn "
                "enable_prefix_caching off for this stage"
            )
        check_block_layout(tables[0], block_size)
        self._table_tensor: Any = None
        self._table_array: np.ndarray
        self._last_req_ids: list[str] | None = None
        self._last_scheduled: Mapping[str, int] = {}
        self._last_counts: np.ndarray
        self._last_row_stops: np.ndarray
        self._requests: np.ndarray
        self._all_one = False

    @property
    def _table(self) -> np.ndarray:
        """int32 `[requests, blocks]`."""
        tensor = self._input_batch.block_table[0].block_table.cpu
        if tensor is not self._table_tensor:
            self._table_tensor, self._table_array = tensor, tensor.numpy()
        return self._table_array

    def step_layout(self, num_scheduled: Mapping[str, int]) -> StepLayout:
        """The step that the batch is in. `num_scheduled` has the tokens of each request that is scheduled.

        Raises `OmniPrefixCacheUnmatchError` if a request computes positions beyond its block table.
        """
        # A copy: the batch changes with the next step, and a step's outputs may be built after that.
        req_ids = list(self._input_batch.req_ids)
        num_requests = len(req_ids)
        starts = self._input_batch.num_computed_tokens_cpu[:num_requests].astype(np.int64)
        counts, row_stops = self._counts(req_ids, num_scheduled)
        num_rows = int(row_stops[-1]) if num_requests else 0
        if self._all_one:
            columns = starts // self.block_size
            block_ids = self._blocks_at(self._requests, columns, req_ids)
            offsets = starts - columns * self.block_size
            return StepLayout(
                req_ids, starts, counts, row_stops, block_ids * self.block_size + offsets, block_ids, offsets, counts
            )
        scheduled = counts > 0
        first_block = starts // self.block_size
        num_blocks = np.where(scheduled, (starts + counts - 1) // self.block_size - first_block + 1, 0)
        block_stops = num_blocks.cumsum()
        requests = np.repeat(np.arange(num_requests), num_blocks)
        columns = np.arange(len(requests)) + np.repeat(first_block - (block_stops - num_blocks), num_blocks)
        block_ids = self._blocks_at(requests, columns, req_ids)
        block_starts = columns * self.block_size
        first = np.maximum(starts[requests], block_starts)
        block_rows = np.minimum((starts + counts)[requests], block_starts + self.block_size) - first
        offsets = first - block_starts
        first_rows = block_rows.cumsum() - block_rows
        slots = np.arange(num_rows) + np.repeat(block_ids * self.block_size + offsets - first_rows, block_rows)
        return StepLayout(req_ids, starts, counts, row_stops, slots, block_ids, offsets, block_rows)

    def block_ids(self, index: int, first: int, stop: int) -> np.ndarray:
        """The blocks of positions `[first, stop)` of request `index` of the batch; int64."""
        columns = slice(first // self.block_size, -(-stop // self.block_size))
        return self._table[index, columns].astype(np.int64)

    def _counts(self, req_ids: list[str], num_scheduled: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each request, and where they end. While a batch decodes both are the same in every step."""
        if req_ids != self._last_req_ids or num_scheduled != self._last_scheduled:
            self._last_counts = np.array([num_scheduled.get(req_id, 0) for req_id in req_ids], dtype=np.int64)
            self._last_row_stops = self._last_counts.cumsum()
            self._all_one = bool((self._last_counts == 1).all())
            self._requests = np.arange(len(req_ids))
            self._last_req_ids, self._last_scheduled = req_ids, dict(num_scheduled)
        return self._last_counts, self._last_row_stops

    def _blocks_at(self, requests: np.ndarray, columns: np.ndarray, req_ids: Sequence[str]) -> np.ndarray:
        """int64, the blocks at these places of the table."""
        try:
            return self._table[requests, columns].astype(np.int64)
        except IndexError:
            worst = int(columns.argmax())
            raise OmniPrefixCacheUnmatchError(
                f"request {req_ids[requests[worst]]} computes rows in block {columns[worst]} of its table, which has "
                f"{self._table.shape[1]}; the batch and the scheduler's output are of different steps"
            ) from None


def check_block_layout(block_table: Any, block_size: int) -> None:
    """Raises `OmniPrefixCacheUnmatchError` unless row `position` of a request is known to be in slot
    `table[position // block_size] * block_size + position % block_size`. What is unknown is refused.
    """
    parts = getattr(block_table, "blocks_per_kv_block", None)
    is_split = getattr(block_table, "use_hybrid_blocks", None)
    # vLLM's tables of 0.29 and 0.30 tell kernel blocks from KV blocks; those of 0.32 have KV blocks alone.
    is_unknown = is_split is parts is None and hasattr(block_table, "kv_cache_block_size")
    if is_split or parts not in (None, 1) or is_unknown:
        raise OmniPrefixCacheUnmatchError(
            f"the attention backend splits each block of {block_size} into "
            f"{parts or 'an unknown number of'} kernel blocks, which the stage cache does not "
            "mirror; choose a --block-size that the backend has itself, or turn enable_prefix_caching off"
        )
    for name in ("dcp_world_size", "pcp_world_size"):
        size = getattr(block_table, name, None)
        if size != 1:
            raise OmniPrefixCacheUnmatchError(
                f"context parallelism spreads the tokens of a block over ranks ({name} is {size}, and must be known to "
                "be 1), which the stage cache does not mirror; turn enable_prefix_caching off for this stage"
            )
    size = getattr(block_table, "kv_cache_block_size", getattr(block_table, "block_size", None))
    if size != block_size:
        raise OmniPrefixCacheUnmatchError(
            f"the stage cache has blocks of {block_size} slots and the batch's block table of {size}; give both the "
            "same block size"
        )
