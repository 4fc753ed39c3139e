"""Runs the same requests through stock vLLM and through the cache, and says what each did."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_neuron_cache.demo.media import PHOTOGRAPHS, load_clip, load_photograph
from vllm_neuron_cache.demo.reference import placeholder_items, reference_encoder_runs
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

MAX_TOKENS = 16


class EngineResult(NamedTuple):
    """What one engine did with one request."""

    token_ids: tuple[int, ...]
    ttft_ms: float
    encoder_runs: int


class RequestResult(NamedTuple):
    """One request on both engines."""

    request: MediaRequest
    prompt_token_ids: tuple[int, ...]
    stock: EngineResult
    blocks: EngineResult

    @property
    def tokens_identical(self) -> bool:
        return self.stock.token_ids == self.blocks.token_ids


def load_media() -> Media:
    return Media(images={name: load_photograph(name) for name in PHOTOGRAPHS}, clip=load_clip().vllm_input)


def compare(
    stock: Any, blocks: Any, requests: Sequence[MediaRequest], media: Media, *, max_tokens: int = MAX_TOKENS
) -> Iterator[RequestResult]:
    """Runs each request alone, first on one engine and then on the other, the order changing from one to the next."""
    for number, request in enumerate(requests):
        prompt = engine_prompt(request, media)
        results = {}
        for engine in (stock, blocks) if number % 2 else (blocks, stock):
            runs_before = engine.encoder_runs
            (completion,) = engine.generate([prompt], max_tokens=max_tokens)
            results[engine] = EngineResult(completion.token_ids, completion.ttft_ms, engine.encoder_runs - runs_before)
        yield RequestResult(request, completion.prompt_token_ids, results[stock], results[blocks])


def warm_up(engine: Any, media: Media) -> None:
    """Pays first-use costs outside the comparison, then empties every cache that it filled."""
    image = next(iter(media.images.values())).resize((96, 96))
    data = {"image": [image], "video": [media.clip]}
    request = MediaRequest(images=("warm-up",), clip=True)
    for _ in range(2):
        engine.generate([{"prompt": request.prompt, "multi_modal_data": data}], max_tokens=2)
    engine.llm.reset_prefix_cache()
    engine.llm.reset_mm_cache()
    engine.llm.llm_engine.reset_encoder_cache()


def start_pair(
    checkpoint: Path, cache: Mapping[str, Any], media: Media, step: Callable[[str], None]
) -> tuple[Any, Any]:
    """Stock vLLM and vLLM with the cache, configured by `cache`, alike otherwise and warm. Close both."""
    from vllm_neuron_cache.integrations.vllm.offline import OfflineEngine

    arguments = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
    step("Starting stock vLLM")
    stock = OfflineEngine(checkpoint, cache=None, **arguments)
    step("Starting vLLM with the encoder cache")
    blocks = OfflineEngine(checkpoint, cache=cache, **arguments)
    step("Warming up")
    warm_up(stock, media)
    warm_up(blocks, media)
    return stock, blocks


def expected_encoder_runs(
    results: Sequence[RequestResult], *, num_blocks: int, block_size: int, image_token: int, video_token: int
) -> list[int]:
    """What the reference predicts for each request."""
    return reference_encoder_runs(
        [
            placeholder_items(
                result.request.item_keys, result.prompt_token_ids, image_token=image_token, video_token=video_token
            )
            for result in results
        ],
        num_blocks=num_blocks,
        block_size=block_size,
    )


class Summary(NamedTuple):
    """The demo's answer; `as_json` has the keys that the documentation lists."""

    results: Sequence[RequestResult]
    expected_runs: Sequence[int]
    hits: int
    processor_cache_hits: int
    geometry: Any
    fat_dim: int
    num_bytes: int
    peak_used: int
    padding_waste: float
    graphs_compiled: int
    recompiles_after_warmup: int

    @property
    def tokens_identical(self) -> bool:
        return all(result.tokens_identical for result in self.results)

    def median_ttft_ms(self, engine: str, *, hit: bool) -> float | None:
        """Over requests with one image, which `engine` ("stock" or "blocks") had cached, or had not."""
        times = [
            getattr(result, engine).ttft_ms
            for result in self.results
            if len(result.request.item_keys) == 1
            and not result.request.clip
            and (getattr(result, engine).encoder_runs == 0) == hit
        ]
        return statistics.median(times) if times else None

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens_identical": self.tokens_identical,
            "requests": len(self.results),
            "encoder_runs": {
                "stock": sum(result.stock.encoder_runs for result in self.results),
                "blocks": sum(result.blocks.encoder_runs for result in self.results),
                "expected": sum(self.expected_runs),
            },
            "hits": self.hits,
            "processor_cache_hits": self.processor_cache_hits,
            "ttft_ms": {
                f"{engine}_{'hit' if hit else 'miss'}": self.median_ttft_ms(engine, hit=hit)
                for engine in ("stock", "blocks")
                for hit in (False, True)
            },
            "blocks": {
                "num_blocks": self.geometry.num_blocks,
                "block_size": self.geometry.block_size,
                "fat_dim": self.fat_dim,
                "bytes": self.num_bytes,
                "peak_used": self.peak_used,
                "padding_waste": self.padding_waste,
            },
            "graphs": {
                "compiled": self.graphs_compiled,
                "recompiles_after_warmup": self.recompiles_after_warmup,
            },
        }


