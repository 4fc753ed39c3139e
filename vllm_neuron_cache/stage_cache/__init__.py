"""The stage cache: hidden states and multimodal outputs of one stage, kept in the slots of vLLM's own KV blocks.

The public names are vLLM-Omni's, so that this cache can stand where that one stands. They are loaded on first use:
the policy cores of this package import neither torch nor vllm, and only the row stores need torch.
"""

import importlib
from typing import Any

_MODULES = {
    "FullAttentionGroupView": "view",
    "HIDDEN_KEY": "interface",
    "DeviceRowStore": "device_row_store",
    "HostRowStore": "row_store",
    "KeySpec": "policy",
    "ModelCachePolicy": "policy",
    "OmniPrefixCacheController": "controller",
    "OmniPrefixCacheManager": "manager",
    "PrefixBlockPool": "row_store",
    "PrefixCacheConfig": "interface",
    "StageCacheOutputs": "interface",
    "StagingBufferPool": "row_store",
    "holds_mirror": "gate",
    "stage_prefix_cache_config": "gate",
}
_ERRORS = ("OmniPrefixCacheStagingTimeoutError", "OmniPrefixCacheUnmatchError")

__all__ = sorted([*_MODULES, *_ERRORS])


def __getattr__(name: str) -> Any:
    if name in _ERRORS:
        return getattr(importlib.import_module("vllm_neuron_cache.errors"), name)
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
