"""Schedules as vLLM makes them, and what the next stage must get of each step: the stage cache's test driver.

No torch and no vllm. Rows are numbers here: the content of a token position given everything before it. Whoever drives
a cache turns a content into the values of a row, for instance with `row_values`.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

DRAFT_CONTENT = 1 << 40
"""Contents from here on are of drafts; none of them is ever right on a hit."""


@dataclass(frozen=True, kw_only=True)
class ScheduleShape:
    """What a schedule is made of. Chances are per request and step, 0 for never."""

    num_requests: int = 64
    prompt_tokens: int = 1024
    shared_tokens: int = 512
    """First tokens of a prompt, the same within a family."""
    decode_tokens: int = 64
    families: int = 4
    block_size: int = 16
    num_blocks: int = 15092
    max_running: int = 32
    step_tokens: int = 2048
    """Most tokens of one step."""
    vary: bool = False
    """Whether lengths vary from request to request, up to those above."""
    abort_chance: float = 0.0
    preempt_chance: float = 0.0
    draft_tokens: int = 0
    """Tokens that a decoding request speculates; how many of them are accepted varies."""
    resume_as_new: bool = False
    """Whether a request that was preempted comes back among the new ones, as with vLLM's newer runner."""
    late_finish: bool = False
    """Whether the end of a request is told one step later than its blocks are free."""
    reuse_ids: bool = False
    """Whether ids of requests that ended are used again."""


@dataclass(kw_only=True)
class ScheduledStep:
    """One step: what the runner is told, and the truth to compare with."""

    scheduler_output: SimpleNamespace
    """As much of vLLM's `SchedulerOutput` as a stage cache reads."""
    req_ids: list[str]
    """The batch, in order."""
    starts: list[int]
    block_tables: list[list[int]]
    contents: list[int]
    """Of every row, in the batch's order."""
    expected: dict[str, list[int]]
    """Contents that each request hands on: each position once, in order."""
    hit_positions: dict[str, tuple[int, int]]
    """Of requests that hand on rows of earlier steps: first position and end. Those rows are from the cache."""
    is_decode: bool = False
    """Whether nobody computes prompt tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.contents)


@dataclass(kw_only=True, eq=False)
class _Request:
    req_id: str
    contents: list[int]
    prompt_tokens: int
    computed: int = 0
    delivered: int = 0
    block_ids: list[int] = field(default_factory=list)
    was_scheduled: bool = False
    drafts: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.contents)

    @property
    def num_output(self) -> int:
        """Tokens that were sampled. The last one's row is not computed yet."""
        return max(0, self.delivered + 1 - self.prompt_tokens)


