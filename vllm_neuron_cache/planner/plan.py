"""The computation: how many blocks, what they cost, what fits into them."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_neuron_cache.config import EncoderNeuronConfig, NeuronCacheConfig
from vllm_neuron_cache.encoder_cache.item import ItemLayout, item_layout
from vllm_neuron_cache.encoder_cache.sizing import (
    CacheGeometry,
    cache_geometry,
    choose_block_size,
    num_blocks_needed,
)
from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.items import MediaSize
from vllm_neuron_cache.planner.model import DTYPE_BYTES, ModelShape
from vllm_neuron_cache.planner.tokens import (
    audio_tokens,
    image_tokens,
    largest_item_tokens,
    smallest_image_tokens,
    video_frame_tokens,
)
from vllm_neuron_cache.planner.values import (
    GIB,
    BlockSizePlan,
    BufferPlan,
    Plan,
    PlanRequest,
    Simulator,
    SizePlan,
    StageKeyPlan,
)

BLOCK_SIZES = (256, 128, 64, 32, 16)
"""Cache blocks worth comparing beside the encoder's own, in token rows."""

_MAX_SIMULATED_ITEMS = 10_000
"""A longer list of items is thinned out, in its proportions."""


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One size of media, in token rows."""

    size: MediaSize
    frame_tokens: tuple[int, ...]
    """Rows of each merged frame; one number for an image and a clip."""
    frames_apart: bool
    """Whether the cache lays the item out by frames."""

    @property
    def tokens(self) -> int:
        return sum(self.frame_tokens)

    def layout(self, geometry: CacheGeometry) -> ItemLayout:
        return item_layout(
            self.tokens,
            self.frame_tokens if self.frames_apart else (),
            encoder_block_size=geometry.encoder_block_size,
            block_size=geometry.block_size,
            max_blocks=geometry.num_item_blocks,
        )


@dataclass(frozen=True, kw_only=True)
class _Mix:
    """All items, in the proportions of their counts."""

    items: tuple[_Item, ...]

    @property
    def count(self) -> int:
        return sum(item.size.count for item in self.items)

    @property
    def tokens(self) -> int:
        return sum(item.size.count * item.tokens for item in self.items)

    def blocks(self, geometry: CacheGeometry) -> int:
        return sum(item.size.count * item.layout(geometry).num_blocks for item in self.items)

    def resident(self, geometry: CacheGeometry) -> int:
        return geometry.num_item_blocks * self.count // self.blocks(geometry)


def make_plan(shape: ModelShape, request: PlanRequest, simulate: Simulator | None = None) -> Plan:
    """Plans a deployment. `simulate` gives the hits; without one, or without `request.reuse`, they are left out.

    Raises `PlannerError` for sizes that the processor refuses and for a budget of less than two blocks, and
    `ConfigurationError` for an attention block that the merger does not divide.
    """
    mix = _Mix(items=tuple(_item(shape, size) for size in request.sizes))
    max_model_len = request.max_model_len or shape.max_model_len
    largest = largest_item_tokens(shape, max_model_len)
    budget = max(request.max_num_batched_tokens, *largest.values())
    geometry = _geometry(shape, request, budget, largest)
    needed = num_blocks_needed(geometry.block_size, budget, largest.values())
    sizes = tuple(_size_plan(item, geometry, budget) for item in mix.items)
    simulated = None
    if simulate is not None and request.reuse is not None:
        simulated = simulate(geometry, _simulated_items(sizes), request.reuse)
    return Plan(
        shape=shape,
        request=request,
        geometry=geometry,
        num_blocks_needed=needed,
        encoder_cache_size=budget,
        largest_items=largest,
        buffer=_buffer(shape, request, mix, geometry),
        buffers=tuple(
            _buffer(shape, request, mix, geometry._replace(num_blocks=blocks))
            for blocks in sorted({needed, 2 * needed, 4 * needed, geometry.num_blocks})
        ),
        sizes=sizes,
        block_sizes=_block_sizes(mix, geometry),
        mean_item_tokens=mix.tokens / mix.count,
        simulated=simulated,
        stage=_stage_plans(shape, request),
        warnings=_warnings(mix, geometry, needed, sizes),
    )


def stage_cache_bytes(num_blocks: int, block_size: int, width: int, dtype: str) -> int:
    """Bytes of one key's rows `[num_blocks, block_size, width]` on the host. Raises `PlannerError` for a dtype."""
    if dtype not in DTYPE_BYTES:
        raise PlannerError(f"dtype is {dtype!r}; give one of {', '.join(DTYPE_BYTES)}.")
    return num_blocks * block_size * width * DTYPE_BYTES[dtype]


def _item(shape: ModelShape, size: MediaSize) -> _Item:
    if size.seconds is not None:
        frame_tokens: tuple[int, ...] = (audio_tokens(shape, size.seconds),)
    elif size.frames is not None:
        frame_tokens = video_frame_tokens(shape, size.width, size.height, size.frames)
    else:
        frame_tokens = (image_tokens(shape, size.width, size.height),)
    return _Item(size=size, frame_tokens=frame_tokens, frames_apart=shape.frames_apart)


