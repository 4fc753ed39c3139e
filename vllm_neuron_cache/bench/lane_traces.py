"""One random run of a worker in every lane: nothing compiles after warm-up, and every lane has the same rows."""

import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.config import LANES
from vllm_neuron_cache.encoder_cache.item import dense_layout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.read_plan import ReadWindow
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import EncoderCacheStep, StepJournal
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.graphs.lanes import make_lane
from vllm_neuron_cache.graphs.merge import example_targets
from vllm_neuron_cache.graphs.spec import BufferShape
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets

GEOMETRY = CacheGeometry(num_blocks=33, block_size=16, encoder_block_size=64)
WIDTH, NUM_LEVELS, STEP_TOKENS = 8, 2, 512
FAT_DIM = WIDTH * (1 + NUM_LEVELS)


class TraceStep(NamedTuple):
    """What a worker is told and does in one step."""

    step: EncoderCacheStep
    written: list[tuple[str, int]]
    """Items that the encoder ran, with their token rows."""
    windows: list[ReadWindow]
    num_tokens: int


class LaneRun(NamedTuple):
    """One lane's run of a trace."""

    graphs_compiled: int
    recompiles_after_warmup: int
    rows: list[torch.Tensor]
    """The merge targets after each step, `[T, FAT_DIM]`."""


def random_trace(num_steps: int, seed: int = 0) -> list[TraceStep]:
    """Steps of a real pool and journal: new items of every size that fits, repeats, parts of items, evictions, and
    steps of every length."""
    choose = random.Random(seed)
    pool, journal = EncoderBlockPool(GEOMETRY.num_item_blocks), StepJournal()
    trace: list[TraceStep] = []
    tokens: dict[str, int] = {}
    for _ in range(num_steps):
        written, windows = [], []
        num_tokens = choose.randint(1, STEP_TOKENS)
        position = 0
        for _ in range(choose.randint(0, 4)):
            resident = [item.key for item in pool.items()]
            if resident and choose.random() < 0.6:
                key = choose.choice(resident)
                pool.refer(key, "request")
            else:
                key = f"item {len(tokens)}"
                layout = dense_layout(choose.randint(1, 128), GEOMETRY.block_size)
                if not pool.can_reserve(layout.num_blocks):
                    continue
                for evicted in pool.make_room(layout.num_blocks):
                    journal.record_eviction(evicted)
                item = pool.reserve(key, layout, reference="request", step=journal.open_seq)
                journal.record_allocation(item)
                tokens[key] = layout.num_tokens
                written.append((key, layout.num_tokens))
            first = choose.randrange(tokens[key])
            count = min(choose.randint(1, tokens[key] - first), num_tokens - position)
            if count > 0:
                windows.append(ReadWindow("request", key, tokens[key], first, count, position, None))
                position += count + choose.randint(0, 3)
        step = journal.close_step()
        trace.append(TraceStep(step, written, windows, num_tokens))
        journal.acknowledge(step.seq)
        pool.acknowledge(step.seq)
        for item in pool.items():
            pool.release(item.key, "request")
    return trace


@torch.inference_mode()
def run_trace(
    lane_name: str,
    trace: list[TraceStep],
    dtype: torch.dtype = torch.float32,
    *,
    warmed_up: Callable[[], None] = lambda: None,
) -> LaneRun:
    """Plays a trace in one lane; `warmed_up` is called before the first step.

    Raises `ConfigurationError` if the lane's compiler is missing.
    """
    lane = make_lane(lane_name)
    buffer = BufferShape(GEOMETRY.num_blocks, GEOMETRY.block_size, FAT_DIM, dtype)
    targets = MergeTargets(*example_targets(buffer, NUM_LEVELS, STEP_TOKENS))
    runtime = EncoderCacheRuntime(
        GEOMETRY, fat_dim=FAT_DIM, dtype=dtype, device=torch.device("cpu"), targets=targets, lane=lane
    )
    runtime.warm_up()
    compiled = lane.num_compiled
    warmed_up()
    rows = []
    for step in trace:
        runtime.apply(step.step)
        for key, num_tokens in step.written:
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            runtime.write(key, torch.randn(num_tokens, FAT_DIM, generator=generator).to(dtype))
        runtime.merge(runtime.plan_reads(step.windows, step.num_tokens))
        rows.append(torch.cat([targets.hidden, *targets.deepstack], dim=1)[:-1].clone())
    runtime.check_integrity()
    stats = runtime.stats()
    return LaneRun(compiled, stats.graphs_compiled - compiled + stats.recompiles_after_warmup, rows)


def bench_lanes(num_steps: int = 500) -> dict[str, Any]:
    """Every lane that can run here over one trace, its rows compared with eager's to the bit."""
    trace = random_trace(num_steps)
    reference = run_trace("eager", trace)
    result: dict[str, Any] = {}
    for name in LANES:
        try:
            run = reference if name == "eager" else run_trace(name, trace)
        except ConfigurationError as error:
            result[name] = {"missing": str(error).split(". ")[0]}
            continue
        result[name] = {
            "steps": num_steps,
            "graphs_compiled": run.graphs_compiled,
            "recompiles_after_warmup": run.recompiles_after_warmup,
            "equals_eager": all(torch.equal(rows, others) for rows, others in zip(run.rows, reference.rows)),
        }
    return result
