"""Steps of a stage written out by hand: a small runner around one stage cache, and the truth of every row."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_neuron_cache.simulation.stage_schedule import ScheduledBatch, ScheduleShape, row_values
from vllm_neuron_cache.stage_cache import (
    FullAttentionGroupView,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    StageCacheOutputs,
)
from vllm_neuron_cache.stage_cache.controller import Threading

BLOCK = 4
HIDDEN, WIDTH = 3, 2
"""Columns of the hidden states, and of key "k"."""
MAX_RUNNING = 8
NOTHING = object()


def text(name: int, length: int = 64) -> list[int]:
    """Contents of the rows of a request, different from those of every other name."""
    return [name * 1000 + position for position in range(1, length + 1)]


def branch(trunk: Sequence[int], shared: int, name: int) -> list[int]:
    """Contents that go on differently after `shared` rows."""
    return [*trunk[:shared], *text(name)[shared:]]


@dataclass
class Turn:
    """What one request does in a step: it computes `count` rows from `start` on, in `blocks`, its whole table."""

    req_id: str
    contents: Sequence[int]
    start: int
    count: int
    blocks: Sequence[int]
    resumed: bool = False
    """It was preempted and comes back as vLLM's V1 runner says it: its table is replaced."""
    as_new: bool = False
    """It is live and comes among the new ones all the same: the next chunk of it, or the way of the newer runner."""
    drafts: int = 0
    """How many of the rows are of drafts."""
    num_tokens: int | None = None
    """Prompt and output, where it is told."""
    left_alone: bool = False
    """In the batch, and not scheduled."""

    @property
    def rows(self) -> list[int]:
        return list(self.contents[self.start : self.start + self.count])


