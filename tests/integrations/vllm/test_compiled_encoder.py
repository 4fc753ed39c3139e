"""The encoder as a static graph in real engines: tokens are those of stock vLLM, and a fault is one request's alone."""

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from asynchrony import assert_asynchronous, asynchronous_scheduling
from engines import mixed_requests, serve, start
from faults import FaultInjector
from ranks import OVER_GLOO
from services import Answer, Ask, EngineService

from vllm_neuron_cache.demo.media import load_clip, load_photograph
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt
from vllm_neuron_cache.errors import ItemTooLargeError
from vllm_neuron_cache.graphs.lanes.inductor import compiler_available

pytestmark = pytest.mark.vllm

needs_compiler = pytest.mark.skipif(not compiler_available(), reason="inductor needs a C++ compiler, and there is none")

ATTENTION_BLOCK = 1280
"""Patches. Two frames of the clip share a block; every photograph fits but "hubble" of 3348."""
MEDIUM = {"encoder_attention_block_size": ATTENTION_BLOCK}
SMALL = {"encoder_attention_block_size": 256}
"""One size of block, so that there is little to compile."""
FAULTY = {"worker_extension_cls": f"{FaultInjector.__module__}.{FaultInjector.__qualname__}"}

CHELSEA, ASTRONAUT = 126, 256
"""Token rows of these photographs, which no other has."""


def media(largest_side: int) -> Media:
    """The photographs and the clip of the tests, none above so many pixels on a side."""
    images = {name: load_photograph(name) for name in ("astronaut", "chelsea", "china", "coffee", "hubble")}
    for image in images.values():
        image.thumbnail((largest_side, largest_side))
    frames, metadata = load_clip(8).vllm_input
    step = 640 // largest_side
    return Media(images=images, clip=(frames[:, ::step, ::step], metadata))


MEDIUM_SIDE, SMALL_SIDE = 600, 240
"""Of images that are no larger than the attention block."""


def compiled(checkpoint: Path, lane: str = "eager", *, encoder: dict[str, int] = MEDIUM, **arguments: Any) -> Any:
    cache = {"lane": lane, "compiled_encoder": True} | arguments.pop("cache", {})
    return start(checkpoint, cache, encoder=encoder, **arguments)


