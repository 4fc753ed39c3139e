"""Requests and engine pairs that the tests on real vLLM share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_neuron_cache.demo.media import load_clip, load_photograph
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

SIZES = {"max_model_len": 4096, "max_num_batched_tokens": 4096}
PHOTOGRAPHS = ("astronaut", "chelsea", "china", "coffee", "hubble")


def small_media() -> Media:
    """Five photographs, 117 to 837 tokens, and a clip of 8 frames of 180 tokens' worth of pixels each two."""
    return Media(images={name: load_photograph(name) for name in PHOTOGRAPHS}, clip=load_clip(8).vllm_input)


def mixed_requests() -> list[MediaRequest]:
    """One image, several, repeats within a prompt and across prompts, video, text; images that a chunk cuts."""
    return [
        MediaRequest(images=("astronaut",)),
        MediaRequest(before="Again. ", images=("astronaut",)),
        MediaRequest(images=("hubble", "chelsea"), after="Compare."),
        MediaRequest(before="The same twice: ", images=("china", "china")),
        MediaRequest(before="Four of them. ", images=("coffee", "chelsea", "astronaut", "china"), after="Which?"),
        MediaRequest(clip=True, after="What happens?"),
        MediaRequest(before="Both. ", images=("chelsea",), clip=True, after="What happens?"),
        MediaRequest(before="No picture. ", after="Who are you?"),
        MediaRequest(before="Large one again. ", images=("hubble",)),
    ]


def serve(
    engine: Any, requests: Sequence[MediaRequest], media: Media, *, max_tokens: int = 12
) -> list[tuple[int, ...]]:
    """Tokens of each request, first one request at a time, then all at once."""
    prompts = [engine_prompt(request, media) for request in requests]
    alone = [engine.generate([prompt], max_tokens=max_tokens)[0].token_ids for prompt in prompts]
    together = [completion.token_ids for completion in engine.generate(prompts, max_tokens=max_tokens)]
    return alone + together


def start(checkpoint: Path, cache: dict | None, **arguments: Any) -> Any:
    """An `OfflineEngine`; imported here, so that collecting the tests needs no vLLM.

    Tests that can should keep `SIZES`: engines of one geometry share what inductor has compiled.
    """
    from vllm_neuron_cache.integrations.vllm.offline import OfflineEngine

    return OfflineEngine(checkpoint, cache=cache, **(SIZES | arguments))


_stock_tokens: dict[frozenset, list[tuple[int, ...]]] = {}


def stock_tokens(checkpoint: Path, **arguments: Any) -> list[tuple[int, ...]]:
    """What `serve` gives for the mixed requests from stock vLLM in this process: computed once in a session for each
    checkpoint and arguments. Not while another engine is open, which would lose vLLM's process groups."""
    key = frozenset({"checkpoint": checkpoint, **SIZES, **arguments}.items())
    if key not in _stock_tokens:
        stock = start(checkpoint, None, **arguments)
        _stock_tokens[key] = serve(stock, mixed_requests(), small_media())
        stock.close()
    # Comparisons mean something: what is seen changes the answers.
    assert len(set(_stock_tokens[key])) > len(mixed_requests()) / 2
    return list(_stock_tokens[key])
