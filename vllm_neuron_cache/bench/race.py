"""Timing helpers that survive a noisy machine."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np


def race(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, float]:
    """Least CPU time of this thread, in seconds, that each contender took for one call; or least time of another clock,
    for work of several threads.

    The contenders take turns, so that a slow phase of the machine falls on all of them; the minimum is what the work
    costs when nothing disturbs it.
    """
    for contender in contenders.values():
        for _ in range(warm_up):
            contender()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, contender in contenders.items():
            begin = clock()
            contender()
            best[name] = min(best[name], clock() - begin)
    return best


def bootstrap_upper(
    statistic: Callable[[np.ndarray], np.ndarray], samples: Sequence[Sequence[float]], *, confidence: float = 0.95
) -> float:
    """Upper end of the two-sided bootstrap interval of a statistic over rows of `samples`.

    `statistic` maps `[resamples, rows, columns]` to `[resamples]`. Percentile method (Efron, 1979), 2,000 resamples,
    seeded.
    """
    rows = np.asarray(samples)
    generator = np.random.default_rng(0)
    chosen = generator.integers(0, len(rows), size=(2000, len(rows)))
    return float(np.quantile(statistic(rows[chosen]), 1 - (1 - confidence) / 2))
