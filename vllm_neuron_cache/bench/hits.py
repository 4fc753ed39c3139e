"""Times to first token of a hit: ours beside stock vLLM's own, on real photographs."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_neuron_cache.bench.hooks import HookTimer
from vllm_neuron_cache.bench.race import bootstrap_upper
from vllm_neuron_cache.demo.comparison import load_media, start_pair
from vllm_neuron_cache.demo.media import LARGEST_PHOTOGRAPH, PHOTOGRAPHS
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt


def bench_hits(
    checkpoint: Path, *, pairs: int, step: Callable[[str], None], advance: Callable[[], None]
) -> dict[str, Any]:
    """Runs everything and returns it as the documented JSON.

    A hit is an image whose entry is resident while the KV prefix misses: every prompt begins with a text of its own.
    """
    media = load_media()
    stock, blocks = start_pair(checkpoint, {}, media, step)
    for engine in (stock, blocks):
        for name in PHOTOGRAPHS:
            _ttft_ms(engine, media, name, "first")
        for number in range(10):
            _ttft_ms(engine, media, LARGEST_PHOTOGRAPH, f"warm {number}")

    step("Hits, in pairs")
    samples = _paired_hits(stock, blocks, media, pairs, advance)
    step("Misses of the largest photograph")
    misses = _misses(blocks, media)
    largest_hits = [_ttft_ms(blocks, media, LARGEST_PHOTOGRAPH, f"largest {number}") for number in range(20)]
    step("Hooks")
    hooks = {kind: _hook_us(blocks, media, miss=kind == "miss") for kind in ("hit", "miss")}
    result = {
        "pairs": pairs,
        "ttft_ms": {
            "stock_hit": float(np.median(samples[:, 0])),
            "blocks_hit": float(np.median(samples[:, 1])),
            "blocks_hit_largest": statistics.median(largest_hits),
            "blocks_miss_largest": statistics.median(misses),
        },
        "ttft_ratio_hit": float(_ratio_of_medians(samples[None])[0]),
        "ttft_ratio_hit_upper": bootstrap_upper(_ratio_of_medians, samples),
        "hook_us": sum(hooks["hit"].values()),
        "hook_us_miss": sum(hooks["miss"].values()),
        "hooks": hooks,
        "hit_over_miss": statistics.median(largest_hits) / statistics.median(misses),
        "recompiles_after_warmup": blocks.runner.encoder_runtime.stats().recompiles_after_warmup,
    }
    stock.close()
    blocks.close()
    return result


def _paired_hits(stock: Any, blocks: Any, media: Media, pairs: int, advance: Callable[[], None]) -> np.ndarray:
    """TTFT in ms `[pairs, 2]`: stock, blocks. Each pair sends one prompt to both; who is first changes every time."""
    names = tuple(PHOTOGRAPHS)
    samples = np.empty((pairs, 2))
    for pair in range(pairs):
        # The order flips within each photograph as well, not only from one pair to the next.
        first_stock = (pair + pair // len(names)) % 2 == 0
        for engine, column in ((stock, 0), (blocks, 1)) if first_stock else ((blocks, 1), (stock, 0)):
            runs = engine.encoder_runs
            samples[pair, column] = _ttft_ms(engine, media, names[pair % len(names)], f"pair {pair}")
            if engine.encoder_runs != runs:
                raise AssertionError(f"pair {pair} was to be a hit and the encoder ran")
        advance()
    return samples


def _ratio_of_medians(samples: np.ndarray) -> np.ndarray:
    medians = np.median(samples, axis=1)
    return medians[:, 1] / medians[:, 0]


def _misses(engine: Any, media: Media, count: int = 10) -> list[float]:
    """TTFT in ms of the largest photograph, one corner pixel of it different every time."""
    times = []
    for number in range(count):
        image = media.images[LARGEST_PHOTOGRAPH].copy()
        image.putpixel((0, 0), (number, 0, 255 - number))
        name = f"{LARGEST_PHOTOGRAPH} {number}"
        times.append(_ttft_ms(engine, Media(images={name: image}), name, f"miss {number}"))
    # The misses may have evicted it.
    _ttft_ms(engine, media, LARGEST_PHOTOGRAPH, "back again")
    return times


def _hook_us(engine: Any, media: Media, *, miss: bool, requests: int = 30) -> dict[str, float]:
    """Median CPU time in µs of each hook, over requests of one photograph and one token: one prefill step each."""
    timer = HookTimer()
    per_request: list[dict[str, float]] = []
    image = media.images["astronaut"]
    _ttft_ms(engine, media, "astronaut", f"hooks {miss}")
    with timer.attached(engine.manager, engine.runner):
        for number in range(requests):
            if miss:
                image = image.copy()
                image.putpixel((0, 0), (number, 1, 255 - number))
            timer.reset()
            _ttft_ms(engine, Media(images={"astronaut": image}), "astronaut", f"hooks {miss} {number}")
            per_request.append({name: seconds * 1e6 for name, seconds in timer.seconds.items()})
    names = sorted({name for times in per_request for name in times})
    return {name: statistics.median(times.get(name, 0.0) for times in per_request) for name in names}


def _ttft_ms(engine: Any, media: Media, name: str, text: str) -> float:
    request = MediaRequest(before=f"{text}. ", images=(name,))
    (completion,) = engine.generate([engine_prompt(request, media)], max_tokens=1)
    return completion.ttft_ms
