"""Tells the scheduler at once when workers have changed by themselves, through vLLM's calls from outside the steps."""

from contextlib import suppress
from typing import Any

from vllm.v1.engine.core import EngineCore

from vllm_neuron_cache.encoder_cache.report import WorkerEntry, WorkerEpochs
from vllm_neuron_cache.errors import IntegrityError
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
            if CHECK not in args[:1]:
                return call(self, *args, **kwargs)
            ranks = call(self, _entries_or_error, *args[1:], **kwargs)
            for rank, entries in enumerate(ranks):
                if isinstance(entries, str):
                    raise IntegrityError(f"rank {rank}: {entries}")
            self.scheduler.encoder_cache_manager.check_integrity(ranks)
            return ranks
        finally:
            # Also after an error: it may have come half-way.
            epochs = _worker_epochs(self.model_executor)
            if epochs:
                self.scheduler.follow_workers(epochs)

    return wrapper


def _entries_or_error(worker: Any) -> list[WorkerEntry] | str:
    """Runs in the workers. What one of them raises reaches the engine without its rank, and see `_worker_epochs`."""
    try:
        return getattr(worker, CHECK)()
    except IntegrityError as error:
        return str(error)


def _worker_epochs(model_executor: Any) -> list[WorkerEpochs]:
    """Epochs of the ranks that tell; of none if the workers are gone.

    When a call fails on several ranks, vLLM's executor leaves all answers but the first unread. From then on, what it
    takes for a rank's answer is the one before, which may be that failure, or a result of any kind.
    """
    for _ in range(2):
        with suppress(RuntimeError):
            answers = model_executor.collective_rpc("encoder_cache_epochs")
            return [answer for answer in answers if isinstance(answer, WorkerEpochs)]
    return []