def run_demo(
    checkpoint: Path,
    requests: Sequence[MediaRequest],
    *,
    step: Callable[[str], None],
    done: Callable[[RequestResult], None],
) -> Summary:
    """The whole demo. `step` hears what begins, `done` each result as it comes."""
    # Here and not above: torch and vLLM take seconds to import and read their settings when they do.
    from vllm_neuron_cache.graphs.lanes.inductor import compiler_available
    from vllm_neuron_cache.integrations.vllm.offline import placeholder_tokens

    step("Loading photographs and the clip")
    media = load_media()
    lane = "inductor" if compiler_available() else "eager"
    if lane == "eager":
        step("No C++ compiler here: the graphs run uncompiled")
    stock, blocks = start_pair(checkpoint, {"lane": lane}, media, step)
    hits_before = blocks.manager.stats.hits
    processor_hits_before = blocks.metric("vllm:mm_cache_hits")
    step("Serving requests")
    results = []
    for result in compare(stock, blocks, requests, media):
        results.append(result)
        done(result)
    geometry = blocks.manager.geometry
    image_token, video_token = placeholder_tokens(checkpoint)
    items = blocks.manager.pool.items()
    rows_held = sum(item.layout.num_blocks for item in items) * geometry.block_size
    stats = blocks.runner.encoder_runtime.stats()
    buffer = blocks.runner.encoder_runtime.blocks
    summary = Summary(
        results=results,
        expected_runs=expected_encoder_runs(
            results,
            num_blocks=geometry.num_item_blocks,
            block_size=geometry.block_size,
            image_token=image_token,
            video_token=video_token,
        ),
        hits=blocks.manager.stats.hits - hits_before,
        processor_cache_hits=int(blocks.metric("vllm:mm_cache_hits") - processor_hits_before),
        geometry=geometry,
        fat_dim=buffer.fat_dim,
        num_bytes=buffer.num_bytes,
        peak_used=blocks.manager.pool.peak_used_blocks,
        padding_waste=1 - sum(item.layout.num_tokens for item in items) / rows_held if rows_held else 0.0,
        graphs_compiled=stats.graphs_compiled,
        recompiles_after_warmup=stats.recompiles_after_warmup,
    )
    blocks.manager.check_integrity()
    blocks.worker.check_encoder_cache_integrity()
    stock.close()
    blocks.close()
    return summary
