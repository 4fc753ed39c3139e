"""Gives the multimodal items of a request the keys under which everything else knows them."""

from dataclasses import replace

from vllm.v1.request import Request

from vllm_neuron_cache.encoder_cache.identity import Adapter, cache_key


def give_cache_keys(request: Request, *, tower_takes_adapters: bool, weights_epoch: int) -> None:
    """Sets the identifiers of the request's items, and its block hashes where they depend on them.

    Call it before the request is queued: KV blocks, scheduler and workers then all use the same keys. Mutates the
    request, not the items: other requests may share those.
    """
    lora = request.lora_request if tower_takes_adapters else None
    adapter = Adapter(lora.lora_name, lora.lora_path, lora.lora_int_id) if lora is not None else None
    keys = [
        cache_key(
            feature.mm_hash or feature.identifier,
            feature.mm_position.get_num_embeds(),
            salt=request.cache_salt,
            adapter=adapter,
            weights_epoch=weights_epoch,
        )
        for feature in request.mm_features
    ]
    if keys == [feature.identifier for feature in request.mm_features]:
        return
    request.mm_features = [
        replace(feature, identifier=key) for feature, key in zip(request.mm_features, keys, strict=True)
    ]
    if request.block_hashes:
        request.block_hashes = []
        request.update_block_hashes()
