"""The stage cache beside vLLM-Omni's own and beside straight-line code, on one schedule and with the rows compared."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_neuron_cache.bench.stage_contenders import MM_KEY, Cache, OurCache, Rows, StraightLine
from vllm_neuron_cache.bench.stage_driver import drive_random
from vllm_neuron_cache.errors import WrongRowsError
from vllm_neuron_cache.integrations.vllm_omni.peer_cache import PeerCache, peer_is_there
from vllm_neuron_cache.simulation.stage_schedule import ScheduledBatch, ScheduledStep, ScheduleShape, StageSchedule
from vllm_neuron_cache.stage_cache import (
    FullAttentionGroupView,
    KeySpec,
    OmniPrefixCacheManager,
    PrefixBlockPool,
    PrefixCacheConfig,
)
from vllm_neuron_cache.stage_cache.interface import HIDDEN_KEY
from vllm_neuron_cache.stage_cache.row_store import as_rows


class StageBenchShape(NamedTuple):
    """Sizes of the measurement; the defaults are those of the documented figures."""

    hidden_size: int = 2048
    decode_requests: tuple[int, ...] = (32, 256)
    decode_steps: int = 60
    workload: ScheduleShape = ScheduleShape(num_blocks=4096)
    hit_requests: int = 8
    hit_tokens: int = 4096
    decoders: int = 64
    scatter_rows: int = 2048
    scatter_blocks: int = 4096
    random_schedules: int = 10_000


Contenders = dict[str, Callable[[PrefixCacheConfig, ScheduledBatch, Sequence[KeySpec]], Cache]]


@torch.inference_mode()
def bench_stage_cache(
    shape: StageBenchShape | None = None, *, rounds: int = 5, step: Callable[[str], None]
) -> dict[str, Any]:
    """Measures everything and returns it as the documented JSON. One thread, bfloat16. Without vLLM-Omni what needs it
    is None. Raises `WrongRowsError` if a contender, ours or not, hands on a wrong row."""
    shape = shape or StageBenchShape()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    contenders: Contenders = {"ours": OurCache, "reference": StraightLine}
    if peer_is_there():
        contenders |= {"peer inline": PeerCache.inline, "peer threaded": PeerCache.threaded}
    rows = Rows(shape.hidden_size)
    result: dict[str, Any] = {"decode_ms": {}, "materialize_ms": {}}
    try:
        for num_requests in shape.decode_requests:
            step(f"Decoding, {num_requests} requests")
            decode_ms, materialize_ms = _decode(shape, num_requests, contenders, rows)
            result["decode_ms"][str(num_requests)] = decode_ms
            result["materialize_ms"][str(num_requests)] = materialize_ms
        step("The main workload")
        result["workload_cpu_s"] = _workload(shape, contenders, rows, rounds)
        result["workload_ratio_peer"] = _ratio(result["workload_cpu_s"], "peer")
        result["workload_ratio_reference"] = _ratio(result["workload_cpu_s"], "reference")
        step("Saves beside pending hits")
        result["cliff_ratio"] = _cliff(shape, OurCache, rows, 4 * rounds)
        step(f"{shape.random_schedules:,} random schedules")
        result["random_schedules"] = _random_schedules(shape.random_schedules)
        step("Scatter beside memcpy")
        result["scatter_speed_of_memcpy"] = _scatter(shape, rounds)
    finally:
        torch.set_num_threads(threads)
    return result


def _ratio(seconds: Mapping[str, float | None], other: str) -> float | None:
    return seconds["ours"] / seconds[other] if seconds[other] else None


def _better_peer(figures: dict[str, float]) -> dict[str, float | None]:
    """With the better of the peer's two modes in place of both."""
    peers = [figures.pop(name) for name in list(figures) if name.startswith("peer ")]
    return {"ours": figures["ours"], "peer": min(peers) if peers else None, "reference": figures["reference"]}


def _keys(hidden_size: int) -> tuple[KeySpec, ...]:
    return tuple(KeySpec(name, (hidden_size,), "bfloat16") for name in (HIDDEN_KEY, MM_KEY))


def _make(contenders: Contenders, schedule: ScheduleShape, hidden_size: int) -> dict[str, tuple[Cache, ScheduledBatch]]:
    config = PrefixCacheConfig(
        num_blocks=schedule.num_blocks,
        block_size=schedule.block_size,
        staging_capacity_tokens=schedule.step_tokens,
    )
    made = {}
    for name, contender in contenders.items():
        batch = ScheduledBatch(schedule, torch.from_numpy)
        made[name] = contender(config, batch, _keys(hidden_size)), batch
    return made


def _check(name: str, step: ScheduledStep, outputs: Any, rows: Rows) -> None:
    """Compares every row of every request, bit for bit."""
    for req_id, contents in step.expected.items():
        for handed_on, expected in zip(outputs, rows.of(contents)):
            got = handed_on[req_id]
            if got.shape != expected.shape or not torch.equal(got.view(torch.int16), expected.view(torch.int16)):
                raise WrongRowsError(f"{name} hands request {req_id} wrong rows; its time means nothing")