def _geometry(shape: ModelShape, request: PlanRequest, budget: int, largest: dict[str, int]) -> CacheGeometry:
    def geometry(block_size: int, num_blocks: int | None) -> CacheGeometry:
        config = NeuronCacheConfig(
            encoder=EncoderNeuronConfig(encoder_attention_block_size=request.encoder_attention_block_size),
            encoder_cache_block_size=block_size,
            encoder_cache_num_blocks_exact=num_blocks,
        )
        return cache_geometry(
            config,
            merge_factor=shape.merge_factor,
            encoder_cache_size=budget,
            largest_item_tokens=largest.values(),
        )

    encoder_block_size = geometry(1, None).encoder_block_size  # the same for every block size, and 1 divides all
    block_size = choose_block_size(encoder_block_size, smallest_image_tokens(shape))
    if request.hbm_gib is None:
        return geometry(block_size, None)
    block_bytes = block_size * shape.row_bytes
    num_blocks = int(request.hbm_gib * GIB) // block_bytes
    if num_blocks < 2:
        raise PlannerError(
            f"{request.hbm_gib:g} GiB hold {num_blocks} blocks of {block_bytes / 2**20:.2f} MiB ({block_size} rows of "
            f"{shape.fat_dim} in {shape.dtype}), and the cache needs at least two, of which one is scratch. "
            f"Give at least {2 * block_bytes / GIB:.6f} GiB."
        )
    return geometry(block_size, num_blocks)


def _size_plan(item: _Item, geometry: CacheGeometry, budget: int) -> SizePlan:
    blocks = item.layout(geometry).num_blocks
    return SizePlan(
        size=item.size,
        tokens=item.tokens,
        blocks=blocks,
        resident=geometry.num_item_blocks // blocks,
        # The two checks that a request meets: the scheduler's in rows, and the cache's in blocks.
        refused=item.tokens > budget or blocks > geometry.num_item_blocks,
    )


def _block_sizes(mix: _Mix, geometry: CacheGeometry) -> tuple[BlockSizePlan, ...]:
    coarse = geometry.encoder_block_size
    candidates = {coarse, geometry.block_size} | {size for size in BLOCK_SIZES if coarse % size == 0}
    return tuple(_block_size_plan(mix, geometry, size) for size in sorted(candidates, reverse=True))


def _block_size_plan(mix: _Mix, chosen: CacheGeometry, block_size: int) -> BlockSizePlan:
    # As many bytes as the chosen geometry has, which is as many rows.
    num_blocks = chosen.num_blocks * chosen.block_size // block_size
    enough = num_blocks >= 2
    geometry = chosen._replace(num_blocks=max(num_blocks, 2), block_size=block_size)
    return BlockSizePlan(
        block_size=block_size,
        num_blocks=num_blocks if enough else 0,
        padding_waste=1 - mix.tokens / (mix.blocks(geometry) * block_size),
        resident=mix.resident(geometry) if enough else 0,
    )


def _buffer(shape: ModelShape, request: PlanRequest, mix: _Mix, geometry: CacheGeometry) -> BufferPlan:
    per_rank = geometry.num_blocks * geometry.block_size * shape.row_bytes
    return BufferPlan(
        num_blocks=geometry.num_blocks,
        bytes_per_rank=per_rank,
        bytes_total=per_rank * request.tensor_parallel_size,
        resident=mix.resident(geometry),
    )


def _simulated_items(sizes: Sequence[SizePlan]) -> list[int]:
    total = sum(plan.size.count for plan in sizes)
    scale = min(1.0, _MAX_SIMULATED_ITEMS / total)
    return [plan.tokens for plan in sizes for _ in range(max(1, round(plan.size.count * scale)))]


def _stage_plans(shape: ModelShape, request: PlanRequest) -> tuple[StageKeyPlan, ...]:
    def size(blocks: int, width: int, dtype: str) -> int:
        return stage_cache_bytes(blocks, request.kv_block_size, width, dtype)

    return tuple(
        StageKeyPlan(
            name=key.name,
            width=key.width,
            dtype=key.dtype,
            bytes_per_block=size(1, key.width, key.dtype),
            bytes=None if request.kv_blocks is None else size(request.kv_blocks, key.width, key.dtype),
        )
        for key in shape.stage_keys
    )


def _warnings(mix: _Mix, geometry: CacheGeometry, needed: int, sizes: Sequence[SizePlan]) -> tuple[str, ...]:
    warnings = []
    if geometry.num_blocks < needed:
        warnings.append(
            f"{geometry.num_blocks} blocks are fewer than the {needed} that hold every item vLLM admits: requests with "
            f"an item of more than {geometry.num_item_blocks} blocks "
            f"({geometry.num_item_blocks * geometry.block_size} rows) will be refused."
        )
    refused = [plan.size.label for plan in sizes if plan.refused]
    if refused:
        warnings.append(f"Refused on arrival: {', '.join(refused)}.")
    long = [
        item.size.label
        for item in mix.items
        if item.size.modality != "audio" and max(item.frame_tokens) > geometry.encoder_block_size
    ]
    if long:
        warnings.append(
            f"An image or frame is larger than one attention block of the encoder ({geometry.encoder_block_size} "
            f"rows): {', '.join(long)}. An encoder compiled for attention within a block computes it differently from "
            "stock; a larger encoder_attention_block_size avoids that."
        )
    return tuple(warnings)
