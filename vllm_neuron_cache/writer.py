"""Writes encoder outputs into the buffer, through the write and stamp graphs."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks
from vllm_neuron_cache.encoder_cache.identity import EMPTY_TAG, Fingerprint, mm_hash_fingerprint, tag_generation
from vllm_neuron_cache.encoder_cache.table import Entry
from vllm_neuron_cache.errors import EncoderOutputError
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.catalog import STAMP_BUCKETS, WRITE_BUCKETS, stamp_spec, write_spec
from vllm_neuron_cache.graphs.host_arrays import HostArrays
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import BufferShape, split_by_buckets

if TYPE_CHECKING:
    from vllm_neuron_cache.kernels.indices import ScatterIndices


class EncoderCacheWriter:
    """Copies an encoder output to the rows of its entry and keeps the tags true while it does.

    Tags are emptied before the rows change and stamped when they have: three launches in stream order. Whoever reads
    rows first and the tag last then never takes a half-written block for a whole one.
    """

    def __init__(self, blocks: EncoderCacheBlocks, lane: Lane) -> None:
        self._blocks = blocks
        buffer = blocks.buffer
        shape = BufferShape(*buffer.shape, buffer.dtype)
        self._write = BucketedGraph(write_spec(shape, lane.kernel), lane)
        self._stamp = BucketedGraph(stamp_spec(shape), lane)
        self.items_written = 0
        self.rows_written = 0
        # Arguments that every launch uses again.
        self._rest = torch.zeros(WRITE_BUCKETS[0], blocks.fat_dim, dtype=buffer.dtype, device=buffer.device)
        self._block_ids, self._block_rows = np.zeros((2, WRITE_BUCKETS[-1]), dtype=np.int32)
        self._places = self._make_places(shape, lane.kernel)
        self._stamped_ids, self._stamps = np.zeros((2, STAMP_BUCKETS[-1]), dtype=np.int32)
        self._tags = np.zeros((STAMP_BUCKETS[-1], 2), dtype=np.int32)
        self._stamp_args = HostArrays((self._stamped_ids, self._tags, self._stamps), STAMP_BUCKETS, buffer.device)

    def _make_places(self, shape: BufferShape, kernel: str) -> "HostArrays | ScatterIndices":
        """Where the rows of a launch go, as the write graph takes it."""
        device = self._blocks.buffer.device
        if kernel != "nki":
            return HostArrays((self._block_ids, self._block_rows), WRITE_BUCKETS, device)
        from vllm_neuron_cache.kernels.indices import ScatterIndices

        return ScatterIndices(
            shape,
            self._block_ids,
            self._block_rows,
            scratch_block=self._blocks.geometry.scratch_block_id,
            buckets=WRITE_BUCKETS,
            device=device,
        )

    @property
    def graphs(self) -> tuple[BucketedGraph, ...]:
        return self._write, self._stamp

    def warm_up(self) -> None:
        """Lowers both graphs in every bucket. Writes the scratch block only."""
        self._block_ids.fill(self._blocks.geometry.scratch_block_id)
        self._stamped_ids.fill(self._blocks.geometry.scratch_block_id)
        self._write.warm_up(
            lambda bucket: (
                self._blocks.buffer,
                self._blocks.buffer.new_zeros(bucket, self._blocks.fat_dim),
                *self._places.send(bucket),
            )
        )
        self._stamp.warm_up(
            lambda bucket: (self._blocks.mm_hash_tags, self._blocks.generations, *self._stamp_args.send(bucket))
        )

    def write(self, key: str, output: torch.Tensor) -> None:
        """Writes `output` `[num_tokens, fat_dim]` into the entry of `key`. Mutates buffer, tags and the entry.

        Raises `EncoderOutputError`, with nothing written, if there is no entry or the output does not fit it.
        """
        entry = self._entry(key, f"the encoder returned {list(output.shape)}")
        self._blocks.check_output(entry, output)
        self._stamp_blocks(entry, EMPTY_TAG, 0)
        self._write_rows(entry, output)
        self.close(entry)

    def open(self, key: str, num_rows: int) -> Entry:
        """The entry of `key`, for a graph that writes `num_rows` rows into it by itself. Mutates its tags: empty.

        Raises `EncoderOutputError` if there is no entry, or it has another number of rows.
        """
        entry = self._entry(key, f"the encoder makes {num_rows} rows")
        if num_rows != entry.num_tokens:
            raise EncoderOutputError(
                f"item {key}: the encoder makes {num_rows} rows; its placeholder takes {entry.num_tokens}", key=key
            )
        self._stamp_blocks(entry, EMPTY_TAG, 0)
        return entry

    def close(self, entry: Entry) -> None:
        """Every row of the entry is written. Mutates tags and entry."""
        self._stamp_blocks(entry, mm_hash_fingerprint(entry.key), tag_generation(entry.generation))
        self._blocks.table.mark_written(entry)
        self.items_written += 1
        self.rows_written += entry.num_tokens

    def _entry(self, key: str, what: str) -> Entry:
        entry = self._blocks.table.get(key)
        if entry is None:
            raise EncoderOutputError(f"item {key}: {what} and no blocks are reserved", key=key)
        return entry

    def _write_rows(self, entry: Entry, output: torch.Tensor) -> None:
        geometry = self._blocks.geometry
        output = output.to(self._blocks.buffer.dtype).contiguous()
        first = 0
        for count in split_by_buckets(entry.num_tokens, WRITE_BUCKETS):
            bucket = max(count, WRITE_BUCKETS[0])
            rows = output[first : first + count]
            if count < bucket:
                self._rest[:count].copy_(rows)
                rows = self._rest
            places = entry.rows[first : first + count]
            np.floor_divide(places, geometry.block_size, out=self._block_ids[:count])
            np.remainder(places, geometry.block_size, out=self._block_rows[:count])
            # Padding goes to the scratch block, whatever the rows hold there.
            self._block_ids[count:bucket] = geometry.scratch_block_id
            self._block_rows[count:bucket] = 0
            self._write.run(bucket, self._blocks.buffer, rows, *self._places.send(bucket))
            first += count

    def _stamp_blocks(self, entry: Entry, tag: Fingerprint, generation: int) -> None:
        for first in range(0, len(entry.block_ids), STAMP_BUCKETS[-1]):
            block_ids = entry.block_ids[first : first + STAMP_BUCKETS[-1]]
            bucket = self._stamp.bucket_for(len(block_ids))
            self._stamped_ids[: len(block_ids)] = block_ids
            self._stamped_ids[len(block_ids) : bucket] = self._blocks.geometry.scratch_block_id
            self._tags[:bucket] = tag
            self._stamps[:bucket] = generation
            self._stamp.run(bucket, self._blocks.mm_hash_tags, self._blocks.generations, *self._stamp_args.send(bucket))
