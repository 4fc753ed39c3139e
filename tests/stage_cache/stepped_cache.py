"""The stage cache as steppable tasks: an engine, output builders, the cache's own threads, and somebody who shuts it
down."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from interleaving import Interleaving, Order, PriorityOrder, RandomOrder
from stepped_stores import CopyEngine, Failures, SteppedHostStore, SteppedLane, device_store

from vllm_neuron_cache.bench.stage_driver import HIDDEN, WIDTH, compare, config_for, random_shape
from vllm_neuron_cache.errors import OmniPrefixCacheUnmatchError
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
)
from vllm_neuron_cache.stage_cache.counters import StageCacheCounters
from vllm_neuron_cache.stage_cache.interface import HIDDEN_KEY, WriteState
from vllm_neuron_cache.stage_cache.policy import KeySpec
from vllm_neuron_cache.stage_cache.reads import HitRead

MOST_READ_ROWS = 32
KEYS = (KeySpec(HIDDEN_KEY, (HIDDEN,), "int64"), KeySpec("k", (WIDTH,), "int64"))


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a run is made of."""

    shape: ScheduleShape
    seed: int
    on_device: bool = False
    inline: bool = False
    deferred_keys: frozenset[str] = frozenset()
    declares_keys: bool = True
    """Without it they are discovered, and their memory is allocated, in the first save."""
    num_builders: int = 1
    staging_depth: int = 2
    gpu_staging_bytes: int = 1 << 20
    copies_lag: bool = False
    failure_chance: float = 0.0
    """Of a scatter and of a gather."""
    saves_fail: bool = False
    """Whether copies out of the step's tensors fail by the same chance."""
    discard_chance: float = 0.0
    part_chance: float = 0.0
    """That a builder materializes only some of a step's requests."""
    pause_chance: float = 0.0
    """That a forward, or the pause after a save, takes so long that everybody else does all they can."""
    ends_at_point: int | None = None
    """Where somebody shuts the cache down; None is after the last step."""

    @classmethod
    def drawn(cls, seed: int, **fixed) -> "Circumstances":
        choose = random.Random(seed)
        drawn = {
            "shape": little_shape(seed),
            "seed": seed,
            "on_device": seed % 4 == 3,
            "inline": choose.random() < 0.2,
            "deferred_keys": frozenset(choose.choice([[], ["k"], ["k"]])),
            "declares_keys": choose.random() < 0.7,
            "num_builders": choose.choice([1, 1, 2]),
            "staging_depth": choose.choice([1, 2, 4, 8, 8]),
            "gpu_staging_bytes": choose.choice([0, 128, 1 << 20]),
            "copies_lag": choose.random() < 0.5,
            "failure_chance": choose.choice([0, 0, 0, 0.05]),
            "saves_fail": choose.random() < 0.5,
            "discard_chance": choose.choice([0, 0.1]),
            "part_chance": choose.choice([0, 0.1]),
            "pause_chance": choose.choice([0, 0, 0, 0.1]),
            "ends_at_point": choose.randrange(800) if choose.random() < 0.15 else None,
        }
        its = cls(**drawn | fixed)
        # An allocation that fails on the device is no copy that fails.
        return replace(its, declares_keys=its.declares_keys or its.on_device)

    def order(self) -> Order:
        return RandomOrder(self.seed) if self.seed % 2 else PriorityOrder(self.seed)


