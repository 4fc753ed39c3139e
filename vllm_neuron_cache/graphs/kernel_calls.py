"""The write and the merge as graphs that call NKI kernels, for `kernel` "nki".

They do what `encoder_write` and `merge_rows` do, but that padding goes nowhere: its index is the sentinel, and neither
the scratch block nor the dummy row is written. Index lists are columns, see `kernels.indices`; what is out of range
is for the host to refuse, and none of it is in the graph.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm_neuron_cache.graphs.merge import example_targets
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec
from vllm_neuron_cache.kernels.limits import SENTINEL, check_buffer, check_tensor, row_chunk
from vllm_neuron_cache.kernels.operators import BLOCK_SCATTER, GATHER_MERGE, KernelOperator, plain

Operators = Callable[[KernelOperator], Callable[..., None]]
"""What a lane has in the place of each operator."""


def encoder_write_nki_spec(buckets: tuple[int, ...], buffer: BufferShape) -> GraphSpec:
    """The buckets count rows. Raises `ConfigurationError` for a buffer that a kernel cannot index."""
    check_buffer("the encoder cache's buffer", buffer)
    chunk = row_chunk(buffer.fat_dim, buffer.dtype)

    def kernel_fn(operators: Operators) -> Callable[..., None]:
        scatter = operators(BLOCK_SCATTER)

        def encoder_write_nki(buffer: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor) -> None:
            """Writes rows `[R, fat_dim]` to the rows `row_ids`, int32 `[R, 1]`, of the flattened buffer; mutated."""
            scatter(buffer, rows, row_ids, chunk)

        return encoder_write_nki

    def example_args(bucket: int) -> tuple[torch.Tensor, ...]:
        return buffer.example(), torch.zeros(bucket, buffer.fat_dim, dtype=buffer.dtype), _nowhere(bucket)

    return GraphSpec(
        name="encoder_write_nki",
        fn=kernel_fn(plain),
        mutates=("buffer",),
        buckets=buckets,
        bytes_per_row=buffer.row_bytes,
        example_args=example_args,
        opaque=frozenset({BLOCK_SCATTER.name}),
        kernel_fn=kernel_fn,
    )


def merge_rows_nki_spec(
    buckets: tuple[int, ...], buffer: BufferShape, *, num_levels: int, max_step_tokens: int
) -> GraphSpec:
    """As `merge_rows_spec`. Raises `ConfigurationError` for a buffer or targets that a kernel cannot index."""
    width = buffer.fat_dim // (1 + num_levels)
    check_buffer("the encoder cache's buffer", buffer)
    check_tensor("a target of the merge", max_step_tokens + 1, width, buffer.dtype)
    chunk = row_chunk(width, buffer.dtype)

    def kernel_fn(operators: Operators) -> Callable[..., None]:
        gather = operators(GATHER_MERGE)

        def merge_rows_nki(
            hidden: torch.Tensor,
            deepstack: tuple[torch.Tensor, ...],
            buffer: torch.Tensor,
            src_rows: torch.Tensor,
            dst_rows: torch.Tensor,
        ) -> None:
            """As `merge_rows`, with columns int32 `[R, 1]` of pairs; one launch for each target."""
            for level, target in enumerate((hidden, *deepstack)):
                gather(target, buffer, src_rows, dst_rows, level * width, chunk)

        return merge_rows_nki

    def example_args(bucket: int) -> tuple[Any, ...]:
        targets = example_targets(buffer, num_levels, max_step_tokens)
        return *targets, buffer.example(), torch.zeros(bucket, 1, dtype=torch.int32), _nowhere(bucket)

    return GraphSpec(
        name="merge_rows_nki",
        fn=kernel_fn(plain),
        mutates=("hidden", "deepstack"),
        buckets=buckets,
        bytes_per_row=buffer.row_bytes,
        example_args=example_args,
        opaque=frozenset({GATHER_MERGE.name}),
        kernel_fn=kernel_fn,
    )


def _nowhere(length: int) -> torch.Tensor:
    """Destinations for a call that only compiles: zeros would be one row, written many times by one copy."""
    return torch.full((length, 1), SENTINEL, dtype=torch.int32)
