"""A start of the cache on torch_xla's CPU, and some steps after it: which graphs XLA was given. Prints JSON.

A process of its own, because what a start compiles is a process's: `xla_graph_hashes.py BLOCKS STEP_TOKENS [SEED]`, and
without a seed no steps follow. Deployment, runtime and warm-up are the cache's own; only the lane is made here.
"""

import json
import random
import sys
from collections import Counter
from typing import Any

import older_torch  # noqa: F401
import torch
import torch_xla

from vllm_neuron_cache.encoder_cache.item import dense_layout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.read_plan import ReadWindow
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.graphs.catalog import encoder_cache_specs
from vllm_neuron_cache.graphs.deployment import Deployment
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.lanes.base import Lowered
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, flat_names, flatten
from vllm_neuron_cache.runtime import EncoderCacheRuntime
from vllm_neuron_cache.warmup import make_runtime

WIDTH, LEVELS, BLOCK_SIZE = 4, 1, 16


class LazyLane(Lane):
    """Every call is one lazy graph, whose hash is noted before it runs. A call may make any graph: whether it is one of
    the warm-up is what the hashes show."""

    name = "torch_xla"

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, set[str]] = {}
        """By graph and bucket."""
        self.calls: Counter[str] = Counter()

    def _lower(self, spec: GraphSpec, bucket: int, example_args: tuple[Any, ...]) -> Lowered:
        names, mutated = flat_names(spec.fn, example_args), spec.mutated_names(example_args)
        key = f"{spec.name} {bucket}"
        found = self.hashes.setdefault(key, set())

        def call(*args: Any) -> None:
            torch_xla.sync(wait=True)  # so that nothing but the graph is pending
            spec.fn(*args)
            targets = [tensor for name, tensor in zip(names, flatten(args)) if name in mutated]
            found.add(torch_xla._XLAC._get_graph_hash(targets).hex())
            self.calls[key] += 1
            torch_xla.sync(wait=True)

        return Lowered(call, mutated)

    def noted(self) -> dict[str, list[str]]:
        return {graph: sorted(hashes) for graph, hashes in self.hashes.items()}


def deployment_of(num_blocks: int, step_tokens: int) -> Deployment:
    buffer = BufferShape(num_blocks, BLOCK_SIZE, WIDTH * (1 + LEVELS), torch.float32)
    return Deployment(
        geometry=CacheGeometry(num_blocks, BLOCK_SIZE, BLOCK_SIZE),
        buffer=buffer,
        num_levels=LEVELS,
        max_step_tokens=step_tokens,
        kernel="compiler",
        merges_in_prefill=False,
        encoders=(),
        attention_block=0,
        specs=encoder_cache_specs(buffer, num_levels=LEVELS, max_step_tokens=step_tokens),
    )


def serve(runtime: EncoderCacheRuntime, step_tokens: int, seed: int) -> int:
    """Steps that write items to any blocks, older ones evicted, and read a part of each at any place, in every bucket
    of every graph. Returns how many rows came back as they were written; others raise."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    geometry = runtime.blocks.geometry
    pool, journal = EncoderBlockPool(geometry.num_item_blocks), StepJournal()
    exact = 0
    largest = min(step_tokens, geometry.num_item_blocks * BLOCK_SIZE)
    sizes = [largest - 64, *(64 << bit for bit in range(7)), *choose.sample(range(1, largest + 1), 3)]
    for number, size in enumerate(sizes):
        key, layout = f"item {seed} {number}", dense_layout(size, BLOCK_SIZE)
        for evicted in pool.make_room(layout.num_blocks):
            journal.record_eviction(evicted)
        journal.record_allocation(pool.reserve(key, layout, reference="request", step=journal.open_seq))
        step = journal.close_step()
        runtime.apply(step)
        output = torch.randn(size, runtime.blocks.fat_dim, generator=generator)
        runtime.write(key, output.to(runtime.blocks.buffer.device))
        first, place = choose.randrange(max(1, size // 4)), choose.randint(0, step_tokens - size)
        window = ReadWindow("request", key, size, first, size - first, place, None)
        runtime.merge(runtime.plan_reads([window], step_tokens))
        got = torch.cat([level.cpu()[place : place + size - first] for level in flatten(runtime.targets)], dim=1)
        assert torch.equal(got, output[first:])
        exact += len(got)
        journal.acknowledge(step.seq)
        pool.acknowledge(step.seq)
        pool.release(key, "request")
    return exact


def main(num_blocks: int, step_tokens: int, seed: int | None = None) -> dict[str, Any]:
    lane = LazyLane()
    runtime = make_runtime(deployment_of(num_blocks, step_tokens), lane, torch_xla.device())
    runtime.warm_up()
    warm = lane.noted()
    lane.calls.clear()
    rows = 0 if seed is None else serve(runtime, step_tokens, seed)
    return {"warm_up": warm, "after_serving": lane.noted(), "calls": lane.calls, "rows_exact": rows}


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))), flush=True)