def little_shape(seed: int) -> ScheduleShape:
    """Short prompts with long hits, and so few blocks that they are used again at once."""
    choose = random.Random(seed)
    block_size = choose.choice([1, 2, 4])
    shape = replace(
        random_shape(seed),
        block_size=block_size,
        num_requests=choose.randint(5, 10),
        prompt_tokens=choose.randint(block_size + 1, 4 * block_size + 1),
        shared_tokens=choose.randint(block_size, 4 * block_size),
        decode_tokens=choose.choice([1, 1, 2]),
        families=choose.randint(1, 2),
        max_running=choose.choice([1, 2, 3, 3]),
        step_tokens=choose.choice([8, 16]),
        abort_chance=choose.choice([0, 0.3]),
        preempt_chance=choose.choice([0, 0.2]),
        draft_tokens=choose.choice([0, 0, 2]),
    )
    most_tokens = shape.prompt_tokens + shape.decode_tokens + shape.draft_tokens
    # One request must fit; block 0 is vLLM's own.
    return replace(shape, num_blocks=1 - (-most_tokens // block_size) + choose.choice([0, 0, 1]))


@cache
def steps_of(shape: ScheduleShape, seed: int) -> Sequence[ScheduledStep]:
    return tuple(StageSchedule(shape, seed).steps())


LANE = SteppedLane()


class LeftBehindError(AssertionError):
    """Something is still there when every task has done what it can."""


class SteppedCache:
    """One run. `run` raises what went wrong: `WrongRowsError`, `DeadlockError`, `LockHeldError`, `LeftBehindError`,
    `IntegrityError`, or an error of the cache that the circumstances do not explain."""

    def __init__(
        self, its: Circumstances, order: Order | None = None, *, may_time_out: bool = False, keep_trace: bool = False
    ) -> None:
        self.its = its
        self.steps = Interleaving(order or its.order(), may_time_out=may_time_out, keep_trace=keep_trace)
        self._failures = Failures(its.seed, its.failure_chance, saves_too=its.saves_fail)
        self._random = random.Random(its.seed)
        self._copies = CopyEngine(self.steps, lags=its.copies_lag and not its.on_device)
        self._batch = ScheduledBatch(its.shape)
        self._unused: list[tuple[int, ScheduledStep]] = []
        self._num_builders = its.num_builders
        self._engine_has_ended = False
        config = config_for(
            its.shape, staging_depth=its.staging_depth, gpu_staging_bytes=its.gpu_staging_bytes, copy_chunk_bytes=1
        )
        if its.on_device:
            LANE.use(None, None)
            store = device_store(config, LANE, MOST_READ_ROWS)
        else:
            store = SteppedHostStore(config, self.steps, self._failures, self._copies)
        self.config = config
        self.manager = OmniPrefixCacheManager(
            config,
            FullAttentionGroupView(self._batch, its.shape.block_size),
            store=store,
            inline=its.inline,
            threads=self.steps.threads,
        )
        keys = KEYS if its.declares_keys else None
        self.manager.register_policy(ModelCachePolicy(deferred_keys=its.deferred_keys, keys=keys))

    @property
    def counters(self) -> StageCacheCounters:
        return self.manager.counters

    @property
    def num_injected(self) -> int:
        return self._failures.count

    def run(self) -> None:
        LANE.use(self.steps, self._failures)
        self.steps.add("engine", self._engine)
        for index in range(self.its.num_builders):
            self.steps.add(f"builder {index}", lambda index=index: self._builder(index))
        if self.its.ends_at_point is not None:
            self.steps.add("closer", self._closer)
        self.steps.run()
        self.manager.check_integrity()

    # Tasks ---------------------------------------------------------------------------------------------------------

    def _engine(self) -> None:
        rows_at_once = self.config.staging_capacity_tokens
        hidden = torch.zeros(rows_at_once, HIDDEN, dtype=torch.int64)
        rows = torch.zeros(rows_at_once, WIDTH, dtype=torch.int64)
        try:
            for step in steps_of(self.its.shape, self.its.seed):
                self._engine_step(step, hidden, rows)
        except OmniPrefixCacheUnmatchError:
            if not self._is_shut_down:
                raise
        self._engine_has_ended = True
        self.steps.wait_until(lambda: not self._num_builders, "the builders")
        if self.its.ends_at_point is None:
            self._check_what_is_left()
        self.manager.shutdown()
        self._copies.close()

    def _engine_step(self, step: ScheduledStep, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        self.manager.new_step_starts(step.scheduler_output)
        self._batch.load(step)
        num_tokens = step.num_tokens
        hidden[:num_tokens] = torch.from_numpy(row_values(step.contents, HIDDEN))
        rows[:num_tokens] = torch.from_numpy(row_values(step.contents, WIDTH))
        self._forward()
        step_id = self.manager.save_outputs(
            hidden, {"k": rows}, num_tokens_unpadded=num_tokens, num_tokens_padded=len(rows)
        )
        hidden.fill_(-1)
        rows.fill_(-1)
        self._forward()
        self._unused.append((step_id, step))
        if step_id % 4 == 0:
            self.manager.check_integrity()

    def _forward(self) -> None:
        self.steps.point("forward")
        if self._random.random() < self.its.pause_chance:
            self.steps.wait_until_idle()
            if not self._is_shut_down:
                self._require_nothing_left(self._work_left())

    def _builder(self, index: int) -> None:
        choose = random.Random(self.its.seed * 2 + index)
        while True:
            self.steps.wait_until(lambda: self._unused or self._engine_has_ended, "a step")
            if not self._unused:
                break
            step_id, step = self._unused.pop(choose.randrange(len(self._unused)))
            self.steps.point("builder has a step")
            try:
                if choose.random() < self.its.discard_chance:
                    self.manager.discard_step(step_id)
                else:
                    self._materialize(step_id, step, choose)
            except OmniPrefixCacheUnmatchError:
                if not self._is_shut_down:
                    raise
        self._num_builders -= 1

    def _materialize(self, step_id: int, step: ScheduledStep, choose: random.Random) -> None:
        req_ids = list(step.req_ids)
        if choose.random() < self.its.part_chance:
            req_ids = choose.sample(req_ids, choose.randint(0, len(req_ids)))
        try:
            outputs = self.manager.materialize(step_id, req_ids)
        except OmniPrefixCacheUnmatchError as error:
            # A scatter that fails costs later hits. On the device it is part of the save, and costs the step's rows.
            may_fail = step.req_ids if self.its.on_device or self.its.saves_fail else step.hit_positions
            if not self._is_shut_down and not (self.num_injected and set(error.request_ids) <= set(may_fail)):
                raise
            outputs = error.outputs
            req_ids = [req_id for req_id in req_ids if req_id not in error.request_ids]
        if req_ids and outputs is not None:
            compare(step_id, replace(step, expected={req_id: step.expected[req_id] for req_id in req_ids}), outputs)

    def _closer(self) -> None:
        self.steps.wait_until(
            lambda: self.steps.num_points >= self.its.ends_at_point or self._engine_has_ended, "its time"
        )
        self.manager.shutdown()

    # Afterwards ----------------------------------------------------------------------------------------------------

    @property
    def _is_shut_down(self) -> bool:
        return self.manager._controller.closed

    def _check_what_is_left(self) -> None:
        self.steps.wait_until_idle()
        self.manager.check_integrity()
        gauges = self.manager.gauges()
        slots_in_use = self.its.staging_depth - self.manager._controller._slots.num_free
        left = {
            "unused steps": gauges.unused_steps,
            "pending reads": gauges.pending_reads,
            "reads with rows": sum(bool(read.rows) for read in self._reads_that_writes_know()),
            "staging slots": slots_in_use - self._writes_nobody_runs(),
        }
        self._require_nothing_left(left | self._work_left())

    def _work_left(self) -> dict[str, int]:
        """What the cache's own threads have still to do."""
        controller = self.manager._controller
        if controller.inline:
            return {}
        writes = [*controller._immediate._writes, *controller._deferred._writes]
        return {
            "writes": sum(write.state is not WriteState.PENDING for write in writes),
            "reads to prefetch": len(controller._prefetches),
        }

    def _require_nothing_left(self, left: dict[str, int]) -> None:
        if any(left.values()):
            raise LeftBehindError(", ".join(f"{count} {what}" for what, count in left.items() if count))

    def _writes_nobody_runs(self) -> int:
        """Without threads a write may wait for the next call."""
        return len(self.manager._controller._slot_of) if self.its.inline else 0

    def _reads_that_writes_know(self) -> Iterator[HitRead]:
        for reads in self.manager._threatened.values():
            yield from reads
        for log in (self.manager._controller._immediate, self.manager._controller._deferred):
            for write in log._writes:
                yield from write.after
