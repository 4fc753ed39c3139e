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


def write_spec(buffer: BufferShape) -> GraphSpec:
    return encoder_write_spec(WRITE_BUCKETS, buffer)


def stamp_spec(buffer: BufferShape) -> GraphSpec:
    return encoder_stamp_spec(STAMP_BUCKETS, buffer.num_blocks)


def merge_spec(buffer: BufferShape, *, num_levels: int, max_step_tokens: int) -> GraphSpec:
    """`num_levels` deepstack levels beside the hidden state; steps of at most `max_step_tokens` token rows."""
    buckets = doubling_buckets(MIN_MERGE_ROWS, max_step_tokens)
    return merge_rows_spec(buckets, buffer, num_levels=num_levels, max_step_tokens=max_step_tokens)


def encoder_cache_specs(
    buffer: BufferShape, *, num_levels: int, max_step_tokens: int, merges_in_prefill: bool = False
) -> tuple[GraphSpec, ...]:
    """All that a worker warms up, in its order. A model that merges in its own prefill needs no graph for it."""
    specs = write_spec(buffer), stamp_spec(buffer)
    if merges_in_prefill:
        return specs
    return *specs, merge_spec(buffer, num_levels=num_levels, max_step_tokens=max_step_tokens)
