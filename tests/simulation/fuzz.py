"""One random run of the simulated engine, from a seed."""

import random

from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.integrations.vllm.simulation.engine import SimulatedEngine, SimulatedEngineConfig
from vllm_neuron_cache.simulation.trace import TraceItem, random_requests, repeating_items

PATIENCE = 40
"""Passes in a row, with nothing in flight, in which nothing may be scheduled before the run counts as stalled."""


class Run:
    """A seeded run: what it does is `choose`'s, what must hold is checked after every move."""

    def __init__(self, seed: int, *, engine_class=SimulatedEngine) -> None:
        self.choose = random.Random(seed)
        self.failing: set[str] = set()
        self.engine = engine_class(self._config(), fails=self._fails)
        self.requests = self._requests(seed)
        self.aborted: set[str] = set()
        self.depth = self.choose.randint(1, 3) if self.engine.config.asynchronous else 1
        self.num_dropped = 0

    def _config(self) -> SimulatedEngineConfig:
        choose = self.choose
        block_size = choose.choice((1, 4, 16, 64))
        self.largest = choose.choice((5, 40, 130))
        # From the smallest pool, which the largest item fills, to one of several items.
        most_blocks = -(-self.largest // block_size) + choose.choice((0, 0, 1, 5, 30))
        # A prompt must fit the KV cache; little more makes preemptions.
        longest_prompt = 4 * (self.largest + 40) + 10
        return SimulatedEngineConfig(
            geometry=CacheGeometry(most_blocks + 1, block_size, 64),
            largest_item_tokens=self.largest,
            max_num_batched_tokens=choose.choice((16, 64, 512)),
            max_num_seqs=choose.choice((1, 4, 16)),
            num_kv_blocks=longest_prompt // 16 * choose.choice((1, 2, 8)) + 3,
            prefix_caching=choose.random() < 0.5,
            asynchronous=choose.random() < 0.6,
            eviction=choose.choice(("lru", "gdsf")),
        )

    def _requests(self, seed):
        choose = self.choose
        sizes = [choose.randint(1, self.largest) for _ in range(4)] + [self.largest]
        items = repeating_items(sizes, 12, reuse=choose.choice((0.0, 0.5, 0.9)), seed=seed)
        if self.largest >= 40 and choose.random() < 0.3:
            items.append(TraceItem("video", 36, "video", (12, 12, 12)))
        return random_requests(
            items, num_requests=choose.randint(1, 9), max_items=3, seed=seed, every=choose.choice((0, 2, 6))
        )

    def _fails(self, key: str) -> bool:
        failing = self.choose.random() < self.failure_rate
        if failing:
            self.failing.add(key)
        return failing

    def play(self) -> None:
        """Raises `AssertionError`, `IntegrityError` or `SimulationError` if anything is not as it should be."""
        choose, engine = self.choose, self.engine
        disturbed = choose.random() < 0.6
        self.failure_rate = choose.choice((0.0, 0.0, 0.1)) if disturbed else 0.0
        arriving = list(reversed(self.requests))
        number = stalled = 0
        while arriving or engine.has_requests or engine.num_in_flight:
            if arriving and (arriving[-1].arrival <= number or not engine.has_requests):
                engine.add(arriving.pop())
                continue
            if engine.num_in_flight < self.depth and engine.has_requests and choose.random() < 0.7:
                idle = engine.num_in_flight == 0
                num_tokens = engine.schedule()
                number += 1
                stalled = stalled + 1 if idle and not num_tokens else 0
                assert stalled < PATIENCE, "the engine stands still"
                if not num_tokens:
                    if choose.random() < 0.3 and engine.drop_empty_step():
                        self.num_dropped += 1
                    engine.drain()
            elif choose.random() < 0.5:
                engine.execute() or engine.take_output()
            else:
                engine.take_output() or engine.execute()
            if disturbed and choose.random() < 0.06:
                self._disturb()
            engine.check_integrity()
        engine.drain()
        self._check_end()

    def _disturb(self) -> None:
        choose, engine = self.choose, self.engine
        kind = choose.random()
        alive = list(engine.scheduler.requests)
        if kind < 0.6 and alive:
            victim = choose.choice(alive)
            self.aborted.add(victim)
            engine.abort(victim)
        elif kind < 0.75:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif kind < 0.9:
            engine.drain()
            engine.reset_encoder_cache()
        else:
            engine.drain()
            engine.worker.lose_rows()

    def _check_end(self) -> None:
        engine = self.engine
        for request in self.requests:
            tokens, reason = engine.outputs[request.request_id], engine.finish_reasons.get(request.request_id)
            assert reason is not None, f"{request.request_id} never ended"
            if request.request_id in self.aborted and reason == "abort":
                continue
            if reason == "error":
                assert {item.key for item in request.items} & self.failing, f"{request} failed, and nothing of it did"
                continue
            assert (reason, len(tokens)) == ("length", request.max_tokens), (request, reason, tokens)
        pool = engine.manager.pool
        assert pool.num_free_blocks + pool.num_evictable_blocks == pool.num_blocks, "somebody still refers to an item"
        engine.reset_encoder_cache()
        assert pool.num_free_blocks == pool.num_blocks
        engine.check_integrity()
