"""Items of Qwen's vision processors: images and videos as patches in the order of the merger."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from vllm_neuron_cache.encoders.interface import EncoderItem
from vllm_neuron_cache.errors import ConfigurationError

_FIELDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}

_MAX_TABLES = 16
"""Grids whose tables are kept. Those of 2048 patches take 10 MiB at a width of 1152 in float32, and the pictures of one
client tend to have few sizes."""

FrameTables = Callable[[int, int], tuple[torch.Tensor, ...]]
"""From the height and width of a frame in patches to what the host prepares for it beside the patches."""


class VisionItems:
    """Cuts items into frames. Keeps the tables of the last grids."""

    def __init__(
        self, frame_tables: FrameTables, prepare_patches: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """`prepare_patches`: what becomes of a frame's patches `[patches, width]` on the host, if anything."""
        self._prepare = prepare_patches or (lambda patches: patches)
        self._tables = lru_cache(maxsize=_MAX_TABLES)(frame_tables)

    def item(self, modality: str, data: Mapping[str, Any]) -> EncoderItem | None:
        """As `EncoderAdapter.item`: every temporal frame is a segment."""
        pixels_name, grid_name = _FIELDS[modality]
        if pixels_name not in data:
            return None
        pixels: torch.Tensor = data[pixels_name]
        num_frames, height, width = (int(size) for size in data[grid_name].flatten().tolist())
        frame = height * width
        if len(pixels) != num_frames * frame:
            raise ValueError(f"{len(pixels)} patches for a grid of {num_frames} x {height} x {width}")

        def inputs(segment: int) -> tuple[torch.Tensor, ...]:
            patches = self._prepare(pixels[segment * frame : (segment + 1) * frame])
            return patches, *self._tables(height, width)

        return EncoderItem((frame,) * num_frames, inputs)

    def forget(self) -> None:
        """Drops the tables."""
        self._tables.cache_clear()


_INPUT_NORMS = ("FusedInputNorm", "FusedMMInputNorm", "IdentityInputNorm")
"""Classes of vLLM's, of 0.29 to 0.32."""


def input_norm(tower: Any, channels: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What becomes of pixels `[patches, width]` before the tower's first layer: vLLM has some towers scale them, by
    channel, instead of the processor. It is done on the host, where the pixels are.

    Raises `ConfigurationError` for a tower that does something unknown to them.
    """
    norm = getattr(tower, "input_norm", None)
    if norm is not None and type(norm).__name__ not in _INPUT_NORMS:
        raise ConfigurationError(
            f"the model's tower prepares pixels by {type(norm).__name__}, which the compiled encoder does not know. "
            "Set vllm_neuron_cache.compiled_encoder to false."
        )

    def scaled(patches: torch.Tensor) -> torch.Tensor:
        norm = getattr(tower, "input_norm", None)
        if getattr(norm, "is_identity", False) or getattr(norm, "weight", None) is None:
            return patches
        weight, bias = (tensor.detach().cpu()[:, None] for tensor in (norm.weight, norm.bias))
        return (patches.to(weight.dtype).unflatten(1, (channels, -1)) * weight + bias).flatten(1)

    return scaled


def merge_order(height: int, width: int, merge_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 row and column of each patch of a frame, `[height * width]`, in the order of the merger: the patches that
    become one token follow one another."""
    grid = torch.arange(height * width).view(height // merge_size, merge_size, width // merge_size, merge_size)
    order = grid.transpose(1, 2).flatten()
    return order // width, order % width


def rotary_tables(cos_sin: torch.Tensor, height: int, width: int, merge_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[height * width, head_dim / 2]` of a frame's patches: those of the row, then those of the column.

    `cos_sin` `[positions, head_dim / 2]` is a rotary embedding's table for a quarter of the head each, cos and sin side
    by side.
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    rows, columns = merge_order(height, width, merge_size)
    return torch.cat((cos[rows], cos[columns]), dim=-1), torch.cat((sin[rows], sin[columns]), dim=-1)


def interpolated_positions(table: torch.Tensor, height: int, width: int, merge_size: int) -> torch.Tensor:
    """float32 `[height * width, C]`: position embeddings of a square grid, `[side * side, C]`, stretched over a frame
    corner to corner, bilinearly."""
    side = math.isqrt(len(table))
    square = table.float().T.view(1, -1, side, side)
    stretched = F.interpolate(square, size=(height, width), mode="bilinear", align_corners=True)[0]
    rows, columns = merge_order(height, width, merge_size)
    return stretched[:, rows, columns].T


class HostTables:
    """A tower's tables on the host, whatever device the tower is on: a picture of a new size then needs nothing of the
    device. Copied at first use, and after `forget`."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def cos_sin(self) -> torch.Tensor:
        """Of the rotary embedding."""
        return self._copy("cos_sin", lambda: self._tower.rotary_pos_emb.cos_sin_cache)

    @property
    def positions(self) -> torch.Tensor:
        """Weights of the position embeddings."""
        return self._copy("positions", lambda: self._tower.pos_embed.weight)

    def forget(self) -> None:
        """The tower has other weights now."""
        self._copies.clear()

    def _copy(self, name: str, table: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._copies:
            self._copies[name] = table().detach().cpu()
        return self._copies[name]
