"""What one multimodal item is to the cache: how many token rows it has and how they lie in blocks.

An item is one image, one video or one audio clip. It owns whole blocks; a block holds rows of one item only. The
layout is data that travels with the item, so that whoever writes the rows and whoever reads them agree without
deriving it twice.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class ItemLayout(NamedTuple):
    """Where an item's rows lie: its block `i` holds its next `tokens_per_block[i]` rows, from the block's row 0 on."""

    tokens_per_block: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.tokens_per_block)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_per_block)


def num_dense_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` rows fill without gaps."""
    return -(-num_tokens // block_size)


@lru_cache(maxsize=4096)
def dense_layout(num_tokens: int, block_size: int) -> ItemLayout:
    """Rows without gaps: every block full but the last. Images and audio lie like this."""
    full, rest = divmod(num_tokens, block_size)
    return ItemLayout((block_size,) * full + ((rest,) if rest else ()))


def frame_layout(frame_tokens: Sequence[int], encoder_block_size: int, block_size: int) -> ItemLayout | None:
    """Whole frames packed into the encoder's blocks, seen in cache blocks of `block_size` rows.

    A static encoder attends within one of its blocks, so a frame never straddles two. `block_size` divides
    `encoder_block_size` (both in token rows); of the cache blocks that make up an encoder block, only those that hold
    rows are kept.

    Returns None when a frame is larger than the encoder's block, for which this layout does not exist.
    """
    if any(tokens > encoder_block_size for tokens in frame_tokens):
        return None
    packed: list[int] = []
    for tokens in frame_tokens:
        if packed and packed[-1] + tokens <= encoder_block_size:
            packed[-1] += tokens
        else:
            packed.append(tokens)
    return ItemLayout(tuple(tokens for rows in packed for tokens in dense_layout(rows, block_size).tokens_per_block))


def item_layout(
    num_tokens: int,
    frame_tokens: Sequence[int],
    *,
    encoder_block_size: int,
    block_size: int,
    max_blocks: int,
) -> ItemLayout:
    """The layout of an item of `num_tokens` rows, by frames where it has several, dense otherwise.

    A video whose frames would need more than `max_blocks` blocks (the pool without its scratch block) lies densely
    instead: whatever vLLM admits by its token count then fits, and no item waits for room that can never come.
    """
    if len(frame_tokens) > 1:
        assert sum(frame_tokens) == num_tokens, (frame_tokens, num_tokens)
        layout = frame_layout(frame_tokens, encoder_block_size, block_size)
        if layout is not None and layout.num_blocks <= max_blocks:
            return layout
    return dense_layout(num_tokens, block_size)


def mask_runs(mask: np.ndarray) -> tuple[int, ...]:
    """Lengths of the runs of True in a one-dimensional bool array: the frames of a video placeholder."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return tuple((edges[1::2] - edges[::2]).tolist())


def buffer_rows(block_ids: Sequence[int], tokens_per_block: Sequence[int], block_size: int) -> np.ndarray:
    """Rows of the flattened buffer `[num_blocks * block_size, fat_dim]` that hold an item, in item order.

    Returns int32 `[sum(tokens_per_block)]`.
    """
    starts = np.asarray(block_ids, dtype=np.int32) * np.int32(block_size)
    num_tokens = sum(tokens_per_block)
    assert len(block_ids) == len(tokens_per_block), (block_ids, tokens_per_block)
    if all(tokens == block_size for tokens in tokens_per_block[:-1]):  # dense, the common case
        return (starts[:, None] + np.arange(block_size, dtype=np.int32)).reshape(-1)[:num_tokens]
    counts = np.asarray(tokens_per_block, dtype=np.int32)
    first_token = np.cumsum(counts, dtype=np.int32) - counts
    # Row of token t in block b is starts[b] + (t - first_token[b]).
    return np.repeat(starts - first_token, counts) + np.arange(num_tokens, dtype=np.int32)
