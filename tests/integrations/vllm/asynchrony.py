"""vLLM's asynchronous scheduling on a CPU, which its platform forces off for want of device events.

Execution stays synchronous: the order of scheduling and acknowledging is real, the overlap is not.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch


class Event:
    """Stands for a device event: on the CPU everything has happened when it is recorded."""

    def __init__(self, *args, **kwargs): ...

    def record(self, *args): ...

    def synchronize(self): ...

    def wait(self, *args): ...

    def query(self):
        return True


class Stream:
    """Stands for a device stream."""

    device = torch.device("cpu")

    def __init__(self, *args, **kwargs): ...

    def wait_stream(self, *args): ...

    def synchronize(self): ...


@contextlib.contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Engines started, and run, inside schedule a step before the one before it has come back."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_switch_on(vllm_config):
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "check_and_update_config", staticmethod(check_and_switch_on))
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", lambda *args, **kwargs: Stream())
        patch.setattr(torch.cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext())
        yield


def assert_asynchronous(engine) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(engine.scheduler, AsyncScheduler)
    assert engine.llm.llm_engine.engine_core.engine_core.batch_queue_size > 1
