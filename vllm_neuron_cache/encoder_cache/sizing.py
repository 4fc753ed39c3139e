"""How many blocks the pool has, by one function, used wherever the number matters."""

from collections.abc import Iterable
from typing import NamedTuple

from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.item import num_dense_blocks
from vllm_neuron_cache.errors import ConfigurationError


class CacheGeometry(NamedTuple):
    """The shape of the cache. The last block is the scratch block; it is never allocated."""

    num_blocks: int
    """Blocks in the buffer, scratch block included."""
    block_size: int
    """Token rows in a block."""
    encoder_block_size: int
    """Token rows that one attention block of the encoder gives; a multiple of `block_size`."""

    @property
    def scratch_block_id(self) -> int:
        return self.num_blocks - 1

    @property
    def num_item_blocks(self) -> int:
        """Blocks that items can own."""
        return self.num_blocks - 1


MIN_CHOSEN_BLOCK_SIZE = 16
"""Finer blocks would save few rows more, and every block of an item costs the scheduler time. As vLLM's KV blocks."""


def choose_block_size(encoder_block_size: int, smallest_item_tokens: int) -> int:
    """The block size that wastes little on the smallest legal image and is no finer than that takes.

    It is the largest divisor of the encoder's block that is at most a quarter of the smallest image, so that an image
    wastes at most a fifth of its blocks' rows, but at least `MIN_CHOSEN_BLOCK_SIZE`. All in token rows; an encoder's
    block of less than that is taken whole.
    """
    divisors = [size for size in _divisors(encoder_block_size) if size >= MIN_CHOSEN_BLOCK_SIZE] or [encoder_block_size]
    return max((size for size in divisors if 4 * size <= smallest_item_tokens), default=divisors[0])


def cache_geometry(
    config: NeuronCacheConfig,
    *,
    merge_factor: int,
    encoder_cache_size: int,
    largest_item_tokens: Iterable[int],
    smallest_item_tokens: int | None = None,
) -> CacheGeometry:
    """Derives the geometry from the configuration, the model and the scheduler's budget.

    Args:
        config: the configuration.
        merge_factor: patches that the encoder's merger turns into one token (4 for a 2x2 merger).
        encoder_cache_size: the scheduler's budget, in token rows.
        largest_item_tokens: token rows of the largest legal item of each modality.
        smallest_item_tokens: token rows of the smallest legal image, for the default of the block size. None where it
            is not known, or the encoder's own block is wanted.

    Without a configured block size it is `choose_block_size`'s; but a configured number of blocks, which means nothing
    without their size, is one of encoder's blocks, as in vLLM Neuron. The number is `round_up_num_blocks`'s; but one
    fixed by `encoder_cache_num_blocks_exact` is taken as it is, also below `num_blocks_needed`.

    Raises `ConfigurationError` when a size does not divide.
    """
    patches = config.encoder.encoder_attention_block_size
    if patches % merge_factor:
        raise ConfigurationError(
            f"encoder_attention_block_size is {patches} patches and the model merges {merge_factor} patches into a "
            f"token; give a multiple of {merge_factor}, {_near_multiple(patches, merge_factor)} for example."
        )
    encoder_block_size = patches // merge_factor
    block_size = config.encoder_cache_block_size or encoder_block_size
    if config.encoder_cache_block_size is None and not config.fixes_num_blocks and smallest_item_tokens is not None:
        block_size = choose_block_size(encoder_block_size, smallest_item_tokens)
    if encoder_block_size % block_size:
        raise ConfigurationError(
            f"encoder_cache_block_size is {block_size} and does not divide the encoder's block of {encoder_block_size} "
            f"token rows ({patches} patches over {merge_factor}). Give a divisor of it: "
            f"{', '.join(map(str, _divisors(encoder_block_size)))}."
        )

    if config.encoder_cache_num_blocks_exact is not None:
        num_blocks = config.encoder_cache_num_blocks_exact
    else:
        needed = num_blocks_needed(block_size, encoder_cache_size, largest_item_tokens)
        num_blocks = round_up_num_blocks(max(needed, config.encoder.encoder_cache_num_blocks or 0))
    return CacheGeometry(num_blocks=num_blocks, block_size=block_size, encoder_block_size=encoder_block_size)


def round_up_num_blocks(num_blocks: int) -> int:
    """The next rung of a ladder, so that a slightly larger pool is one that graphs were compiled for already.

    Blocks for items step by a sixteenth of the power of two below them, the scratch block comes on top: up to 33 blocks
    each number is a rung, from there on a pool grows by less than a sixteenth.
    """
    item_blocks = num_blocks - 1
    step = 1 << max(item_blocks.bit_length() - _LADDER_BITS, 0)
    return -(-item_blocks // step) * step + 1


_LADDER_BITS = 5


def num_blocks_needed(block_size: int, encoder_cache_size: int, largest_item_tokens: Iterable[int]) -> int:
    """Blocks, scratch block included, with which every item that vLLM's own token check admits fits an empty pool.

    The sizes are in token rows, as for `cache_geometry`. A pool of fewer blocks works, for smaller items.
    """
    largest = max(largest_item_tokens, default=0)
    return max(num_dense_blocks(encoder_cache_size, block_size), num_dense_blocks(largest, block_size), 1) + 1


def _near_multiple(value: int, factor: int) -> int:
    return max(factor, round(value / factor) * factor)


def _divisors(value: int) -> list[int]:
    return [candidate for candidate in range(1, value + 1) if value % candidate == 0]
