"""The graphs that the encoder cache needs for a buffer and a step, in the buckets that they are compiled for."""

from vllm_neuron_cache.graphs.encoder_write import encoder_stamp_spec, encoder_write_spec
from vllm_neuron_cache.graphs.merge import merge_rows_spec
from vllm_neuron_cache.graphs.spec import BufferShape, GraphSpec, doubling_buckets

WRITE_BUCKETS = doubling_buckets(64, 2048)
"""Rows of one write launch. An item is cut into parts that fill buckets; only a rest below the smallest is padded."""

STAMP_BUCKETS = (4, 32, 256)
"""Blocks of one stamp launch. A tag is 12 bytes, so padding costs nothing and few sizes will do."""

MIN_MERGE_ROWS = 64
"""Smallest merge bucket: below it a graph's launch costs more than its rows."""


def write_spec(buffer: BufferShape, kernel: str = "compiler") -> GraphSpec:
    """With `kernel` "nki" raises `ConfigurationError` for a buffer that kernels cannot index."""
    if kernel == "nki":
        # Not at the top, here and below: where nki is installed it takes a while to load, and nothing else needs it.
        from vllm_neuron_cache.graphs.kernel_calls import encoder_write_nki_spec

        return encoder_write_nki_spec(WRITE_BUCKETS, buffer)
    return encoder_write_spec(WRITE_BUCKETS, buffer)


def stamp_spec(buffer: BufferShape) -> GraphSpec:
    return encoder_stamp_spec(STAMP_BUCKETS, buffer.num_blocks)


def merge_spec(buffer: BufferShape, kernel: str = "compiler", *, num_levels: int, max_step_tokens: int) -> GraphSpec:
    """`num_levels` deepstack levels beside the hidden state; steps of at most `max_step_tokens` token rows.

    Raises as `write_spec` does.
    """
    buckets = doubling_buckets(MIN_MERGE_ROWS, max_step_tokens)
    if kernel == "nki":
        from vllm_neuron_cache.graphs.kernel_calls import merge_rows_nki_spec

        return merge_rows_nki_spec(buckets, buffer, num_levels=num_levels, max_step_tokens=max_step_tokens)
    return merge_rows_spec(buckets, buffer, num_levels=num_levels, max_step_tokens=max_step_tokens)


def encoder_cache_specs(
    buffer: BufferShape,
    kernel: str = "compiler",
    *,
    num_levels: int,
    max_step_tokens: int,
    merges_in_prefill: bool = False,
) -> tuple[GraphSpec, ...]:
    """All that a worker warms up, in its order. A model that merges in its own prefill needs no graph for it.

    Raises as `write_spec` does.
    """
    specs = write_spec(buffer, kernel), stamp_spec(buffer)
    if merges_in_prefill:
        return specs
    return *specs, merge_spec(buffer, kernel, num_levels=num_levels, max_step_tokens=max_step_tokens)
