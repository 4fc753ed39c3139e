"""What a runner tells the scheduler of requests whose rows are not to be had."""

from collections.abc import Mapping
from typing import Any

_FAILURES = "stage_cache_failures"


def attach_failures(model_runner_output: Any, failures: Mapping[str, str]) -> None:
    """Sends `failures`, request id -> what its client is told, along with a step's output, which has no field for it.
    Mutates the output."""
    setattr(model_runner_output, _FAILURES, dict(failures))


def failures_of(model_runner_output: Any) -> Mapping[str, str]:
    return getattr(model_runner_output, _FAILURES, {})
