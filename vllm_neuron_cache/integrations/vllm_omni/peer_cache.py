"""vLLM-Omni's prefix cache as a contender of the benchmark. This module needs its package only when it is used."""

import contextlib
import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from vllm_neuron_cache.bench.stage_contenders import ManagerCache
from vllm_neuron_cache.simulation.stage_schedule import ScheduledBatch
from vllm_neuron_cache.stage_cache import KeySpec, PrefixCacheConfig


def peer_is_there() -> bool:
    """Whether vLLM-Omni is installed."""
    return importlib.util.find_spec("vllm_omni") is not None


class PeerCache(ManagerCache):
    """vLLM-Omni's `OmniPrefixCacheManager`, through its public calls."""

    def __init__(
        self, config: PrefixCacheConfig, batch: ScheduledBatch, keys: Sequence[KeySpec], *, threaded: bool
    ) -> None:
        """`threaded` as on CUDA: its committer runs, and what it asks CUDA for is answered on the CPU."""
        from vllm_omni.core import prefix_cache as peer
        from vllm_omni.core.prefix_cache import controller

        self._cuda = _cuda_on_cpu(controller) if threaded else None
        if self._cuda is not None:
            self._cuda.__enter__()
        self._manager = peer.OmniPrefixCacheManager(
            peer.PrefixCacheConfig(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                staging_depth=config.staging_depth,
                staging_capacity_tokens=config.staging_capacity_tokens,
            ),
            peer.FullAttentionGroupView(batch, config.block_size),
            eager=not threaded,
        )
        # Its memory is allocated by the first step that has rows, and touched by those that write. The time of that is
        # left out of the comparison: through names that are not public, as there are no others.
        for key in keys:
            self._manager._pool.ensure_key(key.name, getattr(torch, key.dtype), key.shape[0])
            self._manager._pool._caches[key.name].fill_(0)
            self._manager._slot_status.init_table(key.name)

    @classmethod
    def inline(cls, config: PrefixCacheConfig, batch: ScheduledBatch, keys: Sequence[KeySpec]) -> "PeerCache":
        return cls(config, batch, keys, threaded=False)

    @classmethod
    def threaded(cls, config: PrefixCacheConfig, batch: ScheduledBatch, keys: Sequence[KeySpec]) -> "PeerCache":
        return cls(config, batch, keys, threaded=True)

    def close(self) -> None:
        super().close()
        if self._cuda is not None:
            self._cuda.__exit__(None, None, None)


@contextlib.contextmanager
def _cuda_on_cpu(controller: Any) -> Any:
    """The same threads and queues as on CUDA, with copies that are over when they return, and without pinned memory."""
    stream = SimpleNamespace(wait_event=lambda event: None, synchronize=lambda: None)
    event = SimpleNamespace(record=lambda *args: None, synchronize=lambda: None, wait=lambda *args: None)
    views = controller.StagingBufferPool.views

    def unpinned(self: Any, slot: int, key: str, num_rows: int, width: int, dtype: torch.dtype, pin: bool) -> Any:
        return views(self, slot, key, num_rows, width, dtype, False)

    with (
        mock.patch.object(torch.cuda, "Stream", lambda *args, **kwargs: stream),
        mock.patch.object(torch.cuda, "Event", lambda *args, **kwargs: event),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        mock.patch.object(controller.StagingBufferPool, "views", unpinned),
    ):
        yield
