"""The worker's side of the encoder cache, apart from any serving engine: apply steps, write items, merge rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks
from vllm_neuron_cache.encoder_cache.read_plan import ReadPlan, ReadPlanner, ReadWindow
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import EncoderCacheStep
from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderItem
from vllm_neuron_cache.encoders.static_encoder import EncoderRanks, StaticEncoder
from vllm_neuron_cache.encoders.weights import EncoderWeights
from vllm_neuron_cache.errors import ConfigurationError, EncoderOutputError
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.catalog import merge_spec
from vllm_neuron_cache.graphs.host_arrays import HostArrays
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.source_rows import SourceRows
from vllm_neuron_cache.writer import EncoderCacheWriter

if TYPE_CHECKING:
    from vllm_neuron_cache.kernels.indices import MergeIndices


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
    encoder_launches: int
    """Of compiled encoders; so are the next two."""
    positions_live: int
    """Patches (of images and video) and frames (of sound) that were encoded."""
    positions_computed: int
    """The same with padding."""


class EncoderCacheRuntime:
    """Buffer, graphs and plans of one worker rank.

    In a step: `apply`, then `write` for every item that the model's encoder ran and `encode` for those of a compiled
    one, then `plan_reads`, then `merge`. Call `warm_up` once before the first step.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        fat_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        targets: MergeTargets | SourceRows,
        lane: Lane,
    ) -> None:
        """`targets`: what `merge` fills. With `SourceRows` the model merges in its own graph, and none is built.

        Raises `ConfigurationError` for sizes that the lane's kernel cannot take.
        """
        self.blocks = EncoderCacheBlocks(geometry, fat_dim=fat_dim, dtype=dtype, device=device)
        buffer = BufferShape(*self.blocks.buffer.shape, dtype)
        self._writer = EncoderCacheWriter(self.blocks, lane)
        self._targets = targets
        self._lane = lane
        self._merge: BucketedGraph | None = None
        buckets: tuple[int, ...] = (targets.max_step_tokens,)
        if isinstance(targets, MergeTargets):
            num_levels = len(targets.deepstack)
            spec = merge_spec(buffer, lane.kernel, num_levels=num_levels, max_step_tokens=targets.max_step_tokens)
            self._merge, buckets = BucketedGraph(spec, lane), spec.buckets
        self._planner = ReadPlanner(
            buckets=buckets, scratch_row=self.blocks.scratch_row, dummy_row=targets.max_step_tokens
        )
        self._pairs = self._make_pairs(buffer, buckets, device)
        self._rows_read = 0
        self._encoders: list[StaticEncoder] = []

    def _make_pairs(
        self, buffer: BufferShape, buckets: tuple[int, ...], device: torch.device
    ) -> "HostArrays | MergeIndices":
        """The plan's row lists, as the merge graph takes them."""
        src_rows, dst_rows = self._planner.src_rows, self._planner.dst_rows
        if self._merge is None or self._lane.kernel != "nki":
            return HostArrays((src_rows, dst_rows), buckets, device)
        from vllm_neuron_cache.kernels.indices import MergeIndices

        return MergeIndices(
            buffer,
            src_rows,
            dst_rows,
            num_levels=len(self._targets.deepstack),
            dummy_row=self._targets.max_step_tokens,
            buckets=buckets,
            device=device,
        )

    @property
    def lane_name(self) -> str:
        return self._lane.name

    @property
    def targets(self) -> MergeTargets | SourceRows:
        """What `merge` fills."""
        return self._targets

    @property
    def graphs(self) -> tuple[BucketedGraph, ...]:
        encoders = (graph for encoder in self._encoders for graph in encoder.graphs)
        merge = () if self._merge is None else (self._merge,)
        return (*self._writer.graphs, *merge, *encoders)

    def add_encoder(
        self, adapter: EncoderAdapter, weights: EncoderWeights, *, attention_block: int, ranks: EncoderRanks
    ) -> StaticEncoder:
        """An encoder that is compiled, and writes into the blocks by itself. Call it before `warm_up`.

        Raises `ConfigurationError` if its rows are not as wide as the buffer's.
        """
        if adapter.fat_dim != self.blocks.fat_dim:
            raise ConfigurationError(
                f"the compiled encoder {adapter.name} makes rows of {adapter.fat_dim}, and the model's own makes rows "
                f"of {self.blocks.fat_dim}. Set vllm_neuron_cache.compiled_encoder to false."
            )
        encoder = StaticEncoder(
            adapter, weights, self.blocks, self._writer, self._lane, attention_block=attention_block, ranks=ranks
        )
        self._encoders.append(encoder)
        return encoder

    def stats(self) -> RuntimeStats:
        return RuntimeStats(
            self._writer.items_written,
            self._writer.rows_written,
            self._rows_read,
            self._lane.num_compiled,
            self._lane.num_recompiles_refused,
            *map(sum, zip((0, 0, 0), *(encoder.work for encoder in self._encoders))),
        )

    def warm_up(self) -> None:
        """Compiles every bucket of every graph and seals the lane. Writes the scratch block and the dummy row only."""

        def merge_args(bucket: int) -> tuple:
            return self._targets.hidden, self._targets.deepstack, self.blocks.buffer, *self._pairs.send(bucket)

        self._planner.src_rows.fill(self.blocks.scratch_row)
        self._planner.dst_rows.fill(self._targets.max_step_tokens)
        self._writer.warm_up()
        if self._merge is not None:
            self._merge.warm_up(merge_args)
        for encoder in self._encoders:
            encoder.warm_up()
        self._lane.seal()

    def apply(self, step: EncoderCacheStep) -> None:
        """Follows the scheduler's decisions up to `step`. Raises `StepProtocolError` at a gap."""
        self.blocks.table.apply(step)

    def write(self, key: str, output: torch.Tensor) -> None:
        """Writes an encoder output `[num_tokens, fat_dim]` into the blocks reserved for `key`.

        Raises `EncoderOutputError` if there is no entry for `key` or the output does not fit it; nothing is written
        then, and the entry is marked as failed.
        """
        try:
            self._writer.write(key, output)
        except EncoderOutputError as error:
            self.fail(key, str(error))
            raise

    def encode(self, encoder: StaticEncoder, items: Mapping[str, EncoderItem]) -> list[str]:
        """Encodes items, by key, into the blocks reserved for them. Returns the keys of those that failed; they are
        marked as failed, and the others are written."""
        failures = encoder.encode(items)
        for key, failure in failures.items():
            self.fail(key, failure)
        return list(failures)

    def fail(self, key: str, failure: str) -> None:
        """Notes that the item has no rows, and why. Whoever reads it gets an `EncoderOutputError` with that message."""
        entry = self.blocks.table.get(key)
        if entry is not None:
            self.blocks.table.mark_failed(entry, failure)

    def plan_reads(self, windows: Sequence[ReadWindow], num_step_tokens: int) -> ReadPlan:
        """Row lists for a step. Raises `EncoderCacheReadError` or `EncoderOutputError`, naming request and item, if a
        window cannot be read."""
        return self._planner.plan(windows, num_step_tokens, self.blocks.table)

    def merge(self, plan: ReadPlan) -> None:
        """Runs the merge graph on the plan made last, or hands the plan over to the model's. Mutates the targets."""
        targets = self._targets
        if self._merge is None:
            targets.fill(plan)
        else:
            pairs = self._pairs.send(plan.bucket)
            self._merge.run(plan.bucket, targets.hidden, targets.deepstack, self.blocks.buffer, *pairs)
        self._rows_read += plan.num_rows

    def clear(self) -> None:
        """Drops every entry; the rows stay in the buffer, and nothing refers to them any more."""
        self.blocks.table.clear()

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
