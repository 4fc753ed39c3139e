"""The audio encoder of Qwen2.5-Omni's thinker."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from vllm_neuron_cache.encoders.attention import attend, segment_mask
from vllm_neuron_cache.encoders.interface import EncoderAdapter, EncoderInput, EncoderItem, segment_rows
from vllm_neuron_cache.encoders.layers import ACTIVATIONS, clamp_float16, linear_shapes, norm_shapes
from vllm_neuron_cache.encoders.weights import BoundWeights, Shapes
from vllm_neuron_cache.errors import ConfigurationError

_FRAMES_PER_POSITION = 2
"""The second convolution halves the length."""

_POSITIONS = "positional_embedding.positional_embedding"


class QwenOmniAudioEncoder(EncoderAdapter):
    """Mel frames in, one row for each four of them out.

    Follows transformers' `Qwen2_5OmniAudioEncoder` (5.14), which vLLM 0.30 uses. That cuts sound into chunks, and each
    is convolved and attends by itself. So a chunk is a segment with a block of its own: where two shared one, the
    convolutions would reach across.
    """

    name = "qwen_omni_audio"
    modalities = ("audio",)
    max_segments = 1
    max_blocks = 16  # a chunk is small, and half a minute of sound has 15

    def __init__(
        self, config: Any, *, dtype: torch.dtype, tensor_parallel_size: int = 1, tower: torch.nn.Module | None = None
    ) -> None:
        """`config` is the thinker's `audio_config`. `tensor_parallel_size` changes nothing: every rank has the whole
        tower.

        Raises `ConfigurationError` for chunks whose last row would end in the next one.
        """
        super().__init__(dtype, tower)
        self.positions_per_row = 2
        self._chunk_positions = config.n_window
        if self._chunk_positions % self.positions_per_row:
            raise ConfigurationError(
                f"the model's audio encoder makes a row of the end of one chunk and the begin of the next (n_window "
                f"{config.n_window} is odd), and a compiled one does not. Set vllm_neuron_cache.compiled_encoder to "
                "false."
            )
        self._hidden = config.d_model
        self._heads = config.encoder_attention_heads
        self._inner = config.encoder_ffn_dim
        self._depth = config.encoder_layers
        self._activation = ACTIVATIONS[config.activation_function]
        self._eps = 1e-5
        self.fat_dim = config.output_dim
        self.inputs = (
            EncoderInput("mel", config.num_mel_bins, dtype, _FRAMES_PER_POSITION),
            EncoderInput("live", 0, dtype, _FRAMES_PER_POSITION),
        )
        self.weight_shapes = self._shapes(config)
        self.attention_cost = 0.0  # there is one size of block

    def _shapes(self, config: Any) -> Shapes:
        hidden = self._hidden
        shapes: dict[str, tuple[int, ...]] = {
            "conv1.weight": (hidden, config.num_mel_bins, 3),
            "conv1.bias": (hidden,),
            "conv2.weight": (hidden, hidden, 3),
            "conv2.bias": (hidden,),
            _POSITIONS: (config.max_source_positions, hidden),
        }
        for layer in range(self._depth):
            block = f"layers.{layer}"
            shapes |= norm_shapes(f"{block}.self_attn_layer_norm", hidden)
            shapes |= linear_shapes(f"{block}.self_attn.q_proj", hidden, hidden)
            shapes |= {f"{block}.self_attn.k_proj.weight": (hidden, hidden)}
            shapes |= linear_shapes(f"{block}.self_attn.v_proj", hidden, hidden)
            shapes |= linear_shapes(f"{block}.self_attn.out_proj", hidden, hidden)
            shapes |= norm_shapes(f"{block}.final_layer_norm", hidden)
            shapes |= linear_shapes(f"{block}.fc1", hidden, self._inner)
            shapes |= linear_shapes(f"{block}.fc2", self._inner, hidden)
        shapes |= norm_shapes("ln_post", hidden)
        shapes |= linear_shapes("proj", hidden, config.output_dim)
        return shapes

    def block_positions(self, attention_block: int) -> tuple[int, ...]:
        """A block is a chunk, and the model says how large that is."""
        return (self._chunk_positions,)

    def forward(
        self, inputs: tuple[torch.Tensor, ...], segment_ids: torch.Tensor, weights: BoundWeights
    ) -> torch.Tensor:
        mel, live = inputs
        x = F.conv1d(mel.transpose(1, 2), weights["conv1.weight"], weights["conv1.bias"], padding=1)
        # The last frame has zeros behind it for the second convolution too.
        x = F.gelu(x) * live[:, None]
        x = F.gelu(F.conv1d(x, weights["conv2.weight"], weights["conv2.bias"], stride=2, padding=1)).transpose(1, 2)
        x = x + weights[_POSITIONS][: x.shape[1]]
        mask = segment_mask(segment_ids, x.dtype)
        for layer in range(self._depth):
            block = f"layers.{layer}"
            y = weights.layer_norm(x, f"{block}.self_attn_layer_norm", self._eps)
            q, k, v = (
                weights.linear(y, f"{block}.self_attn.{part}_proj").unflatten(2, (self._heads, -1)) for part in "qkv"
            )
            x = x + weights.linear(attend(q, k, v, mask), f"{block}.self_attn.out_proj")
            y = weights.linear(weights.layer_norm(x, f"{block}.final_layer_norm", self._eps), f"{block}.fc1")
            x = clamp_float16(x + weights.linear(self._activation(y), f"{block}.fc2"))
        x = (x[:, 0::2] + x[:, 1::2]) / 2
        return weights.linear(weights.layer_norm(x, "ln_post", self._eps), "proj")

    def work_bytes(self, positions: int) -> int:
        scores_and_mask = (3 * self._heads + 2) * positions**2
        # A convolution may gather the three frames that each of its outputs sees.
        widest = max(self._inner, 3 * _FRAMES_PER_POSITION * max(self._hidden, self.inputs[0].width), self.fat_dim)
        return 4 * (scores_and_mask + 6 * positions * widest)

    def item(self, modality: str, data: Mapping[str, Any]) -> EncoderItem | None:
        if "input_audio_features" not in data:
            return None
        # `[mel bins, frames]`; vLLM's front end in Rust pads them.
        features: torch.Tensor = data["input_audio_features"]
        num_frames = int(data["audio_feature_lengths"])
        chunk = self._chunk_positions * _FRAMES_PER_POSITION
        chunks = [features[:, first : min(first + chunk, num_frames)].T for first in range(0, num_frames, chunk)]
        segments = [-(-len(frames) // _FRAMES_PER_POSITION) for frames in chunks]
        if segments and not segment_rows(segments[-1], self.positions_per_row):
            segments.pop()  # needs no block

        def inputs(segment: int) -> tuple[torch.Tensor, ...]:
            frames = chunks[segment]
            return frames, frames.new_ones(len(frames))

        return EncoderItem(tuple(segments), inputs)
