"""Before a request is queued: items that never fit, and ids that clients choose. And what clients hear of failures."""

import asyncio
import copy
import json
import os
import pickle
import types
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engines import small_media, start
from PIL import Image
from servers import messages, serving

pytest.importorskip("vllm", reason="vLLM is not installed (extra 'cpu')")

from vllm import SamplingParams
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.parse import ImageProcessorItems, VideoProcessorItems

from vllm_neuron_cache.demo.media import load_clip
from vllm_neuron_cache.demo.requests import MediaRequest, engine_prompt
from vllm_neuron_cache.encoder_cache.identity import CLIENT_ID, tenant_client_id, tenant_hash
from vllm_neuron_cache.encoder_cache.metrics import CacheCounters
from vllm_neuron_cache.errors import (
    EncoderCacheReadError,
    EncoderOutputError,
    ItemIdReusedError,
    ItemTooLargeError,
    raise_request_errors,
)
from vllm_neuron_cache.integrations.vllm import front_end, unsent_media
from vllm_neuron_cache.integrations.vllm import serving as failures
from vllm_neuron_cache.integrations.vllm.activation import MANAGER_CLS
from vllm_neuron_cache.integrations.vllm.media_ids import IdKey, IdMemory, SeenMedia, media_size

pytestmark = pytest.mark.vllm

