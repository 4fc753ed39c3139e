"""Which buffer rows go to which rows of the step, as the int32 lists that the merge graph takes.

Three forms exist. Row lists name every row that moves: `src_rows[R]` and `dst_rows[R]`. The gather form, for a graph
that makes the step's rows itself, has for every row of the step the buffer row that it takes, or -1. The block-position
form of vLLM Neuron names whole blocks and, for every row of each, its place in the step or a sentinel. The first two
move only live rows; the last moves every row of every block it names.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_neuron_cache.encoder_cache.table import EntryTable
from vllm_neuron_cache.errors import EncoderCacheReadError, EncoderOutputError, RequestError, StepProtocolError


class ReadWindow(NamedTuple):
    """The part of one item that one request reads in this step."""

    request_id: str
    key: str
    num_tokens: int
    """Rows of the whole item, by its placeholder."""
    first_row: int
    """First row of the item that is read."""
    num_rows: int
    step_position: int
    """Row of the step at which the window's placeholder begins."""
    mask: np.ndarray | None
    """bool over the window's placeholder: which positions take a row. None: all of them, `num_rows` many."""


class ReadPlan(NamedTuple):
    """Row lists of one step, padded to a bucket. The arrays are views that the planner uses again for the next step."""

    num_rows: int
    bucket: int
    src_rows: np.ndarray
    """int32 `[bucket]`."""
    dst_rows: np.ndarray
    """int32 `[bucket]`."""
    is_embed: np.ndarray
    """bool `[num_step_tokens]`, new for every step: the rows of the step that the plan fills."""


class ReadPlanner:
    """Builds and checks the row lists of a step. Holds the arrays that every plan is written into.

    A pair past the last live one reads the scratch block's first row and writes the dummy row.
    """

    def __init__(self, *, buckets: Sequence[int], scratch_row: int, dummy_row: int) -> None:
        """`buckets` ascend, and the last is at least the longest step (`dummy_row`, in token rows)."""
        if list(buckets) != sorted(set(buckets)) or not buckets or buckets[-1] < dummy_row:
            raise ValueError(f"buckets {list(buckets)} must ascend up to at least {dummy_row}")
        self.buckets = tuple(buckets)
        self._scratch_row = scratch_row
        self._dummy_row = dummy_row
        self._src_rows = np.empty(self.buckets[-1], dtype=np.int32)
        self._dst_rows = np.empty(self.buckets[-1], dtype=np.int32)
        self._positions = np.arange(dummy_row, dtype=np.int32)

    @property
    def src_rows(self) -> np.ndarray:
        """int32 `[largest bucket]`, overwritten by every plan."""
        return self._src_rows

    @property
    def dst_rows(self) -> np.ndarray:
        """int32 `[largest bucket]`, overwritten by every plan."""
        return self._dst_rows

    def plan(self, windows: Sequence[ReadWindow], num_step_tokens: int, table: EntryTable) -> ReadPlan:
        """Resolves the windows of a step of `num_step_tokens` token rows. Overwrites the arrays of the plan before.

        Raises `EncoderCacheReadError` if an entry is missing, unwritten or of another size than the placeholder, if a
        window reaches outside its item or the step, or if two windows fill one row of the step; `EncoderOutputError` if
        the encoder failed on the item. Both name the request, so that the rest of the step can be planned without it.
        Raises `StepProtocolError` for a step longer than any that was announced.
        """
        if num_step_tokens > self._dummy_row:
            raise StepProtocolError(f"the step has {num_step_tokens} token rows, the plan takes {self._dummy_row}")
        src_rows, dst_rows, positions = self._src_rows, self._dst_rows, self._positions
        is_embed = np.zeros(num_step_tokens, dtype=bool)
        end = 0
        for window in windows:
            entry = table.get(window.key)
            if entry is None or not entry.written or len(entry.rows) != window.num_tokens:
                raise _unreadable(window, table)
            first, count, position, mask = window.first_row, window.num_rows, window.step_position, window.mask
            length = count if mask is None else len(mask)
            if first < 0 or first + count > window.num_tokens or position < 0 or position + length > num_step_tokens:
                raise _outside(window, num_step_tokens)
            begin, end = end, end + count
            if end > num_step_tokens:
                raise _filled_twice(windows, num_step_tokens)
            src_rows[begin:end] = entry.rows[first : first + count]
            if mask is None:
                dst_rows[begin:end] = positions[position : position + count]
                is_embed[position : position + count] = True
            else:
                places = np.flatnonzero(mask)
                if len(places) != count:
                    raise _outside(window, num_step_tokens)
                dst_rows[begin:end] = places + position
                is_embed[position : position + length] |= mask
        if np.count_nonzero(is_embed) != end:
            raise _filled_twice(windows, num_step_tokens)
        bucket = self.buckets[bisect.bisect_left(self.buckets, end)]
        src_rows[end:bucket] = self._scratch_row
        dst_rows[end:bucket] = self._dummy_row
        return ReadPlan(end, bucket, src_rows[:bucket], dst_rows[:bucket], is_embed)


