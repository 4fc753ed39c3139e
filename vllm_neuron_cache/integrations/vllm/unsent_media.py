"""Media count as known to the engine once a request has carried them there, and not before.

vLLM's sender cache lists an item as soon as it is processed, and the next request with that item is sent without its
data. If the first one is refused, or its client leaves before it was sent, the engine has nothing to put in its place,
and the innocent request fails. So what a request brings is taken off the list until it is sent; a request that comes in
between is processed by itself and sent with data, which the engine's half of the cache allows for.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, NamedTuple

from vllm.multimodal.cache import BaseMultiModalProcessorCache, MultiModalProcessorSenderCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, DPAsyncMPClient, InprocClient, SyncMPClient

from vllm_neuron_cache.integrations.vllm.hooks import wrap_once

_ATTRIBUTE = "_neuron_cache_unsent"


class UnsentItem(NamedTuple):
    """What vLLM's sender cache held for an item. It is kept on the item, and goes with it if that is never sent."""

    cache: MultiModalProcessorSenderCache
    executor: Executor
    """Its one thread is the only one that uses `cache` in a server."""
    mm_hash: str
    entry: Any

    def put_back(self) -> None:
        """Mutates `cache`."""
        if not self.cache.is_cached_item(self.mm_hash):
            self.cache.cache_if_fits(self.cache._cache, self.mm_hash, self.entry)


def install() -> None:
    """Wraps vLLM's clients of the engine. Calling it again changes nothing. Raises `AttributeError` if one changed."""
    for client in (InprocClient, SyncMPClient):
        wrap_once(client, "add_request", _putting_back)
    for client in (AsyncMPClient, DPAsyncMPClient):
        wrap_once(client, "add_request_async", _putting_back_async)


def take_out(cache: BaseMultiModalProcessorCache | None, executor: Executor, mm_input: Mapping[str, Any]) -> None:
    """Takes the items that a processed request has data for out of the list of those that the engine knows. Mutates
    `cache` and the items.

    A cache that always hands on the data is left alone.
    """
    if not isinstance(cache, MultiModalProcessorSenderCache):
        return
    for mm_hash, item in items_with_data(mm_input):
        entry = cache._cache.pop(mm_hash, None)
        if entry is not None:
            setattr(item, _ATTRIBUTE, UnsentItem(cache, executor, mm_hash, entry))


def items_with_data(mm_input: Mapping[str, Any]) -> Iterator[tuple[str, MultiModalKwargsItem]]:
    """The hash and the data of each item that the processor cache did not hold back."""
    for modality, mm_hashes in mm_input["mm_hashes"].items():
        for mm_hash, item in zip(mm_hashes, mm_input["mm_kwargs"][modality], strict=True):
            if item is not None:
                yield mm_hash, item


def _unsent_items(request: EngineCoreRequest) -> list[UnsentItem]:
    """What was taken out for the items of a request. Mutates the items: they no longer have it."""
    items = [feature.data for feature in request.mm_features or ()]
    return [vars(item).pop(_ATTRIBUTE) for item in items if _ATTRIBUTE in getattr(item, "__dict__", ())]


def _putting_back(add_request: Callable[..., None]) -> Callable[..., None]:
    def wrapper(self: Any, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        unsent = _unsent_items(request)
        add_request(self, request, *args, **kwargs)
        for item in unsent:
            item.put_back()

    return wrapper


def _putting_back_async(add_request: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(self: Any, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        unsent = _unsent_items(request)
        await add_request(self, request, *args, **kwargs)
        for item in unsent:
            with suppress(RuntimeError):  # the server shuts down
                item.executor.submit(item.put_back)

    return wrapper
