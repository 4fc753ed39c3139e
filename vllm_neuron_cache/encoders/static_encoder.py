"""Runs items through an encoder's graphs, straight into the cache's blocks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks
from vllm_neuron_cache.encoder_cache.packing import Bucket, Ladder, Launch, Placement, pack
from vllm_neuron_cache.encoder_cache.table import Entry
from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderItem, segment_rows
from vllm_neuron_cache.encoders.weights import EncoderWeights, WeightForm
from vllm_neuron_cache.errors import EncoderOutputError
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.host_arrays import HostArrays
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, doubling_buckets
from vllm_neuron_cache.graphs.vision_encoder import Gather, encoder_spec
from vllm_neuron_cache.writer import EncoderCacheWriter


class EncoderRanks(NamedTuple):
    """Ranks that share the work of one encoder: each encodes its part of the blocks and all write all rows."""

    count: int = 1
    rank: int = 0
    gather: Gather | None = None


ONE_RANK = EncoderRanks()


class EncoderWork(NamedTuple):
    """What an encoder did since it started."""

    launches: int
    positions_live: int
    positions_computed: int
    """Padding included."""


def encoder_ladder(adapter: EncoderAdapter, attention_block: int, num_ranks: int = 1) -> Ladder:
    """What an encoder is compiled for: every size of block by itself, and the largest several at once. Each rank has
    the same number of blocks."""
    sizes = adapter.block_positions(attention_block)
    counts = [number * num_ranks for number in doubling_buckets(1, adapter.max_blocks)]
    buckets = [Bucket(size, counts[0]) for size in sizes] + [Bucket(sizes[-1], number) for number in counts[1:]]
    return Ladder(tuple(buckets), adapter.max_segments, adapter.attention_cost)


def encoder_specs(
    adapter: EncoderAdapter, form: WeightForm, buffer: BufferShape, ladder: Ladder, ranks: EncoderRanks
) -> dict[int, GraphSpec]:
    """The graphs of a ladder, by the positions of their blocks."""
    return {
        positions: encoder_spec(
            adapter,
            form,
            buffer,
            positions=positions,
            buckets=tuple(sorted(b.num_blocks for b in ladder.buckets if b.positions == positions)),
            num_ranks=ranks.count,
            gather=ranks.gather,
        )
        for positions in ladder.block_positions
    }


class StaticEncoder:
    """COLD -> WARM: an adapter's encoder in all its buckets, with the arrays that every launch uses again."""

    def __init__(
        self,
        adapter: EncoderAdapter,
        weights: EncoderWeights,
        blocks: EncoderCacheBlocks,
        writer: EncoderCacheWriter,
        lane: Lane,
        *,
        attention_block: int,
        ranks: EncoderRanks = ONE_RANK,
    ) -> None:
        """`attention_block` is `encoder_attention_block_size`, in positions."""
        self.adapter = adapter
        self.ladder = encoder_ladder(adapter, attention_block, ranks.count)
        self._weights = weights
        self._blocks = blocks
        self._writer = writer
        self._ranks = ranks
        buffer = BufferShape(*blocks.buffer.shape, blocks.buffer.dtype)
        specs = encoder_specs(adapter, weights.form, buffer, self.ladder, ranks)
        self._graphs = {positions: BucketedGraph(spec, lane) for positions, spec in specs.items()}
        self._staged = _StagedInputs(adapter, self.ladder, blocks, ranks)
        self.work = EncoderWork(0, 0, 0)

    @property
    def graphs(self) -> tuple[BucketedGraph, ...]:
        return tuple(self._graphs.values())

    def warm_up(self) -> None:
        """Lowers every graph in every bucket. Writes the scratch block only."""
        for positions, graph in self._graphs.items():
            graph.warm_up(lambda bucket, positions=positions: self._args(Launch(Bucket(positions, bucket), ()), []))

    def encode(self, items: Mapping[str, EncoderItem]) -> dict[str, str]:
        """Encodes items, by key, into the entries reserved for them, together. Mutates buffer, tags and entries.

        Returns what failed, with the message of an `EncoderOutputError`: an item without an entry, of another number of
        rows or larger than an attention block, or one whose rows are not finite. Such an item is marked as failed, and
        the others are not affected, even where they shared a block with it. An exception of a graph leaves every entry
        unwritten.
        """
        failures: dict[str, str] = {}
        work: dict[str, _Work] = {}
        for key, item in items.items():
            try:
                work[key] = self._open(key, item)
            except EncoderOutputError as error:
                failures[key] = str(error)
        bad = self._run(list(work.values()))
        if len(work) > 1:
            # Not a number times nothing is not a number: one item spoils those in the same block.
            bad = [key for key in bad if self._run([work[key]])]
        for key, (_, entry, _) in work.items():
            if key in bad:
                failures[key] = f"item {key}: rows of the {entry.num_tokens} that the encoder made hold NaN or infinity"
            else:
                self._writer.close(entry)
        return failures

    def forget_weights(self) -> None:
        """The model has other weights now."""
        self._weights.forget()
        self.adapter.forget()

    def _open(self, key: str, item: EncoderItem) -> "_Work":
        rows = [segment_rows(positions, self.adapter.positions_per_row) for positions in item.segments]
        largest = max(item.segments, default=0)
        if largest > self.ladder.largest_segment:
            raise EncoderOutputError(
                f"item {key}: its largest image or frame has {largest} patches, and the compiled encoder's attention "
                f"block {self.ladder.largest_segment}. Raise encoder_attention_block_size, or have the processor make "
                "smaller ones.",
                key=key,
            )
        return _Work(item, self._writer.open(key, sum(rows)), np.cumsum([0, *rows]))

    def _run(self, work: "Sequence[_Work]") -> list[str]:
        """Writes rows of the items, and returns the keys of those with rows that are not finite."""
        launches = pack([item.segments for item, _, _ in work], self.ladder)
        # All flags at the end: on a device, looking at one waits for the launches before it.
        flags = [
            self._graphs[run.bucket.positions].run(run.bucket.num_blocks, *self._args(run, work)) for run in launches
        ]
        bad: dict[str, None] = {}
        for launch, (finite,) in zip(launches, flags):
            finite = finite.cpu().numpy()
            for placement, slot in _slots(launch):
                if not finite[placement.block, slot]:
                    bad[work[placement.item].entry.key] = None
            live = sum(placement.length for placement in launch.placements)
            computed = launch.bucket.positions * launch.bucket.num_blocks
            self.work = EncoderWork(*(a + b for a, b in zip(self.work, (1, live, computed))))
        return list(bad)

    def _args(self, launch: Launch, work: "Sequence[_Work]") -> tuple[Any, ...]:
        return self._blocks.buffer, *self._staged.stage(launch, work), self._weights.tensors