def source_rows(plan: ReadPlan, out: np.ndarray) -> None:
    """The gather form of a plan: for each row of the step the buffer row that it takes, -1 where it takes none.

    Writes all of `out`, int32 `[max_step_tokens]`.
    """
    out.fill(-1)
    out[plan.dst_rows[: plan.num_rows]] = plan.src_rows[: plan.num_rows]


class BlockPositions(NamedTuple):
    """The block-position form of a read."""

    encoder_block_ids: np.ndarray
    """int32 `[max_blocks]`; unused places name the scratch block."""
    encoder_positions: np.ndarray
    """int32 `[max_blocks, block_size]`: row of the step for each row of the block, or the sentinel."""


def block_positions(
    src_rows: np.ndarray,
    dst_rows: np.ndarray,
    *,
    block_size: int,
    max_blocks: int,
    scratch_block_id: int,
    sentinel: int,
) -> BlockPositions:
    """The block-position form of a list of live pairs.

    A buffer row may be read more than once (an image that stands twice in a step), and a block has one place for each
    of its rows: the block is then named as often as its most-read row.

    Raises `EncoderCacheReadError` if more than `max_blocks` blocks are needed.
    """
    ids: list[int] = []
    positions: list[np.ndarray] = []
    places: dict[int, list[int]] = {}
    for src, dst in zip(src_rows.tolist(), dst_rows.tolist()):
        block, row = divmod(src, block_size)
        copies = places.setdefault(block, [])
        place = next((index for index in copies if positions[index][row] == sentinel), None)
        if place is None:
            place = len(ids)
            ids.append(block)
            positions.append(np.full(block_size, sentinel, dtype=np.int32))
            copies.append(place)
        positions[place][row] = dst
    if len(ids) > max_blocks:
        raise EncoderCacheReadError(
            f"the step reads {len(ids)} blocks and the graph takes {max_blocks}; raise max_blocks"
        )
    encoder_block_ids = np.full(max_blocks, scratch_block_id, dtype=np.int32)
    encoder_positions = np.full((max_blocks, block_size), sentinel, dtype=np.int32)
    if ids:
        encoder_block_ids[: len(ids)] = ids
        encoder_positions[: len(ids)] = positions
    return BlockPositions(encoder_block_ids, encoder_positions)


def row_lists(form: BlockPositions, *, sentinel: int) -> tuple[np.ndarray, np.ndarray]:
    """The live pairs `(src_rows, dst_rows)`, int32, of a block-position form, in the form's own order."""
    block_size = form.encoder_positions.shape[1]
    place, row = np.nonzero(form.encoder_positions != sentinel)
    src_rows = form.encoder_block_ids[place] * np.int32(block_size) + row.astype(np.int32)
    return src_rows, form.encoder_positions[place, row]


def _unreadable(window: ReadWindow, table: EntryTable) -> RequestError:
    entry = table.get(window.key)
    if entry is not None and entry.failure is not None:
        return EncoderOutputError(entry.failure, request_id=window.request_id, key=window.key)
    if entry is None:
        what = "has no entry in the encoder cache"
    elif not entry.written:
        what = f"has an entry of {entry.num_tokens} rows that the encoder has not written"
    else:
        what = f"has {entry.num_tokens} rows in the encoder cache"
    return _read_error(
        window, f"{what}; rows {window.first_row} to {window.first_row + window.num_rows} were to be read"
    )


def _read_error(window: ReadWindow, what: str) -> EncoderCacheReadError:
    return EncoderCacheReadError(
        f"request {window.request_id}: item {window.key}, {window.num_tokens} rows by its placeholder, {what}",
        request_id=window.request_id,
        key=window.key,
    )


def _outside(window: ReadWindow, num_step_tokens: int) -> EncoderCacheReadError:
    places = window.num_rows if window.mask is None else int(np.count_nonzero(window.mask))
    length = window.num_rows if window.mask is None else len(window.mask)
    return _read_error(
        window,
        f"does not fit: its rows {window.first_row} to {window.first_row + window.num_rows} of {window.num_tokens} are "
        f"to fill {places} places among rows {window.step_position} to {window.step_position + length} of a step of "
        f"{num_step_tokens}",
    )


def _filled_twice(windows: Sequence[ReadWindow], num_step_tokens: int) -> EncoderCacheReadError:
    """Names the first window that fills a row which one before it has filled. Each window by itself is in bounds."""
    taken = np.zeros(num_step_tokens, dtype=bool)
    for window in windows:
        mask = np.ones(window.num_rows, dtype=bool) if window.mask is None else window.mask
        span = taken[window.step_position : window.step_position + len(mask)]
        if (span & mask[: len(span)]).any():
            break
        span |= mask[: len(span)]
    return _read_error(
        window,
        f"is to fill rows of the step, from row {window.step_position} on, that another item of the {len(windows)} in "
        "the step fills already",
    )
