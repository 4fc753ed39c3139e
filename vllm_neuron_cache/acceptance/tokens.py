"""The check of tokens: vLLM with the cache against vLLM without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_neuron_cache.acceptance.report import Check
from vllm_neuron_cache.demo.checkpoint import build_checkpoint
from vllm_neuron_cache.demo.comparison import compare, load_media, start_pair
from vllm_neuron_cache.demo.requests import Media, MediaRequest
from vllm_neuron_cache.graphs.lanes import Lane


def token_requests() -> list[MediaRequest]:
    """Photographs unseen, again under other text, and together; and the clip twice."""
    names = ("astronaut", "chelsea", "coffee")
    return [
        *(MediaRequest(images=(name,)) for name in names),
        *(MediaRequest(before=f"Look again at picture {name}. ", images=(name,)) for name in names),
        MediaRequest(before="The same twice, and another. ", images=(names[0], names[0], names[1])),
        MediaRequest(clip=True, after="What happens in this video?"),
        MediaRequest(before="Once more. ", clip=True, after="What happens in this video?"),
    ]


def check_tokens(
    checkpoint: Path | None,
    make: Callable[[], Lane],
    device: torch.device,
    *,
    step: Callable[[str], None] = lambda text: None,
) -> Check:
    """Serves a few requests with and without the cache, through vLLM, and compares every token.

    The model of `checkpoint`, by default the demo's small one, runs on the CPU. On another `device` cache and graphs
    are there, and merged rows come back for the model. Raises `ConfigurationError` where vLLM is not for CPUs.
    """
    from vllm_neuron_cache.integrations.vllm.device_cache import move_cache, require_cpu_platform

    require_cpu_platform()
    checkpoint = checkpoint or build_checkpoint()
    media = load_media()
    # Ours moves to the lane and the device that are asked for; until then it needs none.
    stock, blocks = start_pair(checkpoint, {"lane": "eager"}, media, step)
    step("Serving requests")
    move_cache(blocks, device, make())
    check = serve_and_compare(stock, blocks, media, checkpoint)
    blocks.manager.check_integrity()
    blocks.worker.check_encoder_cache_integrity()
    stock.close()
    blocks.close()
    return check


def serve_and_compare(stock: Any, blocks: Any, media: Media, checkpoint: Path) -> Check:
    """The check itself, on engines that run: stock vLLM, and vLLM with the cache."""
    runtime = blocks.runner.encoder_runtime
    hits, rows_read = blocks.manager.stats.hits, runtime.stats().rows_read
    results = list(compare(stock, blocks, token_requests(), media))
    hits, rows_read = blocks.manager.stats.hits - hits, runtime.stats().rows_read - rows_read
    recompiles = runtime.stats().recompiles_after_warmup
    differing = [number for number, result in enumerate(results) if not result.tokens_identical]
    values = {
        "requests": len(results),
        "differing_requests": differing,
        "hits": hits,
        "rows_read": rows_read,
        "recompiles_after_warm_up": recompiles,
        "checkpoint": checkpoint.name,
    }
    text = (
        f"{len(results)} requests, {len(differing)} with other tokens than with the cache off"
        f"{f' (numbers {differing})' if differing else ''}; {hits} hits, {rows_read} rows read, {recompiles} "
        "recompilations"
    )
    # Without hits and rows the tokens would be equal whatever the cache does.
    passed = bool(results) and not differing and hits > 0 and rows_read > 0 and recompiles == 0
    return Check("tokens_equal", passed, text, values)
