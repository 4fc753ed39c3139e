"""The vision encoder of Qwen2.5-VL, which is also that of Qwen2.5-Omni's thinker."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from vllm_neuron_cache.encoders.attention import attend, halving_blocks, segment_mask
from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderInput, EncoderItem
from vllm_neuron_cache.encoders.layers import ACTIVATIONS, clamp_float16, linear_shapes
from vllm_neuron_cache.encoders.vision import HostTables, VisionItems, input_norm, rotary_tables
from vllm_neuron_cache.encoders.weights import BoundWeights, Shapes
from vllm_neuron_cache.graphs.layers import rotate


class Qwen2_5VLEncoder(EncoderAdapter):
    """Patches, window numbers and rotary tables in, the merger's rows out.

    Follows `Qwen2_5_VisionTransformer` of vLLM 0.30 (vllm/model_executor/models/qwen2_5_vl.py), which sorts patches by
    window and sorts the rows back. Here patches stay in the order of the merger, and a mask does what the order did.
    """

    name = "qwen2_5_vl"
    modalities = ("image", "video")

    def __init__(
        self, config: Any, *, dtype: torch.dtype, tensor_parallel_size: int = 1, tower: torch.nn.Module | None = None
    ) -> None:
        """`config` is the model's `vision_config`. `tensor_parallel_size`: over how many ranks the tower's layers are
        cut."""
        super().__init__(dtype, tower)
        self._merge_size = config.spatial_merge_size
        self.positions_per_row = config.spatial_merge_size**2
        self._window = config.window_size // config.spatial_merge_size // config.patch_size
        self._hidden = config.hidden_size
        self._heads = config.num_heads // tensor_parallel_size
        self._head_dim = config.hidden_size // config.num_heads
        self._inner = config.intermediate_size // tensor_parallel_size
        self._depth = config.depth
        self._full_attention = frozenset(config.fullatt_block_indexes)
        self._activation = ACTIVATIONS[config.hidden_act]
        # The language model's part of the configuration has it, and the published models have this one.
        self._eps = 1e-6 if tower is None else tower.merger.ln_q.variance_epsilon
        self.fat_dim = config.out_hidden_size
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.inputs = (
            EncoderInput("patches", patch, dtype),
            EncoderInput("window_ids", 0, torch.int32),
            EncoderInput("cos", self._head_dim // 2, dtype),
            EncoderInput("sin", self._head_dim // 2, dtype),
        )
        self.weight_shapes = self._shapes(config, patch, tensor_parallel_size)
        # 8 C^2 + 6 C I operations for each position, 4 C for each pair of them, windows or not.
        self.attention_cost = 2 / (4 * config.hidden_size + 3 * config.intermediate_size)
        self._items = VisionItems(self._frame_tables, input_norm(tower, config.in_channels))
        self._host = HostTables(tower)

    def _shapes(self, config: Any, patch: int, ranks: int) -> Shapes:
        hidden, merged = self._hidden, self._hidden * self.positions_per_row
        heads, inner = self._heads * self._head_dim, self._inner
        shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (hidden, patch)}
        for layer in range(self._depth):
            block = f"blocks.{layer}"
            shapes |= {f"{block}.norm1.weight": (hidden,), f"{block}.norm2.weight": (hidden,)}
            shapes |= linear_shapes(f"{block}.attn.qkv", hidden, 3 * heads)
            shapes |= linear_shapes(f"{block}.attn.proj", heads, hidden)
            shapes |= linear_shapes(f"{block}.mlp.gate_up_proj", hidden, 2 * inner)
            shapes |= linear_shapes(f"{block}.mlp.down_proj", inner, hidden)
        shapes |= {"merger.ln_q.weight": (hidden,)}
        shapes |= linear_shapes("merger.mlp.0", merged, merged // ranks)
        shapes |= linear_shapes("merger.mlp.2", merged // ranks, config.out_hidden_size)
        return shapes

    def block_positions(self, attention_block: int) -> tuple[int, ...]:
        return halving_blocks(attention_block, self.positions_per_row)

    def forward(
        self, inputs: tuple[torch.Tensor, ...], segment_ids: torch.Tensor, weights: BoundWeights
    ) -> torch.Tensor:
        patches, window_ids, cos, sin = inputs
        x = weights.linear(patches, "patch_embed.proj")
        within_segments = segment_mask(segment_ids, x.dtype)
        # Windows are numbered in each segment from 0 on.
        within_windows = within_segments + segment_mask(window_ids, x.dtype)
        for layer in range(self._depth):
            block = f"blocks.{layer}"
            mask = within_segments if layer in self._full_attention else within_windows
            qkv = weights.linear(weights.rms_norm(x, f"{block}.norm1", self._eps), f"{block}.attn.qkv")
            qkv = qkv.unflatten(2, (3, self._heads, self._head_dim))
            qk = rotate(qkv[:, :, :2], cos, sin)
            out = attend(qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2], mask)
            x = x + weights.linear(out, f"{block}.attn.proj")
            y = weights.linear(weights.rms_norm(x, f"{block}.norm2", self._eps), f"{block}.mlp.gate_up_proj")
            gate, up = y.chunk(2, dim=-1)
            x = x + weights.linear(self._activation(gate) * up, f"{block}.mlp.down_proj")
        x = weights.rms_norm(clamp_float16(x), "merger.ln_q", self._eps)
        x = x.reshape(x.shape[0], x.shape[1] // self.positions_per_row, x.shape[2] * self.positions_per_row)
        return weights.linear(F.gelu(weights.linear(x, "merger.mlp.0")), "merger.mlp.2")

    def work_bytes(self, positions: int) -> int:
        scores_and_masks = (3 * self._heads + 6) * positions**2
        widest = max(2 * self._inner, 3 * self._hidden, self.fat_dim // self.positions_per_row)
        return 4 * (scores_and_masks + 6 * positions * widest)

    def item(self, modality: str, data: Mapping[str, Any]) -> EncoderItem | None:
        return self._items.item(modality, data)

    def forget(self) -> None:
        self._items.forget()
        self._host.forget()

    def _frame_tables(self, height: int, width: int) -> tuple[torch.Tensor, ...]:
        """What the host prepares for a frame of that many patches, in the order of the merger."""
        tables = rotary_tables(self._host.cos_sin, height, width, self._merge_size)
        return self.window_ids(height, width), *tables

    def window_ids(self, height: int, width: int) -> torch.Tensor:
        """int32 `[height * width]`: the number of each patch's window within its frame, in the order of the merger.

        Those at the right and lower edge are smaller where the frame's merged cells do not fill them.
        """
        rows, columns = (torch.arange(size // self._merge_size) // self._window for size in (height, width))
        cells = rows[:, None] * (columns[-1] + 1) + columns
        return cells.flatten().repeat_interleave(self.positions_per_row).int()
