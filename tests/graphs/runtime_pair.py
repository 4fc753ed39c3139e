"""A cache whose graphs call kernels beside one with the compiler's, through the same steps."""

import torch

from vllm_neuron_cache.encoder_cache.item import dense_layout
from vllm_neuron_cache.encoder_cache.pool import EncoderBlockPool
from vllm_neuron_cache.encoder_cache.read_plan import ReadWindow
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.encoder_cache.steps import StepJournal
from vllm_neuron_cache.graphs.lanes import Lane, make_lane
from vllm_neuron_cache.graphs.spec import flatten
from vllm_neuron_cache.runtime import EncoderCacheRuntime, MergeTargets
from vllm_neuron_cache.source_rows import SourceRows

GEOMETRY = CacheGeometry(num_blocks=24, block_size=16, encoder_block_size=32)
WIDTH, LEVELS, TOKENS = 8, 2, 200
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
SIZES = (1, 15, 16, 64, 65, 130, 150, 200)
"""Rows of items: with a rest, without one, in one launch and in several."""


def make_runtime(
    lane: Lane, device: torch.device = CPU, targets: MergeTargets | SourceRows | None = None
) -> EncoderCacheRuntime:
    def target() -> torch.Tensor:
        return torch.zeros(TOKENS + 1, WIDTH, dtype=DTYPE, device=device)

    runtime = EncoderCacheRuntime(
        GEOMETRY,
        fat_dim=WIDTH * (1 + LEVELS),
        dtype=DTYPE,
        device=device,
        targets=targets or MergeTargets(target(), tuple(target() for _ in range(LEVELS))),
        lane=lane,
    )
    runtime.warm_up()
    return runtime


@torch.inference_mode()
def check_against_the_compiler(lane: Lane, device: torch.device = CPU) -> EncoderCacheRuntime:
    """Both go through the same steps, the compiler's on the CPU: items of every size, written over evicted ones, read
    in parts. Their tags, their targets, and their buffers but for the scratch block are the same, to the bit. Returns
    the runtime with kernels."""
    nki, compiler = make_runtime(lane, device), make_runtime(make_lane("eager"))
    pool, journal = EncoderBlockPool(GEOMETRY.num_item_blocks), StepJournal()
    generator = torch.Generator().manual_seed(1)
    for number, size in enumerate((*SIZES, *reversed(SIZES))):
        key = f"item {number}"
        layout = dense_layout(size, GEOMETRY.block_size)
        for evicted in pool.make_room(layout.num_blocks):
            journal.record_eviction(evicted)
        journal.record_allocation(pool.reserve(key, layout, reference="request", step=journal.open_seq))
        step = journal.close_step()
        output = torch.randn(size, WIDTH * (1 + LEVELS), generator=generator).to(DTYPE)
        first = size // 3
        window = ReadWindow("request", key, size, first, size - first, TOKENS - size + first, None)
        for runtime in (nki, compiler):
            for target in flatten(runtime.targets):
                target.fill_(number)
            runtime.apply(step)
            runtime.write(key, output.to(runtime.blocks.buffer.device))
            runtime.merge(runtime.plan_reads([window], TOKENS))
        for mine, its in zip(flatten(nki.targets), flatten(compiler.targets), strict=True):
            assert torch.equal(mine.cpu()[:TOKENS], its[:TOKENS]), key
            assert torch.all(mine.cpu()[TOKENS] == number), "padding goes nowhere"
        assert torch.equal(nki.blocks.buffer.cpu()[:-1], compiler.blocks.buffer[:-1])
        assert torch.equal(nki.blocks.mm_hash_tags.cpu(), compiler.blocks.mm_hash_tags)
        assert torch.equal(nki.blocks.generations.cpu(), compiler.blocks.generations)
        journal.acknowledge(step.seq)
        pool.acknowledge(step.seq)
        pool.release(key, "request")
    assert not nki.blocks.buffer[-1].cpu().any(), "nor do rows of padding"
    nki.check_integrity()
    assert nki.stats().recompiles_after_warmup == 0
    return nki
