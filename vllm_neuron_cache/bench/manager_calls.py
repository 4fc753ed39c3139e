"""The calls that a scheduler makes to its encoder-cache manager, recorded in one run and replayed alone."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from vllm_neuron_cache.bench.race import race
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.integrations.vllm.manager import BlockEncoderCacheManager
from vllm_neuron_cache.integrations.vllm.simulation.engine import SimulatedEngine, play, vllm_request
from vllm_neuron_cache.simulation.trace import TraceItem, TraceRequest, one_item_requests

_LOTS = 1 << 30
_BATCH = 40
"""Requests timed together, half of which evict an item; and how many items their hits are drawn from."""

Call = tuple[str, tuple[Any, ...]]


class CallRecorder:
    """Stands between a scheduler and its manager, and notes every call in `calls`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._manager, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return value(*args)

        return call


def record_calls(engine: SimulatedEngine, requests: Sequence[TraceRequest], *, depth: int = 1) -> list[Call]:
    """Plays a trace, and returns what the scheduler asked of its manager."""
    recorder = engine.scheduler.encoder_cache_manager = CallRecorder(engine.scheduler.encoder_cache_manager)
    play(engine, requests, depth=depth)
    return recorder.calls


def replay_seconds(contenders: dict[str, tuple[Callable[[], Any], list[Call]]], *, rounds: int) -> dict[str, float]:
    """Least CPU time of a contender's calls, in seconds, each time on a manager that its factory makes anew.

    The contenders take turns. What it takes to go through the list without calling anything is subtracted.
    """
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, (make, calls) in contenders.items():
            manager = make()
            bound = [(getattr(manager, method), args) for method, args in calls]
            loops = {"calls": lambda b=bound: _call_all(b), "none": lambda b=bound: _call_none(b)}
            times = race(loops, rounds=1, warm_up=0)
            best[name] = min(best.get(name, float("inf")), times["calls"] - times["none"])
    return best


def _call_all(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    for method, args in calls:
        method(*args)


def _call_none(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    for _method, _args in calls:
        pass


def seconds_per_request(num_resident: int, *, num_requests: int = 400, rounds: int = 5) -> float:
    """CPU time of all manager calls for one request, in a pool full of `num_resident` items of one block.

    Every second request hits one of the items that came last, and the others miss and evict the one that came first.
    The requests are the same whatever `num_resident` is (at least 100).
    """
    geometry = CacheGeometry(num_blocks=num_resident + 1, block_size=16, encoder_block_size=512)
    manager = BlockEncoderCacheManager(geometry, cache_size=num_resident * 16)
    for index in range(num_resident):
        _serve(manager, _request(f"resident-{index}"))
    choose = random.Random(0)
    times = []
    for number in range(rounds):
        seconds = 0.0
        for batch in range(num_requests // _BATCH):
            # Still there when their turn comes, however small the pool.
            last = [item.key for item in manager.pool.items()[-_BATCH:]]
            requests = [
                _request(choose.choice(last) if index % 2 else f"new-{number}-{batch}-{index}")
                for index in range(_BATCH)
            ]
            seconds += race({"serve": lambda r=requests: _serve_all(manager, r)}, rounds=1, warm_up=0)["serve"]
        times.append(seconds)
    return min(times) / num_requests


def _request(key: str) -> Any:
    return vllm_request(one_item_requests([TraceItem(key, 16)])[0]._replace(request_id=f"for {key}"))


def _serve_all(manager: BlockEncoderCacheManager, requests: Sequence[Any]) -> None:
    for request in requests:
        _serve(manager, request)


def _serve(manager: BlockEncoderCacheManager, request: Any) -> None:
    """What a scheduler asks for a request with one item: one pass, and its end."""
    encoder_inputs = {}
    if not manager.check_and_update_cache(request, 0) and manager.can_allocate(request, 0, _LOTS, 0):
        manager.allocate(request, 0)
        encoder_inputs[request.request_id] = [0]
    manager.get_freed_mm_hashes()
    metadata = manager.get_manager_metadata()
    manager.end_pass({request.request_id}, encoder_inputs)
    manager.acknowledge(metadata)
    manager.free_encoder_input(request, 0)
    manager.free(request)
