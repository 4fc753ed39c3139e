"""The merge inside vLLM's own compiled forward: a language model that vLLM has loaded, run by `graphs.prefill`."""

from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models.qwen3_vl import Qwen3LLMModel
from vllm.model_executor.models.qwen3_vl_moe import Qwen3MoeLLMModel

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.prefill import Decoder, prefill

# Language models whose forward is: embed, run the layers one after the other, add a level of deepstack after each of
# the first, norm.
_KNOWN_DECODERS = (Qwen3LLMModel, Qwen3MoeLLMModel)

_MODEL_TAG = "vllm_neuron_cache_prefill"
"""vLLM keeps compiled graphs on disk by a number and this name; those of the language model itself have another."""


# The number of rows of the buffer is dynamic too: as a number in the graph, which vLLM keeps on disk and calls without
# guards, it could be that of another pool.
@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "src_rows": 0, "buffer_rows": 0})
class MergingDecoder(nn.Module):
    """A language model's layers, weights and all, behind a forward that merges cached rows."""

    def __init__(self, *, vllm_config: VllmConfig, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, src_rows: torch.Tensor, buffer_rows: torch.Tensor
    ) -> torch.Tensor:
        """`graphs.prefill.prefill`. vLLM compiles it once and drops the guards: every call gives all arguments."""
        decoder = Decoder(self.decoder.embed_input_ids, self.decoder.layers, self.decoder.norm)
        return prefill(decoder, input_ids, positions, src_rows, buffer_rows)


def require_known_decoder(model: nn.Module) -> None:
    """Raises `ConfigurationError` for a model whose language model is not known to do what `graphs.prefill` does."""
    decoder = getattr(getattr(model, "language_model", None), "model", None)
    if type(decoder) not in _KNOWN_DECODERS:
        raise ConfigurationError(
            f"compiled_prefill serves the language models {', '.join(known.__name__ for known in _KNOWN_DECODERS)}, "
            f"and that of {type(model).__name__} is {type(decoder).__name__}. Set vllm_neuron_cache.compiled_prefill "
            "to false."
        )


def merge_in_forward(model: nn.Module, vllm_config: VllmConfig, buffer: torch.Tensor) -> None:
    """Has a model's forward take rows of `buffer` `[num_blocks, block_size, H * (1 + levels)]`. Mutates the model.

    From now on the model's forward takes, in the place of embeddings, `src_rows` of `graphs.prefill`, or None for a
    step of text, which is the model's own forward of token ids; it embeds tokens by itself, and `embed_input_ids`
    returns rows of width 0; and it has no buffers for deepstack. Its weights are not touched.
    """
    require_known_decoder(model)
    with set_current_vllm_config(vllm_config), set_model_tag(_MODEL_TAG):
        merging = MergingDecoder(vllm_config=vllm_config, decoder=model.language_model.model)
    buffer_rows = buffer.view(-1, buffer.shape[2])
    own_forward = model.forward

    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        if inputs_embeds is None:
            return own_forward(input_ids, positions, intermediate_tensors)
        return merging(input_ids, positions, inputs_embeds, buffer_rows)

    def embed_input_ids(input_ids: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return buffer.new_empty(input_ids.shape[0], 0)

    model.forward = forward
    model.embed_input_ids = embed_input_ids
    model.requires_raw_input_tokens = True
    model.deepstack_input_embeds = []
