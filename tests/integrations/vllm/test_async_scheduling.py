"""With vLLM's asynchronous scheduler, which schedules a step before the one before it has come back."""

import contextlib

import numpy as np
import pytest
import torch
from engines import PHOTOGRAPHS, mixed_requests, serve, small_media, start

from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

pytestmark = pytest.mark.vllm


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


@pytest.fixture
def asynchronous(monkeypatch):
    """vLLM's CPU platform forces asynchronous scheduling off, for want of device events; both are put back here.

    Execution stays synchronous: the order of scheduling and acknowledging is real, the overlap is not.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_switch_on(vllm_config):
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check_and_switch_on))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args, **kwargs: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext())


def assert_asynchronous(engine) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(engine.scheduler, AsyncScheduler)
    assert engine.llm.llm_engine.engine_core.engine_core.batch_queue_size > 1


def test_tokens_are_those_of_stock(checkpoint, asynchronous):
    media, requests = small_media(), mixed_requests()
    arguments = {"max_num_batched_tokens": 256}
    stock = start(checkpoint, None, **arguments)
    expected = serve(stock, requests, media)
    stock.close()
    ours = start(checkpoint, {}, **arguments)
    assert_asynchronous(ours)
    assert serve(ours, requests, media) == expected
    ours.manager.check_integrity()
    ours.worker.check_encoder_cache_integrity()
    assert not [item for item in ours.manager.pool.items() if item.references]
    ours.close()


def test_blocks_are_reused_at_once_and_rows_stay_right(checkpoint, asynchronous):
    """32 requests at once through a pool of four blocks: items are evicted while steps are in flight."""
    generator = np.random.default_rng(3)
    media = Media(images=small_media().images)
    requests = [
        MediaRequest(
            before=f"Request {number}. ",
            images=tuple(generator.choice(PHOTOGRAPHS, size=generator.integers(1, 3)).tolist()),
        )
        for number in range(32)
    ]
    prompts = [engine_prompt(request, media) for request in requests]
    arguments = {
        "max_num_batched_tokens": 512,
        "max_model_len": 2048,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
        "enable_prefix_caching": False,
    }
    stock = start(checkpoint, None, **arguments)
    expected = [completion.token_ids for completion in stock.generate(prompts, max_tokens=6)]
    stock.close()
    ours = start(checkpoint, {"encoder_cache_block_size": 256}, **arguments)
    assert_asynchronous(ours)
    in_flight = []
    close_pass = ours.manager.get_manager_metadata

    def watching():
        metadata = close_pass()
        in_flight.append(metadata.step.seq - metadata.step.acknowledged)
        return metadata

    ours.manager.get_manager_metadata = watching
    tokens = [completion.token_ids for completion in ours.generate(prompts, max_tokens=6)]
    assert tokens == expected
    assert max(in_flight) > 1, "no step was scheduled while another was in flight"
    assert ours.manager.stats.evictions > 10
    ours.manager.check_integrity()
    ours.close()
