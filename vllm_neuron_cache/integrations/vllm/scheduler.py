"""The scheduler's part of the protocol, composed over whichever scheduler vLLM would have used."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

BASE_SCHEDULER_KEY = "scheduler_cls"
"""In `ec_manager_config.manager_config`: the scheduler class to compose over, if it is not vLLM's own choice."""


class BlockSchedulerMixin:
    """Closes every scheduling pass and acknowledges every step to the `BlockEncoderCacheManager`.

    It decides nothing about requests; synchronous, asynchronous and third-party schedulers keep their behaviour.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.encoder_cache_manager.end_pass(output.num_scheduled_tokens, output.scheduled_encoder_inputs)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Before the base class, which frees inputs: what the step wrote may then be evictable at once.
        self.encoder_cache_manager.acknowledge(scheduler_output.ec_manager_metadata)
        return super().update_from_output(scheduler_output, model_runner_output)


_composed: dict[type, type] = {}


def compose(base: type) -> type:
    """`base` with the mixin over it; the same class every time."""
    if issubclass(base, BlockSchedulerMixin):
        return base
    if base not in _composed:
        _composed[base] = type(f"Block{base.__name__}", (BlockSchedulerMixin, base), {"__module__": __name__})
    return _composed[base]


def block_scheduler(*, vllm_config: VllmConfig, **kwargs: Any) -> Any:
    """What `--scheduler-cls` names: vLLM calls it like a class and gets a scheduler.

    A function and not a class, because the base is known only now: vLLM's synchronous or asynchronous scheduler, or
    the one under `BASE_SCHEDULER_KEY`.
    """
    base_path = vllm_config.ec_manager_config.manager_config.get(BASE_SCHEDULER_KEY)
    if base_path is not None:
        base = resolve_obj_by_qualname(base_path)
    elif vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as base
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as base
    return compose(base)(vllm_config=vllm_config, **kwargs)


def acknowledges_steps(scheduler_cls: Callable[..., Any]) -> bool:
    """Whether a scheduler made by `scheduler_cls` drives a `BlockEncoderCacheManager`."""
    if scheduler_cls is block_scheduler:
        return True
    return isinstance(scheduler_cls, type) and issubclass(scheduler_cls, BlockSchedulerMixin)