# 704 token rows: all of the photographs fit but "hubble", which has 837, and the short clip, but not the long one.
SMALL = {"lane": "eager", "encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 12}
TOKENS = 6


@pytest.fixture(scope="module")
def media():
    return small_media()


@pytest.fixture(scope="module")
def stock(checkpoint):
    engine = start(checkpoint, None)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small_pool(checkpoint):
    engine = start(checkpoint, SMALL)
    yield engine
    engine.close()


@pytest.fixture
def engine(small_pool):
    """The engine with the cache, as after its start."""
    small_pool.llm.reset_prefix_cache()
    small_pool.llm.llm_engine.reset_encoder_cache()
    small_pool.llm.llm_engine.reset_mm_cache()
    small_pool.llm.llm_engine.renderer.__dict__.pop("_neuron_cache_ids", None)
    yield small_pool
    small_pool.manager.check_integrity()
    assert not small_pool.scheduler.requests


def prompt_of(media, *names, ids=None, salt=None, **request):
    prompt = engine_prompt(MediaRequest(images=names, **request), media)
    if ids is not None:
        prompt["multi_modal_uuids"] = {"image": ids}
    if salt is not None:
        prompt["cache_salt"] = salt
    return prompt


def tokens(engine, prompt):
    return engine.generate([prompt], max_tokens=TOKENS)[0].token_ids


@pytest.fixture(scope="module")
def expected(stock, media):
    """What stock vLLM answers to a prompt of these photographs, without ids and salt."""
    known = {}

    def answer(*names):
        if names not in known:
            known[names] = tokens(stock, prompt_of(media, *names))
        return known[names]

    return answer


@contextmanager
def recorded_hashes(engine):
    """Collects the `mm_hash` of every item that reaches the scheduler."""
    mm_hashes = []
    add_request = engine.scheduler.add_request

    def recording(request):
        mm_hashes.extend(feature.mm_hash for feature in request.mm_features)
        return add_request(request)

    engine.scheduler.add_request = recording
    try:
        yield mm_hashes
    finally:
        del engine.scheduler.add_request


def hashes_of(engine, prompt):
    with recorded_hashes(engine) as mm_hashes:
        engine.generate([prompt], max_tokens=1)
    return mm_hashes


# Items that never fit ------------------------------------------------------------------------------------------


def test_an_item_larger_than_the_pool_is_refused_with_the_sizes_and_the_remedy(engine, media):
    refused = front_end.refusals(engine.llm.llm_engine.renderer).of("image")
    before = refused.refusals
    with pytest.raises(ItemTooLargeError) as caught:
        tokens(engine, prompt_of(media, "china", "hubble"))
    assert refused.refusals == before + 1
    assert isinstance(caught.value, VLLMValidationError) and isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert "image 1 of the prompt has 837 token rows and needs 14 blocks of 64 rows" in text
    assert "11 blocks for items" in text and "encoder_cache_num_blocks_exact" in text and "smaller media" in text


def test_a_video_is_refused_by_what_it_needs_densely(engine, media):
    long_clip = load_clip(16).vllm_input
    prompt = engine_prompt(MediaRequest(clip=True), media)
    assert len(tokens(engine, prompt)) == TOKENS
    prompt["multi_modal_data"] = {"video": [long_clip]}
    with pytest.raises(ItemTooLargeError, match="video 0 of the prompt has"):
        tokens(engine, prompt)


def test_an_item_whose_data_the_processor_cache_holds_back_is_refused_again(engine, media, monkeypatch):
    renderer = engine.llm.llm_engine.renderer
    # As if it had come in once: the next request is a hit, and has placeholders alone.
    monkeypatch.setattr(renderer.mm_processor_cache, "invalidate", lambda mm_hash: None)
    monkeypatch.setattr(unsent_media, "keep_data_until_sent", lambda cache: None)
    monkeypatch.delattr(renderer.mm_processor_cache, "get_and_update_item", raising=False)
    with pytest.raises(ItemTooLargeError):
        tokens(engine, prompt_of(media, "hubble"))
    hits = renderer.mm_processor_cache.make_stats().hits
    for _ in range(2):
        with pytest.raises(ItemTooLargeError, match="837"):
            tokens(engine, prompt_of(media, "hubble"))
    assert renderer.mm_processor_cache.make_stats().hits == hits + 2


def test_what_a_refused_request_shares_with_a_later_valid_one_is_served(engine, media, expected):
    with pytest.raises(ItemTooLargeError):
        tokens(engine, prompt_of(media, "china", "hubble"))
    assert tokens(engine, prompt_of(media, "china")) == expected("china")


def test_what_a_refused_request_shares_with_an_earlier_valid_one_is_served(engine, media, expected):
    assert tokens(engine, prompt_of(media, "china")) == expected("china")
    with pytest.raises(ItemTooLargeError):
        tokens(engine, prompt_of(media, "china", "coffee", "hubble"))
    engine.llm.reset_prefix_cache()
    runs = engine.encoder_runs
    assert tokens(engine, prompt_of(media, "china")) == expected("china")
    assert engine.encoder_runs == runs
    assert tokens(engine, prompt_of(media, "coffee")) == expected("coffee")


def test_a_refused_prompt_takes_its_batch_with_it_and_nothing_more(engine, media, expected):
    with pytest.raises(ItemTooLargeError):
        engine.generate([prompt_of(media, "china"), prompt_of(media, "hubble")], max_tokens=TOKENS)
    assert tokens(engine, prompt_of(media, "china", "coffee")) == expected("china", "coffee")


def test_media_of_a_request_that_vllm_refuses_are_sent_with_the_next(engine, media, expected):
    adapter = LoRARequest("adapter", 1, "/nowhere")
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS)
    with pytest.raises(VLLMValidationError, match="LoRA"):
        engine.llm.generate(prompt_of(media, "china", ids=["a"]), sampling, lora_request=adapter, use_tqdm=False)
    assert tokens(engine, prompt_of(media, "china", ids=["a"])) == expected("china")
    with pytest.raises(ItemIdReusedError):  # another request may be on its way with the first
        tokens(engine, prompt_of(media, "coffee", ids=["a"]))


class Rendering:
    """Requests that are processed and not yet sent, as a server has them at any time."""

    def __init__(self, engine):
        self._engine = engine.llm.llm_engine
        self._number = 0

    def __call__(self, prompt):
        renderer = self._engine.renderer
        return renderer.render_cmpl([prompt], renderer.default_cmpl_tok_params)[0]

    def send(self, mm_input):
        self._number += 1
        self._engine.add_request(f"late-{self._number}", mm_input, SamplingParams(temperature=0, max_tokens=TOKENS))
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        return tuple(outputs[0].outputs[0].token_ids)


def data_of(mm_input):
    return [item is not None for item in mm_input["mm_kwargs"]["image"]]


