"""Tells the scheduler at once when workers have changed by themselves, through vLLM's calls from outside the steps."""

from typing import Any

from vllm.v1.engine.core import EngineCore

from vllm_neuron_cache.integrations.vllm.hooks import wrap_once
from vllm_neuron_cache.integrations.vllm.scheduler import BlockSchedulerMixin

CHECK = "check_encoder_cache_integrity"
"""The worker method whose results are compared with the scheduler's pool, wherever it is called from."""

_CALLS = ("collective_rpc", "reset_encoder_cache", "wake_up", "add_lora")
"""Calls after which weights may be others, or rows gone: a reload, a weight update, a reset, a wake-up, an adapter
loaded in the place of another."""


def install() -> None:
    """Wraps `EngineCore`'s calls. Calling it again changes nothing.

    Without it the scheduler would learn of a change from the output of the step after it, one step late.
    """
    for name in _CALLS:
        wrap_once(EngineCore, name, _following)


def _following(call: Any) -> Any:
    def wrapper(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        # vLLM calls workers before there is a scheduler.
        if not isinstance(getattr(self, "scheduler", None), BlockSchedulerMixin):
            return call(self, *args, **kwargs)
        try:
            result = call(self, *args, **kwargs)
            if CHECK in args[:1]:
                self.scheduler.encoder_cache_manager.check_integrity(result)
            return result
        finally:
            # Also after an error: it may have come half-way.
            self.scheduler.follow_workers(self.model_executor.collective_rpc("encoder_cache_epochs"))

    return wrapper
