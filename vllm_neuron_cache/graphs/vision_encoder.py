"""An encoder as one static graph, whose last operation is the write into the encoder cache's buffer."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_neuron_cache.encoders.interface import EncoderAdapter
from vllm_neuron_cache.encoders.weights import WeightForm, plain_form
from vllm_neuron_cache.graphs.encoder_write import encoder_write
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec

Gather = Callable[[torch.Tensor], torch.Tensor]
"""From a rank's rows `[n, rows, fat_dim]` to those of all ranks, `[n * ranks, rows, fat_dim]`."""


_COLLECTIVES = frozenset({"_c10d_functional.all_gather_into_tensor", "_c10d_functional.wait_tensor"})


def encoder_spec(
    adapter: EncoderAdapter,
    form: WeightForm,
    buffer: BufferShape,
    *,
    positions: int,
    buckets: tuple[int, ...],
    num_ranks: int = 1,
    gather: Gather | None = None,
) -> GraphSpec:
    """The graph of an adapter for attention blocks of so many positions. The buckets count blocks.

    Its arguments are `buffer` (mutated), `block_ids` and `block_rows` (int32 `[rows]`, where each row goes; padding
    goes to the scratch block), `segment_ids` (int32 `[positions]`, as the adapter takes them), `inputs` (the adapter's)
    and `weights`. It returns one bool tensor `[blocks, max_segments]`: whether all rows of the segment are finite, true
    where there is none.

    With `num_ranks` each rank has the inputs of its share of the blocks, in their order, and `gather` brings the rows
    together, so that all ranks write the same. Destinations and segments are those of all blocks; the segments of the
    rank's own follow as a second tensor. Nothing in the graph depends on which rank it is.
    """
    rows_per_block = positions // adapter.positions_per_row

    def encode(
        buffer: torch.Tensor,
        block_ids: torch.Tensor,
        block_rows: torch.Tensor,
        segment_ids: tuple[torch.Tensor, ...],
        inputs: tuple[torch.Tensor, ...],
        weights: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor]:
        batched = tuple(
            tensor.unflatten(0, (-1, positions * given.per_position)) for tensor, given in zip(inputs, adapter.inputs)
        )
        rows = adapter.forward(batched, segment_ids[-1].view(-1, positions), form.bind(weights))
        if gather is not None:
            rows = gather(rows)
        flags = _finite_segments(rows, segment_ids[0].view(-1, positions), adapter)
        encoder_write(buffer, rows.flatten(0, 1), block_ids, block_rows)
        return (flags,)

    def example_args(bucket: int) -> tuple[Any, ...]:
        num_positions = bucket * positions
        own_positions = num_positions // num_ranks
        places = (torch.zeros(bucket * rows_per_block, dtype=torch.int32) for _ in range(2))
        segment_ids = tuple(
            torch.zeros(size, dtype=torch.int32)
            for size in (num_positions, own_positions)[: 1 if num_ranks == 1 else 2]
        )
        inputs = tuple(given.example(own_positions) for given in adapter.inputs)
        return buffer.example(), *places, segment_ids, inputs, form.example()

    return GraphSpec(
        name=f"encoder_{adapter.name}_{positions}",
        fn=encode,
        mutates=("buffer",),
        buckets=buckets,
        bytes_per_row=plain_form(adapter.weight_shapes, adapter.dtype).num_bytes,
        example_args=example_args,
        index_limits={"block_ids": buffer.num_blocks, "block_rows": buffer.block_size},
        opaque=_COLLECTIVES if gather is not None else frozenset(),
        work_bytes=adapter.work_bytes(positions),
    )


def _finite_segments(rows: torch.Tensor, segment_ids: torch.Tensor, adapter: EncoderAdapter) -> torch.Tensor:
    """bool `[n, max_segments]`."""
    # A row belongs to the segment of the last of its positions: a segment's rest makes no row.
    of_row = segment_ids.unflatten(1, (-1, adapter.positions_per_row))[:, :, -1]
    bad = ~torch.isfinite(rows).all(-1)
    numbers = torch.arange(adapter.max_segments, dtype=torch.int32, device=rows.device)
    return ~((of_row[:, None, :] == numbers[None, :, None]) & bad[:, None, :]).any(-1)