def test_media_are_sent_with_data_until_one_request_has_carried_them(engine, media, expected):
    rendered = Rendering(engine)
    processed = engine.llm.llm_engine.renderer.mm_processor_cache
    waiting = [rendered(prompt_of(media, "china")) for _ in range(4)]  # the first of them is never sent
    assert all(data_of(mm_input) == [True] for mm_input in waiting)
    assert processed.make_stats().hits >= 3, "processed once for all of them"
    twice = rendered(prompt_of(media, "china", "china"))
    assert rendered.send(waiting[1]) == expected("china")
    assert data_of(rendered(prompt_of(media, "china"))) == [False]
    assert rendered.send(twice) == expected("china", "china")
    assert rendered.send(waiting[2]) == expected("china")
    assert data_of(rendered(prompt_of(media, "china"))) == [False]


def test_rendered_media_can_be_copied_and_pickled(engine, media):
    mm_kwargs = Rendering(engine)(prompt_of(media, "china"))["mm_kwargs"]
    for copied in (copy.deepcopy(mm_kwargs), pickle.loads(pickle.dumps(mm_kwargs))):
        assert [list(item) for item in copied["image"]] == [list(item) for item in mm_kwargs["image"]]


def test_both_halves_of_the_processor_cache_drop_the_same_item(engine, media, monkeypatch):
    """Requests are sent in the order in which they were processed, and the halves stay in step."""
    rendered = Rendering(engine)
    sender = engine.llm.llm_engine.renderer.mm_processor_cache
    receiver = engine.llm.llm_engine.engine_core.engine_core.mm_receiver_cache
    first = [rendered(prompt_of(media, name)) for name in ("china", "coffee")]
    second = rendered(prompt_of(media, "china"))
    for mm_input in (*first, second):
        rendered.send(mm_input)
    assert list(sender._cache.order) == list(receiver._cache.order)


def test_media_injected_by_another_front_end_keep_their_data(engine, media, expected):
    rendered = Rendering(engine)
    mm_input = rendered(prompt_of(media, "china"))
    engine.llm.llm_engine.reset_mm_cache()
    processor = engine.llm.llm_engine.input_processor
    never_sent, later = dict(mm_input["mm_kwargs"]), dict(mm_input["mm_kwargs"])
    for mm_kwargs in (never_sent, later):
        mm_kwargs["image"] = list(mm_kwargs["image"])
        processor.inject_into_mm_cache(mm_input["mm_hashes"], mm_kwargs)
    assert rendered.send(mm_input | {"mm_kwargs": later}) == expected("china")


def test_a_request_that_fails_does_not_free_the_id_of_one_on_its_way(engine, media, expected):
    rendered = Rendering(engine)
    waiting = rendered(prompt_of(media, "china", ids=["x"]))
    with pytest.raises(ItemTooLargeError):
        tokens(engine, prompt_of(media, "china", "hubble", ids=["x", "y"]))
    assert rendered.send(waiting) == expected("china")
    with pytest.raises(ItemIdReusedError):
        tokens(engine, prompt_of(media, "coffee", ids=["x"]))
    assert tokens(engine, prompt_of(media, "coffee", ids=["y"])) == expected("coffee")


def test_an_item_processed_elsewhere_is_refused_at_the_engine(engine):
    position = PlaceholderRange(offset=1, length=705)
    mm_input = {
        "type": "multimodal",
        "prompt_token_ids": [5] * 800,
        "mm_placeholders": {"image": [position]},
        "mm_hashes": {"image": ["elsewhere"]},
        "mm_kwargs": {"image": [None]},
    }
    with pytest.raises(ItemTooLargeError, match="705 token rows and needs 12 blocks"):
        engine.llm.llm_engine.add_request("0", mm_input, SamplingParams(max_tokens=1))
    assert front_end.refusals(engine.llm.llm_engine.renderer).refusals > 0


def config_with(num_blocks, max_item_tokens):
    resolved = {"num_blocks": num_blocks, "block_size": 64, "encoder_block_size": 512}
    return types.SimpleNamespace(
        ec_manager_config=types.SimpleNamespace(
            encoder_cache_manager_cls=MANAGER_CLS, manager_config=resolved | {"max_item_tokens": max_item_tokens}
        )
    )


