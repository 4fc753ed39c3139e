"""A language model's `prefill` graph over the cache's own rows, in chunks, on any lane and device: what
`compiled_prefill` needs of a device, without a serving engine."""

from typing import Any

import torch

from vllm_neuron_cache.encoder_cache.item import dense_layout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.read_plan import ReadWindow
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.graphs.attention import plain_attention
from vllm_neuron_cache.graphs.decoder import DecoderShape, prefill_spec
from vllm_neuron_cache.graphs.lanes import Lane
from vllm_neuron_cache.graphs.spec import BufferShape, flat_names, flatten, unflatten
from vllm_neuron_cache.runtime import EncoderCacheRuntime
from vllm_neuron_cache.source_rows import SourceRows

GEOMETRY = CacheGeometry(num_blocks=9, block_size=16, encoder_block_size=32)
CHUNK, CHUNKS, ITEM_ROWS, LEVELS = 32, 3, 50, 2
SHAPE = DecoderShape(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    dtype=torch.float32,
    num_slots=CHUNK * CHUNKS + 1,
    context_rows=CHUNK * CHUNKS,
)


def chunks_of(lane: Lane, device: torch.device, *, item_at: int = 20) -> list[torch.Tensor]:
    """Hidden states `[CHUNK, H]` of each step of one request, on the CPU; an item lies at `item_at` of it, over chunks.

    Runtime and graph are lowered first, and the lane is sealed: whatever else compiles in a step is an error.
    """
    source = SourceRows(CHUNK, device)
    runtime = EncoderCacheRuntime(
        GEOMETRY,
        fat_dim=SHAPE.hidden_size * (1 + LEVELS),
        dtype=SHAPE.dtype,
        device=device,
        targets=source,
        lane=lane,
    )
    buffer = runtime.blocks.buffer
    spec = prefill_spec((CHUNK,), BufferShape(*buffer.shape, buffer.dtype), SHAPE, attention=plain_attention)
    args = _arguments(spec, buffer, device)
    call = lane.lower(spec, CHUNK, args)
    runtime.warm_up()
    _refill(spec, args, _values(spec))

    pool, journal = EncoderBlockPool(GEOMETRY.num_item_blocks), StepJournal()
    layout = dense_layout(ITEM_ROWS, GEOMETRY.block_size)
    journal.record_allocation(pool.reserve("item", layout, reference="request", step=journal.open_seq))
    runtime.apply(journal.close_step())
    rows = torch.randn(ITEM_ROWS, SHAPE.hidden_size * (1 + LEVELS), generator=torch.Generator().manual_seed(3))
    runtime.write("item", rows.to(device))

    hidden = []
    for begin in range(0, CHUNK * CHUNKS, CHUNK):
        first, last = max(begin, item_at), min(begin + CHUNK, item_at + ITEM_ROWS)
        windows = []
        if first < last:
            windows = [ReadWindow("request", "item", ITEM_ROWS, first - item_at, last - first, first - begin, None)]
        runtime.merge(runtime.plan_reads(windows, CHUNK))
        if not windows:
            source.fill_with_text()
        values = dict(zip(flat_names(spec.fn, args), flatten(args)))
        values["src_rows"].copy_(source.take(CHUNK))
        for name, value in _step(begin).items():
            values[name].copy_(value)
        result = call(*args)
        hidden.append((result[0] if isinstance(result, list | tuple) else result).cpu().clone())
    assert lane.num_recompiles_refused == 0
    return hidden


def _arguments(spec: Any, buffer: torch.Tensor, device: torch.device) -> tuple[Any, ...]:
    """Example arguments on the device, with the cache's own buffer among them."""
    example = spec.example_args(CHUNK)
    named = zip(flat_names(spec.fn, example), flatten(example))
    return unflatten([buffer if name == "buffer" else tensor.to(device) for name, tensor in named], example)


def _values(spec: Any) -> dict[str, torch.Tensor]:
    """Weights."""
    generator = torch.Generator().manual_seed(2)
    example = spec.example_args(CHUNK)
    return {
        name: torch.randn(tensor.shape, generator=generator) * (tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1)
        for name, tensor in zip(flat_names(spec.fn, example), flatten(example))
        if name in ("embed_tokens", "norm") or name.startswith("layers[")
    }


def _refill(spec: Any, args: tuple[Any, ...], values: dict[str, torch.Tensor]) -> None:
    for name, tensor in zip(flat_names(spec.fn, args), flatten(args)):
        if name in values:
            tensor.copy_(values[name])


def _step(begin: int) -> dict[str, torch.Tensor]:
    """What the host hands over for the tokens from `begin` on: ids, angles and the metadata of attention."""
    positions = torch.arange(begin, begin + CHUNK)
    angles = positions[:, None] / 10 ** torch.linspace(0, 3, SHAPE.head_dim // 2)
    context = torch.arange(SHAPE.context_rows)
    known = context < begin + CHUNK
    values = {
        "input_ids": positions * 7 % SHAPE.vocab_size,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "metadata[0]": positions,
        "metadata[1]": torch.where(known, context, SHAPE.num_slots - 1),
        "metadata[2]": torch.zeros(CHUNK),
        "metadata[3]": positions,
        "metadata[4]": torch.where(known, 0, -2),
        "metadata[5]": context,
    }
    return {name: value.to(SHAPE.dtype if name in ("cos", "sin") else torch.int32) for name, value in values.items()}


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Hidden states after the last norm are of the order of 1; sums of a device have another order."""
    for mine, its in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-2)