def _decode(
    shape: StageBenchShape, num_requests: int, contenders: Contenders, rows: Rows
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Median milliseconds of a decode step on the engine's thread, and of the step's `materialize`. The contenders take
    turns in every step."""
    schedule = ScheduleShape(
        num_requests=num_requests,
        prompt_tokens=8,
        shared_tokens=0,
        decode_tokens=shape.decode_steps,
        num_blocks=num_requests * (-(-(8 + shape.decode_steps) // 16) + 1),
        max_running=num_requests,
        step_tokens=8 * num_requests,
    )
    caches = _make(contenders, schedule, shape.hidden_size)
    times: dict[str, list[float]] = {name: [] for name in caches}
    deliveries: dict[str, list[float]] = {name: [] for name in caches}
    for number, step in enumerate(StageSchedule(schedule).steps()):
        hidden, mm_rows = rows.of(step.contents)
        order = list(caches)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            cache, batch = caches[name]
            begin = time.perf_counter()
            cache.new_step(step)
            middle = time.perf_counter()
            batch.load(step)
            again = time.perf_counter()
            step_id = cache.save(hidden, mm_rows, step.num_tokens)
            saved = time.perf_counter()
            outputs = cache.materialize(step_id, step.req_ids)
            done = time.perf_counter()
            _check(name, step, outputs, rows)
            if step.is_decode:
                times[name].append(1e3 * (middle - begin + saved - again))
                deliveries[name].append(1e3 * (done - saved))
    for cache, _ in caches.values():
        cache.close()
    return tuple(
        _better_peer({name: statistics.median(values) for name, values in measured.items()})
        for measured in (times, deliveries)
    )


def _workload(shape: StageBenchShape, contenders: Contenders, rows: Rows, rounds: int) -> dict[str, float | None]:
    """Least CPU seconds of the engine's thread for a whole schedule, `materialize` included."""
    best = dict.fromkeys(contenders, float("inf"))
    for round_number in range(rounds):
        for name in contenders:
            caches = _make({name: contenders[name]}, shape.workload, shape.hidden_size)
            cache, batch = caches[name]
            seconds = 0.0
            for step in StageSchedule(shape.workload).steps():
                hidden, mm_rows = rows.of(step.contents)
                batch_loaded = time.thread_time()
                cache.new_step(step)
                seconds += time.thread_time() - batch_loaded
                batch.load(step)
                begin = time.thread_time()
                step_id = cache.save(hidden, mm_rows, step.num_tokens)
                outputs = cache.materialize(step_id, step.req_ids)
                seconds += time.thread_time() - begin
                if not round_number:
                    _check(name, step, outputs, rows)
            cache.close()
            best[name] = min(best[name], seconds)
            del cache, batch, caches, outputs
            gc.collect()
    return _better_peer(best)


def _random_schedules(count: int) -> dict[str, int]:
    """Runs schedules with hits, blocks used again, aborts, preemption, roll-back, late and disordered use, and compares
    every row. Their number, and how many rows were handed on from the cache."""

    def in_host(config: PrefixCacheConfig, view: FullAttentionGroupView) -> OmniPrefixCacheManager:
        return OmniPrefixCacheManager(config, view, inline=True)

    rows_from_cache = 0
    for seed in range(count):
        manager, _ = drive_random(seed, in_host)
        rows_from_cache += manager.counters.rows_from_cache
    return {"count": count, "rows_from_cache": rows_from_cache}


def _scatter(shape: StageBenchShape, rounds: int) -> float:
    """Time of a memcpy of one step's rows over that of their scatter into the pool. Both write to destinations that
    rotate, so that neither finds them in the processor's cache."""
    num_rows, block_size = shape.scatter_rows, shape.workload.block_size
    config = PrefixCacheConfig(num_blocks=shape.scatter_blocks, block_size=block_size)
    key = KeySpec(HIDDEN_KEY, (shape.hidden_size,), "bfloat16")
    pool = PrefixBlockPool(config)
    pool.open_key(key)
    plain = as_rows(torch.zeros(config.num_slots, shape.hidden_size, dtype=torch.bfloat16))
    rows = as_rows(torch.zeros(num_rows, shape.hidden_size, dtype=torch.bfloat16))
    blocks = np.random.default_rng(0).permutation(shape.scatter_blocks)
    times: dict[str, list[float]] = {"memcpy": [], "scatter": []}
    num_places = config.num_slots // num_rows
    for turn in range((2 + rounds) * num_places):
        place = turn % num_places
        first = place * num_rows
        taken = blocks[first // block_size : (first + num_rows) // block_size]
        slots = (taken[:, None] * block_size + np.arange(block_size)).ravel()
        begin = time.perf_counter()
        plain[first : first + num_rows] = rows
        middle = time.perf_counter()
        pool.write(key.name, slots, rows)
        done = time.perf_counter()
        if turn >= 2 * num_places:
            times["memcpy"].append(middle - begin)
            times["scatter"].append(done - middle)
    return statistics.median(times["memcpy"]) / statistics.median(times["scatter"])


class _PendingHits:
    """Steps by hand: one long prompt, decoders, and requests that hit the prompt again and again."""

    def __init__(self, shape: StageBenchShape, contender: Callable[..., Cache], rows: Rows) -> None:
        block_size = shape.workload.block_size
        self._shape = shape
        self._rows = rows
        self._prompt = list(range(1, 1 + shape.hit_tokens // block_size))
        self._blocks = {f"d{index}": [1 + len(self._prompt) + index] for index in range(shape.decoders)}
        self._decoding = dict.fromkeys(self._blocks, (0, 1))
        self._first_spare = 1 + len(self._prompt) + shape.decoders
        schedule = dataclasses.replace(
            shape.workload,
            num_blocks=self._first_spare + shape.hit_requests,
            max_running=shape.decoders + shape.hit_requests,
            prompt_tokens=shape.hit_tokens + block_size,
            step_tokens=shape.hit_tokens + shape.decoders,
        )
        self._cache, self._batch = _make({"": contender}, schedule, shape.hidden_size)[""]
        self._num_hits = 0
        self._evict = torch.zeros(2, 32 << 20, dtype=torch.uint8)
        self._use(self._save({"p": (0, shape.hit_tokens)}, {"p": self._prompt}, new={"p": 0}))
        self._use(self._save(self._decoding, self._blocks, new=dict.fromkeys(self._blocks, 0), finished={"p"}))

    def close(self) -> None:
        self._cache.close()

    def timed_save(self, *, pending: bool) -> float:
        """Seconds of a save beside hits that are pending, or that were handed on before."""
        hits = [f"h{self._num_hits + index}" for index in range(self._shape.hit_requests)]
        self._num_hits += len(hits)
        blocks = self._blocks | {
            req_id: [*self._prompt, self._first_spare + index] for index, req_id in enumerate(hits)
        }
        stop = self._shape.hit_tokens
        brought = self._save(
            self._decoding | dict.fromkeys(hits, (stop, stop + 1)), blocks, new=dict.fromkeys(hits, stop)
        )
        if not pending:
            self._use(brought)
        self._evict[1].copy_(self._evict[0])  # or the hits that were just copied would have emptied the caches
        beside = self._save(self._decoding | dict.fromkeys(hits, (stop + 1, stop + 2)), blocks)
        self._use(beside)
        if pending:
            self._use(brought)
        self._use(self._save(self._decoding, self._blocks, finished=set(hits)))
        return beside.seconds

    def _save(
        self,
        spans: Mapping[str, tuple[int, int]],
        blocks: Mapping[str, list[int]],
        *,
        new: Mapping[str, int] | None = None,
        finished: set[str] | None = None,
    ) -> "_Saved":
        """Saves a step of requests that compute positions `[first, stop)`. `new` ones have a hit of so many tokens."""
        new = new or {}
        known = [req_id for req_id in spans if req_id not in new]
        step = ScheduledStep(
            scheduler_output=SimpleNamespace(
                finished_req_ids=finished or set(),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=req_id, num_computed_tokens=hit, block_ids=[blocks[req_id]])
                    for req_id, hit in new.items()
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=known, resumed_req_ids=set(), new_block_ids=[None] * len(known)
                ),
                num_scheduled_tokens={req_id: stop - first for req_id, (first, stop) in spans.items()},
            ),
            req_ids=list(spans),
            starts=[first for first, _ in spans.values()],
            block_tables=[blocks[req_id] for req_id in spans],
            contents=[position for first, stop in spans.values() for position in range(first, stop)],
            expected={
                req_id: list(range(0 if req_id in new else first, stop)) for req_id, (first, stop) in spans.items()
            },
            hit_positions={},
        )
        hidden, mm_rows = self._rows.of(step.contents)
        begin = time.perf_counter()
        self._cache.new_step(step)
        middle = time.perf_counter()
        self._batch.load(step)
        again = time.perf_counter()
        step_id = self._cache.save(hidden, mm_rows, step.num_tokens)
        return _Saved(step_id, step, middle - begin + time.perf_counter() - again)

    def _use(self, saved: "_Saved") -> None:
        outputs = self._cache.materialize(saved.step_id, saved.step.req_ids)
        _check("a contender", saved.step, outputs, self._rows)


class _Saved(NamedTuple):
    step_id: Any
    step: ScheduledStep
    seconds: float


def _cliff(shape: StageBenchShape, contender: Callable[..., Cache], rows: Rows, rounds: int) -> float:
    """Median time of a save with hits pending, over that of the same save with none."""
    steps = _PendingHits(shape, contender, rows)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 + rounds):
        for pending in times:
            seconds = steps.timed_save(pending=pending)
            if turn >= 2:
                times[pending].append(seconds)
    steps.close()
    return statistics.median(times[True]) / statistics.median(times[False])