class _Blocks:
    """vLLM's allocation in small: free blocks keep their contents until they are taken, oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.free = OrderedDict.fromkeys(range(1, num_blocks))  # vLLM keeps block 0 for itself
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, tuple[int, ...]] = {}
        self._by_hash: dict[tuple[int, ...], int] = {}

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        old = self._hash_of.pop(block, None)
        if old is not None and self._by_hash.get(old) == block:
            del self._by_hash[old]
        self._references[block] = 1
        return block

    def find(self, block_hash: tuple[int, ...]) -> int | None:
        return self._by_hash.get(block_hash)

    def touch(self, block: int) -> None:
        self.free.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def drop(self, block_ids: Sequence[int]) -> None:
        for block in reversed(block_ids):
            self._references[block] -= 1
            if not self._references[block]:
                self.free[block] = None

    def publish(self, block: int, block_hash: tuple[int, ...]) -> None:
        if block_hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash


class StageSchedule:
    """Makes the steps of one schedule, which its shape and seed fix.

    Mirrored of vLLM: a block can be hit from the moment it is allocated for, within the same step too; a hit is whole
    blocks and leaves one token to compute; prompts are computed in chunks; blocks of a request that ended are free at
    once; who finds no block preempts the youngest.
    """

    def __init__(self, shape: ScheduleShape, seed: int = 0) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self._blocks = _Blocks(shape.num_blocks)
        self._waiting = deque(self._make_requests())
        self._running: list[_Request] = []
        self._ended: list[str] = []
        self._ended_before: list[str] = []

    def steps(self) -> Iterator[ScheduledStep]:
        while self._waiting or self._running:
            step = self._step()
            if step is not None:
                yield step

    def _make_requests(self) -> list[_Request]:
        requests = []
        for index in range(self.shape.num_requests):
            prompt, decode = self.shape.prompt_tokens, self.shape.decode_tokens
            if self.shape.vary:
                prompt, decode = self._random.randint(1, prompt), self._random.randint(1, decode)
            family = self._random.randrange(self.shape.families) if self.shape.vary else index % self.shape.families
            shared = min(self.shape.shared_tokens, prompt)
            contents = [1 + family * 1_000_003 + position for position in range(shared)]
            contents += [7_000_001 + index * 50_021 + position for position in range(shared, prompt + decode)]
            name = index % 7 if self.shape.reuse_ids else index
            requests.append(_Request(req_id=f"r{name}", contents=contents, prompt_tokens=prompt))
        return requests

    def _step(self) -> ScheduledStep | None:
        finished = self._ended_before if self.shape.late_finish else self._ended
        self._ended_before, self._ended = self._ended, []
        self._abort_some()
        new: list[SimpleNamespace] = []
        known: list[tuple[_Request, list[int] | None, bool]] = []
        planned: list[tuple[_Request, int]] = []
        budget = self.shape.step_tokens
        for request in list(self._running):
            if request not in self._running:  # preempted meanwhile
                continue
            if self._random.random() < self.shape.preempt_chance and len(self._running) > 1:
                self._preempt(request)
                continue
            count = self._count(request, budget)
            if not count:
                continue
            added = self._grow(request, count, [taken for taken, _ in planned])
            if added is None:
                continue
            known.append((request, added or None, False))
            planned.append((request, count))
            budget -= count
        while self._waiting and len(self._running) < self.shape.max_running and budget > 0:
            request = self._waiting[0]
            if any(other.req_id == request.req_id for other in self._running) or self._is_ending(request.req_id):
                break
            self._match(request)
            count = self._count(request, budget)
            if self._needed(request, count) > len(self._blocks.free):
                self._blocks.drop(request.block_ids)
                request.block_ids, request.computed = [], 0
                break
            self._waiting.popleft()
            self._running.append(request)
            self._take_blocks(request, count)
            planned.append((request, count))
            budget -= count
            if request.was_scheduled and not self.shape.resume_as_new:
                known.append((request, list(request.block_ids), True))
            else:
                new.append(
                    SimpleNamespace(
                        req_id=request.req_id,
                        num_computed_tokens=request.computed,
                        block_ids=[list(request.block_ids)],
                        prompt_token_ids=request.contents[: request.prompt_tokens],
                        prefill_token_ids=request.contents[: request.prompt_tokens + request.num_output],
                    )
                )
            request.was_scheduled = True
        if not planned:
            self._ended = [*finished, *self._ended]
            return None
        return self._finish_step(finished, new, known, planned)

    def _is_ending(self, req_id: str) -> bool:
        """Whether the end of a request of this id was not told yet."""
        return req_id in self._ended or (self.shape.late_finish and req_id in self._ended_before)

    def _finish_step(
        self,
        finished: list[str],
        new: list[SimpleNamespace],
        known: list[tuple[_Request, list[int] | None, bool]],
        planned: list[tuple[_Request, int]],
    ) -> ScheduledStep:
        step = ScheduledStep(
            scheduler_output=SimpleNamespace(
                finished_req_ids=set(finished),
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[request.req_id for request, _, _ in known],
                    resumed_req_ids={request.req_id for request, _, resumed in known if resumed},
                    new_block_ids=[None if added is None else (added,) for _, added, _ in known],
                    num_computed_tokens=[request.computed for request, _, _ in known],
                    num_output_tokens=[request.num_output for request, _, _ in known],
                ),
                scheduled_spec_decode_tokens={
                    request.req_id: request.drafts for request, _ in planned if request.drafts
                },
                num_scheduled_tokens={request.req_id: count for request, count in planned},
            ),
            req_ids=[request.req_id for request, _ in planned],
            starts=[request.computed for request, _ in planned],
            block_tables=[list(request.block_ids) for request, _ in planned],
            contents=[],
            expected={},
            hit_positions={},
            is_decode=all(request.computed >= request.prompt_tokens for request, _ in planned),
        )
        for request, count in planned:
            self._compute(step, request, count)
        for request in [request for request, _ in planned if request.computed >= request.total]:
            self._end(request)
        return step

    def _compute(self, step: ScheduledStep, request: _Request, count: int) -> None:
        stop = request.computed + count
        rows = request.contents[request.computed : stop]
        accepted = count
        if request.drafts:
            accepted = 1 + self._random.randint(0, len(request.drafts))
            rows[accepted:] = request.drafts[accepted - 1 :]
        step.contents += rows
        if request.delivered < request.computed:
            step.hit_positions[request.req_id] = request.delivered, request.computed
        step.expected[request.req_id] = (
            request.contents[request.delivered : request.computed]
            + rows[max(0, request.delivered - request.computed) :]
        )
        request.computed += accepted
        # Rows of drafts that were rejected are handed on as well, and again when they are right.
        request.delivered = request.computed if accepted < count else max(request.delivered, request.computed)
        request.drafts = []

    def _count(self, request: _Request, budget: int) -> int:
        """Tokens that `request` computes in this step, drafts included, which it chooses."""
        request.drafts = []
        known = request.prompt_tokens + request.num_output
        if request.computed < known - 1 or not request.num_output:
            return min(known - request.computed, budget)
        most = min(self.shape.draft_tokens, request.total - request.computed - 1, budget - 1)
        num_drafts = self._random.randint(0, most) if most > 0 else 0
        request.drafts = [DRAFT_CONTENT + self._random.randrange(1 << 20) for _ in range(num_drafts)]
        return min(1 + num_drafts, budget)

    def _needed(self, request: _Request, count: int) -> int:
        return -(-(request.computed + count) // self.shape.block_size) - len(request.block_ids)

    def _grow(self, request: _Request, count: int, planned: list[_Request]) -> list[int] | None:
        """Blocks that `request` got for its next tokens; None if it had to give way itself."""
        while self._needed(request, count) > len(self._blocks.free):
            victim = next((other for other in reversed(self._running) if other not in planned), request)
            self._preempt(victim)
            if victim is request:
                return None
        return self._take_blocks(request, count)

    def _take_blocks(self, request: _Request, count: int) -> list[int]:
        added = [self._blocks.take() for _ in range(max(0, self._needed(request, count)))]
        request.block_ids += added
        sure = request.computed + count - len(request.drafts)
        for index in range(request.computed // self.shape.block_size, sure // self.shape.block_size):
            self._blocks.publish(request.block_ids[index], self._hash(request, index))
        return added

    def _hash(self, request: _Request, index: int) -> tuple[int, ...]:
        first = index * self.shape.block_size
        return (index, request.contents[0], *request.contents[first : first + self.shape.block_size])

    def _match(self, request: _Request) -> None:
        request.block_ids = []
        known = request.total if request.was_scheduled else request.prompt_tokens
        known = max(request.prompt_tokens, min(known, request.delivered + 1))
        while (len(request.block_ids) + 1) * self.shape.block_size < known:
            block = self._blocks.find(self._hash(request, len(request.block_ids)))
            if block is None:
                break
            self._blocks.touch(block)
            request.block_ids.append(block)
        request.computed = len(request.block_ids) * self.shape.block_size

    def _preempt(self, request: _Request) -> None:
        self._running.remove(request)
        self._blocks.drop(request.block_ids)
        request.block_ids, request.computed, request.drafts = [], 0, []
        self._waiting.appendleft(request)

    def _end(self, request: _Request) -> None:
        self._running.remove(request)
        self._blocks.drop(request.block_ids)
        self._ended.append(request.req_id)

    def _abort_some(self) -> None:
        for request in list(self._running):
            if self._random.random() < self.shape.abort_chance:
                self._end(request)


class ScheduledBatch:
    """The runner's batch: what `FullAttentionGroupView` reads of vLLM's `InputBatch`. `load` moves it to a step."""

    def __init__(self, shape: ScheduleShape, wrap: Callable[[np.ndarray], Any] | None = None) -> None:
        """`wrap` makes the table the host tensor that vLLM has there; without torch, something with its array."""
        max_tokens = shape.prompt_tokens + shape.decode_tokens + shape.draft_tokens
        max_blocks = -(-max_tokens // shape.block_size) + 1
        self.table = np.zeros((shape.max_running, max_blocks), dtype=np.int32)
        self.num_computed_tokens_cpu = np.zeros(shape.max_running, dtype=np.int32)
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        group = SimpleNamespace(
            block_table=SimpleNamespace(cpu=(wrap or _Numpy)(self.table)),
            use_hybrid_blocks=False,
            blocks_per_kv_block=1,
            dcp_world_size=1,
            pcp_world_size=1,
            kv_cache_block_size=shape.block_size,
        )
        self.block_table = _Groups(group)

    def load(self, step: ScheduledStep) -> None:
        self.req_ids = list(step.req_ids)
        self.req_id_to_index = {req_id: index for index, req_id in enumerate(step.req_ids)}
        self.num_computed_tokens_cpu[: len(step.starts)] = step.starts
        for row, block_ids in zip(self.table, step.block_tables):
            row[: len(block_ids)] = block_ids


class _Numpy:
    """Stands for a host tensor where a view asks it for its array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        return self._array


class _Groups:
    def __init__(self, group: SimpleNamespace) -> None:
        self.block_tables = [group]

    def __getitem__(self, index: int) -> SimpleNamespace:
        return self.block_tables[index]


def row_values(contents: Sequence[int], width: int) -> np.ndarray:
    """A row of `width` numbers for each content, different for any two; int64 `[len(contents), width]`."""
    column = np.asarray(contents, dtype=np.int64)[:, None]
    return column * 8 + np.arange(width)
