"""The worker's side of the encoder cache, apart from any serving engine: apply steps, write items, merge rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks
from vllm_neuron_cache.encoder_cache.read_plan import ReadPlan, ReadPlanner, ReadWindow
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import EncoderCacheStep
from vllm_neuron_cache.encoder_cache.table import Entry
from vllm_neuron_cache.errors import EncoderOutputError
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.encoder_write import encoder_stamp_spec, encoder_write_spec
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.merge import merge_rows_spec
from vllm_neuron_cache.graphs.spec import doubling_buckets

MAX_WRITE_TOKENS = 2048
"""Rows that one write launch carries: bounds the staging area to a few of the encoder's blocks."""

MIN_MERGE_ROWS = 64
"""Smallest merge bucket: below it a graph's launch costs more than its rows."""


class MergeTargets(NamedTuple):
    """Tensors that the merge writes, each `[T + 1, H]` with the dummy row last. Owned by the caller."""

    hidden: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def max_step_tokens(self) -> int:
        """Token rows of the longest step (T)."""
        return self.hidden.shape[0] - 1


class RuntimeStats(NamedTuple):
    """What one worker rank did since it started."""

    items_written: int
    rows_written: int
    rows_read: int
    graphs_compiled: int
    recompiles_after_warmup: int


class EncoderCacheRuntime:
    """Buffer, graphs and plans of one worker rank.

    In a step: `apply`, then `write` for every item that the encoder ran, then `plan_reads`, then `merge`. Call
    `warm_up` once before the first step, under the inference mode that steps run in.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        fat_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        targets: MergeTargets,
        lane: Lane,
    ) -> None:
        block_size = geometry.block_size
        max_write_blocks = min(max(MAX_WRITE_TOKENS // block_size, 1), geometry.num_item_blocks)
        write_buckets = doubling_buckets(1, max_write_blocks)
        merge_buckets = doubling_buckets(MIN_MERGE_ROWS, targets.max_step_tokens)
        self.blocks = EncoderCacheBlocks(
            geometry, fat_dim=fat_dim, dtype=dtype, device=device, max_write_blocks=write_buckets[-1]
        )
        self._targets = targets
        self._lane = lane
        self._write = BucketedGraph(encoder_write_spec(write_buckets), lane)
        self._stamp = BucketedGraph(encoder_stamp_spec(write_buckets), lane)
        self._merge = BucketedGraph(merge_rows_spec(merge_buckets), lane)
        self._planner = ReadPlanner(
            buckets=merge_buckets, scratch_row=self.blocks.scratch_row, dummy_row=targets.max_step_tokens
        )
        # One view per bucket, made once: the graphs then see the same tensors in every step.
        self._pairs = {
            bucket: (
                torch.from_numpy(self._planner.src_rows)[:bucket],
                torch.from_numpy(self._planner.dst_rows)[:bucket],
            )
            for bucket in merge_buckets
        }
        self._items_written = 0
        self._rows_written = 0
        self._rows_read = 0

    @property
    def graphs(self) -> tuple[BucketedGraph, ...]:
        return (self._write, self._stamp, self._merge)

    def stats(self) -> RuntimeStats:
        return RuntimeStats(
            self._items_written,
            self._rows_written,
            self._rows_read,
            self._lane.num_compiled,
            self._lane.num_recompiles_refused,
        )

    def warm_up(self) -> None:
        """Compiles every bucket of every graph and seals the lane. Writes the scratch block and the dummy row only."""
        blocks, targets = self.blocks, self._targets
        nothing = Entry(key="", generation=0, block_ids=(), tokens_per_block=(), rows=self._planner.src_rows[:0])
        no_rows = blocks.buffer.new_empty(0, blocks.fat_dim)

        def write_args(bucket: int) -> tuple[torch.Tensor, ...]:
            staged = blocks.stage(nothing, no_rows, 0, 0, bucket)
            return blocks.buffer, staged.rows, staged.block_ids

        def stamp_args(bucket: int) -> tuple[torch.Tensor, ...]:
            return blocks.mm_hash_tags, blocks.generations, *blocks.stamp(nothing, 0, 0, bucket, valid=False)

        def merge_args(bucket: int) -> tuple:
            src_rows, dst_rows = self._pairs[bucket]
            src_rows.fill_(blocks.scratch_row)
            dst_rows.fill_(targets.max_step_tokens)
            return targets.hidden, targets.deepstack, blocks.buffer, src_rows, dst_rows

        self._write.warm_up(write_args)
        self._stamp.warm_up(stamp_args)
        self._merge.warm_up(merge_args)
        self._lane.seal()

    def apply(self, step: EncoderCacheStep) -> None:
        """Follows the scheduler's decisions up to `step`. Raises `StepProtocolError` at a gap."""
        self.blocks.table.apply(step)

    def write(self, key: str, output: torch.Tensor) -> None:
        """Writes an encoder output `[num_tokens, fat_dim]` into the blocks reserved for `key`.

        Tags are emptied before the rows change and stamped after, so that whoever reads rows first and the tag last
        never takes a half-written block for a whole one. Raises `EncoderOutputError` if there is no entry for `key`
        or the output does not fit it; the entry then stays unwritten.
        """
        entry = self.blocks.table.get(key)
        if entry is None:
            raise EncoderOutputError(f"item {key}: the encoder returned {list(output.shape)} and no blocks are reserved")
        self.blocks.check_output(entry, output)
        blocks = self.blocks
        for valid in (False, True):
            for first in range(0, len(entry.block_ids), blocks.max_write_blocks):
                count = min(len(entry.block_ids) - first, blocks.max_write_blocks)
                bucket = self._write.bucket_for(count)
                if valid:
                    staged = blocks.stage(entry, output, first, count, bucket)
                    self._write.run(bucket, blocks.buffer, staged.rows, staged.block_ids)
                stamp = blocks.stamp(entry, first, count, bucket, valid=valid)
                self._stamp.run(bucket, blocks.mm_hash_tags, blocks.generations, *stamp)
        blocks.table.mark_written(entry)
        self._items_written += 1
        self._rows_written += entry.num_tokens

    def plan_reads(self, windows: Sequence[ReadWindow], num_step_tokens: int) -> ReadPlan:
        """Row lists for a step. Raises `EncoderCacheReadError`, naming request and item, if a window cannot be read."""
        return self._planner.plan(windows, num_step_tokens, self.blocks.table)

    def merge(self, plan: ReadPlan) -> None:
        """Runs the merge graph on the plan made last. Mutates the merge targets."""
        targets = self._targets
        src_rows, dst_rows = self._pairs[plan.bucket]
        self._merge.run(plan.bucket, targets.hidden, targets.deepstack, self.blocks.buffer, src_rows, dst_rows)
        self._rows_read += plan.num_rows

    def clear(self) -> None:
        """Drops every entry; the rows stay in the buffer, and nothing refers to them any more."""
        self.blocks.table.clear()

    def check_integrity(self) -> None:
        self.blocks.table.check_integrity()
