"""The write and merge graphs against a memcpy of the bytes that have to move."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_neuron_cache.bench.lane_traces import bench_lanes
from vllm_neuron_cache.bench.race import race
from vllm_neuron_cache.encoder_cache.item import dense_layout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.read_plan import ReadPlanner, ReadWindow
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.encoder_cache.table import EntryTable
from vllm_neuron_cache.graphs.bucketed import BucketedGraph
from vllm_neuron_cache.graphs.encoder_write import encoder_write_spec
from vllm_neuron_cache.graphs.lanes import InductorLane
from vllm_neuron_cache.graphs.merge import merge_rows_fat_spec, merge_rows_spec
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, doubling_buckets


class GraphBenchShape(NamedTuple):
    """Sizes of the measurement; the defaults are those of Qwen3-VL 32B with 30 images in a step."""

    block_size: int = 512
    hidden_size: int = 5120
    num_levels: int = 3
    step_tokens: int = 8192
    num_images: int = 30
    image_tokens: int = 256
    write_blocks: int = 4
    few_blocks: int = 9
    many_blocks: int = 90

    @property
    def fat_dim(self) -> int:
        return self.hidden_size * (1 + self.num_levels)

    def buffer(self, num_blocks: int) -> BufferShape:
        return BufferShape(num_blocks, self.block_size, self.fat_dim, torch.bfloat16)


@torch.inference_mode()
def bench_graphs(
    shape: GraphBenchShape | None = None, *, rounds: int = 9, step: Callable[[str], None]
) -> dict[str, Any]:
    """Measures everything and returns it as the documented JSON. One thread, bfloat16, least CPU time."""
    shape = shape or GraphBenchShape()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step("Read plan")
        read_plan_us = _read_plan_us(shape)
        step("Write graph")
        lane = InductorLane()
        write = _bench_write(shape, lane, rounds)
        step("Merge graphs, beside the usual form")
        merge = _bench_merge(shape, lane, rounds)
    finally:
        torch.set_num_threads(threads)
    step("A random run in every lane")
    lanes = bench_lanes()
    recompiles = lane.num_recompiles_refused + sum(run.get("recompiles_after_warmup", 0) for run in lanes.values())
    return {
        "write": write,
        **merge,
        "read_plan_us": read_plan_us,
        "recompiles_after_warmup": recompiles,
        "lanes": lanes,
    }


def _bench_write(shape: GraphBenchShape, lane: InductorLane, rounds: int) -> dict[str, float]:
    num_rows = shape.write_blocks * shape.block_size
    rows = torch.randn(num_rows, shape.fat_dim).to(torch.bfloat16)
    copy = torch.empty_like(rows)
    block_rows = torch.arange(shape.block_size, dtype=torch.int32).repeat(shape.write_blocks)
    contenders: dict[str, Callable[[], object]] = {"memcpy": lambda: copy.copy_(rows)}
    for num_blocks in (shape.few_blocks, shape.many_blocks):
        buffer = torch.zeros(num_blocks, shape.block_size, shape.fat_dim, dtype=torch.bfloat16)
        blocks = torch.linspace(0, num_blocks - 2, shape.write_blocks).to(torch.int32)
        args = (buffer, rows, blocks.repeat_interleave(shape.block_size), block_rows)
        contenders[f"write_{num_blocks}"] = _lowered(
            encoder_write_spec((num_rows,), shape.buffer(num_blocks)), lane, args
        )
    best = race(contenders, rounds=rounds)
    few, many = best[f"write_{shape.few_blocks}"], best[f"write_{shape.many_blocks}"]
    return {"ratio_memcpy": few / best["memcpy"], "growth": many / few, "memcpy_ms": best["memcpy"] * 1e3}


def _bench_merge(shape: GraphBenchShape, lane: InductorLane, rounds: int) -> dict[str, Any]:
    width, levels, tokens = shape.hidden_size, shape.num_levels, shape.step_tokens
    buffer = torch.zeros(shape.num_images + 1, shape.block_size, shape.fat_dim, dtype=torch.bfloat16)
    for block in buffer[: shape.num_images]:
        block[: shape.image_tokens] = torch.randn(1, shape.fat_dim)
    planner, table, windows = _images_in_a_step(shape)
    plan = planner.plan(windows, tokens, table)
    src_rows, dst_rows = torch.from_numpy(plan.src_rows), torch.from_numpy(plan.dst_rows)

    hidden = torch.randn(tokens + 1, width).to(torch.bfloat16)
    deepstack = tuple(torch.zeros(tokens + 1, width, dtype=torch.bfloat16) for _ in range(levels))
    fat = torch.zeros(tokens + 1, shape.fat_dim, dtype=torch.bfloat16)
    bytes_moved = plan.num_rows * shape.fat_dim
    source, destination = (torch.ones(bytes_moved, dtype=torch.bfloat16) for _ in range(2))

    buckets = (plan.bucket,)
    usual_args = _usual_arguments(shape, buffer, windows, table)
    buffer_shape = shape.buffer(shape.num_images + 1)
    usual_spec = GraphSpec(
        name="merge_usual",
        fn=_merge_usual,
        mutates=(),
        buckets=buckets,
        bytes_per_row=buffer_shape.row_bytes,
        example_args=lambda bucket: usual_args,
    )
    usual = _lowered(usual_spec, lane, usual_args)
    contenders: dict[str, Callable[[], object]] = {
        "memcpy": lambda: destination.copy_(source),
        "merge_split": _lowered(
            merge_rows_spec(buckets, buffer_shape, num_levels=levels, max_step_tokens=tokens),
            lane,
            (hidden, deepstack, buffer, src_rows, dst_rows),
        ),
        "merge_fat": _lowered(
            merge_rows_fat_spec(buckets, buffer_shape, max_step_tokens=tokens), lane, (fat, buffer, src_rows, dst_rows)
        ),
    }
    best = race(contenders, rounds=rounds)
    slow = race(
        {
            "memcpy": contenders["memcpy"],
            "eager": lambda: _merge_usual(*usual_args),
            "inductor": usual,
        },
        rounds=3,
        warm_up=1,
    )
    return {
        "merge_fat": {"ratio_memcpy": best["merge_fat"] / best["memcpy"]},
        "merge_split": {"ratio_memcpy": best["merge_split"] / best["memcpy"]},
        "merge_usual": {name: slow[name] / slow["memcpy"] for name in ("eager", "inductor")},
        "merge_bucket": plan.bucket,
        "merge_memcpy_ms": best["memcpy"] * 1e3,
    }


def _lowered(spec: GraphSpec, lane: InductorLane, args: tuple[Any, ...]) -> Callable[[], object]:
    """The graph in its only bucket, bound to its arguments."""
    graph = BucketedGraph(spec, lane)
    graph.warm_up(lambda bucket: args)
    return lambda: graph.run(spec.buckets[0], *args)


def _read_plan_us(shape: GraphBenchShape, repeats: int = 300) -> float:
    planner, table, windows = _images_in_a_step(shape)
    best = float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        planner.plan(windows, shape.step_tokens, table)
        best = min(best, time.thread_time() - begin)
    return best * 1e6


def _images_in_a_step(shape: GraphBenchShape) -> tuple[ReadPlanner, EntryTable, list[ReadWindow]]:
    """A step with every image once, one per block, evenly spread."""
    pool, journal = EncoderBlockPool(shape.num_images), StepJournal()
    table = EntryTable(shape.num_images, shape.block_size)
    for image in range(shape.num_images):
        layout = dense_layout(shape.image_tokens, shape.block_size)
        journal.record_allocation(pool.reserve(f"image {image}", layout, reference="request", step=1))
    table.apply(journal.close_step())
    for entry in table.entries():
        table.mark_written(entry)
    stride = shape.step_tokens // shape.num_images
    windows = [
        ReadWindow("request", f"image {image}", shape.image_tokens, 0, shape.image_tokens, image * stride, None)
        for image in range(shape.num_images)
    ]
    planner = ReadPlanner(
        buckets=doubling_buckets(64, shape.step_tokens),
        scratch_row=shape.num_images * shape.block_size,
        dummy_row=shape.step_tokens,
    )
    return planner, table, windows


def _merge_usual(
    hidden: torch.Tensor,
    deepstack: torch.Tensor,
    buffer: torch.Tensor,
    block_ids: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The form to compare with: whole blocks, fresh outputs with a dummy row appended, deepstack levels as views.

    After the published design of vLLM Neuron ("On-Device Encoder Cache": stack, flatten, `index_put_`, sentinel row).
    """
    width, tokens = hidden.shape[1], hidden.shape[0]
    rows = buffer.index_select(0, block_ids).flatten(0, 1)
    flat_positions = positions.flatten()

    def merged(target: torch.Tensor, level: int) -> torch.Tensor:
        padded = torch.cat([target, target.new_zeros(1, width)])
        padded.index_put_((flat_positions,), rows[:, level * width : (level + 1) * width])
        return padded[:tokens]

    levels = [merged(deepstack[level], level + 1) for level in range(deepstack.shape[0])]
    return merged(hidden, 0), torch.stack(levels)


def _usual_arguments(
    shape: GraphBenchShape, buffer: torch.Tensor, windows: list[ReadWindow], table: EntryTable
) -> tuple[torch.Tensor, ...]:
    positions = torch.full((shape.num_images, shape.block_size), shape.step_tokens, dtype=torch.int64)
    block_ids = torch.empty(shape.num_images, dtype=torch.int64)
    for place, window in enumerate(windows):
        block_ids[place] = table.get(window.key).block_ids[0]
        positions[place, : window.num_rows] = torch.arange(window.step_position, window.step_position + window.num_rows)
    hidden = torch.randn(shape.step_tokens, shape.hidden_size).to(torch.bfloat16)
    deepstack = torch.zeros(shape.num_levels, shape.step_tokens, shape.hidden_size, dtype=torch.bfloat16)
    return hidden, deepstack, buffer, block_ids, positions