class _Work(NamedTuple):
    """An item, the entry that takes its rows, and where in the entry the rows of each segment begin."""

    item: EncoderItem
    entry: Entry
    first_rows: np.ndarray


class _StagedInputs:
    """The arguments of a launch that the host prepares: inputs, segments, and where rows go."""

    def __init__(
        self, adapter: EncoderAdapter, ladder: Ladder, blocks: EncoderCacheBlocks, ranks: EncoderRanks
    ) -> None:
        self._adapter = adapter
        self._blocks = blocks
        self._ranks = ranks
        device = blocks.buffer.device
        sizes = sorted({bucket.positions * bucket.num_blocks for bucket in ladder.buckets})
        own_sizes = [size // ranks.count for size in sizes]
        per_row = adapter.positions_per_row
        self._block_ids, self._block_rows = np.zeros((2, sizes[-1] // per_row), dtype=np.int32)
        self._places = HostArrays((self._block_ids, self._block_rows), [size // per_row for size in sizes], device)
        self._segment_ids = np.zeros(sizes[-1], dtype=np.int32)
        self._segments = HostArrays((self._segment_ids,), sizes, device)
        self._own_segment_ids = np.zeros(own_sizes[-1], dtype=np.int32)
        self._own_segments = HostArrays((self._own_segment_ids,), own_sizes, device)
        self._inputs = [given.example(own_sizes[-1]) for given in adapter.inputs]
        self._sent = [
            HostArrays((tensor,), [size * given.per_position for size in own_sizes], device)
            for tensor, given in zip(self._inputs, adapter.inputs)
        ]

    def stage(self, launch: Launch, work: Sequence[_Work]) -> tuple[Any, ...]:
        """The graph's arguments between the buffer and the weights. Overwrites those of the launch before."""
        positions, num_blocks = launch.bucket
        per_row, block_size = self._adapter.positions_per_row, self._blocks.geometry.block_size
        num_positions = positions * num_blocks
        own_blocks = num_blocks // self._ranks.count
        own_first, own_positions = self._ranks.rank * own_blocks, positions * own_blocks
        self._segment_ids[:num_positions] = -1
        self._block_ids[: num_positions // per_row] = self._blocks.geometry.scratch_block_id
        self._block_rows[: num_positions // per_row] = 0
        used = [0] * own_blocks
        for placement, slot in _slots(launch):
            item, entry, first_rows = work[placement.item]
            first = placement.block * positions + placement.first
            self._segment_ids[first : first + placement.length] = slot
            rows = entry.rows[first_rows[placement.segment] : first_rows[placement.segment + 1]]
            assert first % per_row == 0, (placement, per_row)
            places = slice(first // per_row, first // per_row + len(rows))
            np.floor_divide(rows, block_size, out=self._block_ids[places])
            np.remainder(rows, block_size, out=self._block_rows[places])
            block = placement.block - own_first
            if 0 <= block < own_blocks:
                used[block] = placement.first + placement.length
                self._fill(block * positions + placement.first, placement.length, item.inputs(placement.segment))
        for block, end in enumerate(used):
            # What an item left here before could be infinite, and zero times that is not zero.
            self._fill(block * positions + end, positions - end, ())
        segment_ids = self._segments.send(num_positions)
        if self._ranks.count > 1:
            own = own_first * positions
            self._own_segment_ids[:own_positions] = self._segment_ids[own : own + own_positions]
            segment_ids = *segment_ids, *self._own_segments.send(own_positions)
        inputs = tuple(
            sent.send(own_positions * given.per_position)[0] for sent, given in zip(self._sent, self._adapter.inputs)
        )
        return *self._places.send(num_positions // per_row), segment_ids, inputs

    def _fill(self, first: int, length: int, sources: tuple[torch.Tensor, ...]) -> None:
        """Writes a segment's inputs, and zeros where it has none."""
        for number, (target, given) in enumerate(zip(self._inputs, self._adapter.inputs)):
            rows = target[first * given.per_position : (first + length) * given.per_position]
            count = 0
            if sources:
                count = len(sources[number])
                rows[:count].copy_(sources[number])
            rows[count:].zero_()


def _slots(launch: Launch) -> list[tuple[Placement, int]]:
    """Each placement with its number within its block."""
    numbered = []
    block, slot = -1, 0
    for placement in launch.placements:
        slot = slot + 1 if placement.block == block else 0
        block = placement.block
        numbered.append((placement, slot))
    return numbered