def check(engine: Any) -> dict[str, int]:
    """Checks both sides. Returns what the worker has counted, after which nothing was compiled."""
    engine.manager.check_integrity()
    engine.llm.collective_rpc("check_encoder_cache_integrity")
    (stats,) = engine.llm.collective_rpc("encoder_cache_stats")
    assert stats["recompiles_after_warmup"] == 0
    return stats


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Tokens of stock vLLM for media of either size."""
    stock = start(checkpoint, None)
    tokens = {side: serve(stock, mixed_requests(), media(side)) for side in (MEDIUM_SIDE, SMALL_SIDE)}
    stock.close()
    assert all(len(set(some)) > len(mixed_requests()) / 2 for some in tokens.values())
    return tokens


# Tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "arguments"),
    [
        (16, {}),
        (64, {"max_num_batched_tokens": 256}),
        (None, {"max_num_batched_tokens": 256, "enable_prefix_caching": False}),
    ],
    ids=["16 rows", "64 rows chunked", "default chunked"],
)
def test_tokens_are_those_of_stock(checkpoint, expected, block_size, arguments):
    engine = compiled(checkpoint, cache={"encoder_cache_block_size": block_size}, **arguments)
    embed, runs = engine.runner.model.embed_multimodal, []
    engine.runner.model.embed_multimodal = lambda **kwargs: runs.append(kwargs) or embed(**kwargs)
    tokens = serve(engine, mixed_requests(), media(MEDIUM_SIDE))
    stats = check(engine)
    engine.close()
    assert tokens == expected[MEDIUM_SIDE]
    assert not runs, "the model's own encoder ran"
    # Five photographs and the clip, each once, however often they were asked about.
    assert engine.encoder_runs == stats["items_written"] == 6
    assert stats["encoder_launches"] > 0
    assert 1 <= stats["positions_computed"] / stats["positions_live"] < 1.5
    assert stats["positions_live"] == 4 * stats["rows_written"]
    assert stats["graphs_compiled"] == 0


@pytest.mark.parametrize("lane", [pytest.param("inductor", marks=needs_compiler), "check"])
def test_tokens_are_those_of_stock_in_a_lane_that_compiles(checkpoint, expected, lane):
    engine = compiled(checkpoint, lane, encoder=SMALL)
    (before,) = engine.llm.collective_rpc("encoder_cache_stats")
    tokens = serve(engine, mixed_requests(), media(SMALL_SIDE))
    stats = check(engine)
    engine.close()
    assert tokens == expected[SMALL_SIDE]
    assert engine.encoder_runs == stats["items_written"] == 6
    assert stats["graphs_compiled"] == before["graphs_compiled"] > 0


def test_control_rows_of_a_damaged_graph_change_tokens(checkpoint, expected, monkeypatch):
    from vllm_neuron_cache.encoders import qwen3_vl

    monkeypatch.setattr(
        qwen3_vl, "segment_mask", lambda segment_ids, dtype: torch.zeros_like(segment_ids, dtype=dtype)[:, None, None]
    )
    engine = compiled(checkpoint, encoder=SMALL)
    tokens = serve(engine, mixed_requests(), media(SMALL_SIDE))
    engine.close()
    assert tokens != expected[SMALL_SIDE]


def test_in_bfloat16_it_starts_and_answers(checkpoint):
    engine = compiled(checkpoint, dtype="bfloat16", encoder=SMALL)
    assert engine.runner.encoder_runtime.blocks.buffer.dtype is torch.bfloat16
    tokens = serve(engine, mixed_requests(), media(SMALL_SIDE), max_tokens=4)
    assert len(set(tokens)) > len(mixed_requests()) / 2
    assert check(engine)["items_written"] == 6
    engine.close()


def test_embeddings_instead_of_pixels_do_not_go_through_the_encoder(checkpoint):
    generator = torch.Generator().manual_seed(0)
    embeddings = {
        "image_embeds": torch.randn(24, 512, generator=generator),
        "image_grid_thw": torch.tensor([[1, 8, 12]]),
    }
    prompts = [
        {"prompt": MediaRequest(images=("given",)).prompt, "multi_modal_data": {"image": embeddings}},
        engine_prompt(MediaRequest(images=("chelsea",), after="And this?"), media(MEDIUM_SIDE)),
    ]
    arguments = {"enable_mm_embeds": True}
    stock = start(checkpoint, None, **arguments)
    expected = [completion.token_ids for completion in stock.generate(prompts, max_tokens=8)]
    stock.close()
    engine = compiled(checkpoint, **arguments)
    assert [completion.token_ids for completion in engine.generate(prompts, max_tokens=8)] == expected
    stats = check(engine)
    engine.close()
    assert stats["items_written"] == 2
    assert stats["positions_live"] == 4 * CHELSEA


@pytest.fixture(scope="module")
def other_checkpoint(checkpoint, tmp_path_factory):
    """The checkpoint with another encoder, position embeddings and all, and the same language model."""
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(checkpoint, tmp_path_factory.mktemp("checkpoint") / "other")
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name, tensor in tensors.items():
        if name.startswith("model.visual."):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.std(unbiased=False)
            # Position embeddings as large as patches, or tokens would not tell old ones from new ones.
            tensors[name] = (noise / noise.std() if "pos_embed" in name else tensor + noise).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def reloaded_tokens(engine: Any) -> list[tuple[int, ...]]:
    requests = [MediaRequest(images=("chelsea", "coffee")), MediaRequest(clip=True)]
    prompts = [engine_prompt(request, media(SMALL_SIDE)) for request in requests]
    return [completion.token_ids for completion in engine.generate(prompts, max_tokens=8)]


@pytest.fixture(scope="module")
def expected_of_either(checkpoint, other_checkpoint):
    """Tokens of stock vLLM with the weights of either checkpoint."""
    tokens = []
    for directory in (checkpoint, other_checkpoint):
        stock = start(directory, None)
        tokens.append(reloaded_tokens(stock))
        stock.close()
    assert not set(tokens[0]) & set(tokens[1])
    return tokens


@pytest.mark.parametrize("lane", ["eager", "check"], ids=["layers", "weights"])
def test_weights_that_were_loaded_anew_are_those_that_encode(checkpoint, other_checkpoint, expected_of_either, lane):
    """Lane check computes a weight that vLLM has packed from its layer, and keeps it."""
    engine = compiled(checkpoint, lane, encoder=SMALL)
    assert reloaded_tokens(engine) == expected_of_either[0]
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_checkpoint)})
    engine.llm.reset_prefix_cache()
    assert reloaded_tokens(engine) == expected_of_either[1]
    assert check(engine)["items_written"] == engine.encoder_runs == 6
    engine.close()


# Faults ----------------------------------------------------------------------------------------------------------

ASKS = (Ask("First. ", ("coffee",)), Ask("Second. ", ("chelsea",)), Ask("Third. ", ("china", "coffee")), Ask("Text. "))
VICTIM = CHELSEA


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def service(request, checkpoint):
    arguments = {"max_num_batched_tokens": 1024, "block_size": 32, **FAULTY}
    if request.param == "asynchronous":
        with asynchronous_scheduling():
            engine = compiled(checkpoint, **arguments)
            assert_asynchronous(engine)
            yield EngineService(engine)
            engine.close()
    else:
        engine = compiled(checkpoint, **arguments)
        yield EngineService(engine)
        engine.close()


@pytest.fixture
def answers(service):
    """Those without a fault; and the engine is as new before and after."""
    service.fresh()
    answers = service.ask(ASKS)
    assert not any(answer.error for answer in answers)
    service.fresh()
    yield answers
    service.fresh()
    check(service.engine)


@contextmanager
def spoilt(service: EngineService, value: float, num_rows: int = VICTIM):
    """A patch of the item of `num_rows` rows holds `value` as it comes to the encoder."""
    encoder = service.engine.runner._compiled_encoders._encoders["image"]
    item_of, together = encoder.adapter.item, []

    def spoilt_item(modality: str, data: dict) -> Any:
        grid = data[f"{modality}_grid_thw"]
        together.append(int(grid.prod()) // 4)
        if together[-1] == num_rows:
            pixels = data["pixel_values"].clone()
            pixels[len(pixels) // 2, 3] = value
            data = {**data, "pixel_values": pixels}
        return item_of(modality, data)

    encoder.adapter.item = spoilt_item
    yield together
    del encoder.adapter.item


def only_the_second_failed(given: list[Answer], expected: list[Answer], *words: str) -> None:
    assert given[1].error == "EncoderOutputError"
    assert all(word in given[1].message for word in words), given[1].message
    assert [given[0], *given[2:]] == [expected[0], *expected[2:]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pixels_that_are_not_finite_fail_their_request_and_none_beside_it(service, answers, value):
    launches = check(service.engine)["encoder_launches"]
    with spoilt(service, value) as together:
        given = service.ask(ASKS)
    only_the_second_failed(given, answers, f"rows of the {VICTIM} that the encoder made hold NaN or infinity")
    assert len(together) == 3, "all three images came in one step"
    assert check(service.engine)["encoder_launches"] > launches + 2
    # Failed items are encoded again, and the others are not.
    written = check(service.engine)["items_written"]
    assert service.ask(ASKS) == answers
    assert check(service.engine)["items_written"] == written + 1


def test_a_graph_that_raises_fails_the_item_that_made_it_raise(service, answers):
    adapter = service.engine.runner._compiled_encoders._encoders["image"].adapter
    forward = adapter.forward

    def raising(inputs, segment_ids, weights):
        if (inputs[0] == 12345).any():
            raise ValueError("planted in the graph")
        return forward(inputs, segment_ids, weights)

    adapter.forward = raising
    with spoilt(service, 12345.0):
        given = service.ask(ASKS)
    del adapter.forward
    only_the_second_failed(given, answers, "planted in the graph", f"{VICTIM} rows")
    assert service.ask(ASKS) == answers


def test_data_of_another_size_than_the_placeholder_fail_their_request(service, answers):
    encoder = service.engine.runner._compiled_encoders._encoders["image"]
    item_of = encoder.adapter.item

    def smaller(modality, data):
        item = item_of(modality, data)
        return item if sum(item.segments) != 4 * VICTIM else item._replace(segments=(4 * VICTIM - 8,))

    encoder.adapter.item = smaller
    given = service.ask(ASKS)
    del encoder.adapter.item
    only_the_second_failed(given, answers, f"makes {VICTIM - 2} rows", f"takes {VICTIM}")
    assert service.ask(ASKS) == answers


def test_an_image_above_the_attention_block_fails_its_request_alone(service, answers):
    """The front end refuses it, or the worker does."""
    try:
        given = service.ask((ASKS[0], Ask("Large. ", ("hubble",)), *ASKS[2:]))
    except ItemTooLargeError as error:
        assert "encoder_attention_block_size" in str(error) and "837" in str(error) and "320" in str(error)
        assert service.ask(ASKS) == answers
    else:
        assert given[1].error and "encoder_attention_block_size" in given[1].message
        assert [given[0], *given[2:]] == [answers[0], *answers[2:]]


def test_the_worker_refuses_an_image_above_the_attention_block_too(service, answers, monkeypatch):
    """As it would come from a front end that does not look."""
    from vllm_neuron_cache.integrations.vllm import front_end

    monkeypatch.setattr(front_end, "refuse_too_large", lambda *args, **kwargs: None)
    given = service.ask((ASKS[0], Ask("Large. ", ("hubble",)), *ASKS[2:]))
    assert given[1].error == "EncoderOutputError"
    assert "3348 patches" in given[1].message and str(ATTENTION_BLOCK) in given[1].message
    assert [given[0], *given[2:]] == [answers[0], *answers[2:]]


@pytest.mark.parametrize("phase", ["queued", "prompt", "tokens"])
def test_a_request_that_is_aborted_takes_none_with_it(service, answers, phase):
    # So long that a step ends within its prompt.
    asks = (ASKS[0], Ask("word " * 180, ("chelsea",)), *ASKS[2:])
    given = service.ask(asks, event=service.abort, phase=phase)
    assert given[1].error is None
    assert [given[0], *given[2:]] == [answers[0], *answers[2:]]
    assert service.ask(ASKS) == answers


def test_rows_that_were_lost_are_encoded_again(service, answers):
    service.ask(ASKS)
    service.reset_prefix_cache()
    written = check(service.engine)["items_written"]
    service.engine.runner.note_rows_lost()
    assert service.ask(ASKS) == answers
    assert check(service.engine)["items_written"] == written + 3


# Ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_stock(checkpoint, expected, monkeypatch):
    """Each encodes its share of the blocks, and the graph gathers the rows over gloo. The merge is in the forward,
    where embeddings are a sum over ranks."""
    for name, value in {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "LOCAL_WORLD_SIZE": "2",
        "PYTHONPATH": str(Path(__file__).parent),
        OVER_GLOO: "1",
    }.items():
        monkeypatch.setenv(name, value)
    engine = compiled(
        checkpoint,
        "eager",
        encoder=SMALL,
        in_process=False,
        tensor_parallel_size=2,
        mm_encoder_tp_mode="data",
        cache={"compiled_prefill": True},
        worker_extension_cls="ranks.RankRecorder",
    )
    try:
        tokens = serve(engine, mixed_requests(), media(SMALL_SIDE))
        tables = engine.llm.collective_rpc("table")
        stats = engine.llm.collective_rpc("encoder_cache_stats")
        engine.llm.collective_rpc("check_encoder_cache_integrity")
    finally:
        engine.close()
    assert tokens == expected[SMALL_SIDE]
    # Digests of all rows are in them.
    assert tables[0] == tables[1] and len(tables[0]) == 6
    assert stats[0] == stats[1]
    assert stats[0]["rows_read"] > 0
    assert stats[0]["items_written"] == 6 and stats[0]["encoder_launches"] > 0
    assert stats[0]["recompiles_after_warmup"] == 0
