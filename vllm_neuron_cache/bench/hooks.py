"""CPU time that our code takes on the engine's thread, hook by hook."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MANAGER_HOOKS = (
    "check_and_update_cache",
    "can_allocate",
    "allocate",
    "get_cached_input_ids",
    "free_encoder_input",
    "free",
    "get_freed_mm_hashes",
    "get_manager_metadata",
    "end_pass",
    "acknowledge",
)
RUNNER_HOOKS = (
    "_process_encoder_cache_scheduler_output",
    "_cache_encoder_output",
    "_gather_mm_embeddings",
    "_prepare_mm_inputs",
)


class HookTimer:
    """Thread CPU time inside the hooks of one engine, the graphs that they launch included.

    A hook called from another is part of that one. The timer's own cost, measured once, is taken off every call.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False
        self._overhead = self._measure_overhead()

    @contextmanager
    def attached(self, manager: Any, runner: Any) -> Iterator[None]:
        """Times the hooks of `manager` and `runner` inside the context."""
        wrapped = [(manager, name) for name in MANAGER_HOOKS] + [(runner, name) for name in RUNNER_HOOKS]
        for owner, name in wrapped:
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in wrapped:
                delattr(owner, name)

    def reset(self) -> None:
        self.seconds.clear()

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return hook(*args, **kwargs)
            self._inside = True
            begin = time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - begin - self._overhead
                self._inside = False

        return timed

    def _measure_overhead(self) -> float:
        def nothing() -> None:
            pass

        self._overhead = 0.0
        timed = self._timed("nothing", nothing)
        costs = []
        for _ in range(500):
            self.seconds["nothing"] = 0.0
            timed()
            costs.append(self.seconds["nothing"])
        self.reset()
        return min(costs)
