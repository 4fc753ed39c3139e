"""What a model must provide so that its encoder runs as a static graph.

An implementation for one family is about a hundred lines: the shapes of the weights, the forward pass over one batch of
attention blocks, and how an item's data is cut into segments. Packing, staging, masks for padding, the write into the
cache, flags, buckets and warm-up are the same for all and are not its business.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from vllm_neuron_cache.encoders.weights import BoundWeights, Shapes


class EncoderInput(NamedTuple):
    """One input that the host prepares for each position."""

    name: str
    width: int
    """Elements of each position's row; 0 for a single number, without a dimension of its own."""
    dtype: torch.dtype
    per_position: int = 1
    """Rows for each position: 2 for an encoder whose first layers halve the length."""

    def example(self, num_positions: int) -> torch.Tensor:
        """Zeros for so many positions, on torch's default device."""
        rows = num_positions * self.per_position
        return torch.zeros((rows, self.width) if self.width else rows, dtype=self.dtype)


class EncoderItem(NamedTuple):
    """One item on its way into an encoder."""

    segments: tuple[int, ...]
    """Positions of each segment, in the order of the item's rows. A segment is what attends to itself alone: an image,
    a frame of a video, a chunk of sound. Where several may share a block, each is a multiple of `positions_per_row`."""
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    """The inputs of a segment, by its number: one tensor `[positions * per_position, width]` or shorter for each of
    `EncoderAdapter.inputs`. Rows that are missing are zero."""


class EncoderAdapter(abc.ABC):
    """An encoder of one family of models, with or without a loaded model behind it.

    Without one (`tower` None) it has shapes only, which is what compiling ahead of time needs.
    """

    name: ClassVar[str]
    """In names of graphs."""
    modalities: ClassVar[tuple[str, ...]]
    """Of vLLM's names, those that go through this encoder."""
    max_segments: ClassVar[int] = 32
    """Segments that may share an attention block; 1 where each needs one of its own."""

    max_blocks: ClassVar[int] = 4
    """Blocks of the largest size in one launch; a few large ones keep every core and engine busy."""

    inputs: tuple[EncoderInput, ...]
    weight_shapes: Shapes
    """By path in the tower."""
    positions_per_row: int
    """Positions that become one row of the output; a segment's last positions that do not fill a row are dropped."""
    fat_dim: int
    """Width of a row, deepstack levels included."""
    attention_cost: float
    """What attention costs beside the rest of the work: a block of p positions costs p * (1 + attention_cost * p)."""

    def __init__(self, dtype: torch.dtype, tower: torch.nn.Module | None) -> None:
        self.dtype = dtype
        self.tower = tower

    @abc.abstractmethod
    def block_positions(self, attention_block: int) -> tuple[int, ...]:
        """Sizes of attention blocks to compile for, in positions, where the largest may have `attention_block`
        (`encoder_attention_block_size`)."""

    @abc.abstractmethod
    def forward(
        self, inputs: tuple[torch.Tensor, ...], segment_ids: torch.Tensor, weights: BoundWeights
    ) -> torch.Tensor:
        """The encoder over n blocks of P positions; traced, so it obeys the rules of `graphs.check`.

        Args:
            inputs: for each of `self.inputs` `[n, P * per_position, width]`, or without the last dimension where its
                width is 0. Zero where there is no segment.
            segment_ids: int32 `[n, P]`: which of its block's segments a position belongs to, from 0 on; -1 where none.
            weights: those of `weight_shapes`, by name.

        Returns `[n, P / positions_per_row, fat_dim]`. What stands in rows of no segment does not matter.
        """

    @abc.abstractmethod
    def work_bytes(self, positions: int) -> int:
        """Bytes that the forward pass takes at most for one more block of so many positions, beside weights and inputs:
        a bound that a copy of the cache would break, not a measure."""

    @abc.abstractmethod
    def item(self, modality: str, data: Mapping[str, Any]) -> EncoderItem | None:
        """An item of vLLM's processor, by the names of its fields. None if it holds embeddings instead of media.

        Needs a tower. The item may refer to tensors of `data`.
        """

    def forget(self) -> None:  # noqa: B027 - most have computed nothing
        """The tower has other weights now: drops what was computed from them."""


def segment_rows(positions: int, positions_per_row: int) -> int:
    """Rows that a segment gives."""
    return positions // positions_per_row