@dataclass
class Stage:
    """A runner with one manager. `tables` are the blocks of the live requests, as the runner knows them."""

    manager: OmniPrefixCacheManager
    batch: ScheduledBatch
    tables: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    turns: dict[int, list[Turn]] = field(default_factory=dict)

    @property
    def counters(self):
        return self.manager.counters

    def announce(self, *turns: Turn, finished: Iterable[str] = ()) -> None:
        """`new_step_starts`, and the runner's own update after it."""
        for req_id in finished:
            self.tables.pop(req_id, None)
        new, known = [], []
        for turn in turns:
            if turn.left_alone:
                continue
            if turn.as_new or turn.req_id not in self.tables:
                prompt = turn.num_tokens or turn.start + turn.count
                if turn.req_id in self.tables and turn.num_tokens is not None:
                    prompt = self.prompts[turn.req_id]
                self.prompts[turn.req_id] = prompt
                new.append(
                    SimpleNamespace(
                        req_id=turn.req_id,
                        num_computed_tokens=turn.start,
                        block_ids=(list(turn.blocks),),
                        prompt_token_ids=[0] * prompt,
                        prefill_token_ids=None if turn.num_tokens is None else [0] * turn.num_tokens,
                    )
                )
                continue
            old = [] if turn.resumed else self.tables[turn.req_id]
            assert list(turn.blocks[: len(old)]) == old, "a runner's table only grows"
            added = list(turn.blocks[len(old) :])
            num_output = (turn.num_tokens or turn.start + turn.count) - self.prompts[turn.req_id]
            known.append((turn, (added,) if added else None, num_output))
        for turn in turns:
            self.tables[turn.req_id] = list(turn.blocks)
        self.manager.new_step_starts(
            SimpleNamespace(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[turn.req_id for turn, _, _ in known],
                    resumed_req_ids={turn.req_id for turn, _, _ in known if turn.resumed},
                    new_block_ids=[added for _, added, _ in known],
                    num_computed_tokens=[turn.start for turn, _, _ in known],
                    num_output_tokens=[max(0, num_output) for _, _, num_output in known],
                ),
                scheduled_spec_decode_tokens={turn.req_id: [0] * turn.drafts for turn in turns if turn.drafts},
                finished_req_ids=set(finished),
                num_scheduled_tokens={turn.req_id: turn.count for turn in turns if not turn.left_alone},
            )
        )
        self.batch.load(
            SimpleNamespace(
                req_ids=[turn.req_id for turn in turns],
                starts=[turn.start for turn in turns],
                block_tables=[list(turn.blocks) for turn in turns],
            )
        )

    def save(
        self,
        *turns: Turn,
        hidden: Any = NOTHING,
        keys: Iterable[str] = ("k",),
        mm: dict[str, Any] | None = None,
        padded: int | None = None,
    ) -> int:
        """`save_outputs` of the true rows, whose tensors are overwritten at once, and of `mm` beside them."""
        contents = [content for turn in turns if not turn.left_alone for content in turn.rows]
        if hidden is NOTHING:
            hidden = torch.from_numpy(row_values(contents, HIDDEN)).clone() if contents else None
        live = {key: torch.from_numpy(row_values(contents, WIDTH)).clone() for key in keys}
        if not contents:
            live = {}
        step_id = self.manager.save_outputs(
            hidden,
            live | (mm or {}),
            num_tokens_unpadded=len(contents),
            num_tokens_padded=len(contents) if padded is None else padded,
        )
        for tensor in (hidden, *live.values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(-1)
        self.turns[step_id] = list(turns)
        return step_id

    def step(self, *turns: Turn, finished: Iterable[str] = (), **outputs: Any) -> int:
        self.announce(*turns, finished=finished)
        return self.save(*turns, **outputs)

    def take(self, step_id: int, *req_ids: str) -> StageCacheOutputs:
        """`materialize`; of everybody if nobody is named."""
        return self.manager.materialize(step_id, req_ids or [turn.req_id for turn in self.turns[step_id]])

    def run(self, *turns: Turn, finished: Iterable[str] = (), **outputs: Any) -> StageCacheOutputs:
        return self.take(self.step(*turns, finished=finished, **outputs))

    def occupy(self, *blocks: int, name: int = 99, finished: Iterable[str] = (), **outputs: Any) -> None:
        """A request that nobody asks about gets these blocks and fills them, and is over afterwards."""
        req_id = f"other{name}-{len(self.turns)}"
        self.run(
            Turn(req_id, text(name), 0, len(blocks) * self.manager.config.block_size, blocks),
            finished=finished,
            **outputs,
        )
        self.ended = req_id

    def settle(self) -> None:
        """Waits until nothing is queued, in the store with threads too, however short its own patience is."""
        controller = self.manager._controller
        with self.manager._cond:
            last = self.manager._step
        self.wait(lambda: controller._immediate.is_done(last))

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Runs and waits for what is queued until `is_done`, which is called under the lock."""
        for _ in range(1000):
            try:
                self.manager._controller._wait(is_done, TimeoutError)
            except TimeoutError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError("it does not end")

    def close(self) -> None:
        if not self.manager._controller.closed:
            self.manager.check_integrity()
        self.manager.shutdown()


def make_stage(
    make_store: Callable[[PrefixCacheConfig], Any] | None = None,
    *,
    inline: bool | None = True,
    policy: ModelCachePolicy | None = None,
    max_blocks: int = 16,
    threads: type[Threading] = Threading,
    **sizes: Any,
) -> Stage:
    config = PrefixCacheConfig(
        **{"num_blocks": 64, "block_size": BLOCK, "staging_capacity_tokens": 64, "staging_claim_timeout_s": 20.0}
        | sizes
    )
    shape = ScheduleShape(
        prompt_tokens=max_blocks * config.block_size - config.block_size,
        decode_tokens=0,
        block_size=config.block_size,
        max_running=MAX_RUNNING,
    )
    batch = ScheduledBatch(shape)
    store = None if make_store is None else make_store(config)
    view = FullAttentionGroupView(batch, config.block_size)
    manager = OmniPrefixCacheManager(config, view, store=store, inline=inline, threads=threads)
    manager.register_policy(policy or ModelCachePolicy())
    return Stage(manager, batch)


def hidden_rows(contents: Sequence[int]) -> list[list[int]]:
    return row_values(contents, HIDDEN).tolist()


def key_rows(contents: Sequence[int]) -> list[list[int]]:
    return row_values(contents, WIDTH).tolist()


def zeros(count: int, width: int = WIDTH) -> list[list[int]]:
    return np.zeros((count, width), dtype=np.int64).tolist()


def assert_rows(outputs: StageCacheOutputs, req_id: str, contents: Sequence[int], *, keys: Iterable[str] = ("k",)):
    """Hidden states and `keys` of a request are the rows of these contents."""
    assert outputs.hidden_states[req_id].tolist() == hidden_rows(contents), f"hidden states of {req_id}"
    for key in keys:
        assert outputs.mm_outputs[key][req_id].tolist() == key_rows(contents), f"{key} of {req_id}"
