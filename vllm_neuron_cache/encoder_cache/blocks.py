"""The device buffer of the encoder cache, with its tags. The only module of this package that imports torch."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_neuron_cache.encoder_cache.identity import EMPTY_TAG, mm_hash_fingerprint
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.table import Entry, EntryTable
from vllm_neuron_cache.errors import ConfigurationError, EncoderOutputError


class StagedBlocks(NamedTuple):
    """Rows of an item laid out in blocks, padded to a bucket; the tensors are reused by the next `stage`."""

    rows: torch.Tensor
    """`[K, block_size, fat_dim]`."""
    block_ids: torch.Tensor
    """int32 `[K]`."""


class EncoderCacheBlocks:
    """Buffer, scratch block, tags and entry table of one worker rank.

    It holds memory and says where rows belong; graphs move the rows. `table` mutates through its own methods, the
    tensors are mutated by the graphs that get them as arguments.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        fat_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_write_blocks: int,
    ) -> None:
        """Allocates everything.

        Args:
            geometry: blocks and rows.
            fat_dim: elements of a row.
            dtype, device: of the buffer.
            max_write_blocks: blocks that one write can carry, the staging area's size.
        """
        self.geometry = geometry
        self.fat_dim = fat_dim
        self.table = EntryTable(geometry.num_item_blocks, geometry.block_size)
        shape = (geometry.num_blocks, geometry.block_size, fat_dim)
        num_bytes = geometry.num_blocks * geometry.block_size * fat_dim * dtype.itemsize
        try:
            self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch has no narrower class for a failed allocation on the CPU
            raise ConfigurationError(
                f"the encoder cache needs {num_bytes / 2**30:.2f} GiB on {device} ({geometry.num_blocks} blocks of "
                f"{geometry.block_size} rows of {fat_dim} {dtype}) and they cannot be allocated. Lower "
                "encoder_cache_num_blocks, max_num_batched_tokens or limit_mm_per_prompt."
            ) from error
        self.mm_hash_tags = torch.zeros(geometry.num_blocks, 2, dtype=torch.int32, device=device)
        self.generations = torch.zeros(geometry.num_blocks, dtype=torch.int32, device=device)
        self._staging = torch.zeros(max_write_blocks, geometry.block_size, fat_dim, dtype=dtype, device=device)
        self._staged_ids = torch.empty(max_write_blocks, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes

    @property
    def scratch_row(self) -> int:
        """First row of the scratch block in the flattened buffer."""
        return self.geometry.scratch_block_id * self.geometry.block_size

    @property
    def max_write_blocks(self) -> int:
        return self._staging.shape[0]

    def check_output(self, entry: Entry, output: torch.Tensor) -> None:
        """Raises `EncoderOutputError` if an encoder output `[num_tokens, fat_dim]` does not fit its entry."""
        if output.ndim != 2 or output.shape[0] != entry.num_tokens or output.shape[1] != self.fat_dim:
            raise EncoderOutputError(
                f"item {entry.key}: the encoder returned {list(output.shape)}; its placeholder takes "
                f"[{entry.num_tokens}, {self.fat_dim}] (tokens, width)"
            )

    def stage(self, entry: Entry, output: torch.Tensor, first: int, count: int, bucket: int) -> StagedBlocks:
        """Lays out blocks `first` to `first + count` of an item in the staging area, padded to `bucket` blocks.

        Rows of a block beyond its tokens are zero: nothing of another item's, and no NaN, gets into the buffer.
        """
        block_size = self.geometry.block_size
        counts = entry.tokens_per_block[first : first + count]
        token = sum(entry.tokens_per_block[:first])
        total = sum(counts)
        rows = self._staging[:bucket]
        flat = rows.view(-1, self.fat_dim)
        if all(tokens == block_size for tokens in counts[:-1]):  # dense: one copy
            flat[:total].copy_(output[token : token + total])
            flat[total:].zero_()
        else:
            rows.zero_()
            for place, tokens in enumerate(counts):
                rows[place, :tokens].copy_(output[token : token + tokens])
                token += tokens
        return StagedBlocks(rows, self._block_ids(entry.block_ids[first : first + count], bucket))

    def stamp(self, entry: Entry, first: int, count: int, bucket: int, *, valid: bool) -> tuple[torch.Tensor, ...]:
        """Arguments of `encoder_stamp` after the tensors it mutates: block ids, tags and stamps, padded to `bucket`.

        `valid` False empties the tags (before the rows change); True gives them the item's own.
        """
        tag, generation = (mm_hash_fingerprint(entry.key), entry.generation) if valid else (EMPTY_TAG, 0)
        device = self.buffer.device
        tags = torch.from_numpy(np.tile(np.array(tag, dtype=np.int32), (bucket, 1))).to(device)
        # Generations count reservations; one that has outgrown int32 wraps, which a reader compares just as well.
        stamps = torch.from_numpy(np.full(bucket, generation & 0x7FFFFFFF, dtype=np.int32)).to(device)
        return self._block_ids(entry.block_ids[first : first + count], bucket), tags, stamps

    def _block_ids(self, block_ids: tuple[int, ...], bucket: int) -> torch.Tensor:
        padded = self._staged_ids[:bucket]
        padded.fill_(self.geometry.scratch_block_id)
        padded[: len(block_ids)] = torch.tensor(block_ids, dtype=torch.int32)
        return padded.to(self.buffer.device)
