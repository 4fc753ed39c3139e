"""Media that are processed and not yet with the engine keep their data.

vLLM's sender cache lists an item as soon as it is processed, keeps its size alone, and sends the next request with that
item without data. If the first one is refused, or its client leaves before it was sent, the engine has nothing to put
in the data's place, and the innocent request fails. So an entry keeps the data until a request has carried it to the
engine, and hands it to whoever comes until then. Sizes and order of the cache stay vLLM's own.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from vllm.multimodal import cache as processor_caches
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, DPAsyncMPClient, InprocClient, SyncMPClient

from vllm_neuron_cache.integrations.vllm.hooks import wrap_once

# The second name is vLLM's from 0.32 on.
_SENDER_CACHES = tuple(
    getattr(processor_caches, name)
    for name in ("MultiModalProcessorSenderCache", "LruKeyReplicatedSenderCache")
    if hasattr(processor_caches, name)
)

_unsent: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Entries of sender caches that keep data, by the id of that data, which no other object has while it is kept."""


def install() -> None:
    """Wraps vLLM's clients of the engine. Calling it again changes nothing. Raises `AttributeError` if one changed, or
    the cache that sends items without data is not known by a name."""
    if not _SENDER_CACHES:
        raise AttributeError("vLLM's sender cache of processed media has another name")
    for client in (InprocClient, SyncMPClient):
        wrap_once(client, "add_request", _noting_sent)
    for client in (AsyncMPClient, DPAsyncMPClient):
        wrap_once(client, "add_request_async", _noting_sent_async)


def keep_data_until_sent(cache: BaseMultiModalProcessorCache | None) -> None:
    """Makes the entries of a sender cache keep their data until it was sent. Mutates `cache`; doing it again changes
    nothing, and a cache that always hands on the data is left alone."""
    if isinstance(cache, _SENDER_CACHES) and "get_and_update_item" not in vars(cache):
        cache.get_and_update_item = _keeping_data(cache, cache.get_and_update_item)


def _keeping_data(cache: Any, get_and_update_item: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(mm_item: Any, mm_hash: str) -> Any:
        data, prompt_updates = get_and_update_item(mm_item, mm_hash)
        entry = cache._cache.cache.get(mm_hash)  # not `_cache.get`, which counts a hit
        if data is None:
            return getattr(entry, "unsent_data", None), prompt_updates
        if entry is not None:  # and not too large to be kept
            entry.unsent_data = data
            _unsent[id(data)] = entry
        return data, prompt_updates

    return wrapper


def _carried(request: EngineCoreRequest) -> list[Any]:
    """Entries whose data the request has."""
    entries = [_unsent.get(id(feature.data)) for feature in request.mm_features or ()]
    return [entry for entry in entries if entry is not None]


def _note_sent(entries: list[Any]) -> None:
    for entry in entries:
        _unsent.pop(id(entry.unsent_data), None)
        entry.unsent_data = None


def _noting_sent(add_request: Callable[..., None]) -> Callable[..., None]:
    def wrapper(self: Any, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        carried = _carried(request)  # an engine in this process puts its own data into the request
        add_request(self, request, *args, **kwargs)
        _note_sent(carried)

    return wrapper


def _noting_sent_async(add_request: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(self: Any, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        carried = _carried(request)
        await add_request(self, request, *args, **kwargs)
        _note_sent(carried)

    return wrapper
