"""The block pool beside vLLM's own manager: time, stalls, what is resident, and hits on a real engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_neuron_cache.bench.manager_calls import record_calls, replay_seconds, seconds_per_request
from vllm_neuron_cache.demo.media import PHOTOGRAPHS, load_photograph
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.integrations.vllm.manager import BlockEncoderCacheManager
from vllm_neuron_cache.integrations.vllm.offline import OfflineEngine
from vllm_neuron_cache.integrations.vllm.simulation.engine import SimulatedEngine, SimulatedEngineConfig, play
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.planner.tokens import image_tokens
from vllm_neuron_cache.simulation.trace import TraceItem, TraceRequest, one_item_requests, repeating_items

COARSE = 512
"""Token rows of an encoder's block at the default attention block of 2048 patches and a 2x2 merger."""

SMALL_IMAGE = (256, 320)
"""Height and width in pixels: 80 token rows at 32 pixels a side, the images of the field's failure."""


def bench_pool(checkpoint: Path, *, rounds: int, requests: int, step: Callable[[str], None]) -> dict[str, Any]:
    """Runs everything and returns it as the documented JSON. `requests` are those of the engines' trace."""
    photographs = _photograph_tokens(checkpoint)
    step("Manager calls")
    ops = _ops(photographs, rounds)
    step("Traces that overflow a device")
    traces = {
        name: _stalls(items, budget, num_blocks) for name, items, budget, num_blocks in _overflowing_traces(photographs)
    }
    step("A hundred thousand items")
    # Once for each size first: the allocator and the caches of the machine are then as they will be.
    growth = seconds_per_request(100_000, rounds=rounds) / seconds_per_request(100, rounds=rounds)
    step("Resident items")
    resident = {
        "coarse": _resident_items(COARSE),
        "b64": _resident_items(64),
        "b16": _resident_items(16),
    }
    hit_rate = _hit_rates(checkpoint, requests, step)
    return {
        **ops,
        "stalled_steps": sum(trace["stalled_steps"] for trace in traces.values()),
        "failed_requests": sum(trace["failed_requests"] for trace in traces.values()),
        "stock": {"overflows": sum(trace["stock_overflows"] for trace in traces.values())},
        "traces": traces,
        "resident_items": resident,
        "growth": growth,
        "hit_rate": hit_rate,
    }


def _photograph_tokens(checkpoint: Path) -> list[int]:
    """Token rows of each photograph, as the model's processor makes them."""
    shape = load_model_shape(checkpoint)
    return [image_tokens(shape, *load_photograph(name).size) for name in PHOTOGRAPHS]


