"""The vision encoder of Qwen3-VL, dense and mixture of experts."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from vllm_neuron_cache.encoders.attention import attend, halving_blocks, segment_mask
from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderInput, EncoderItem
from vllm_neuron_cache.encoders.layers import ACTIVATIONS, linear_shapes, norm_shapes
from vllm_neuron_cache.encoders.vision import HostTables, VisionItems, input_norm, interpolated_positions, rotary_tables
from vllm_neuron_cache.encoders.weights import BoundWeights, Shapes
from vllm_neuron_cache.graphs.layers import rotate


class Qwen3VLEncoder(EncoderAdapter):
    """Patches, position embeddings and rotary tables in; mergers of the last layer and of each deepstack level out.

    Follows `Qwen3_VisionTransformer` of vLLM 0.30 (vllm/model_executor/models/qwen3_vl.py), whose tables it uses.
    """

    name = "qwen3_vl"
    modalities = ("image", "video")

    def __init__(
        self, config: Any, *, dtype: torch.dtype, tensor_parallel_size: int = 1, tower: torch.nn.Module | None = None
    ) -> None:
        """`config` is the model's `vision_config`. `tensor_parallel_size`: over how many ranks the tower's layers are
        cut."""
        super().__init__(dtype, tower)
        self._merge_size = config.spatial_merge_size
        self.positions_per_row = config.spatial_merge_size**2
        self._hidden = config.hidden_size
        self._heads = config.num_heads // tensor_parallel_size
        self._head_dim = config.hidden_size // config.num_heads
        self._depth = config.depth
        self._deepstack = tuple(config.deepstack_visual_indexes)
        self._inner = config.intermediate_size // tensor_parallel_size
        self._activation = ACTIVATIONS[config.hidden_act]
        # The language model's part of the configuration may have another; the published models do not.
        self._eps = 1e-6 if tower is None else tower.get_submodule("blocks.0.norm1").eps
        self.fat_dim = config.out_hidden_size * (1 + len(self._deepstack))
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.inputs = (
            EncoderInput("patches", patch, dtype),
            EncoderInput("position_embeds", self._hidden, dtype),
            EncoderInput("cos", self._head_dim // 2, dtype),
            EncoderInput("sin", self._head_dim // 2, dtype),
        )
        self.weight_shapes = self._shapes(config, patch, tensor_parallel_size)
        # 24 C^2 operations for each position, 4 C for each pair of them.
        self.attention_cost = 1 / (6 * self._hidden)
        self._items = VisionItems(self._frame_tables, input_norm(tower, config.in_channels))
        self._host = HostTables(tower)

    def _shapes(self, config: Any, patch: int, ranks: int) -> Shapes:
        hidden, merged = self._hidden, self._hidden * self.positions_per_row
        heads, inner = self._heads * self._head_dim, self._inner
        shapes: dict[str, tuple[int, ...]] = linear_shapes("patch_embed.proj", patch, hidden)
        for layer in range(self._depth):
            block = f"blocks.{layer}"
            shapes |= norm_shapes(f"{block}.norm1", hidden) | norm_shapes(f"{block}.norm2", hidden)
            shapes |= linear_shapes(f"{block}.attn.qkv", hidden, 3 * heads)
            shapes |= linear_shapes(f"{block}.attn.proj", heads, hidden)
            shapes |= linear_shapes(f"{block}.mlp.linear_fc1", hidden, inner)
            shapes |= linear_shapes(f"{block}.mlp.linear_fc2", inner, hidden)
        for merger, normed in self._mergers():
            shapes |= norm_shapes(f"{merger}.norm", merged if normed else hidden)
            shapes |= linear_shapes(f"{merger}.linear_fc1", merged, merged // ranks)
            shapes |= linear_shapes(f"{merger}.linear_fc2", merged // ranks, config.out_hidden_size)
        return shapes

    def _mergers(self) -> list[tuple[str, bool]]:
        """Path of each merger, and whether it normalises merged rows instead of single positions."""
        return [("merger", False), *((f"deepstack_merger_list.{level}", True) for level in range(len(self._deepstack)))]

    def block_positions(self, attention_block: int) -> tuple[int, ...]:
        return halving_blocks(attention_block, self.positions_per_row)

    def forward(
        self, inputs: tuple[torch.Tensor, ...], segment_ids: torch.Tensor, weights: BoundWeights
    ) -> torch.Tensor:
        patches, position_embeds, cos, sin = inputs
        x = weights.linear(patches, "patch_embed.proj") + position_embeds
        mask = segment_mask(segment_ids, x.dtype)
        levels = []
        for layer in range(self._depth):
            block = f"blocks.{layer}"
            qkv = weights.linear(weights.layer_norm(x, f"{block}.norm1", self._eps), f"{block}.attn.qkv")
            qkv = qkv.unflatten(2, (3, self._heads, self._head_dim))
            qk = rotate(qkv[:, :, :2], cos, sin)
            out = attend(qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2], mask)
            x = x + weights.linear(out, f"{block}.attn.proj")
            y = weights.linear(weights.layer_norm(x, f"{block}.norm2", self._eps), f"{block}.mlp.linear_fc1")
            x = x + weights.linear(self._activation(y), f"{block}.mlp.linear_fc2")
            if layer in self._deepstack:
                levels.append(self._merge(x, 1 + self._deepstack.index(layer), weights))
        return torch.cat([self._merge(x, 0, weights), *levels], dim=-1)

    def _merge(self, x: torch.Tensor, number: int, weights: BoundWeights) -> torch.Tensor:
        merger, normed = self._mergers()[number]
        merged = (x.shape[0], x.shape[1] // self.positions_per_row, x.shape[2] * self.positions_per_row)
        if normed:
            x = weights.layer_norm(x.reshape(merged), f"{merger}.norm", self._eps)
        else:
            x = weights.layer_norm(x, f"{merger}.norm", self._eps).reshape(merged)
        return weights.linear(F.gelu(weights.linear(x, f"{merger}.linear_fc1")), f"{merger}.linear_fc2")

    def work_bytes(self, positions: int) -> int:
        scores = self._heads * positions**2
        widest = max(self._inner, 3 * self._hidden, self.fat_dim // self.positions_per_row)
        return 4 * (3 * scores + 6 * positions * widest)

    def item(self, modality: str, data: Mapping[str, Any]) -> EncoderItem | None:
        return self._items.item(modality, data)

    def forget(self) -> None:
        self._items.forget()
        self._host.forget()

    def _frame_tables(self, height: int, width: int) -> tuple[torch.Tensor, ...]:
        """What the host prepares for a frame of that many patches, in the order of the merger."""
        positions = interpolated_positions(self._host.positions, height, width, self._merge_size)
        return positions, *rotary_tables(self._host.cos_sin, height, width, self._merge_size)
