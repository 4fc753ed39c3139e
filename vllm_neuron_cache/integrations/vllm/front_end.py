"""What happens to a request before it is queued: items that can never fit, and ids that clients chose.

Everything here is wrapped around methods of vLLM's, and does nothing for an engine without this cache.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.processing import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.input_processor import InputProcessor

from vllm_neuron_cache.encoder_cache.metrics import CacheCounters
from vllm_neuron_cache.errors import ItemTooLargeError
from vllm_neuron_cache.integrations.vllm import unsent_media
from vllm_neuron_cache.integrations.vllm.activation import uses_block_cache
from vllm_neuron_cache.integrations.vllm.geometry import max_item_tokens, placeholder_layout, resolve_geometry
from vllm_neuron_cache.integrations.vllm.hooks import wrap_once
from vllm_neuron_cache.integrations.vllm.media_ids import Arrival, IdMemory, SaltedIds, mapping_hashes
from vllm_neuron_cache.integrations.vllm.unsent_media import items_with_data


class ItemTooLargeRefusal(VLLMValidationError, ItemTooLargeError):
    """`ItemTooLargeError` as vLLM's servers know it: HTTP 400."""


def install() -> None:
    """Wraps vLLM's methods. Calling it again changes nothing. Raises `AttributeError` if one is missing."""
    wrap_once(ProcessorInputs, "get_mm_hashes", mapping_hashes)
    wrap_once(BaseRenderer, "_process_tokens", _handing_on_the_salt)
    wrap_once(BaseRenderer, "_process_tokens_async", _handing_on_the_salt)
    wrap_once(BaseRenderer, "_process_multimodal", _checking_items)
    wrap_once(InputProcessor, "process_inputs", _undoing_refusals)
    unsent_media.install()


def refusals(renderer: BaseRenderer) -> CacheCounters:
    """What the front end of one engine counts: refused items, by modality. The scheduler never hears of them."""
    # On the renderer, of which there is one for each engine.
    return renderer.__dict__.setdefault("_neuron_cache_refusals", CacheCounters())


def refuse_too_large(
    placeholders: Mapping[str, list[PlaceholderRange]],
    vllm_config: VllmConfig,
    counters: CacheCounters | None = None,
) -> None:
    """Raises `ItemTooLargeRefusal` if an item of a request can never be encoded, or never fit into the empty pool. It
    is counted in `counters`.

    Placeholders suffice: the items' data is not there when the processor cache knows it.
    """
    geometry = resolve_geometry(vllm_config)
    max_tokens = max_item_tokens(vllm_config)
    for modality, positions in placeholders.items():
        for index, position in enumerate(positions):
            num_tokens = position.get_num_embeds()
            num_blocks = placeholder_layout(modality, position, geometry).num_blocks
            if num_blocks <= geometry.num_item_blocks and num_tokens <= max_tokens:
                continue
            if num_blocks > geometry.num_item_blocks:
                limit = f"the cache has {geometry.num_item_blocks} blocks for items"
                remedy = "encoder_cache_num_blocks (or encoder_cache_num_blocks_exact, where that is set)"
            else:
                limit = (
                    f"the cache has {geometry.num_item_blocks}, but the scheduler encodes items of at most "
                    f"{max_tokens} rows"
                )
                remedy = "max_num_batched_tokens"
            if counters is not None:
                counters.of(modality).refusals += 1
            raise ItemTooLargeRefusal(
                f"{modality} {index} of the prompt has {num_tokens} token rows and needs {num_blocks} blocks of "
                f"{geometry.block_size} rows; {limit}. Send smaller media, or raise {remedy}."
            )


# Wrappers ------------------------------------------------------------------------------------------------------


def _handing_on_the_salt(process_tokens: Any) -> Any:
    """Over `_process_tokens` and its asynchronous form, which alone see the salt of a request with media."""

    def wrapper(self: BaseRenderer, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        salt, ids = prompt.get("cache_salt"), prompt.get("multi_modal_uuids")
        if prompt.get("multi_modal_data") and (salt or ids) and uses_block_cache(self.config):
            # A copy: the prompt is the caller's, who may send it again.
            prompt = {**prompt, "multi_modal_uuids": SaltedIds(ids, salt or None)}
        return process_tokens(self, prompt, *args, **kwargs)

    return wrapper


def _checking_items(process_multimodal: Any) -> Any:
    """Over `_process_multimodal`, which the asynchronous path runs in a thread."""

    def wrapper(
        self: BaseRenderer, prompt: Any, mm_data: Any, mm_uuids: Any, *args: Any, skip_mm_cache: bool = False, **kwargs
    ) -> Any:
        if not uses_block_cache(self.config):
            return process_multimodal(self, prompt, mm_data, mm_uuids, *args, skip_mm_cache=skip_mm_cache, **kwargs)
        arrival = Arrival(mm_uuids, _id_memory(self), self.mm_processor_cache, aside=skip_mm_cache)
        try:
            with arrival.active():
                mm_input = process_multimodal(
                    self, prompt, mm_data, arrival.mm_uuids, *args, skip_mm_cache=skip_mm_cache, **kwargs
                )
        except Exception:
            arrival.undo()
            raise
        if not skip_mm_cache:  # such a request may only ask how many tokens it has; if it is queued, see below
            unsent_media.take_out(self.mm_processor_cache, self._mm_executor, mm_input)
            try:
                refuse_too_large(mm_input["mm_placeholders"], self.config, refusals(self))
            except ItemTooLargeError:
                _forget_media(self, mm_input)
                raise
        arrival.remember()
        return mm_input

    return wrapper


def _undoing_refusals(process_inputs: Any) -> Any:
    """Over `InputProcessor.process_inputs`, the last thing before the engine: also for media processed elsewhere."""

    def wrapper(self: InputProcessor, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        processed = isinstance(prompt, dict) and prompt.get("type") == "multimodal"
        if not processed or not uses_block_cache(self.vllm_config):
            return process_inputs(self, request_id, prompt, *args, **kwargs)
        try:
            refuse_too_large(prompt["mm_placeholders"], self.vllm_config, refusals(self.renderer))
            return process_inputs(self, request_id, prompt, *args, **kwargs)
        except Exception:
            _forget_media(self.renderer, prompt)
            raise

    return wrapper


def _id_memory(renderer: BaseRenderer) -> IdMemory:
    # On the renderer, because ids mean something within one engine.
    return renderer.__dict__.setdefault("_neuron_cache_ids", IdMemory())


def _forget_media(renderer: BaseRenderer, mm_input: Mapping[str, Any]) -> None:
    """Undoes, for a request that is refused after its media were processed, that their ids stand for them.

    Only for items with data that the engine does not know from another request.
    """
    cache = renderer.mm_processor_cache
    mm_hashes = {mm_hash for mm_hash, _ in items_with_data(mm_input)}
    _id_memory(renderer).forget(
        {mm_hash for mm_hash in mm_hashes if cache is None or not cache.is_cached_item(mm_hash)}
    )
