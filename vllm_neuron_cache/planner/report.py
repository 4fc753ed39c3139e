"""A plan as JSON and as tables."""

import json
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_neuron_cache.planner.values import GIB, BufferPlan, Plan

_MIB = 1 << 20


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything in the plan as plain values. Sizes are token rows and bytes unless a name says otherwise.

    What was not asked, or needs a simulator that is not there, is None.
    """
    shape, request, simulated = plan.shape, plan.request, plan.simulated
    return {
        "model": {
            "family": shape.family,
            "patch_size": shape.patch_size,
            "merge_size": shape.merge_size,
            "temporal_patch_size": shape.temporal_patch_size,
            "hidden_size": shape.hidden_size,
            "num_deepstack_levels": shape.num_deepstack_levels,
            "fat_dim": shape.fat_dim,
            "dtype": shape.dtype,
            "image_pixels": shape.image_limits._asdict(),
            "video_pixels": shape.video_limits._asdict(),
        },
        "cache": {
            "num_blocks": plan.geometry.num_blocks,
            "num_blocks_needed": plan.num_blocks_needed,
            "block_size": plan.geometry.block_size,
            "encoder_block_size": plan.geometry.encoder_block_size,
            "block_bytes": plan.block_bytes,
            "bytes_per_rank": plan.buffer.bytes_per_rank,
            "bytes_total": plan.buffer.bytes_total,
            "tensor_parallel_size": request.tensor_parallel_size,
            "encoder_cache_size": plan.encoder_cache_size,
            "largest_item_tokens": plan.largest_items,
            "resident_items": plan.buffer.resident,
        },
        "sizes": [
            {
                "size": size.size.label,
                "modality": size.size.modality,
                "count": size.size.count,
                "tokens": size.tokens,
                "blocks": size.blocks,
                "resident_items": size.resident,
                "refused": size.refused,
            }
            for size in plan.sizes
        ],
        "block_sizes": [
            {
                "block_size": size.block_size,
                "num_blocks": size.num_blocks,
                "padding_waste": size.padding_waste,
                "resident_items": size.resident,
            }
            for size in plan.block_sizes
        ],
        "buffers": [
            {
                "num_blocks": buffer.num_blocks,
                "bytes_per_rank": buffer.bytes_per_rank,
                "bytes_total": buffer.bytes_total,
                "resident_items": buffer.resident,
            }
            for buffer in plan.buffers
        ],
        "load": {
            "mean_item_tokens": plan.mean_item_tokens,
            "reuse": request.reuse,
            "hit_rate": None if simulated is None else simulated.hit_rate,
            "encoder_tokens_saved_fraction": None if simulated is None else simulated.encoder_tokens_saved_fraction,
            "encode_seconds_per_1000_requests": plan.encode_seconds_per_1000,
            "saved_seconds_per_1000_requests": plan.saved_seconds_per_1000,
        },
        "stage_cache": [
            {
                "key": key.name,
                "width": key.width,
                "dtype": key.dtype,
                "bytes_per_kv_block": key.bytes_per_block,
                "bytes": key.bytes,
            }
            for key in plan.stage
        ],
        "additional_config": plan.additional_config,
        "vllm_arguments": plan.vllm_arguments,
        "warnings": list(plan.warnings),
        "notes": list(plan.shape.notes),
    }


def vllm_flags(plan: Plan) -> str:
    """The options to paste after `--model MODEL`, quoted for a shell."""
    words = [word for name, value in plan.vllm_arguments.items() for word in (name, str(value))]
    return shlex.join([*words, "--additional-config", json.dumps(plan.additional_config)])


def show(plan: Plan, console: Console) -> None:
    """Prints the tables, the warnings and what to paste."""
    console.print(_summary(plan))
    console.print(_sizes(plan))
    console.print(_block_sizes(plan))
    console.print(_buffers(plan))
    if plan.stage:
        console.print(_stage(plan))
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for note in plan.shape.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print("Options for vLLM:", highlight=False)
    # Unbroken, so that it can be copied.
    console.print(vllm_flags(plan), markup=False, highlight=False, soft_wrap=True)


def _summary(plan: Plan) -> Table:
    shape, geometry = plan.shape, plan.geometry
    table = Table(title=f"Encoder cache for {shape.family}")
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_row(
        "blocks (one is scratch) x rows x width", f"{geometry.num_blocks} x {geometry.block_size} x {shape.fat_dim}"
    )
    table.add_row("dtype", shape.dtype)
    table.add_row("HBM per rank, GiB", _gib(plan.buffer.bytes_per_rank))
    table.add_row(f"HBM on {plan.request.tensor_parallel_size} rank(s), GiB", _gib(plan.buffer.bytes_total))
    table.add_row("one block, MiB", f"{plan.block_bytes / _MIB:.2f}")
    table.add_row("blocks that hold every item vLLM admits", str(plan.num_blocks_needed))
    table.add_row(
        "largest items, rows", ", ".join(f"{modality} {rows}" for modality, rows in plan.largest_items.items())
    )
    table.add_row("items of the mix resident", str(plan.buffer.resident))
    table.add_row("rows of a mean item", f"{plan.mean_item_tokens:.1f}")
    if plan.simulated is not None:
        table.add_row("expected hit rate", f"{plan.simulated.hit_rate:.1%}")
        table.add_row("rows that the encoder is spared", f"{plan.simulated.encoder_tokens_saved_fraction:.1%}")
    if plan.encode_seconds_per_1000 is not None:
        table.add_row("encoding 1000 requests without cache, s", f"{plan.encode_seconds_per_1000:.1f}")
    if plan.saved_seconds_per_1000 is not None:
        table.add_row("of which saved, s", f"{plan.saved_seconds_per_1000:.1f}")
    return table


def _sizes(plan: Plan) -> Table:
    table = Table(title=f"Sizes, in blocks of {plan.geometry.block_size} rows")
    table.add_column("size")
    for name in ("count", "rows", "blocks", "resident alone"):
        table.add_column(name, justify="right")
    for size in plan.sizes:
        resident = "refused" if size.refused else str(size.resident)
        table.add_row(size.size.label, str(size.size.count), str(size.tokens), str(size.blocks), resident)
    return table


def _block_sizes(plan: Plan) -> Table:
    table = Table(title="Other block sizes in the same HBM")
    for name in ("rows in a block", "blocks", "padding", "items resident"):
        table.add_column(name, justify="right")
    for size in plan.block_sizes:
        chosen = " *" if size.block_size == plan.geometry.block_size else ""
        table.add_row(
            f"{size.block_size}{chosen}", str(size.num_blocks), f"{size.padding_waste:.1%}", str(size.resident)
        )
    return table


def _buffers(plan: Plan) -> Table:
    table = Table(title="More or less HBM")
    for name in ("blocks", "GiB per rank", "GiB in all", "items resident"):
        table.add_column(name, justify="right")
    for buffer in plan.buffers:
        table.add_row(*_buffer_row(plan, buffer))
    return table


def _buffer_row(plan: Plan, buffer: BufferPlan) -> tuple[str, ...]:
    chosen = " *" if buffer.num_blocks == plan.geometry.num_blocks else ""
    return (f"{buffer.num_blocks}{chosen}", _gib(buffer.bytes_per_rank), _gib(buffer.bytes_total), str(buffer.resident))


def _stage(plan: Plan) -> Table:
    table = Table(title=f"Host memory of the stage cache, KV blocks of {plan.request.kv_block_size}")
    table.add_column("key")
    for name in ("width", "dtype", "KiB per KV block", "GiB"):
        table.add_column(name, justify="right")
    for key in plan.stage:
        total = "-" if key.bytes is None else _gib(key.bytes)
        table.add_row(key.name, str(key.width), key.dtype, f"{key.bytes_per_block / 1024:.2f}", total)
    return table


def _gib(value: int) -> str:
    gib = value / GIB
    return f"{gib:.2f}" if gib >= 1 else f"{gib:.3g}"
