"""Drives a stage cache through a schedule and compares every row that it hands on with the truth."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_neuron_cache.errors import WrongRowsError
from vllm_neuron_cache.simulation.stage_schedule import (
    ScheduledBatch,
    ScheduledStep,
    ScheduleShape,
    StageSchedule,
    row_values,
)
from vllm_neuron_cache.stage_cache import (
    FullAttentionGroupView,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    StageCacheOutputs,
)

HIDDEN, WIDTH = 3, 2
"""Columns of the hidden states, and of key "k"."""


MakeManager = Callable[[PrefixCacheConfig, FullAttentionGroupView], OmniPrefixCacheManager]


def random_shape(seed: int) -> ScheduleShape:
    """A small schedule in which something happens: few blocks, and preemption, abort and speculation in some."""
    choose = random.Random(seed)
    block_size = choose.choice([1, 2, 4, 16])
    return ScheduleShape(
        num_requests=choose.randint(2, 12),
        prompt_tokens=choose.randint(1, 6 * block_size + 3),
        shared_tokens=choose.randint(0, 5 * block_size),
        decode_tokens=choose.randint(1, 12),
        families=choose.randint(1, 3),
        block_size=block_size,
        num_blocks=choose.randint(0, 20) + (14 if block_size > 1 else 26),
        max_running=choose.randint(1, 6),
        step_tokens=choose.choice([4, 16, 64]),
        vary=True,
        abort_chance=choose.choice([0, 0.05]),
        preempt_chance=choose.choice([0, 0.1]),
        draft_tokens=choose.choice([0, 0, 3]),
        resume_as_new=choose.random() < 0.5,
        late_finish=choose.random() < 0.5,
        reuse_ids=choose.random() < 0.3,
    )


def config_for(shape: ScheduleShape, *, delay: int = 0, **sizes: Any) -> PrefixCacheConfig:
    capacity = shape.step_tokens + shape.max_running * (1 + shape.draft_tokens)
    defaults = {
        "num_blocks": shape.num_blocks,
        "block_size": shape.block_size,
        "staging_capacity_tokens": capacity,
        "staging_depth": delay + 2,
        "staging_claim_timeout_s": 20.0,
    }
    return PrefixCacheConfig(**defaults | sizes)


def compare(step_id: int, step: ScheduledStep, outputs: StageCacheOutputs) -> None:
    """Raises `WrongRowsError` unless hidden states and key "k" are what the schedule expects of every request."""
    for req_id, contents in step.expected.items():
        for name, rows, width in (
            ("hidden states", outputs.hidden_states[req_id], HIDDEN),
            ("k", outputs.mm_outputs["k"][req_id], WIDTH),
        ):
            expected = row_values(contents, width)
            if rows.shape != expected.shape or not np.array_equal(rows.numpy(), expected):
                raise WrongRowsError(f"step {step_id}, request {req_id}: wrong {name}")


def drive(
    shape: ScheduleShape,
    seed: int,
    make_manager: MakeManager,
    *,
    delay: int = 0,
    policy: ModelCachePolicy | None = None,
    check_integrity: bool = True,
    **sizes: Any,
) -> tuple[OmniPrefixCacheManager, int]:
    """Runs a whole schedule. Steps are used up to `delay` steps late and out of order, and the tensors they were saved
    from are overwritten at once. Returns the manager, shut down, and how many requests had hits."""
    choose = random.Random(seed)
    batch = ScheduledBatch(shape)
    config = config_for(shape, delay=delay, **sizes)
    manager = make_manager(config, FullAttentionGroupView(batch, shape.block_size))
    manager.register_policy(policy or ModelCachePolicy())
    hidden = torch.zeros(config.staging_capacity_tokens, HIDDEN, dtype=torch.int64)
    rows = torch.zeros(config.staging_capacity_tokens, WIDTH, dtype=torch.int64)
    unused: list[tuple[int, ScheduledStep]] = []
    num_hits = 0

    def use(index: int) -> None:
        step_id, step = unused.pop(index)
        compare(step_id, step, manager.materialize(step_id, step.req_ids))

    for step in StageSchedule(shape, seed).steps():
        manager.new_step_starts(step.scheduler_output)
        batch.load(step)
        num_tokens = step.num_tokens
        hidden[:num_tokens] = torch.from_numpy(row_values(step.contents, HIDDEN))
        rows[:num_tokens] = torch.from_numpy(row_values(step.contents, WIDTH))
        step_id = manager.save_outputs(
            hidden, {"k": rows[:num_tokens]}, num_tokens_unpadded=num_tokens, num_tokens_padded=len(hidden)
        )
        hidden.fill_(-1)
        rows.fill_(-1)
        unused.append((step_id, step))
        num_hits += len(step.hit_positions)
        if len(unused) > delay:
            use(choose.randrange(len(unused)))
        if check_integrity:
            manager.check_integrity()
    while unused:
        use(choose.randrange(len(unused)))
    manager.check_integrity()
    manager.shutdown()
    return manager, num_hits


def drive_random(
    seed: int,
    make_manager: MakeManager,
    **options: Any,
) -> tuple[OmniPrefixCacheManager, int]:
    """`drive` with everything chosen by the seed. Raises `WrongRowsError` for a wrong row."""
    choices = {
        "delay": seed % 4,
        "policy": ModelCachePolicy(deferred_keys=frozenset({"k"} if seed % 2 else ())),
        "check_integrity": seed % 10 == 0,
    }
    return drive(random_shape(seed), seed, make_manager, **choices | options)