@pytest.mark.parametrize(
    ("num_tokens", "max_item_tokens", "refused"),
    [(704, 704, None), (705, 4096, "the cache has 11 blocks"), (650, 649, "at most 649 rows.*max_num_batched_tokens")],
)
def test_the_largest_item_is_the_smaller_of_the_pool_and_of_what_can_be_encoded(num_tokens, max_item_tokens, refused):
    placeholders = {"image": [PlaceholderRange(offset=0, length=1), PlaceholderRange(offset=1, length=num_tokens)]}
    config = config_with(12, max_item_tokens)
    if refused is None:
        front_end.refuse_too_large(placeholders, config)
    else:
        with pytest.raises(ItemTooLargeError, match=f"image 1 of .*{refused}"):
            front_end.refuse_too_large(placeholders, config)


def test_rows_are_what_the_mask_says_and_not_the_length_of_the_placeholder():
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[100:800] = True
    front_end.refuse_too_large({"image": [PlaceholderRange(0, 1000, mask)]}, config_with(12, 704))
    mask = mask.clone()
    mask[850:860] = True
    with pytest.raises(ItemTooLargeError, match="710 token rows"):
        front_end.refuse_too_large({"image": [PlaceholderRange(0, 1000, mask)]}, config_with(12, 4096))


def test_an_image_above_the_attention_block_of_a_compiled_encoder_is_refused():
    config = config_with(12, 704)
    config.ec_manager_config.manager_config["max_segment_tokens"] = 512
    counters = CacheCounters()
    front_end.refuse_too_large({"image": [PlaceholderRange(0, 512)]}, config, counters)
    with pytest.raises(ItemTooLargeError, match=r"image 1 .* 513 token rows, .* takes 512.*attention_block_size"):
        images = [PlaceholderRange(0, 512), PlaceholderRange(512, 513)]
        front_end.refuse_too_large({"image": images}, config, counters)
    assert counters.refusals == 1


@pytest.mark.parametrize(("model_type", "refused"), [("qwen3_vl", True), ("qwen2_5_omni", False)])
def test_frames_of_a_video_are_looked_at_where_the_placeholder_shows_them(model_type, refused):
    """In an omni model what stands between two stretches of sound may be several frames."""
    config = config_with(12, 704)
    config.ec_manager_config.manager_config["max_segment_tokens"] = 64
    config.model_config = types.SimpleNamespace(hf_config=types.SimpleNamespace(model_type=model_type))
    mask = torch.ones(200, dtype=torch.bool)
    mask[[64, 130]] = False  # frames of 64, 65 and 69 rows
    video = {"video": [PlaceholderRange(0, 200, mask)]}
    if refused:
        with pytest.raises(ItemTooLargeError, match="video 0 of the prompt has a frame of 69 token rows"):
            front_end.refuse_too_large(video, config)
    else:
        front_end.refuse_too_large(video, config)


# Ids that clients choose ---------------------------------------------------------------------------------------


def test_two_tenants_with_one_id_each_get_their_own_picture(engine, media, expected):
    for _ in range(2):
        assert tokens(engine, prompt_of(media, "china", ids=["a"], salt="one")) == expected("china")
        assert tokens(engine, prompt_of(media, "coffee", ids=["a"], salt="two")) == expected("coffee")
        assert tokens(engine, prompt_of(media, "chelsea", ids=["a"])) == expected("chelsea")


def test_an_id_spares_the_processor_and_the_encoder_the_second_time(engine, media, expected):
    prompt = prompt_of(media, "china", "coffee", ids=["a", "b"], salt="one")
    assert tokens(engine, prompt) == expected("china", "coffee")
    hits, runs = engine.llm.llm_engine.renderer.mm_processor_cache.make_stats().hits, engine.encoder_runs
    engine.llm.reset_prefix_cache()
    prompt["multi_modal_data"] = {"image": [None, None]}
    assert tokens(engine, prompt) == expected("china", "coffee")
    assert engine.llm.llm_engine.renderer.mm_processor_cache.make_stats().hits == hits + 2
    assert engine.encoder_runs == runs
    assert prompt["multi_modal_uuids"] == {"image": ["a", "b"]} and "prompt_token_ids" not in prompt


