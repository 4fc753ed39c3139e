"""An encoder of a few lines on cache blocks of its own, for the tests of what is around an encoder."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks
from vllm_neuron_cache.encoder_cache.item import ItemLayout, item_layout
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import Allocation, EncoderCacheStep, StepDelta
from vllm_neuron_cache.encoders.attention import attend, segment_mask
from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderInput, EncoderItem
from vllm_neuron_cache.encoders.static_encoder import EncoderRanks, StaticEncoder
from vllm_neuron_cache.encoders.weights import ModelWeights
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.writer import EncoderCacheWriter

PATCH, WIDTH, FAT = 6, 8, 12
PER_ROW = 4
SIZES = (16, 24, 32)
"""Positions of the attention blocks: at most 8 rows."""


class Tower(torch.nn.Module):
    """The model's own encoder: one layer of attention within a segment, then four positions to a row."""

    def __init__(self, per_row: int = PER_ROW) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = torch.nn.Linear(PATCH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.out = torch.nn.Linear(WIDTH * per_row, FAT)
        self.per_row = per_row
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, patches: torch.Tensor, halves: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """One segment: `[positions, PATCH]`, `[2 * positions, 1]` and `[positions]`, to `[rows, FAT]`."""
        x = self.norm(self.embed(patches) + halves.view(len(patches), 2).sum(1, keepdim=True)) * turns[:, None]
        x = x + torch.softmax(x @ x.T * WIDTH**-0.5, -1) @ x
        rows = len(x) // self.per_row
        return self.out(x[: rows * self.per_row].reshape(rows, -1))


class SmallEncoder(EncoderAdapter):
    """`Tower` for blocks. `on_forward` is called in every launch of lane eager, as the graph runs."""

    name = "small"
    modalities = ("image",)
    max_segments = 3

    def __init__(self, tower: Tower, *, max_segments: int = 3) -> None:
        super().__init__(torch.float32, tower)
        self.max_segments = max_segments
        self.positions_per_row = tower.per_row
        self.fat_dim = FAT
        self.attention_cost = 0.01
        self.inputs = (
            EncoderInput("patches", PATCH, torch.float32),
            EncoderInput("halves", 1, torch.float32, per_position=2),
            EncoderInput("turns", 0, torch.float32),
        )
        self.weight_shapes = {name: tuple(tensor.shape) for name, tensor in tower.named_parameters()}
        self.on_forward: Callable[[], None] = lambda: None
        self.num_forgotten = 0

    def block_positions(self, attention_block: int) -> tuple[int, ...]:
        return tuple(size for size in SIZES if size <= attention_block)

    def forward(self, inputs, segment_ids, weights):
        self.on_forward()
        patches, halves, turns = inputs
        x = weights.linear(patches, "embed") + halves.unflatten(1, (-1, 2)).sum((2, 3))[:, :, None]
        x = weights.layer_norm(x, "norm", 1e-5) * turns[:, :, None]
        heads = x[:, :, None]
        x = x + attend(heads, heads, heads, segment_mask(segment_ids, x.dtype))
        return weights.linear(x.unflatten(1, (-1, self.positions_per_row)).flatten(2), "out")

    def work_bytes(self, positions: int) -> int:
        return 4 * (4 * positions**2 + 8 * positions * WIDTH)

    def item(self, modality, data):
        raise NotImplementedError

    def forget(self) -> None:
        self.num_forgotten += 1


def random_item(lengths: Sequence[int], seed: int) -> EncoderItem:
    """An item of segments of so many positions."""
    generator = torch.Generator().manual_seed(seed)
    segments = [
        (
            torch.randn(length, PATCH, generator=generator),
            torch.randn(2 * length, 1, generator=generator),
            torch.randn(length, generator=generator),
        )
        for length in lengths
    ]
    return EncoderItem(tuple(lengths), lambda segment: segments[segment])


def rows_of(tower: Tower, item: EncoderItem) -> torch.Tensor:
    """What the model's own encoder makes of an item, one segment after the other."""
    return torch.cat([tower(*item.inputs(segment)) for segment in range(len(item.segments))])


class Rank:
    """A static encoder with blocks of its own, and a scheduler's hand that reserves entries in them."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 41,
        attention_block: int = SIZES[-1],
        lane: str = "eager",
        ranks: EncoderRanks | None = None,
        warm: bool = True,
        adapter: EncoderAdapter | None = None,
        call_layers: bool = False,
    ) -> None:
        self.adapter = adapter or SmallEncoder(Tower())
        self.tower = self.adapter.tower
        geometry = CacheGeometry(num_blocks, block_size, attention_block // self.adapter.positions_per_row)
        self.blocks = EncoderCacheBlocks(
            geometry, fat_dim=self.adapter.fat_dim, dtype=self.adapter.dtype, device=torch.device("cpu")
        )
        lane = make_lane(lane)
        self.writer = EncoderCacheWriter(self.blocks, lane)
        self.weights = ModelWeights(self.tower, self.adapter.weight_shapes, self.adapter.dtype, call_layers=call_layers)
        self.encoder = StaticEncoder(
            self.adapter,
            self.weights,
            self.blocks,
            self.writer,
            lane,
            attention_block=attention_block,
            ranks=ranks or EncoderRanks(),
        )
        self.lane = lane
        self._seq = self._next_block = 0
        if warm:
            self.writer.warm_up()
            self.encoder.warm_up()
            lane.seal()
        self.reset()

    def reserve(self, rows: dict[str, tuple[int, ...]]) -> None:
        """Entries for items of frames of so many rows, in blocks from the first free one on; none is freed."""
        geometry = self.blocks.geometry
        allocated = []
        for key, frames in rows.items():
            layout: ItemLayout = item_layout(
                sum(frames),
                frames,
                encoder_block_size=geometry.encoder_block_size,
                block_size=geometry.block_size,
                max_blocks=geometry.num_item_blocks,
            )
            ids = tuple(range(self._next_block, self._next_block + layout.num_blocks))
            assert ids[-1] < geometry.num_item_blocks, "the test's items do not fit"
            self._next_block += layout.num_blocks
            allocated.append(Allocation(key, self._seq + 7, ids, layout.tokens_per_block))
        self._seq += 1
        delta = StepDelta(self._seq, 0, (), tuple(allocated))
        self.blocks.table.apply(EncoderCacheStep(self._seq, self._seq - 1, 0, (delta,)))

    def reset(self) -> None:
        """Takes all entries away, and their rows."""
        self.blocks.table.clear()
        self._next_block = 0
        self.blocks.buffer.copy_(torch.rand(self.blocks.buffer.shape, generator=torch.Generator().manual_seed(11)))

    def reserve_for(self, items: dict[str, EncoderItem]) -> None:
        per_row = self.adapter.positions_per_row
        self.reserve({key: tuple(length // per_row for length in item.segments) for key, item in items.items()})

    def entry(self, key: str) -> Any:
        return self.blocks.table.get(key)

    def rows(self, key: str) -> torch.Tensor:
        return self.blocks.buffer.flatten(0, 1)[self.entry(key).rows.tolist()]

    def holds(self, key: str) -> bool:
        entry = self.entry(key)
        return self.blocks.holds(key, entry.generation, entry.block_ids)

    def without_scratch(self) -> torch.Tensor:
        """A copy of the rows that items can own."""
        return self.blocks.buffer[:-1].flatten(0, 1).clone()

    def tags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the tags of the blocks that items can own."""
        return self.blocks.mm_hash_tags[:-1].clone(), self.blocks.generations[:-1].clone()
