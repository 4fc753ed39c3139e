"""The device buffer of the encoder cache, with its tags. The only module of this package that imports torch."""

from collections.abc import Sequence

import torch

from vllm_neuron_cache.encoder_cache.identity import mm_hash_fingerprint, tag_generation
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.table import Entry, EntryTable
from vllm_neuron_cache.errors import ConfigurationError, EncoderOutputError, IntegrityError


class EncoderCacheBlocks:
    """Buffer, scratch block, tags and entry table of one worker rank.

    It holds memory and says what belongs where; graphs move the rows. `table` changes through its own methods, the
    tensors are mutated by the graphs that get them as arguments.
    """

    def __init__(self, geometry: CacheGeometry, *, fat_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates `buffer` `[num_blocks, block_size, fat_dim]`, `mm_hash_tags` int32 `[num_blocks, 2]` and
        `generations` int32 `[num_blocks]`, all zero. Raises `ConfigurationError` if they do not fit on the device."""
        self.geometry = geometry
        self.fat_dim = fat_dim
        self.table = EntryTable(geometry.num_item_blocks, geometry.block_size)
        try:
            self.buffer = torch.zeros(geometry.num_blocks, geometry.block_size, fat_dim, dtype=dtype, device=device)
        except RuntimeError as error:  # torch has no narrower class for a failed allocation on the CPU
            gib = geometry.num_blocks * geometry.block_size * fat_dim * dtype.itemsize / 2**30
            raise ConfigurationError(
                f"the encoder cache needs {gib:.2f} GiB on {device} ({geometry.num_blocks} blocks of "
                f"{geometry.block_size} rows of {fat_dim} {dtype}) and they cannot be allocated. Lower "
                "encoder_cache_num_blocks, max_num_batched_tokens or limit_mm_per_prompt."
            ) from error
        self.mm_hash_tags = torch.zeros(geometry.num_blocks, 2, dtype=torch.int32, device=device)
        self.generations = torch.zeros(geometry.num_blocks, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes

    @property
    def scratch_row(self) -> int:
        """First row of the scratch block in the flattened buffer."""
        return self.geometry.scratch_block_id * self.geometry.block_size

    def holds(self, key: str, generation: int, block_ids: Sequence[int]) -> bool:
        """Whether the tags say of each of the blocks that it holds rows of that item, wholly written.

        A reader outside the process reads rows first and asks this afterwards. The fingerprint alone would not do:
        another key may have the same one, and no two reservations have the same generation.
        """
        ids = list(block_ids)
        tags = torch.tensor(mm_hash_fingerprint(key), dtype=torch.int32)
        return bool((self.mm_hash_tags[ids].cpu() == tags).all()) and bool(
            (self.generations[ids].cpu() == tag_generation(generation)).all()
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the table is inconsistent, or a written entry's tags are not its own."""
        self.table.check_integrity()
        for entry in self.table.entries():
            if entry.written and not self.holds(entry.key, entry.generation, entry.block_ids):
                raise IntegrityError(
                    f"{entry.key!r}, generation {entry.generation}, is written in blocks {entry.block_ids}; their tags "
                    f"are {self.mm_hash_tags[list(entry.block_ids)].tolist()}, of generations "
                    f"{self.generations[list(entry.block_ids)].tolist()}"
                )

    def check_output(self, entry: Entry, output: torch.Tensor) -> None:
        """Raises `EncoderOutputError` if an encoder output `[num_tokens, fat_dim]` does not fit its entry, or holds
        NaN or infinity."""
        if output.ndim != 2 or output.shape[0] != entry.num_tokens or output.shape[1] != self.fat_dim:
            raise EncoderOutputError(
                f"item {entry.key}: the encoder returned {list(output.shape)}; its placeholder takes "
                f"[{entry.num_tokens}, {self.fat_dim}] (tokens, width)",
                key=entry.key,
            )
        # A sum is finite only if everything in it is, and takes a fraction of the time of looking at each element. One
        # that overflows by itself is looked at more closely.
        if not torch.isfinite(output.sum(dtype=torch.float32)):
            bad_rows = (~torch.isfinite(output)).any(dim=1).nonzero().flatten().tolist()
            if bad_rows:
                raise EncoderOutputError(
                    f"item {entry.key}: {len(bad_rows)} of the {entry.num_tokens} rows that the encoder returned hold "
                    f"NaN or infinity, the first of them row {bad_rows[0]}",
                    key=entry.key,
                )