def test_a_salt_keeps_content_apart_in_the_processor_cache(engine, media, stock):
    (plain,) = hashes_of(stock, prompt_of(media, "china"))
    stats = engine.llm.llm_engine.renderer.mm_processor_cache.make_stats
    hits = stats().hits
    hashes = [hashes_of(engine, prompt_of(media, "china", salt=salt)) for salt in ("one", "two", None)]
    assert stats().hits == hits
    assert hashes == [[tenant_hash(plain, "one")], [tenant_hash(plain, "two")], [plain]]
    assert len({mm_hash for (mm_hash,) in hashes}) == 3
    assert hashes_of(engine, prompt_of(media, "china", salt="one")) == hashes[0]
    assert stats().hits == hits + 1


def test_an_id_that_is_another_items_hash_does_not_collide(engine, media, stock, expected):
    (plain,) = hashes_of(stock, prompt_of(media, "china"))
    assert tokens(engine, prompt_of(media, "china")) == expected("china")
    assert tokens(engine, prompt_of(media, "coffee", ids=[plain])) == expected("coffee")
    assert tokens(engine, prompt_of(media, "china")) == expected("china")


@pytest.mark.parametrize(
    ("ids", "salt"), [("a", None), (["a"], None), (["a"], "one"), ("a", "one"), ([None], "one"), ([None], None)]
)
def test_the_forms_in_which_ids_come(engine, media, stock, ids, salt):
    (plain,) = hashes_of(stock, prompt_of(media, "china"))
    (mm_hash,) = hashes_of(engine, prompt_of(media, "china", ids=ids, salt=salt))
    assert mm_hash == (tenant_hash(plain, salt) if ids == [None] else tenant_client_id("a", salt))


@pytest.mark.parametrize("salt", [None, "one"])
def test_some_items_with_an_id_and_some_without(engine, media, stock, salt):
    plain = hashes_of(stock, prompt_of(media, "china", "coffee"))
    mm_hashes = hashes_of(engine, prompt_of(media, "china", "coffee", ids=["a", None], salt=salt))
    assert mm_hashes == [tenant_client_id("a", salt), tenant_hash(plain[1], salt)]


def test_options_of_the_processor_keep_an_id_an_id(engine, media, stock):
    options = {"mm_processor_kwargs": {"max_pixels": 256 * 256}}
    plain = hashes_of(stock, prompt_of(media, "china") | options)
    assert hashes_of(engine, prompt_of(media, "china") | options) == plain
    (mixed,) = hashes_of(engine, prompt_of(media, "china", ids=["a"], salt="one") | options)
    (other,) = hashes_of(engine, prompt_of(media, "china", ids=["a"], salt="two") | options)
    assert mixed.startswith(CLIENT_ID) and other.startswith(CLIENT_ID)
    assert len({mixed, other, tenant_client_id("a", "one"), tenant_client_id("a", "two")}) == 4


def test_without_id_and_salt_hashes_are_vllms_own(engine, media, stock):
    prompt = prompt_of(media, "china", "coffee")
    assert hashes_of(engine, prompt) == hashes_of(stock, prompt)


def test_an_engine_without_the_cache_is_left_alone(engine, stock, media):
    """Although another in the process has it: ids reach the scheduler as they were written, and nothing is refused."""
    assert hashes_of(stock, prompt_of(media, "chelsea", ids=["left alone"], salt="one")) == ["left alone"]
    stock.generate([prompt_of(media, "astronaut", ids=["left alone"], salt="two")], max_tokens=1)
    assert hashes_of(stock, prompt_of(media, "astronaut", salt="two")) == hashes_of(
        stock, prompt_of(media, "astronaut")
    )
    assert len(tokens(stock, prompt_of(media, "hubble"))) == TOKENS
    assert not hasattr(stock.llm.llm_engine.renderer, "_neuron_cache_ids")


# An id sent again ----------------------------------------------------------------------------------------------


