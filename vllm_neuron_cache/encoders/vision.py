"""Items of Qwen's vision processors: images and videos as patches in the order of the merger."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from vllm_neuron_cache.encoders.interface import EncoderItem

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
