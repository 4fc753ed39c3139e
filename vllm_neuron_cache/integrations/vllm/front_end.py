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
from vllm_neuron_cache.encoder_cache.sizing import CacheGeometry
from vllm_neuron_cache.errors import ItemTooLargeError
from vllm_neuron_cache.integrations.vllm import unsent_media
from vllm_neuron_cache.integrations.vllm.activation import uses_block_cache
from vllm_neuron_cache.integrations.vllm.geometry import (
    largest_segment_tokens,
    max_item_tokens,
    max_segment_tokens,
    placeholder_layout,
    resolve_geometry,
)
from vllm_neuron_cache.integrations.vllm.hooks import wrap_once
from vllm_neuron_cache.integrations.vllm.media_ids import Arrival, IdMemory, SaltedIds, mapping_hashes


class ItemTooLargeRefusal(VLLMValidationError, ItemTooLargeError):
    """`ItemTooLargeError` as vLLM's servers know it: HTTP 400."""

    def __init__(self, message: str, *, places: list[tuple[str, int]]) -> None:
        """`places` are modality and index of each item that is too large."""
        super().__init__(message)
        self.places = places


def install() -> None:
    """Wraps vLLM's methods. Calling it again changes nothing. Raises `AttributeError` if one is missing."""
    wrap_once(ProcessorInputs, "get_mm_hashes", mapping_hashes)
    wrap_once(BaseRenderer, "_process_tokens", _handing_on_the_salt)
    wrap_once(BaseRenderer, "_process_tokens_async", _handing_on_the_salt)
    wrap_once(BaseRenderer, "_process_multimodal", _checking_items)
    wrap_once(InputProcessor, "process_inputs", _refusing_too_large)
    wrap_once(InputProcessor, "inject_into_mm_cache", _keeping_injected_data)
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
    """Raises `ItemTooLargeRefusal` if an item of a request can never be encoded, or never fit into the empty pool. Its
    `places` are those of all such items; they are counted in `counters`.

    Placeholders suffice: the items' data is not there when the processor cache knows it.
    """
    geometry = resolve_geometry(vllm_config)
    max_tokens = max_item_tokens(vllm_config)
    max_segment = max_segment_tokens(vllm_config)
    places, first = [], ""
    for modality, positions in placeholders.items():
        for index, position in enumerate(positions):
            num_tokens = position.get_num_embeds()
            num_blocks = placeholder_layout(modality, position, geometry).num_blocks
            largest = None if max_segment is None else largest_segment_tokens(modality, position, vllm_config)
            if num_blocks > geometry.num_item_blocks or num_tokens > max_tokens:
                text = _too_large(modality, index, num_tokens, num_blocks, geometry, max_tokens)
            elif largest is not None and largest > max_segment:
                text = _above_attention_block(modality, index, largest, max_segment)
            else:
                continue
            places.append((modality, index))
            first = first or text
            if counters is not None:
                counters.of(modality).refusals += 1
    if places:
        raise ItemTooLargeRefusal(first, places=places)


def _above_attention_block(modality: str, index: int, num_tokens: int, max_tokens: int) -> str:
    return (
        f"{modality} {index} of the prompt has {'a frame of ' if modality == 'video' else ''}{num_tokens} token rows, "
        f"and an attention block of the compiled encoder takes {max_tokens}. Send smaller media, or raise "
        "encoder_attention_block_size."
    )


def _too_large(
    modality: str, index: int, num_tokens: int, num_blocks: int, geometry: CacheGeometry, max_tokens: int
) -> str:
    if num_blocks > geometry.num_item_blocks:
        limit = f"the cache has {geometry.num_item_blocks} blocks for items"
        remedy = "encoder_cache_num_blocks (or encoder_cache_num_blocks_exact, where that is set)"
    else:
        limit = (
            f"the cache has {geometry.num_item_blocks}, but the scheduler encodes items of at most {max_tokens} rows"
        )
        remedy = "max_num_batched_tokens"
    return (
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
        unsent_media.keep_data_until_sent(self.mm_processor_cache)
        arrival = Arrival(mm_uuids, _id_memory(self), self.mm_processor_cache, aside=skip_mm_cache)
        try:
            with arrival.active():
                mm_input = process_multimodal(
                    self, prompt, mm_data, arrival.mm_uuids, *args, skip_mm_cache=skip_mm_cache, **kwargs
                )
        except Exception:
            arrival.undo()
            raise
        arrival.remember()
        if not skip_mm_cache:  # such a request may only ask how many tokens it has; if it is queued, see below
            try:
                refuse_too_large(mm_input["mm_placeholders"], self.config, refusals(self))
            except ItemTooLargeRefusal as refusal:
                _forget_too_large(self, mm_input, refusal.places)
                raise
        return mm_input

    return wrapper


def _refusing_too_large(process_inputs: Any) -> Any:
    """Over `InputProcessor.process_inputs`, the last thing before the engine: also for media processed elsewhere."""

    def wrapper(self: InputProcessor, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        processed = isinstance(prompt, dict) and prompt.get("type") == "multimodal"
        if processed and uses_block_cache(self.vllm_config):
            try:
                refuse_too_large(prompt["mm_placeholders"], self.vllm_config, refusals(self.renderer))
            except ItemTooLargeRefusal as refusal:
                _forget_too_large(self.renderer, prompt, refusal.places)
                raise
        return process_inputs(self, request_id, prompt, *args, **kwargs)

    return wrapper


def _keeping_injected_data(inject_into_mm_cache: Any) -> Any:
    def wrapper(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        if uses_block_cache(self.vllm_config):
            unsent_media.keep_data_until_sent(self.renderer.mm_processor_cache)
        return inject_into_mm_cache(self, *args, **kwargs)

    return wrapper


def _id_memory(renderer: BaseRenderer) -> IdMemory:
    # On the renderer, because ids mean something within one engine.
    return renderer.__dict__.setdefault("_neuron_cache_ids", IdMemory())


def _forget_too_large(renderer: BaseRenderer, mm_input: Mapping[str, Any], places: list[tuple[str, int]]) -> None:
    """Takes items that can never be served out of the processor cache, and lets their ids come with smaller media.

    Those beside them in the request stay, with their data and under their ids: another request may be on its way with
    them.
    """
    mm_hashes = {mm_input["mm_hashes"][modality][index] for modality, index in places}
    if renderer.mm_processor_cache is not None:
        for mm_hash in mm_hashes:
            renderer.mm_processor_cache.invalidate(mm_hash)
    _id_memory(renderer).forget(mm_hashes)