def test_an_id_with_media_of_another_size_is_refused_and_the_first_stay(engine, media, expected):
    assert tokens(engine, prompt_of(media, "china", ids=["holiday"])) == expected("china")
    with pytest.raises(ItemIdReusedError) as caught:
        tokens(engine, prompt_of(media, "coffee", ids=["holiday"]))
    assert isinstance(caught.value, VLLMValidationError) and isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert "the id 'holiday'" in text and "image of 640 x 427" in text and "image of 600 x 400" in text
    assert "an id of its own" in text
    engine.llm.reset_prefix_cache()
    assert tokens(engine, prompt_of(media, "china", ids=["holiday"])) == expected("china")


def test_one_prompt_cannot_give_two_sizes_to_an_id(engine, media, expected):
    with pytest.raises(ItemIdReusedError, match="'a'"):
        tokens(engine, prompt_of(media, "china", "coffee", ids=["a", "a"]))
    assert tokens(engine, prompt_of(media, "coffee", ids=["a"])) == expected("coffee")
    assert tokens(engine, prompt_of(media, "coffee", "coffee", ids=["a", "a"])) == expected("coffee", "coffee")


def test_the_id_of_an_item_that_is_too_large_may_come_again_with_other_media(engine, media, expected):
    with pytest.raises(ItemTooLargeError):
        tokens(engine, prompt_of(media, "china", "hubble", ids=["a", "b"]))
    assert tokens(engine, prompt_of(media, "china", "chelsea", ids=["a", "b"])) == expected("china", "chelsea")


def test_an_id_that_cannot_be_processed_may_come_again(engine, media, expected):
    prompt = prompt_of(media, "china", ids=["a"])
    prompt["prompt"] = "No place for a picture."
    with pytest.raises(Exception, match="Failed to apply prompt"):
        tokens(engine, prompt)
    assert tokens(engine, prompt_of(media, "china")) == expected("china")
    assert tokens(engine, prompt_of(media, "coffee", ids=["a"])) == expected("coffee")


def test_an_id_cannot_stand_for_a_picture_and_a_video(engine, media, expected):
    video = engine_prompt(MediaRequest(clip=True), media) | {"multi_modal_uuids": {"video": ["a"]}, "cache_salt": "one"}
    assert tokens(engine, prompt_of(media, "china", ids=["a"], salt="one")) == expected("china")
    with pytest.raises(ItemIdReusedError, match="first for image of 640 x 427, and now for video of 8 x"):
        tokens(engine, video)
    assert len(tokens(engine, video | {"cache_salt": "two"})) == TOKENS


def test_a_request_that_only_counts_tokens_neither_refuses_nor_remembers_for_others(engine, media, expected):
    renderer = engine.llm.llm_engine.renderer
    prompt_token_ids = renderer.get_tokenizer().encode(prompt_of(media, "hubble")["prompt"])

    def count(name):
        data = {"image": [media.images[name]]}
        arguments = {"mm_uuids": {"image": ["a"]}, "mm_processor_kwargs": None, "skip_mm_cache": True}
        return len(renderer._process_multimodal(prompt_token_ids, data, **arguments)["prompt_token_ids"])

    assert count("hubble") > 837
    with pytest.raises(ItemIdReusedError):  # the cache for counting would count the first
        count("china")
    assert tokens(engine, prompt_of(media, "china", ids=["a"])) == expected("china")


def test_the_memory_is_bounded_and_forgets_by_hash():
    memory = IdMemory(2)
    keys = [IdKey(name, False) for name in "abc"]
    for number, key in enumerate(keys):
        memory.add({key: SeenMedia("image", (number, number), f"hash {number}")})
    assert [memory.get(key) is None for key in keys] == [True, False, False]
    memory.forget({"hash 2", "another"})
    assert [memory.get(key) is None for key in keys] == [True, False, True]


def test_sizes_of_media(media):
    china = media.images["china"]
    images = ImageProcessorItems([china, np.array(china), torch.zeros(3, 427, 640), np.zeros((427, 640)), None])
    assert [media_size(images, index) for index in range(5)] == [(640, 427)] * 3 + [(427, 640), None]
    frames = np.zeros((8, 32, 48, 3), dtype=np.uint8)
    videos = VideoProcessorItems([(frames, {"fps": 2, "frames_indices": [1, 2]}), frames, [china, china], None])
    assert [media_size(videos, index) for index in range(4)] == [
        frames.shape,
        frames.shape,
        ((640, 427), (640, 427)),
        None,
    ]
    embeddings = types.SimpleNamespace(get=lambda index: {"embeds": torch.zeros(5, 8), "grid": torch.zeros(3), "n": 2})
    assert media_size(embeddings, 0) == (("embeds", (5, 8)), ("grid", (3,)))
    assert media_size(types.SimpleNamespace(get=lambda index: object()), 0) is None