def _ops(photographs: Sequence[int], rounds: int) -> dict[str, Any]:
    """CPU time in the manager's calls, ours over stock's, on one trace of a loaded server.

    400 images in the sizes of the photographs, six in ten seen before, one arriving in every pass; 64 tokens each, 32
    requests running.
    """
    items = repeating_items(photographs, 400, reuse=0.6, seed=3)
    requests = one_item_requests(items, max_tokens=64)
    budget = 8192
    contenders = {}
    for name, stock, block_size in (("stock", True, COARSE), ("coarse", False, COARSE), ("b16", False, 16)):
        config = SimulatedEngineConfig(
            geometry=CacheGeometry(budget // block_size + 1, block_size, COARSE),
            stock=stock,
            largest_item_tokens=budget,
            max_num_batched_tokens=2048,
            max_num_seqs=32,
        )
        engine = SimulatedEngine(config)
        make = _manager_factory(type(engine.manager), config.geometry, budget)
        contenders[name] = (make, record_calls(engine, requests))
    seconds = replay_seconds(contenders, rounds=rounds)
    return {
        # The default block; the coarse one, which holds fewer items and so misses more, beside it.
        "ops_ratio_stock": seconds["b16"] / seconds["stock"],
        "ops_ratio_stock_coarse": seconds["coarse"] / seconds["stock"],
        "ops_us_per_request": {name: value / len(requests) * 1e6 for name, value in seconds.items()},
    }


def _manager_factory(manager_class: type, geometry: CacheGeometry, cache_size: int) -> Callable[[], Any]:
    if issubclass(manager_class, BlockEncoderCacheManager):
        return lambda: manager_class(geometry, cache_size)
    return lambda: manager_class(cache_size)


def _overflowing_traces(photographs: Sequence[int]) -> list[tuple[str, list[TraceItem], int, int]]:
    """Name, items, vLLM's token budget, and blocks of the device, of traces that the budget lets through and the device
    cannot hold."""
    pictures = repeating_items(photographs, 200, reuse=0.5, seed=11)
    return [
        ("102 images of 80 tokens, 16 blocks", [TraceItem(f"small-{n}", 80) for n in range(102)], 8192, 16),
        ("nine videos of 1568 tokens, 32 blocks", [TraceItem(f"clip-{n}", 1568, "video") for n in range(9)], 16384, 32),
        ("photographs, half of them again, 16 blocks", pictures, 8192, 16),
    ]


def _stalls(items: Sequence[TraceItem], budget: int, num_blocks: int) -> dict[str, int]:
    """Plays requests of three items each, all there at once, through both managers over blocks of 512 rows."""
    requests = [
        TraceRequest(
            f"request-{index}", 0, tuple(items[index : index + 3]), (4,) * (len(items[index : index + 3]) + 1), 4
        )
        for index in range(0, len(items), 3)
    ]
    results: dict[str, int] = {}
    for stock in (True, False):
        engine = SimulatedEngine(
            SimulatedEngineConfig(
                geometry=CacheGeometry(num_blocks + 1, COARSE, COARSE),
                stock=stock,
                largest_item_tokens=max(item.num_tokens for item in items),
                max_num_batched_tokens=budget,
                max_num_seqs=128,
            )
        )
        stalled = play(engine, requests)
        if stock:
            results["stock_overflows"] = engine.worker.num_overflows
            continue
        engine.check_integrity()
        results["stalled_steps"] = stalled
        results["failed_requests"] = sum(
            engine.finish_reasons.get(request.request_id) != "length" for request in requests
        )
    return results


def _resident_items(block_size: int) -> int:
    """How many images of 80 tokens are there at once before the first is evicted, in the bytes of 65 coarse blocks."""
    geometry = CacheGeometry(65 * COARSE // block_size, block_size, COARSE)
    engine = SimulatedEngine(
        SimulatedEngineConfig(geometry=geometry, largest_item_tokens=80, max_num_batched_tokens=64 * COARSE)
    )
    most = 0
    for index in range(2 * geometry.num_item_blocks):
        request = TraceRequest(f"request-{index}", 0, (TraceItem(f"image-{index}", 80),), (1, 1))
        engine.add(request)
        while engine.has_requests:
            engine.schedule()
            engine.drain()
        most = max(most, engine.manager.pool.num_items)
        if engine.manager.stats.evictions:
            return most
    raise AssertionError("nothing was evicted")


# On a real engine ----------------------------------------------------------------------------------------------


def _hit_rates(checkpoint: Path, num_requests: int, step: Callable[[str], None]) -> dict[str, float]:
    """Hits over queries of one trace of real pictures, on vLLM: 17 coarse blocks, and a quarter of their bytes in fine
    ones. Every request must end with tokens, and they must be the same."""
    pools = {"coarse_full": (COARSE, 17), "fine_quarter": (16, 17 * COARSE // 16 // 4)}
    items = repeating_items((80,), num_requests, reuse=0.7, seed=5)
    pictures = _small_pictures(len({item.key for item in items}))
    names = {key: name for key, name in zip(dict.fromkeys(item.key for item in items), pictures)}
    rates: dict[str, float] = {}
    tokens: dict[str, list[Any]] = {}
    for pool, (block_size, num_blocks) in pools.items():
        step(f"Real engine, {num_blocks} blocks of {block_size} rows")
        engine = OfflineEngine(
            checkpoint,
            cache={
                "lane": "eager",
                "encoder_cache_block_size": block_size,
                "encoder_cache_num_blocks_exact": num_blocks,
            },
            max_model_len=4096,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,  # a hit there asks the encoder cache nothing
        )
        media = Media(images=pictures)
        prompts = [
            engine_prompt(MediaRequest(before=f"{index}. ", images=(names[item.key],)), media)
            for index, item in enumerate(items)
        ]
        tokens[pool] = []
        for first in range(0, len(prompts), 4):
            tokens[pool] += [c.token_ids for c in engine.generate(prompts[first : first + 4], max_tokens=2)]
        stats = engine.manager.stats
        rates[pool] = stats.hits / stats.queries
        engine.close()
    if tokens["coarse_full"] != tokens["fine_quarter"] or not all(map(all, tokens["coarse_full"])):
        raise AssertionError("the two pools gave different tokens")
    return rates


def _small_pictures(count: int) -> dict[str, Any]:
    """`count` cuttings of 80 token rows from the photographs, all different."""
    height, width = SMALL_IMAGE
    pictures: dict[str, Any] = {}
    photographs = {name: load_photograph(name) for name in PHOTOGRAPHS}
    for index in range(count):
        name = tuple(photographs)[index % len(photographs)]
        photograph = photographs[name]
        left = 37 * (index // len(photographs)) % (photograph.width - width + 1)
        top = 23 * (index // len(photographs)) % (photograph.height - height + 1)
        pictures[f"{name} {index}"] = photograph.crop((left, top, left + width, top + height))
    return pictures