# Requests that failed ------------------------------------------------------------------------------------------


def request_output(*, finished=True, finish_reason=None, stop_reason=None, request_id="r"):
    output = types.SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)
    return types.SimpleNamespace(request_id=request_id, outputs=[output], finished=finished)


FAILED = {"finish_reason": "error", "stop_reason": "EncoderOutputError: item x: rows with NaN"}


class Stream:
    """Stands for `AsyncLLM.generate`: gives what it was told, and notes how it ended."""

    def __init__(self, *outputs):
        self.outputs = outputs
        self.end = None

    async def generate(self, engine, *args):
        try:
            for output in self.outputs:
                yield output
                await asyncio.sleep(0)
            self.end = "finished"
        except (GeneratorExit, asyncio.CancelledError):
            self.end = "aborted"
            raise

    def through(self, config=None):
        engine = types.SimpleNamespace(vllm_config=config or config_with(12, 704))
        return failures._raising_failures(self.generate)(engine)


async def collected(stream):
    return [output async for output in stream]


def test_outputs_go_through_unchanged():
    outputs = [
        request_output(finished=False),
        request_output(finish_reason="stop", stop_reason="EncoderOutputError: x"),
    ]
    stream = Stream(*outputs)
    assert asyncio.run(collected(stream.through())) == outputs
    assert stream.end == "finished"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("EncoderOutputError: item x: rows with NaN", EncoderOutputError),
        ("EncoderCacheReadError: item x: rows with NaN", EncoderCacheReadError),
    ],
)
def test_a_failed_request_raises_its_error_which_is_vllms_too(text, error):
    stream = Stream(
        request_output(finished=False), request_output(finish_reason="error", stop_reason=text, request_id="r7")
    )
    with pytest.raises(error, match=r"^item x: rows with NaN$") as caught:
        asyncio.run(collected(stream.through()))
    assert isinstance(caught.value, GenerationError)
    assert caught.value.status_code == 500 and caught.value.request_id == "r7"
    assert stream.end == "finished"


def test_a_failed_sequence_aborts_the_others_of_its_request():
    stream = Stream(request_output(finished=False, **FAILED), request_output(finished=False), request_output())

    async def fail():
        with pytest.raises(EncoderOutputError):
            await collected(stream.through())
        assert stream.end == "aborted"  # at once, and not when the collector comes by

    asyncio.run(fail())


@pytest.mark.parametrize("stop_reason", [None, 7, "a stop string", "ValueError: x"])
def test_errors_of_others_are_left_to_vllm(stop_reason):
    outputs = [request_output(finish_reason="error", stop_reason=stop_reason)]
    assert asyncio.run(collected(Stream(*outputs).through())) == outputs


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_a_client_that_goes_away_aborts_its_request(end):
    stream = Stream(*[request_output(finished=False)] * 100)

    async def go_away():
        through = stream.through()
        await anext(through)
        if end == "close":
            await through.aclose()
        else:
            task = asyncio.create_task(collected(through))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert stream.end == "aborted"

    asyncio.run(go_away())


def test_an_engine_without_the_cache_gets_vllms_own_generator():
    config = types.SimpleNamespace(ec_manager_config=types.SimpleNamespace(encoder_cache_manager_cls=None))
    outputs = [request_output(**FAILED)]
    stream = Stream(*outputs).through(config)
    assert stream.__qualname__ == "Stream.generate"
    assert asyncio.run(collected(stream)) == outputs


def test_a_process_without_a_server_imports_none(monkeypatch):
    modules = {}
    monkeypatch.setattr(failures.sys, "modules", modules)
    failures._name_failures_over_http()
    assert not modules


def test_a_server_without_these_seams_gets_the_error_all_the_same(monkeypatch):
    modules = {failures._HANDLERS: types.SimpleNamespace(), failures._SERVING: types.SimpleNamespace()}
    monkeypatch.setattr(failures.sys, "modules", modules)
    with pytest.raises(EncoderOutputError, match=r"^item x: rows with NaN$"):
        asyncio.run(collected(Stream(request_output(**FAILED)).through()))


def test_offline_the_error_is_in_the_output_and_can_be_raised():
    outputs = [request_output(finish_reason="length"), request_output(request_id="r2", **FAILED)]
    raise_request_errors(outputs[:1])
    with pytest.raises(EncoderOutputError, match="item x") as caught:
        raise_request_errors(outputs)
    assert caught.value.request_id == "r2"


# Over HTTP -----------------------------------------------------------------------------------------------------


class Client:
    def __init__(self, address):
        self.http = httpx.Client(base_url=address, timeout=60, trust_env=False)

    def chat(self, images, *, uuids=(), timeout=60, **more):
        body = {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "messages": messages(images, "What is this?", uuids=uuids),
        }
        return self.http.post("/v1/chat/completions", json=body | more, timeout=timeout)

    def tokens(self, images, **arguments):
        response = self.chat(images, **arguments)
        assert response.status_code == 200, response.text
        return tuple(response.json()["choices"][0]["token_ids"])

    def rpc(self, method, *args):
        self.http.post("/collective_rpc", json={"method": method, "args": list(args)}).raise_for_status()


@pytest.fixture(scope="module")
def client(checkpoint, tmp_path_factory):
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with serving(
        checkpoint,
        tmp_path_factory.mktemp("server") / "log",
        additional_config=json.dumps({"vllm_neuron_cache": SMALL}),
        arguments=("--worker-extension-cls", "faults.FaultInjector"),
        environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    ) as address:
        yield Client(address)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_item_is_http_400(client, media, stream):
    response = client.chat([media.images["china"], media.images["hubble"]], stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "BadRequestError" and error["code"] == 400
    assert "image 1 of the prompt has 837 token rows" in error["message"]
    assert len(client.tokens([media.images["china"]])) == TOKENS


def test_media_of_a_client_that_leaves_before_they_are_sent_are_sent_with_the_next_request(client):
    random = np.random.default_rng(0)
    left = 0
    for timeout in np.linspace(0.002, 0.08, 30):
        image = Image.fromarray(random.integers(0, 255, (200, 200, 3), dtype=np.uint8))
        try:
            client.chat([image], timeout=httpx.Timeout(60, read=timeout))
        except httpx.ReadTimeout:
            left += 1
        assert len(client.tokens([image])) == TOKENS
    assert left


@pytest.mark.parametrize("stream", [False, True])
def test_a_reused_id_is_http_400_and_tenants_have_ids_of_their_own(client, media, stream):
    china, coffee = media.images["china"], media.images["coffee"]
    first = client.tokens([china], uuids=["a"])
    response = client.chat([coffee], uuids=["a"], stream=stream)
    assert response.status_code == 400
    assert "the id 'a'" in response.json()["error"]["message"]
    assert client.tokens([china], uuids=["a"]) == first
    assert client.tokens([coffee], uuids=["a"], cache_salt="other") == client.tokens([coffee]) != first


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_is_http_500_with_its_class_and_message(client, media, stream):
    chelsea = media.images["chelsea"]
    expected = client.tokens([chelsea])
    client.http.post("/reset_encoder_cache").raise_for_status()
    client.http.post("/reset_prefix_cache").raise_for_status()
    client.rpc("plant_fault", "output NaN", 126)
    try:
        response = client.chat([chelsea], stream=stream)
    finally:
        client.rpc("remove_faults")
    if stream:
        *chunks, end = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert response.status_code == 200 and end == "[DONE]"
        error = json.loads(chunks[-1])["error"]
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert error["type"] == "EncoderOutputError" and error["code"] == 500
    assert error["message"] and "EncoderOutputError" not in error["message"]
    assert "nternal server error" not in error["message"]
    assert client.tokens([chelsea]) == expected
